// Products of small matrices that lie near the core: tiles of ROWS x COLUMNS kept in registers.
//
// The right factor lies in panels: all its rows, COLUMNS of its columns; the left one anywhere, by strides.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <memory>
#include "vector.h"

constexpr int ROWS = BYTES == 64 ? 8 : 4;
constexpr int VECTORS = 2;
template <class T>
constexpr int COLUMNS = VECTORS * LANES<T>;

// How many threads so many multiplications are worth: where there are few, waking them would take longer.
inline int team(Size multiplications, int threads) { return int(std::clamp<Size>(multiplications >> 20, 1, threads)); }

// Memory of one task, aligned to cache lines; zeros if asked.
template <class T>
struct Buffer {
  T* data;
  explicit Buffer(Size count, bool zeros = false) : data(nullptr) {
    size_t bytes = up_to(std::max<Size>(count, 1) * Size(sizeof(T)), 64);
    data = static_cast<T*>(std::aligned_alloc(64, bytes));
    if (zeros) std::memset(data, 0, bytes);
  }
  ~Buffer() { std::free(data); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  operator T*() const { return data; }
};

// Left factors, by their element (i, k): rows and columns equally far apart; rows that lie anywhere; another one's transpose.
template <class T>
struct Strided {
  const T* a;
  Size row, column;
  T operator()(Size i, Size k) const { return a[i * row + k * column]; }
  Strided from(Size i, Size k) const { return {a + i * row + k * column, row, column}; }
};

template <class T>
struct ByRows {
  const T* const* rows;
  Size column = 0;
  T operator()(Size i, Size k) const { return rows[i][column + k]; }
  ByRows from(Size i, Size k) const { return {rows + i, column + k}; }
};

template <class A>
struct Transposed {
  A a;
  auto operator()(Size i, Size k) const { return a(k, i); }
  Transposed from(Size i, Size k) const { return {a.from(k, i)}; }
};

// c[ROWS x N vectors] = (ADD: +=) a[ROWS x depth] b[depth x N vectors]. The loops over registers are unrolled before GCC decides
// where the sums lie: in memory, otherwise, and read back at the end.
template <bool ADD, int N, class T, class A>
inline void tile(Size depth, A a, const T* b, T* c, Size c_row) {
  Vec<T> sums[ROWS][N];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 2
    for (int j = 0; j < N; j++) sums[i][j] = Vec<T>{};
#pragma GCC unroll 2
  for (Size k = 0; k < depth; k++) {
    Vec<T> right[N];
#pragma GCC unroll 2
    for (int j = 0; j < N; j++) right[j] = load(b + k * COLUMNS<T> + j * LANES<T>);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
      Vec<T> left = splat(a(i, k));
#pragma GCC unroll 2
      for (int j = 0; j < N; j++) sums[i][j] += left * right[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 2
    for (int j = 0; j < N; j++) {
      T* to = c + i * c_row + j * LANES<T>;
      store(to, ADD ? load(to) + sums[i][j] : sums[i][j]);
    }
}

struct Span {
  Size begin, end;
};

// c[rows x columns] = (ADD: +=) a b, rows and columns rounded up to whole tiles, columns to half ones; b's panels are `panel`
// elements apart. depths(i, j) is asked before the tile at (i, j), in order: the span of the depth that it needs; nothing is
// written where it is empty.
template <bool ADD, class T, class A, class F>
inline void multiply(Size rows, Size columns, F depths, A a, const T* b, Size panel, T* c, Size c_row) {
  for (Size j = 0; j < columns; j += COLUMNS<T>)
    for (Size i = 0; i < rows; i += ROWS) {
      auto [from, to] = depths(i, j);
      if (from >= to) continue;
      const T* right = b + j / COLUMNS<T> * panel + from * COLUMNS<T>;
      if (columns - j > LANES<T>)
        tile<ADD, VECTORS>(to - from, a.from(i, from), right, c + i * c_row + j, c_row);
      else
        tile<ADD, 1>(to - from, a.from(i, from), right, c + i * c_row + j, c_row);
    }
}

template <bool ADD, class T, class A>
inline void multiply(Size rows, Size columns, Size depth, A a, const T* b, Size panel, T* c, Size c_row) {
  multiply<ADD, T>(rows, columns, [=](Size, Size) { return Span{0, depth}; }, a, b, panel, c, c_row);
}

// The distance of rows that are read column by column: not a power of two, whose multiples share few places in the cache.
template <class T>
inline Size apart(Size width) {
  return width + LANES<T>;
}

constexpr Size AHEAD = 6;  // rows that are asked for before they are read: a scattered row comes from far away

template <class S>
inline void fetch(const S* row, Size width) {
  for (Size i = 0; i < width; i += 64 / Size(sizeof(S))) __builtin_prefetch(row + i);
}

// Converts a row of `count` elements, times `factor`, and fills with zeros up to `padded`.
template <class S>
inline void copy_row(const S* from, Size count, Size padded, Work<S>* to, Work<S> factor = 1) {
  constexpr int lanes = LANES<Work<S>>;
  Size i = 0;
  for (; i + lanes <= count; i += lanes) store(to + i, load(from + i) * factor);
  for (; i < count; i++) to[i] = load_one(from + i) * factor;
  for (; i < padded; i++) to[i] = 0;
}

template <class S>
inline void write_row(const Work<S>* from, Size count, S* to, Work<S> factor = 1) {
  constexpr int lanes = LANES<Work<S>>;
  Size i = 0;
  for (; i + lanes <= count; i += lanes) store(to + i, load(from + i) * factor);
  for (; i < count; i++) store_one(to + i, from[i] * factor);
}

// A tensor whose rows are written once: past the caches where it is larger than those near a core.
template <class S>
struct Written {
  S* data;
  Size width;
  bool streamed;
  Written(S* data, Size rows, Size width) : data(data), width(width) {
    Size row = width * Size(sizeof(S));
    streamed = rows * row > Size(1) << 21 && row % BYTES == 0 && reinterpret_cast<uintptr_t>(data) % BYTES == 0;
  }
  void put(Size row, const Work<S>* from) const {
    S* to = data + row * width;
    if (!streamed) return write_row(from, width, to);
    for (Size i = 0; i < width; i += LANES<Work<S>>) stream(to + i, load(from + i));
  }
};

// Row `row` of a right factor, split over its panels (which are `panel` elements apart); zeros past `count`.
template <class S>
inline void pack_row(const S* from, Size count, Size row, Work<S>* panels, Size panel, Work<S> factor = 1) {
  constexpr int columns = COLUMNS<Work<S>>;
  for (Size j = 0; j < count; j += columns)
    copy_row(from + j, std::min<Size>(columns, count - j), columns, panels + j / columns * panel + row * columns, factor);
}

// `count` rows of `width` elements become the columns of a right factor; zeros in what its last panel has beyond them.
template <class S>
inline void pack_columns(const S* from, Size row, Size count, Size width, Work<S>* panels) {
  typedef Work<S> T;
  constexpr int columns = COLUMNS<T>, lanes = LANES<T>;
  for (Size i = 0; i < up_to(count, columns); i += lanes) {
    T* to = panels + i / columns * width * columns + i % columns;
    Size rows = std::clamp<Size>(count - i, 0, lanes), k = 0;
    for (; k + lanes <= width; k += lanes) {
      Vec<T> block[lanes];
      for (int j = 0; j < lanes; j++) block[j] = j < rows ? load(from + (i + j) * row + k) : Vec<T>{};
      transpose(block);
      for (int j = 0; j < lanes; j++) store(to + (k + j) * columns, block[j]);
    }
    for (; k < width; k++)
      for (int j = 0; j < lanes; j++) to[k * columns + j] = j < rows ? load_one(from + (i + j) * row + k) : T(0);
  }
}
