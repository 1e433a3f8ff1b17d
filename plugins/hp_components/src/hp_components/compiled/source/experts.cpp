// SwiGLU experts: gathered rows, both products with the activation between them, and their gradients.
//
// T tokens, K experts of each, R rows sorted by expert, H hidden, I intermediate, G = 2I (gate, then up). The slot of a row
// says which of the T x K choices it is; its token is slot / K. An expert is one task (long ones are several in the forward),
// and a task works on few rows at a time, so that what lies between two products stays in the cache.
#include <algorithm>
#include <type_traits>
#include <vector>
#include "matmul.h"

namespace {

constexpr Size CHUNK = 64;  // rows
constexpr Size RUN = 1024;  // rows of an expert that one task of the forward takes

struct Sizes {
  Size tokens, choices, experts, hidden, inner;
};

// Rows by expert: `slots` is null where every row is a slot of its own, in order; `offsets` has E + 1 ends.
struct Rows {
  const Size *slots, *offsets;
  Size slot(Size row) const { return slots ? slots[row] : row; }
};

struct Task {
  Size expert, first, last;
};

// Tasks of at most `run` rows, the longest first, so that no thread is left with a long one at the end.
std::vector<Task> tasks_of(Rows rows, Size experts, Size run) {
  std::vector<Task> found;
  for (Size e = 0; e < experts; e++)
    for (Size r = rows.offsets[e]; r < rows.offsets[e + 1]; r += run) found.push_back({e, r, std::min(r + run, rows.offsets[e + 1])});
  std::stable_sort(found.begin(), found.end(), [](Task a, Task b) { return a.last - a.first > b.last - b.first; });
  return found;
}

// The rows of tokens that a task works on, as factors: where they lie if their dtype is the work's and tiles do not reach past
// their ends, else copied.
template <class S>
struct Tokens {
  typedef Work<S> T;
  const S* x;
  Rows rows;
  Size choices, width;
  bool copied;
  Buffer<T> copies;
  const T* at[CHUNK];

  Tokens(const S* x, Rows rows, Size choices, Size width)
      : x(x), rows(rows), choices(choices), width(width), copied(!std::is_same_v<S, T> || width % ROWS),
        copies(copied ? CHUNK * stride() : 0) {}
  Size stride() const { return apart<T>(up_to(width, ROWS)); }
  const S* row(Size row) const { return x + rows.slot(row) / choices * width; }

