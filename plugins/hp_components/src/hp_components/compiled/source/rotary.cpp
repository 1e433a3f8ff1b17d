// Rotary position embedding: the heads of a token turned by its angles, in halves or in pairs that leave as halves.
#include "rotary.h"

namespace {

// The tokens from .. to of the batch: all heads of one, then the next, as its angles serve them all.
template <bool PAIRS, bool BACK, class S>
void rotate(
    const S* x, Strides xs, const S* cos, Strides cs, const S* sin, Strides ss, S* out, Strides os, Shape n, Size from,
    Size to) {
  for (Size token = from; token < to; token++) {
    Size b = token / n.rows, i = token % n.rows;
    const S *c = cos + b * cs.batch + i * cs.row, *s = sin + b * ss.batch + i * ss.row;
    const S* row = x + b * xs.batch + i * xs.row;
    S* found = out + b * os.batch + i * os.row;
    for (Size h = 0; h < n.heads; h++) turn<PAIRS, BACK>(row + h * xs.head, c, s, found + h * os.head, n);
  }
}

template <bool BACK, class S>
void rotate_all(
    const S* x, Strides xs, const S* cos, Strides cs, const S* sin, Strides ss, S* out, Strides os, Shape n, bool pairs,
    Size threads) {
  Size tokens = n.batch * n.rows;
  split(tokens, parts_of(tokens, n.heads * n.width, threads), [=](Size, Size from, Size to) {
    (pairs ? rotate<true, BACK, S> : rotate<false, BACK, S>)(x, xs, cos, cs, sin, ss, out, os, n, from, to);
  });
}

}  // namespace

#define STRIDES(name) Size name##_batch, Size name##_head, Size name##_row
#define GIVEN(name) Strides{name##_batch, name##_head, name##_row}
#define EXPORT_WAY(S, way, back, suffix)                                                                                   \
  extern "C" void rotary_##way##_##suffix(                                                                                 \
      const S* x, STRIDES(x), const S* cos, STRIDES(c), const S* sin, STRIDES(s), S* out, STRIDES(o), Size batch,          \
      Size heads, Size rows, Size width, Size rotated, Size place, Size pairs, Size threads) {                             \
    rotate_all<back, S>(                                                                                                   \
        x, GIVEN(x), cos, GIVEN(c), sin, GIVEN(s), out, GIVEN(o), {batch, heads, rows, width, rotated, place}, pairs != 0, \
        threads);                                                                                                          \
  }
#define EXPORT(S, suffix)                   \
  EXPORT_WAY(S, forward, false, suffix)     \
  EXPORT_WAY(S, backward, true, suffix)

EXPORT(float, float32)
EXPORT(double, float64)
EXPORT(bf16, bfloat16)
