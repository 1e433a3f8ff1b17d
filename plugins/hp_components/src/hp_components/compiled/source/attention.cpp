// Attention of query heads that share key-value heads; each query sees one range of keys.
//
// Forward: a few queries at a time, all their scores in the nearest cache. Backward: scores made again by blocks of
// queries and keys from the log-sum-exps, nothing of size queries x keys is kept. One key-value head is one task.
#include <algorithm>
#include <initializer_list>
#include <limits>
#include "matmul.h"
#include "rows.h"

namespace {

constexpr Size BLOCK = 64;  // queries, and keys, of a block of the backward

struct Strides {
  Size batch, head, row;
};

struct Shape {
  Size batch, heads, kv_heads, queries, keys, width, value_width;  // width: of queries and keys
  Size groups() const { return heads / kv_heads; }
  Size products() const { return batch * heads * queries * keys * (width + value_width); }
};

// Each query sees keys first[i] .. end[i]; rows of the batch are `row` apart, 0 where all have the same.
struct Ranges {
  const int32_t *first, *end;
  Size row;
};

// The keys that any of some queries sees, and those that all of them see.
struct Seen {
  Span any, all;
  Seen(const int32_t* first, const int32_t* end, Size queries) : any{first[0], end[0]}, all{first[0], end[0]} {
    for (Size i = 1; i < queries; i++) {
      any = {std::min<Size>(any.begin, first[i]), std::max<Size>(any.end, end[i])};
      all = {std::max<Size>(all.begin, first[i]), std::min<Size>(all.end, end[i])};
    }
  }
};

template <class S>
void pack_rows(const S* x, Size row, Size count, Size padded, Size width, Work<S>* panels) {
  constexpr int columns = COLUMNS<Work<S>>;
  for (Size i = 0; i < count; i++) pack_row(x + i * row, width, i, panels, padded * columns);
  for (Size j = 0; j < up_to(width, columns); j += columns)
    std::memset(panels + j / columns * padded * columns + count * columns, 0, (padded - count) * columns * sizeof(Work<S>));
}

template <class T>
struct Sums {
  T top, total;  // the largest score, and the sum of exp(score - top)
};

// scores[0 .. count] -> exp(score - largest) for the keys from first to end, zeros elsewhere, in place.
template <class T>
Sums<T> exponentials(T* scores, Size count, Size first, Size end) {
  constexpr T none = -std::numeric_limits<T>::infinity();
  constexpr int lanes = LANES<T>;
  if (first >= end) {
    std::fill(scores, scores + count, T(0));
    return {none, 0};
  }
  auto mask = [=](Size j) { store(scores + j, within<T>(load(scores + j), first - j, end - j, splat(none))); };
  for (Size j = 0; j < first; j += lanes) mask(j);
  for (Size j = end / lanes * lanes; j < count; j += lanes) mask(j);
  T top = largest<T>(gather<T>(count, splat(none), [=](Size j, auto) { return load(scores + j); }, larger<T>));
  T total = reduce<T>(count, [=](Size j, auto) {
    Vec<T> e = exponential(load(scores + j) - top);
    store(scores + j, e);
    return e;
  });
  return {top, total};
}

template <class S>
void forward(
    const S* query, Strides qs, const S* key, Strides ks, const S* value, Strides vs, S* out, Strides os, Work<S>* lse,
    Ranges ranges, Work<S> scale, Shape n, int threads) {
  typedef Work<S> T;
  constexpr int columns = COLUMNS<T>;
  threads = team(n.products(), threads);
  Size pairs = n.batch * n.kv_heads, parts = std::max<Size>(1, (threads + pairs - 1) / std::max<Size>(pairs, 1));
  Size keys = up_to(n.keys, columns), wide = up_to(n.value_width, columns), strips = (n.queries + ROWS - 1) / ROWS;
#pragma omp parallel num_threads(threads)
  {
    Buffer<T> k_panels(keys * n.width), v_panels(keys * wide), q(ROWS * n.width), scores(ROWS * keys), o(ROWS * wide);
#pragma omp for schedule(dynamic, 1) collapse(2)
    for (Size pair = 0; pair < pairs; pair++)
      for (Size part = 0; part < parts; part++) {
        Size b = pair / n.kv_heads, kv = pair % n.kv_heads;
        pack_columns(key + b * ks.batch + kv * ks.head, ks.row, n.keys, n.width, k_panels.data);
        pack_rows(value + b * vs.batch + kv * vs.head, vs.row, n.keys, keys, n.value_width, v_panels.data);
        for (Size h = kv * n.groups(); h < (kv + 1) * n.groups(); h++)
          for (Size strip = part; strip < strips; strip += parts) {
            Size row = strip * ROWS, rows = std::min<Size>(ROWS, n.queries - row);
            const int32_t* first = ranges.first + b * ranges.row + row;
            const int32_t* end = ranges.end + b * ranges.row + row;
            auto [from, to] = Seen(first, end, rows).any;
            from = from / columns * columns;
            to = std::min(keys, std::max(from + columns, up_to(to, columns)));
            from = std::min(from, to - columns);
            for (Size i = 0; i < ROWS; i++) {
              const S* x = query + b * qs.batch + h * qs.head + (row + i) * qs.row;
              fetch(x + parts * ROWS * qs.row, n.width);
              copy_row(x, i < rows ? n.width : 0, n.width, q + i * n.width, scale);
            }
            multiply<false, T>(
                ROWS, to - from, n.width, Strided<T>{q, n.width, 1}, k_panels + from * n.width, n.width * columns, scores,
                to - from);
            T part[ROWS];
            for (Size i = 0; i < rows; i++) {
              Sums<T> s = exponentials(scores + i * (to - from), to - from, std::max<Size>(first[i] - from, 0), end[i] - from);
              part[i] = s.total == 0 ? T(0) : 1 / s.total;
              lse[(b * n.heads + h) * n.queries + row + i] = s.top + std::log(s.total);
            }
            multiply<false, T>(
                ROWS, n.value_width, to - from, Strided<T>{scores, to - from, 1}, v_panels + from * columns, keys * columns, o,
                wide);
            for (Size i = 0; i < rows; i++)
              write_row(o + i * wide, n.value_width, out + b * os.batch + h * os.head + (row + i) * os.row, part[i]);
          }
      }
  }
}

// What the backward knows of a block of queries: as left factors [BLOCK, width], as right factors in panels.
template <class T>
struct Queries {
  Buffer<T> left, panels, grad_left, grad_panels, delta, lse, grad;
  Queries(Size width, Size wide, Size value_width)
      : left(BLOCK * width), panels(BLOCK * wide), grad_left(BLOCK * value_width),
        grad_panels(BLOCK * up_to(value_width, COLUMNS<T>)), delta(BLOCK), lse(BLOCK), grad(BLOCK * wide) {}
};

// Who sees whom in a block, by tiles: the keys that any of ROWS queries sees, and the queries that see any of ROWS keys.
struct Sight {
  Span keys[BLOCK / ROWS], queries[BLOCK / ROWS];
  Sight(Size rows, Size from, const int32_t* first, const int32_t* end, Span all) {
    bool whole = all.begin <= from && from + BLOCK <= all.end;
    for (Size g = 0; g < BLOCK / ROWS; g++) keys[g] = queries[g] = whole ? Span{0, BLOCK} : Span{BLOCK, 0};
    for (Size i = 0; i < (whole ? 0 : rows); i++) {
      Size begin = std::clamp<Size>(first[i] - from, 0, BLOCK), stop = std::clamp<Size>(end[i] - from, 0, BLOCK);
      if (begin >= stop) continue;
      widen(keys[i / ROWS], begin, stop);
      for (Size g = begin / ROWS; g <= (stop - 1) / ROWS; g++) widen(queries[g], i, i + 1);
    }
  }
  static void widen(Span& span, Size begin, Size end) {
    span.begin = std::min(span.begin, begin);
    span.end = std::max(span.end, end);
  }
};

// weights[i, j] = exp(scores - lse) where query i sees key `from` + j, else 0; slopes = weights * (slopes - delta).
template <class T>
void differentiate(
    T* weights, T* slopes, const T* lse, const T* delta, Size rows, Size from, const int32_t* first, const int32_t* end) {
  constexpr int lanes = LANES<T>;
  for (Size i = 0; i < BLOCK; i++) {
    T *w = weights + i * BLOCK, *s = slopes + i * BLOCK;
    Size begin = i < rows ? std::clamp<Size>(first[i] - from, 0, BLOCK) : BLOCK;
    Size stop = i < rows ? std::clamp<Size>(end[i] - from, 0, BLOCK) : 0;
    for (Size j = 0; j < BLOCK; j += lanes) {
      Vec<T> weight{}, slope{};
      if (j < stop && begin < j + lanes) {
        weight = within<T>(exponential(load(w + j) - lse[i]), begin - j, stop - j, Vec<T>{});
        slope = within<T>(weight * (load(s + j) - delta[i]), begin - j, stop - j, Vec<T>{});
      }
      store(w + j, weight);
      store(s + j, slope);
    }
  }
}

template <class S>
void backward(
    const S* query, Strides qs, const S* key, Strides ks, const S* value, Strides vs, const S* out, Strides os, const S* grad,
    Strides gs, const Work<S>* lse, const Work<S>* grad_lse, S* grad_query, Strides gqs, S* grad_key, Strides gks,
    S* grad_value, Strides gvs, Ranges ranges, Work<S> scale, Shape n, int threads) {
  typedef Work<S> T;
  constexpr int columns = COLUMNS<T>;
  threads = team(n.products(), threads);
  Size pairs = n.batch * n.kv_heads, keys = up_to(n.keys, BLOCK);
  Size wide = up_to(n.width, columns), value_wide = up_to(n.value_width, columns);
#pragma omp parallel num_threads(threads)
  {
    Buffer<T> k_columns(keys * n.width), k_panels(keys * wide), v_columns(keys * n.value_width);
    Buffer<T> sum_key(keys * wide), sum_value(keys * value_wide), weights(BLOCK * BLOCK), slopes(BLOCK * BLOCK);
    Queries<T> block(n.width, wide, n.value_width);
#pragma omp for schedule(dynamic, 1)
    for (Size pair = 0; pair < pairs; pair++) {
      Size b = pair / n.kv_heads, kv = pair % n.kv_heads;
      const S *k = key + b * ks.batch + kv * ks.head, *v = value + b * vs.batch + kv * vs.head;
      pack_columns(k, ks.row, n.keys, n.width, k_columns.data);
      pack_columns(v, vs.row, n.keys, n.value_width, v_columns.data);
      pack_rows(k, ks.row, n.keys, keys, n.width, k_panels.data);
      std::memset(sum_key, 0, keys * wide * sizeof(T));
      std::memset(sum_value, 0, keys * value_wide * sizeof(T));
      for (Size h = kv * n.groups(); h < (kv + 1) * n.groups(); h++)
        for (Size row = 0; row < n.queries; row += BLOCK) {
          Size rows = std::min(BLOCK, n.queries - row);
          const int32_t* first = ranges.first + b * ranges.row + row;
          const int32_t* end = ranges.end + b * ranges.row + row;
          for (Size i = 0; i < BLOCK; i++) {
            const S* q = query + b * qs.batch + h * qs.head + (row + i) * qs.row;
            const S* g = grad + b * gs.batch + h * gs.head + (row + i) * gs.row;
            fetch(q + AHEAD * qs.row, n.width);
            fetch(g + AHEAD * gs.row, n.value_width);
            fetch(out + b * os.batch + h * os.head + (row + i + AHEAD) * os.row, n.value_width);
            Size width = i < rows ? n.width : 0, value_width = i < rows ? n.value_width : 0;
            copy_row(q, width, n.width, block.left + i * n.width, scale);
            copy_row(g, value_width, n.value_width, block.grad_left + i * n.value_width);
            for (Size j = 0; j < wide; j += columns)
              copy_row(q + j, std::clamp<Size>(width - j, 0, columns), columns, block.panels + j * BLOCK + i * columns, scale);
            for (Size j = 0; j < value_wide; j += columns)
              copy_row(g + j, std::clamp<Size>(value_width - j, 0, columns), columns, block.grad_panels + j * BLOCK + i * columns);
            if (i >= rows) continue;
            const S* o = out + b * os.batch + h * os.head + (row + i) * os.row;
            const T* wide_grad = block.grad_left + i * n.value_width;
            T delta = reduce<T>(n.value_width, [=](Size j, auto part) { return take(o + j, part) * take(wide_grad + j, part); });
            Size place = (b * n.heads + h) * n.queries + row + i;
            block.delta[i] = delta - (grad_lse ? grad_lse[place] : T(0));
            block.lse[i] = lse[place];
          }
          std::memset(block.grad, 0, BLOCK * wide * sizeof(T));
          auto [any, all] = Seen(first, end, rows);
          for (Size from = any.begin / BLOCK * BLOCK; from < std::min(n.keys, any.end); from += BLOCK) {
            Sight sight(rows, from, first, end, all);
            auto in_sight = [&](Size depth) {
              return [&sight, depth](Size i, Size j) {
                auto [begin, stop] = sight.keys[i / ROWS];
                return Span{0, begin < j + columns && j < stop ? depth : 0};
              };
            };
            auto keys_of = [&](Size i, Size) { return sight.keys[i / ROWS]; };
            auto queries_of = [&](Size i, Size) { return sight.queries[i / ROWS]; };
            multiply<false, T>(
                BLOCK, BLOCK, in_sight(n.width), Strided<T>{block.left, n.width, 1}, k_columns + from * n.width,
                n.width * columns, weights, BLOCK);
            multiply<false, T>(
                BLOCK, BLOCK, in_sight(n.value_width), Strided<T>{block.grad_left, n.value_width, 1}, v_columns + from * n.value_width,
                n.value_width * columns, slopes, BLOCK);
            differentiate<T>(weights, slopes, block.lse, block.delta, rows, from, first, end);
            multiply<true, T>(
                BLOCK, n.value_width, queries_of, Strided<T>{weights, 1, BLOCK}, block.grad_panels, BLOCK * columns,
                sum_value + from * value_wide, value_wide);
            multiply<true, T>(
                BLOCK, n.width, queries_of, Strided<T>{slopes, 1, BLOCK}, block.panels, BLOCK * columns, sum_key + from * wide,
                wide);
            multiply<true, T>(
                BLOCK, n.width, keys_of, Strided<T>{slopes, BLOCK, 1}, k_panels + from * columns, keys * columns, block.grad,
                wide);
          }
          for (Size i = 0; i < rows; i++)
            write_row(block.grad + i * wide, n.width, grad_query + b * gqs.batch + h * gqs.head + (row + i) * gqs.row, scale);
        }
      for (Size i = 0; i < n.keys; i++) {
        write_row(sum_key + i * wide, n.width, grad_key + b * gks.batch + kv * gks.head + i * gks.row);
        write_row(sum_value + i * value_wide, n.value_width, grad_value + b * gvs.batch + kv * gvs.head + i * gvs.row);
      }
    }
  }
}

}  // namespace