  // `count` rows from `first`; the tile's others are the first one again.
  void take(Size first, Size count) {
    for (Size i = 0; i < up_to(count, ROWS); i++) {
      const S* from = row(first + (i < count ? i : 0));
      if constexpr (std::is_same_v<S, T>) at[i] = from;
      if (!copied) continue;
      if (i + AHEAD < count) fetch(row(first + i + AHEAD), width);
      copy_row(from, width, up_to(width, ROWS), copies + i * stride());
      at[i] = copies + i * stride();
    }
  }
};

// A depth for a product that asks, before each of its tiles, for one of the rows from `next` to `last`: they are read soon.
template <class S>
auto ahead(const Tokens<S>& tokens, Size next, Size last, Size depth) {
  return [&tokens, next, last, depth](Size, Size) mutable {
    if (next < last) fetch(tokens.row(next++), tokens.width);
    return Span{0, depth};
  };
}

// out[t] = the sum of a token's rows.
template <class S>
void sum_rows(const Work<S>* rows, const Size* places, Size tokens, Size choices, Size width, S* out) {
  typedef Work<S> T;
#pragma omp for schedule(static)
  for (Size t = 0; t < tokens; t++) {
    const Size* place = places + t * choices;
    if (t + 2 < tokens)
      for (Size k = 0; k < choices; k++) fetch(rows + place[2 * choices + k] * width, width);
    Size i = 0;
    for (; i + LANES<T> <= width; i += LANES<T>) {
      Vec<T> total = load(rows + place[0] * width + i);
      for (Size k = 1; k < choices; k++) total += load(rows + place[k] * width + i);
      store(out + t * width + i, total);
    }
    for (; i < width; i++) {
      T total = rows[place[0] * width + i];
      for (Size k = 1; k < choices; k++) total += rows[place[k] * width + i];
      store_one(out + t * width + i, total);
    }
  }
}

// silu(gate) * up * weight; a row of `inner`, whose end is done by itself in vectors of which only a part counts.
template <class T>
void activate(const T* gate, const T* up, T weight, Size inner, T* act) {
  for (Size i = 0; i < inner; i += LANES<T>) {
    Vec<T> g = load(gate + i), u = load(up + i);
    store(act + i, g * sigmoid<T>(g) * u * weight);
  }
}

// The same again, into panels that are `panel` apart, and from the activation's gradient those of gate and up; returns the
// weight's.
template <class T>
T activate_backward(
    const T* gate, const T* up, T weight, const T* grad, Size inner, T* act, Size panel, T* grad_gate, T* grad_up) {
  Vec<T> along = Vec<T>{};
  for (Size i = 0; i < inner; i += LANES<T>) {
    Vec<T> g = load(gate + i), u = load(up + i), d = load(grad + i);
    Vec<T> s = sigmoid<T>(g), silu = g * s;
    along += d * silu * u;
    d *= weight;
    store(act + i / COLUMNS<T> * panel + i % COLUMNS<T>, silu * u * weight);
    store(grad_gate + i, d * u * s * (T(1) + g - silu));
    store(grad_up + i, d * silu);
  }
  return sum<T>(along);
}

// Gate and up of a row, up `wide` after gate: where they lie if that is so there, else split in `to`, zeros between.
template <class S>
const Work<S>* split_row(const S* gate_up, Size inner, Size wide, Work<S>* to) {
  if constexpr (std::is_same_v<S, Work<S>>)
    if (inner == wide) return gate_up;
  copy_row(gate_up, inner, wide, to);
  copy_row(gate_up + inner, inner, wide, to + wide);
  return to;
}

// y, [R, H] in the work's dtype, holds the rows until they are summed; where rows are tokens, they go to `out` at once.
template <class S>
void forward(
    const S* x, Rows rows, const Size* places, const Work<S>* weights, const S* gate_up, const S* down, S* saved,
    Work<S>* y, S* out, Sizes n, int threads) {
  typedef Work<S> T;
  constexpr int columns = COLUMNS<T>;
  Size hidden = up_to(n.hidden, columns), inner = up_to(n.inner, columns);
  std::vector<Task> tasks = tasks_of(rows, n.experts, RUN);
  Size all = rows.offsets[n.experts];
  Written<S> halves(saved, 2 * all, n.inner), in_order(out, all, n.hidden);
  Written<T> by_expert(y, all, n.hidden);
  threads = team(all * n.hidden * n.inner, threads);
#pragma omp parallel num_threads(threads)
  {
    Buffer<T> up_panels(n.hidden * 2 * inner), down_panels(n.inner * hidden);
    Buffer<T> both(CHUNK * 2 * inner), act(CHUNK * inner), right(CHUNK * hidden);
    Tokens<S> tokens(x, rows, n.choices, n.hidden);
    Size packed = -1;
#pragma omp for schedule(dynamic, 1)
    for (Size place = 0; place < Size(tasks.size()); place++) {
      Task task = tasks[place];
      if (packed != task.expert) {
        packed = task.expert;
        const S *g = gate_up + packed * 2 * n.inner * n.hidden, *d = down + packed * n.hidden * n.inner;
        for (Size half = 0; half < 2; half++)
          pack_columns(g + half * n.inner * n.hidden, n.hidden, n.inner, n.hidden, up_panels + half * inner * n.hidden);
        pack_columns(d, n.inner, n.hidden, n.inner, down_panels.data);
      }
      for (Size first = task.first; first < task.last; first += CHUNK) {
        Size count = std::min(CHUNK, task.last - first), tall = up_to(count, ROWS), next = first + count;
        tokens.take(first, count);
        multiply<false, T>(
            tall, 2 * inner, ahead(tokens, next, std::min(task.last, next + CHUNK), n.hidden), ByRows<T>{tokens.at}, up_panels,
            n.hidden * columns, both, 2 * inner);
        for (Size i = 0; i < count; i++) {
          T *gate = both + i * 2 * inner, *up = gate + inner;
          if (saved) {
            halves.put(2 * (first + i), gate);
            halves.put(2 * (first + i) + 1, up);
          }
          activate<T>(gate, up, weights[rows.slot(first + i)], inner, act + i * inner);
        }
        for (Size i = count; i < tall; i++) std::memset(act + i * inner, 0, inner * sizeof(T));
        multiply<false, T>(tall, hidden, n.inner, Strided<T>{act, inner, 1}, down_panels, n.inner * columns, right, hidden);
        for (Size i = 0; i < count; i++) {
          if (y) by_expert.put(first + i, right + i * hidden);
          else in_order.put(first + i, right + i * hidden);
        }
      }
      publish();
    }
    if (y) sum_rows<S>(y, places, n.tokens, n.choices, n.hidden, out);
  }
}

template <class S>
void backward(
    const S* x, const S* grad, Rows rows, const Size* places, const Work<S>* weights,
    const S* gate_up, const S* down, const S* saved, Work<S>* y, S* grad_x, Work<S>* grad_weights, S* grad_gate_up,
    S* grad_down, Sizes n, int threads) {
  typedef Work<S> T;
  constexpr int columns = COLUMNS<T>;
  Size hidden = up_to(n.hidden, columns), inner = up_to(n.inner, columns);
  Size both_row = apart<T>(2 * inner);
  std::vector<Task> tasks = tasks_of(rows, n.experts, std::numeric_limits<Size>::max() / 2);
  Size all = rows.offsets[n.experts];
  Written<S> in_order(grad_x, all, n.hidden), of_gate_up(grad_gate_up, n.experts * 2 * n.inner, n.hidden);
  Written<S> of_down(grad_down, n.experts * n.hidden, n.inner);
  Written<T> by_expert(y, all, n.hidden);
  threads = team(all * n.hidden * n.inner, threads);
  for (Size e = 0; e < n.experts; e++)
    if (rows.offsets[e] == rows.offsets[e + 1]) {
      std::memset((void*)(grad_gate_up + e * 2 * n.inner * n.hidden), 0, 2 * n.inner * n.hidden * sizeof(S));
      std::memset((void*)(grad_down + e * n.hidden * n.inner), 0, n.hidden * n.inner * sizeof(S));
    }
#pragma omp parallel num_threads(threads)
  {
    Buffer<T> up_panels(2 * inner * hidden), down_panels(n.hidden * inner), sum_up(2 * inner * hidden), sum_down(hidden * inner);
    Buffer<T> grad_act(CHUNK * inner), both(2 * inner), grad_both(CHUNK * both_row);
    Buffer<T> act_panels(CHUNK * inner), x_panels(CHUNK * hidden), right(CHUNK * hidden);
    Tokens<S> grads(grad, rows, n.choices, n.hidden), inputs(x, rows, n.choices, n.hidden);
#pragma omp for schedule(dynamic, 1)
    for (Size place = 0; place < Size(tasks.size()); place++) {
      Task task = tasks[place];
      const S *g = gate_up + task.expert * 2 * n.inner * n.hidden, *d = down + task.expert * n.hidden * n.inner;
      if (inner > n.inner) std::memset(up_panels, 0, 2 * inner * hidden * sizeof(T));
      for (Size i = 0; i < n.inner; i++) {
        pack_row(g + i * n.hidden, n.hidden, i, up_panels.data, 2 * inner * columns);
        pack_row(g + (n.inner + i) * n.hidden, n.hidden, inner + i, up_panels.data, 2 * inner * columns);
      }
      for (Size i = 0; i < n.hidden; i++) pack_row(d + i * n.inner, n.inner, i, down_panels.data, n.hidden * columns);
      for (Size first = task.first; first < task.last; first += CHUNK) {
        Size count = std::min(CHUNK, task.last - first), tall = up_to(count, ROWS), next = first + count;
        grads.take(first, count);
        multiply<false, T>(tall, inner, n.hidden, ByRows<T>{grads.at}, down_panels, n.hidden * columns, grad_act, inner);
        for (Size i = 0; i < count; i++) {
          Size slot = rows.slot(first + i);
          T* to = grad_both + i * both_row;
          const T* gate = split_row(saved + (first + i) * 2 * n.inner, n.inner, inner, both.data);
          grad_weights[slot] = activate_backward<T>(
              gate, gate + inner, weights[slot], grad_act + i * inner, inner, act_panels + i * columns, CHUNK * columns, to, to + inner);
          pack_row(inputs.row(first + i), n.hidden, i, x_panels.data, CHUNK * columns);
        }
        for (Size i = count; i < tall; i++) std::memset(grad_both + i * both_row, 0, 2 * inner * sizeof(T));
        auto sum = [&, add = first > task.first](Size rows, Size columns, auto depths, auto a, const T* b, T* c) {
          if (add) multiply<true, T>(rows, columns, depths, a, b, CHUNK * COLUMNS<T>, c, columns);
          else multiply<false, T>(rows, columns, depths, a, b, CHUNK * COLUMNS<T>, c, columns);
        };
        sum(
            up_to(n.hidden, ROWS), inner, ahead(inputs, next, std::min(task.last, next + CHUNK), count),
            Transposed<ByRows<T>>{{grads.at}}, act_panels, sum_down);
        sum(2 * inner, hidden, count, Strided<T>{grad_both, 1, both_row}, x_panels, sum_up);
        multiply<false, T>(
            tall, hidden, ahead(grads, next, std::min(task.last, next + CHUNK), 2 * inner), Strided<T>{grad_both, both_row, 1}, up_panels,
            2 * inner * columns, right, hidden);
        for (Size i = 0; i < count; i++) {
          if (y) by_expert.put(first + i, right + i * hidden);
          else in_order.put(first + i, right + i * hidden);
        }
      }
      for (Size i = 0; i < 2 * n.inner; i++)
        of_gate_up.put(task.expert * 2 * n.inner + i, sum_up + (i < n.inner ? i : inner + i - n.inner) * hidden);
      for (Size i = 0; i < n.hidden; i++) of_down.put(task.expert * n.hidden + i, sum_down + i * inner);
      publish();
    }
    if (y) sum_rows<S>(y, places, n.tokens, n.choices, n.hidden, grad_x);
  }
}

}  // namespace

