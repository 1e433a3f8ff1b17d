// RMSNorm of each head and its rotary position embedding in one pass, and both gradients in another.
#include <cmath>
#include "matmul.h"
#include "rotary.h"

namespace {

template <class S>
struct Heads {
  S* data;
  Strides strides;
  S* row(Size b, Size i) const { return data + b * strides.batch + i * strides.row; }
};

// The weight plus its offset, in whole vectors.
template <class S, class T = Work<S>>
void widen(const S* weight, T offset, Size width, T* scale) {
  each<T>(width, [=](Size j, auto part) { store(scale + j, take(weight + j, part) + offset); });
}

template <bool PAIRS, class S, class T = Work<S>>
void forward(
    Heads<const S> x, const S* weight, Heads<const S> cos, Heads<const S> sin, Heads<S> out, T* factors, Shape n, T eps,
    T offset, Size from, Size to) {
  Buffer<T> scale(up_to(n.width, LANES<T>)), normed(up_to(n.width, LANES<T>));
  widen(weight, offset, n.width, scale.data);
  for (Size token = from; token < to; token++) {
    Size b = token / n.rows, i = token % n.rows;
    for (Size h = 0; h < n.heads; h++) {
      const S* row = x.row(b, i) + h * x.strides.head;
      T squares = reduce<T>(n.width, [=](Size j, auto part) {
        Vec<T> v = take(row + j, part);
        return v * v;
      });
      T factor = 1 / std::sqrt(squares / T(n.width) + eps);
      factors[token * n.heads + h] = factor;
      each<T>(n.width, [&](Size j, auto part) { store(normed + j, take(row + j, part) * factor * load(scale + j)); });
      turn<PAIRS, false>(normed.data, cos.row(b, i), sin.row(b, i), out.row(b, i) + h * out.strides.head, n);
    }
  }
}

// Adds the rows' summands of the weight's gradient to `sums`, whose length is a whole number of vectors.
template <bool PAIRS, class S, class T = Work<S>>
void backward(
    Heads<const S> x, const S* weight, Heads<const S> cos, Heads<const S> sin, Heads<const S> grad, Heads<S> grad_x,
    const T* factors, T* sums, Shape n, T offset, Size from, Size to) {
  Buffer<T> scale(up_to(n.width, LANES<T>)), slopes(up_to(n.width, LANES<T>));
  widen(weight, offset, n.width, scale.data);
  for (Size token = from; token < to; token++) {
    Size b = token / n.rows, i = token % n.rows;
    for (Size h = 0; h < n.heads; h++) {
      const S* row = x.row(b, i) + h * x.strides.head;
      S* found = grad_x.row(b, i) + h * grad_x.strides.head;
      T factor = factors[token * n.heads + h];
      turn<PAIRS, true>(grad.row(b, i) + h * grad.strides.head, cos.row(b, i), sin.row(b, i), slopes.data, n);
      T along = reduce<T>(n.width, [&](Size j, auto part) {
        return take(slopes + j, part) * load(scale + j) * take(row + j, part);
      });
      along *= factor / T(n.width);
      each<T>(n.width, [&](Size j, auto part) {
        Vec<T> g = take(slopes + j, part), normed = take(row + j, part) * factor;
        give(found + j, (g * load(scale + j) - normed * along) * factor, part);
        store(sums + j, load(sums + j) + g * normed);
      });
    }
  }
}

template <class S, class T = Work<S>>
void backward_of_all(
    Heads<const S> x, const S* weight, Heads<const S> cos, Heads<const S> sin, Heads<const S> grad, Heads<S> grad_x,
    S* grad_weight, const T* factors, Shape n, bool pairs, T offset, Size threads) {
  Size tokens = n.batch * n.rows, parts = parts_of(tokens, n.heads * n.width, threads), padded = up_to(n.width, 64);
  Buffer<T> sums(parts * padded, true);
  split(tokens, parts, [=, all = sums.data](Size part, Size from, Size to) {
    (pairs ? backward<true, S> : backward<false, S>)(
        x, weight, cos, sin, grad, grad_x, factors, all + part * padded, n, offset, from, to);
  });
  each<T>(n.width, [&](Size j, auto part) {
    Vec<T> sum = load(sums + j);
    for (Size k = 1; k < parts; k++) sum += load(sums + k * padded + j);
    give(grad_weight + j, sum, part);
  });
}

}  // namespace

#define HEADS(S, name) S *name, Size name##_batch, Size name##_head, Size name##_row
#define GIVEN(S, name) \
  Heads<S> { name, { name##_batch, name##_head, name##_row } }
#define SHAPE Size batch, Size heads, Size rows, Size width, Size rotated
#define EXPORT(S, suffix)                                                                                                  \
  extern "C" void normed_rotary_forward_##suffix(                                                                          \
      HEADS(const S, x), const S* weight, HEADS(const S, cos), HEADS(const S, sin), HEADS(S, out), Work<S>* factors,       \
      SHAPE, Size pairs, double eps, double offset, Size threads) {                                                        \
    Heads<const S> x_ = GIVEN(const S, x), cos_ = GIVEN(const S, cos), sin_ = GIVEN(const S, sin);                         \
    Heads<S> out_ = GIVEN(S, out);                                                                                         \
    Shape n{batch, heads, rows, width, rotated, 0};                                                                        \
    split(batch * rows, parts_of(batch * rows, heads * width, threads), [=](Size, Size from, Size to) {                    \
      (pairs ? forward<true, S> : forward<false, S>)(                                                                      \
          x_, weight, cos_, sin_, out_, factors, n, Work<S>(eps), Work<S>(offset), from, to);                              \
    });                                                                                                                    \
  }                                                                                                                        \
  extern "C" void normed_rotary_backward_##suffix(                                                                         \
      HEADS(const S, x), const S* weight, HEADS(const S, cos), HEADS(const S, sin), HEADS(const S, grad),                  \
      HEADS(S, grad_x), S* grad_weight, const Work<S>* factors, SHAPE, Size pairs, double offset, Size threads) {          \
    backward_of_all<S>(                                                                                                    \
        GIVEN(const S, x), weight, GIVEN(const S, cos), GIVEN(const S, sin), GIVEN(const S, grad), GIVEN(S, grad_x),       \
        grad_weight, factors, {batch, heads, rows, width, rotated, 0}, pairs != 0, Work<S>(offset), threads);              \
  }

EXPORT(float, float32)
EXPORT(double, float64)
EXPORT(bf16, bfloat16)
