// Rows of tensors, whatever their width: steps over the vectors of a row, and parts of the rows for threads.
#pragma once
#include <algorithm>
#include "vector.h"

// Row r lies at (r / inner) * outer + (r % inner) * stride; inner is 0 where one stride is enough.
template <class S>
struct Rows {
  S* data;
  Size inner, outer, stride;
  S* operator[](Size r) const { return data + (inner ? r / inner * outer + r % inner * stride : r * stride); }
};

// A vector that lies in the row as a whole, or the first elements of one at the end of a row.
struct Whole {};
struct Part {
  Size count;
};

template <class S>
inline Vec<Work<S>> take(const S* p, Whole, Work<S> = 0) {
  return load(p);
}

template <class S>
inline Vec<Work<S>> take(const S* p, Part part, Work<S> rest = 0) {
  Vec<Work<S>> v = splat(rest);
  for (Size i = 0; i < part.count; i++) v[i] = load_one(p + i);
  return v;
}

template <class S>
inline void give(S* p, Vec<Work<S>> v, Whole) {
  store(p, v);
}

template <class S>
inline void give(S* p, Vec<Work<S>> v, Part part) {
  for (Size i = 0; i < part.count; i++) store_one(p + i, Work<S>(v[i]));
}

// step(j, Whole or Part) for each vector of a row.
template <class T, class F>
inline void each(Size width, F step) {
  Size j = 0;
  for (; j + LANES<T> <= width; j += LANES<T>) step(j, Whole{});
  if (j < width) step(j, Part{width - j});
}

// The vectors term(j, Whole or Part) put together by add: four at a time, as one would wait for the one before it.
template <class T, class F, class G>
inline Vec<T> gather(Size width, Vec<T> start, F term, G add) {
  constexpr int lanes = LANES<T>;
  Vec<T> found[4] = {start, start, start, start};
  Size j = 0;
  for (; j + 4 * lanes <= width; j += 4 * lanes)
    for (int k = 0; k < 4; k++) found[k] = add(found[k], term(j + k * lanes, Whole{}));
  for (; j + lanes <= width; j += lanes) found[0] = add(found[0], term(j, Whole{}));
  if (j < width) found[1] = add(found[1], term(j, Part{width - j}));
  return add(add(found[0], found[1]), add(found[2], found[3]));
}

template <class T, class F>
inline T reduce(Size width, F term) {
  return sum<T>(gather<T>(width, Vec<T>{}, term, [](Vec<T> a, Vec<T> b) { return a + b; }));
}

// The parts that the rows go to threads in: fewer than threads where they would not repay the waking.
inline Size parts_of(Size rows, Size width, Size threads) {
  return std::clamp<Size>(std::min(rows, rows * width / 16384), 1, std::max<Size>(threads, 1));
}

// run(part, from, to) for each part of the rows. The parts depend on the sizes only, whatever threads there are.
template <class F>
inline void split(Size rows, Size parts, F run) {
#pragma omp parallel for num_threads(parts) schedule(static)
  for (Size part = 0; part < parts; part++) run(part, rows * part / parts, rows * (part + 1) / parts);
}

#define ROWS_OF(S, name) S *name, Size name##_inner, Size name##_outer, Size name##_stride
#define GIVEN_ROWS(S, name) Rows<S>{name, name##_inner, name##_outer, name##_stride}