// Sorts the slots by expert, those of one expert in order: slots[row], rows[slot], and E + 1 ends. The first end is -1, and
// nothing else is written, if some expert does not exist.
extern "C" void route_int64(const Size* expert, Size count, Size experts, Size* slots, Size* rows, Size* offsets, Size) {
  offsets[0] = -1;
  if (std::any_of(expert, expert + count, [=](Size e) { return e < 0 || e >= experts; })) return;
  std::fill(offsets, offsets + experts + 1, 0);
  for (Size slot = 0; slot < count; slot++) offsets[expert[slot] + 1]++;
  for (Size e = 0; e < experts; e++) offsets[e + 1] += offsets[e];
  std::vector<Size> next(offsets, offsets + experts);
  for (Size slot = 0; slot < count; slot++) {
    Size row = next[expert[slot]]++;
    slots[row] = slot;
    rows[slot] = row;
  }
}

#define EXPORT(S, suffix)                                                                                                  \
  extern "C" void experts_forward_##suffix(                                                                                \
      const S* x, const Size* slots, const Size* offsets, const Size* places, const Work<S>* weights,          \
      const S* gate_up, const S* down, S* saved, Work<S>* y, S* out, Size tokens, Size choices, Size experts, Size hidden, \
      Size inner, Size threads) {                                                                                          \
    Sizes n{tokens, choices, experts, hidden, inner};                                                                      \
    forward<S>(x, {slots, offsets}, places, weights, gate_up, down, saved, y, out, n, threads);                     \
  }                                                                                                                        \
  extern "C" void experts_backward_##suffix(                                                                               \
      const S* x, const S* grad, const Size* slots, const Size* offsets, const Size* places,    \
      const Work<S>* weights, const S* gate_up, const S* down, const S* saved, Work<S>* y, S* grad_x,                      \
      Work<S>* grad_weights, S* grad_gate_up, S* grad_down, Size tokens, Size choices, Size experts, Size hidden,          \
      Size inner, Size threads) {                                                                                          \
    Sizes n{tokens, choices, experts, hidden, inner};                                                                      \
    backward<S>(                                                                                                           \
        x, grad, {slots, offsets}, places, weights, gate_up, down, saved, y, grad_x, grad_weights,        \
        grad_gate_up, grad_down, n, threads);                                                                              \
  }

EXPORT(float, float32)
EXPORT(double, float64)
EXPORT(bf16, bfloat16)
