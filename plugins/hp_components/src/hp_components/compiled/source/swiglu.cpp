// SwiGLU: silu(gate) * up, and both gradients in one pass.
#include "rows.h"

namespace {

template <class S, class T = Work<S>>
void forward(Rows<const S> gate, Rows<const S> up, S* out, Size width, Size from, Size to) {
  for (Size r = from; r < to; r++) {
    const S *g = gate[r], *u = up[r];
    S* found = out + r * width;
    each<T>(width, [=](Size j, auto part) {
      Vec<T> x = take(g + j, part);
      give(found + j, x / (splat(T(1)) + exponential(-x)) * take(u + j, part), part);
    });
  }
}

template <class S, class T = Work<S>>
void backward(
    Rows<const S> gate, Rows<const S> up, Rows<const S> grad, S* grad_gate, S* grad_up, Size width, Size from, Size to) {
  for (Size r = from; r < to; r++) {
    const S *g = gate[r], *u = up[r], *slope = grad[r];
    S *found_gate = grad_gate + r * width, *found_up = grad_up + r * width;
    each<T>(width, [=](Size j, auto part) {
      Vec<T> x = take(g + j, part), d = take(slope + j, part), s = sigmoid<T>(x);
      give(found_up + j, d * (x * s), part);
      give(found_gate + j, d * take(u + j, part) * (s * (x * (T(1) - s) + T(1))), part);
    });
  }
}

}  // namespace

#define EXPORT(S, suffix)                                                                                                  \
  extern "C" void swiglu_forward_##suffix(                                                                                 \
      ROWS_OF(const S, gate), ROWS_OF(const S, up), S* out, Size rows, Size width, Size threads) {                         \
    auto left = GIVEN_ROWS(const S, gate), right = GIVEN_ROWS(const S, up);                                                \
    split(rows, parts_of(rows, width, threads), [=](Size, Size from, Size to) {                                            \
      forward<S>(left, right, out, width, from, to);                                                                       \
    });                                                                                                                    \
  }                                                                                                                        \
  extern "C" void swiglu_backward_##suffix(                                                                                \
      ROWS_OF(const S, gate), ROWS_OF(const S, up), ROWS_OF(const S, grad), S* grad_gate, S* grad_up, Size rows,           \
      Size width, Size threads) {                                                                                          \
    auto left = GIVEN_ROWS(const S, gate), right = GIVEN_ROWS(const S, up), slopes = GIVEN_ROWS(const S, grad);            \
    split(rows, parts_of(rows, width, threads), [=](Size, Size from, Size to) {                                            \
      backward<S>(left, right, slopes, grad_gate, grad_up, width, from, to);                                               \
    });                                                                                                                    \
  }

EXPORT(float, float32)
EXPORT(double, float64)
EXPORT(bf16, bfloat16)
