// Vectors of the processor's widest registers, by GCC's vector extensions: any processor, no intrinsics but for stores past caches.
//
// Storage types are float, double and bf16; Work<S> is what their elements are computed in.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#if defined(__AVX512F__)
constexpr int BYTES = 64;
#elif defined(__AVX2__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif

typedef int64_t Size;

struct bf16 {
  uint16_t bits;
};

template <class S>
struct WorkOf {
  typedef S type;
};
template <>
struct WorkOf<bf16> {
  typedef float type;
};
template <class S>
using Work = typename WorkOf<S>::type;

template <class T>
struct VecOf {
  typedef T type __attribute__((vector_size(BYTES)));
};
template <class T>
using Vec = typename VecOf<T>::type;

template <class T>
constexpr int LANES = BYTES / int(sizeof(T));

typedef int32_t Ints __attribute__((vector_size(BYTES)));
typedef uint32_t Words __attribute__((vector_size(BYTES)));
typedef uint16_t Halves __attribute__((vector_size(BYTES / 2)));

// Integers as wide as T, which comparisons of its vectors give.
template <class T>
struct IntegerOf {
  typedef int32_t type;
};
template <>
struct IntegerOf<double> {
  typedef int64_t type;
};
template <class T>
using Integers = Vec<typename IntegerOf<T>::type>;

// The same number in every lane. Subtracting zero changes none, so that this is one broadcast; adding it would change -0.
template <class T>
inline Vec<T> splat(T x) {
  return x - Vec<T>{};
}

