// RMSNorm: x / sqrt(mean(x^2) + eps) * (weight + offset), a row at a time while it lies in the nearest cache.
#include <cmath>
#include "matmul.h"
#include "rows.h"

namespace {

template <class S, class T = Work<S>>
void forward(
    Rows<const S> x, const S* weight, S* out, T* factors, Size width, T eps, T offset, Size from, Size to) {
  for (Size r = from; r < to; r++) {
    const S* row = x[r];
    T squares = reduce<T>(width, [=](Size j, auto part) {
      Vec<T> v = take(row + j, part);
      return v * v;
    });
    T factor = 1 / std::sqrt(squares / T(width) + eps);
    S* normed = out + r * width;
    each<T>(width, [=](Size j, auto part) {
      give(normed + j, take(row + j, part) * factor * (take(weight + j, part) + offset), part);
    });
    factors[r] = factor;
  }
}

// Adds the rows' summands of the weight's gradient to `sums`, whose length is a whole number of vectors.
template <class S, class T = Work<S>>
void backward(
    Rows<const S> x, Rows<const S> grad, const S* weight, const T* factors, S* grad_x, T* sums, Size width, T offset,
    Size from, Size to) {
  for (Size r = from; r < to; r++) {
    const S *row = x[r], *slope = grad[r];
    T factor = factors[r];
    T along = reduce<T>(width, [=](Size j, auto part) {
      return take(slope + j, part) * (take(weight + j, part) + offset) * take(row + j, part);
    });
    along *= factor / T(width);
    S* found = grad_x + r * width;
    each<T>(width, [=](Size j, auto part) {
      Vec<T> g = take(slope + j, part), normed = take(row + j, part) * factor;
      give(found + j, (g * (take(weight + j, part) + offset) - normed * along) * factor, part);
      store(sums + j, load(sums + j) + g * normed);
    });
  }
}

template <class S, class T = Work<S>>
void backward_of_all(
    Rows<const S> x, Rows<const S> grad, const S* weight, const T* factors, S* grad_x, S* grad_weight, Size rows, Size width,
    T offset, Size threads) {
  Size parts = parts_of(rows, width, threads), padded = up_to(width, 64);
  Buffer<T> sums(parts * padded);
  split(rows, parts, [=, all = sums.data](Size part, Size from, Size to) {
    T* mine = all + part * padded;
    std::fill(mine, mine + padded, T(0));
    backward<S>(x, grad, weight, factors, grad_x, mine, width, offset, from, to);
  });
  each<T>(width, [&](Size j, auto part) {
    Vec<T> sum = load(sums + j);
    for (Size k = 1; k < parts; k++) sum += load(sums + k * padded + j);
    give(grad_weight + j, sum, part);
  });
}

}  // namespace

#define EXPORT(S, suffix)                                                                                                  \
  extern "C" void rms_norm_forward_##suffix(                                                                               \
      ROWS_OF(const S, x), const S* weight, S* out, Work<S>* factors, Size rows, Size width, double eps, double offset,    \
      Size threads) {                                                                                                      \
    auto given = GIVEN_ROWS(const S, x);                                                                                   \
    split(rows, parts_of(rows, width, threads), [=](Size, Size from, Size to) {                                            \
      forward<S>(given, weight, out, factors, width, Work<S>(eps), Work<S>(offset), from, to);                             \
    });                                                                                                                    \
  }                                                                                                                        \
  extern "C" void rms_norm_backward_##suffix(                                                                              \
      ROWS_OF(const S, x), ROWS_OF(const S, grad), const S* weight, const Work<S>* factors, S* grad_x, S* grad_weight,     \
      Size rows, Size width, double offset, Size threads) {                                                                \
    backward_of_all<S>(                                                                                                    \
        GIVEN_ROWS(const S, x), GIVEN_ROWS(const S, grad), weight, factors, grad_x, grad_weight, rows, width,              \
        Work<S>(offset), threads);                                                                                         \
  }

EXPORT(float, float32)
EXPORT(double, float64)
EXPORT(bf16, bfloat16)