#define STRIDES(name) Size name##_batch, Size name##_head, Size name##_row
#define GIVEN(name) Strides{name##_batch, name##_head, name##_row}
#define EXPORT(S, suffix)                                                                                                  \
  extern "C" void attention_forward_##suffix(                                                                              \
      const S* query, STRIDES(q), const S* key, STRIDES(k), const S* value, STRIDES(v), S* out, STRIDES(o), Work<S>* lse,  \
      const int32_t* first, const int32_t* end, Size range_row, double scale, Size batch, Size heads, Size kv_heads,       \
      Size queries, Size keys, Size width, Size value_width, Size threads) {                                               \
    forward<S>(                                                                                                            \
        query, GIVEN(q), key, GIVEN(k), value, GIVEN(v), out, GIVEN(o), lse, {first, end, range_row}, scale,               \
        {batch, heads, kv_heads, queries, keys, width, value_width}, threads);                                             \
  }                                                                                                                        \
  extern "C" void attention_backward_##suffix(                                                                             \
      const S* query, STRIDES(q), const S* key, STRIDES(k), const S* value, STRIDES(v), const S* out, STRIDES(o),          \
      const S* grad, STRIDES(g), const Work<S>* lse, const Work<S>* grad_lse, S* grad_query, STRIDES(gq), S* grad_key,     \
      STRIDES(gk), S* grad_value, STRIDES(gv), const int32_t* first, const int32_t* end, Size range_row, double scale,     \
      Size batch, Size heads, Size kv_heads, Size queries, Size keys, Size width, Size value_width, Size threads) {        \
    backward<S>(                                                                                                           \
        query, GIVEN(q), key, GIVEN(k), value, GIVEN(v), out, GIVEN(o), grad, GIVEN(g), lse, grad_lse, grad_query,         \
        GIVEN(gq), grad_key, GIVEN(gk), grad_value, GIVEN(gv), {first, end, range_row}, scale,                             \
        {batch, heads, kv_heads, queries, keys, width, value_width}, threads);                                             \
  }

EXPORT(float, float32)
EXPORT(double, float64)
EXPORT(bf16, bfloat16)