// A vector of the first elements at p, in the dtype of the work.
template <class T>
inline Vec<T> load(const T* p) {
  Vec<T> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// One instruction where the elements are listed; GCC 12 converts a vector of halves in two parts and puts them together.
template <size_t... I>
inline Vec<float> widened(const bf16* p, std::index_sequence<I...>) {
  return (Vec<float>)(Words{p[I].bits...} << 16);
}

inline Vec<float> load(const bf16* p) { return widened(p, std::make_index_sequence<LANES<float>>()); }

template <class T>
inline void store(T* p, Vec<T> v) {
  std::memcpy(p, &v, sizeof v);
}

// Rounds to nearest, ties to even; a NaN stays one.
inline void store(bf16* p, Vec<float> v) {
  Words word = (Words)v;
  Words rounded = (word + 0x7fff + ((word >> 16) & 1)) >> 16;
  Halves half = __builtin_convertvector(v != v ? Words{} + 0x7fc0 : rounded, Halves);
  std::memcpy(p, &half, sizeof half);
}

// A store past the caches, for what is not read before it would have left them: the line is not read first. p is aligned to a
// vector; publish() before another thread reads. Plain where the processor has none, and for bf16.
template <class T>
inline void stream(T* p, Vec<T> v) {
#if defined(__AVX512F__)
  __builtin_ia32_movntps512(reinterpret_cast<float*>(p), (Vec<float>)v);
#elif defined(__AVX2__)
  __builtin_ia32_movntps256(reinterpret_cast<float*>(p), (Vec<float>)v);
#elif defined(__SSE2__)
  __builtin_ia32_movntps(reinterpret_cast<float*>(p), (Vec<float>)v);
#else
  store(p, v);
#endif
}

inline void stream(bf16* p, Vec<float> v) { store(p, v); }

inline void publish() {
#if defined(__SSE2__)
  __builtin_ia32_sfence();
#endif
}

template <class T>
inline T load_one(const T* p) {
  return *p;
}

inline float load_one(const bf16* p) {
  uint32_t word = uint32_t(p->bits) << 16;
  float x;
  std::memcpy(&x, &word, sizeof x);
  return x;
}

template <class T>
inline void store_one(T* p, T x) {
  *p = x;
}

inline void store_one(bf16* p, float x) {
  uint32_t word;
  std::memcpy(&word, &x, sizeof word);
  p->bits = x != x ? 0x7fc0 : uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

// Both return b where one of them is no number.
template <class T>
inline Vec<T> larger(Vec<T> a, Vec<T> b) {
  return a > b ? a : b;
}

template <class T>
inline Vec<T> smaller(Vec<T> a, Vec<T> b) {
  return a < b ? a : b;
}

// Lanes of two vectors after each other, in memory: GCC would put a shuffle's lanes together one by one, each time.
template <class F>
struct Shuffle {
  int32_t at[LANES<float>];
  constexpr explicit Shuffle(F place) : at{} {
    for (int i = 0; i < LANES<float>; i++) at[i] = place(i);
  }
  Vec<float> operator()(Vec<float> a, Vec<float> b) const {
    Ints lanes;
    std::memcpy(&lanes, at, sizeof lanes);
    return __builtin_shuffle(a, b, lanes);
  }
};

// Lane i ^ DISTANCE of the same vector; lanes of two rows that a transpose exchanges.
template <int DISTANCE>
constexpr Shuffle ACROSS{[](int i) { return i ^ DISTANCE; }};
template <int DISTANCE>
constexpr Shuffle FIRST{[](int i) { return i & DISTANCE ? LANES<float> + (i ^ DISTANCE) : i; }};
template <int DISTANCE>
constexpr Shuffle SECOND{[](int i) { return i & DISTANCE ? LANES<float> + i : i ^ DISTANCE; }};

// All lanes put together by add, by halves: one lane after the other would wait for each.
template <int DISTANCE = LANES<float> / 2, class F>
inline float fold(Vec<float> v, F add) {
  v = add(v, ACROSS<DISTANCE>(v, v));
  if constexpr (DISTANCE > 1)
    return fold<DISTANCE / 2>(v, add);
  else
    return v[0];
}

template <class F>
inline double fold(Vec<double> v, F add) {
  Vec<double> found = splat(double(v[0]));
  for (int i = 1; i < LANES<double>; i++) found = add(found, splat(double(v[i])));
  return found[0];
}

template <class T>
inline T sum(Vec<T> v) {
  return fold(v, [](Vec<T> a, Vec<T> b) { return a + b; });
}

template <class T>
inline T largest(Vec<T> v) {
  return fold(v, larger<T>);
}

// The lanes 0, 1, 2 ..
template <class T>
struct Count {
  typename IntegerOf<T>::type at[LANES<T>];
  constexpr Count() : at{} {
    for (int i = 0; i < LANES<T>; i++) at[i] = i;
  }
};
template <class T>
constexpr Count<T> COUNT;

// The lanes first .. end - 1 of v, `rest` in all others.
template <class T>
inline Vec<T> within(Vec<T> v, Size first, Size end, Vec<T> rest) {
  Integers<T> lane;
  std::memcpy(&lane, COUNT<T>.at, sizeof lane);
  typedef typename IntegerOf<T>::type I;
  return (lane >= I(first)) & (lane < I(end)) ? v : rest;
}

// Rows become columns: as many vectors as a vector has lanes.
template <int DISTANCE = 1>
inline void transpose(Vec<float>* rows) {
  for (int i = 0; i < LANES<float>; i++)
    if (!(i & DISTANCE)) {
      Vec<float> a = rows[i], b = rows[i + DISTANCE];
      rows[i] = FIRST<DISTANCE>(a, b);
      rows[i + DISTANCE] = SECOND<DISTANCE>(a, b);
    }
  if constexpr (2 * DISTANCE < LANES<float>) transpose<2 * DISTANCE>(rows);
}

inline void transpose(Vec<double>* rows) {
  for (int i = 0; i < LANES<double>; i++)
    for (int j = 0; j < i; j++) {
      double other = rows[i][j];
      rows[i][j] = rows[j][i];
      rows[j][i] = other;
    }
}

// e^x. float: within 2 units in the last place; 0 below -87.7, infinite from 88.4.
inline Vec<float> exponential(Vec<float> x) {
  constexpr float low = -88.f, high = 89.f;
  constexpr float round = 12582912.f + 127;  // 1.5 * 2^23 + 127: adding it leaves an integer, plus 127, in the lowest bits
  Vec<float> inside = smaller<float>(splat(high), larger<float>(splat(low), x));  // a NaN stays one
  Vec<float> shifted = inside * 1.44269504f + round;
  Vec<float> n = shifted - round;
  Vec<float> r = inside - n * 0.693359375f + n * 2.12194440e-4f;  // ln 2 in two parts
  Vec<float> p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.f);
  return p * (Vec<float>)((Ints)shifted << 23);
}

inline Vec<double> exponential(Vec<double> x) {
  Vec<double> found;
  for (int i = 0; i < LANES<double>; i++) found[i] = std::exp(x[i]);
  return found;
}

template <class T>
inline Vec<T> sigmoid(Vec<T> x) {
  return splat(T(1)) / (splat(T(1)) + exponential(-x));
}

inline Size up_to(Size n, Size multiple) { return (n + multiple - 1) / multiple * multiple; }
