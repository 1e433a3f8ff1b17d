// Rotary position embedding of one head: in halves or in pairs that leave as halves. Of what S is made of, X goes in, O comes out.
#pragma once
#include "rows.h"

struct Strides {
  Size batch, head, row;
};

struct Shape {
  Size batch, heads, rows, width, rotated, place;  // the rotated features begin at `place`
  Size half() const { return rotated / 2; }
};

template <class T>
struct Two {
  Vec<T> first, second;
};

// Lane i of the result is lane first + step * (i / every) + shift * (i % every) of the two vectors after each other.
template <class T>
inline Vec<T> choose(Vec<T> a, Vec<T> b, int first, int every, int step, int shift) {
  Integers<T> lanes;
  for (int i = 0; i < LANES<T>; i++) lanes[i] = first + step * (i / every) + shift * (i % every);
  return __builtin_shuffle(a, b, lanes);
}

// Elements j .. of both halves at p, or of the first and second ones of pairs.
template <bool PAIRS, class S, class T = Work<S>>
inline Two<T> take_two(const S* p, Size half, Size j, Whole whole) {
  if (!PAIRS) return {take(p + j, whole), take(p + half + j, whole)};
  Vec<T> a = load(p + 2 * j), b = load(p + 2 * j + LANES<T>);
  return {choose<T>(a, b, 0, 1, 2, 0), choose<T>(a, b, 1, 1, 2, 0)};
}

template <bool PAIRS, class S, class T = Work<S>>
inline Two<T> take_two(const S* p, Size half, Size j, Part part) {
  if (!PAIRS) return {take(p + j, part), take(p + half + j, part)};
  Two<T> found = {Vec<T>{}, Vec<T>{}};
  for (Size i = 0; i < part.count; i++) {
    found.first[i] = load_one(p + 2 * (j + i));
    found.second[i] = load_one(p + 2 * (j + i) + 1);
  }
  return found;
}

template <bool PAIRS, class S, class T = Work<S>>
inline void give_two(S* p, Two<T> v, Size half, Size j, Whole whole) {
  if (!PAIRS) {
    give(p + j, v.first, whole);
    give(p + half + j, v.second, whole);
    return;
  }
  constexpr int lanes = LANES<T>;
  store(p + 2 * j, choose<T>(v.first, v.second, 0, 2, 1, lanes));
  store(p + 2 * j + lanes, choose<T>(v.first, v.second, lanes / 2, 2, 1, lanes));
}

template <bool PAIRS, class S, class T = Work<S>>
inline void give_two(S* p, Two<T> v, Size half, Size j, Part part) {
  for (Size i = 0; i < part.count; i++) {
    store_one(p + (PAIRS ? 2 * (j + i) : j + i), T(v.first[i]));
    store_one(p + (PAIRS ? 2 * (j + i) + 1 : half + j + i), T(v.second[i]));
  }
}

// BACK: the transpose, which turns the other way and puts halves back into pairs.
template <bool PAIRS, bool BACK, class X, class S, class O, class T = Work<S>>
inline void turn(const X* x, const S* cos, const S* sin, O* out, const Shape& n) {
  Size half = n.half(), place = n.place, after = place + 2 * half;
  auto copy = [=](Size from, Size to) {
    each<T>(to - from, [=](Size j, auto part) { give(out + from + j, take(x + from + j, part), part); });
  };
  copy(0, place);
  each<T>(half, [=](Size j, auto part) {
    Two<T> v = take_two<PAIRS && !BACK>(x + place, half, j, part);
    Two<T> c = take_two<false>(cos, half, j, part), s = take_two<false>(sin, half, j, part), found;
    if (BACK)
      found = {v.first * c.first + v.second * s.second, v.second * c.second - v.first * s.first};
    else
      found = {v.first * c.first - v.second * s.first, v.second * c.second + v.first * s.second};
    give_two<PAIRS && BACK>(out + place, found, half, j, part);
  });
  copy(after, n.width);
}
