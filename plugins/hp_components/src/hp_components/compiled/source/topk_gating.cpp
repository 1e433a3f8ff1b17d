// Gating: a token's scores, the experts that it chooses and their weights, and the gradient of the logits.
//
// T tokens, E experts, K choices. Scores are the softmax of the logits or the sigmoid of each. A lane is a token: of BLOCK
// tokens all experts lie in columns, so that scores and choices need no sum or comparison across lanes.
#include <algorithm>
#include <cmath>
#include <limits>
#include "matmul.h"
#include "rows.h"

namespace {

template <class T>
constexpr int BLOCK = COLUMNS<T>;
template <class T>
constexpr T NONE = -std::numeric_limits<T>::infinity();

template <class T>
struct Gate {
  Size experts, choices;
  bool sigmoids;
  Size groups, kept_groups;
  bool normalize;
  T scale;
  Size group() const { return experts / groups; }
};

// The best few of what is shown one by one, the best first, of equal ones the first; places are numbers of T.
template <class T>
struct Best {
  Buffer<T> values, places;
  Size count;
  explicit Best(Size count) : values(count * LANES<T>), places(count * LANES<T>), count(count) {}
  void clear() {
    for (Size k = 0; k < count; k++) {
      store(values + k * LANES<T>, splat(NONE<T>));
      store(places + k * LANES<T>, splat(T(-1)));
    }
  }
  void show(Vec<T> value, Size number) {
    Vec<T> place = splat(T(number));
    for (Size k = 0; k < count; k++) {
      Vec<T> kept = load(values + k * LANES<T>), at = load(places + k * LANES<T>);
      auto before = (value > kept) | ((value == kept) & (place < at));
      store(values + k * LANES<T>, before ? value : kept);
      store(places + k * LANES<T>, before ? place : at);
      value = before ? kept : value;
      place = before ? at : place;
    }
  }
  // What was minus infinity or no number did not come in: the first places that are not taken stand for it.
  void fill(int lane) {
    T* mine = places + lane;
    for (Size k = 0; k < count; k++)
      if (mine[k * LANES<T>] < 0) {
        T place = 0;
        for (Size j = 0; j < count;) j = mine[j * LANES<T>] == place ? (place++, Size(0)) : j + 1;
        mine[k * LANES<T>] = place;
      }
  }
  Size place(Size k, int lane) const { return Size(places[k * LANES<T> + lane]); }
};

// Columns of BLOCK tokens become their scores, in place.
template <class T>
void score(T* columns, const Gate<T>& gate) {
  for (int lane = 0; lane < BLOCK<T>; lane += LANES<T>) {
    auto each_expert = [&](auto step) {
      for (Size e = 0; e < gate.experts; e++) store(columns + e * BLOCK<T> + lane, step(load(columns + e * BLOCK<T> + lane)));
    };
    if (gate.sigmoids) {
      each_expert(sigmoid<T>);
      continue;
    }
    Vec<T> top = splat(NONE<T>), total = Vec<T>{};
    each_expert([&](Vec<T> v) { return top = larger<T>(top, v), v; });
    each_expert([&](Vec<T> v) {
      Vec<T> e = exponential(v - top);
      return total += e, e;
    });
    Vec<T> share = splat(T(1)) / total;
    each_expert([&](Vec<T> v) { return v * share; });
  }
}

// One vector of tokens chooses: `best` gets its experts. `columns` are the scores, `bias` may be null.
template <class T>
void choose(const T* columns, const T* bias, const Gate<T>& gate, Best<T>& best, Best<T>& groups) {
  auto value = [=](Size e) { return load(columns + e * BLOCK<T>) + (bias ? splat(bias[e]) : Vec<T>{}); };
  best.clear();
  if (gate.groups == 1) {
    for (Size e = 0; e < gate.experts; e++) best.show(value(e), e);
    return;
  }
  groups.clear();
  for (Size g = 0; g < gate.groups; g++) {
    Vec<T> most = splat(NONE<T>), second = most;
    for (Size e = g * gate.group(); e < (g + 1) * gate.group(); e++) {
      Vec<T> v = value(e);
      second = larger<T>(second, smaller<T>(most, v));
      most = larger<T>(most, v);
    }
    groups.show(most + second, g);
  }
  for (Size g = 0; g < gate.groups; g++) {
    Integers<T> open = Integers<T>{};
    for (Size k = 0; k < gate.kept_groups; k++) open |= load(groups.places + k * LANES<T>) == splat(T(g));
    for (Size e = g * gate.group(); e < (g + 1) * gate.group(); e++) best.show(open ? value(e) : splat(NONE<T>), e);
  }
}

// What a token's weights are the scores' multiple of.
template <class T, class F>
T share(const Gate<T>& gate, F chosen) {
  if (!gate.normalize) return 1;
  T total = 0;
  for (Size k = 0; k < gate.choices; k++) total += chosen(k);
  return 1 / (total + T(1e-20));
}

template <class S, class T = Work<S>>
void forward(
    const S* logits, Size row, const T* bias, S* weights, Size* index, const Gate<T>& gate, Size from, Size to) {
  Buffer<T> columns(gate.experts * BLOCK<T>);
  Best<T> best(gate.choices), groups(gate.kept_groups);
  for (Size block = from; block < to; block += BLOCK<T>) {
    Size count = std::min<Size>(BLOCK<T>, to - block);
    pack_columns(logits + block * row, row, count, gate.experts, columns.data);
    score<T>(columns, gate);
    for (Size first = 0; first < count; first += LANES<T>) {
      choose<T>(columns + first, bias, gate, best, groups);
      for (int lane = 0; lane < std::min<Size>(LANES<T>, count - first); lane++) {
        Size t = block + first + lane;
        if (best.places[(gate.choices - 1) * LANES<T> + lane] < 0) best.fill(lane);
        auto chosen = [&](Size k) { return columns[best.place(k, lane) * BLOCK<T> + first + lane]; };
        T factor = gate.scale * share(gate, chosen);
        for (Size k = 0; k < gate.choices; k++) {
          index[t * gate.choices + k] = best.place(k, lane);
          store_one(weights + t * gate.choices + k, chosen(k) * factor);
        }
      }
    }
  }
}

// Columns of `count` tokens go to their rows.
template <class S, class T = Work<S>>
void unpack_columns(const T* columns, Size count, Size width, S* rows) {
  for (Size first = 0; first < count; first += LANES<T>)
    each<T>(width, [=](Size e, auto part) {
      Vec<T> block[LANES<T>];
      for (int j = 0; j < LANES<T>; j++) block[j] = e + j < width ? load(columns + (e + j) * BLOCK<T> + first) : Vec<T>{};
      transpose(block);
      for (int i = 0; i < std::min<Size>(LANES<T>, count - first); i++) give(rows + (first + i) * width + e, block[i], part);
    });
}

template <class S, class T = Work<S>>
void backward(
    const S* logits, Size row, const Size* index, const S* grad, S* grad_logits, const Gate<T>& gate, Size from, Size to) {
  Buffer<T> columns(gate.experts * BLOCK<T>), found(gate.experts * BLOCK<T>), spread(BLOCK<T>, true);
  for (Size block = from; block < to; block += BLOCK<T>) {
    Size count = std::min<Size>(BLOCK<T>, to - block);
    pack_columns(logits + block * row, row, count, gate.experts, columns.data);
    score<T>(columns, gate);
    std::memset(found, 0, gate.experts * BLOCK<T> * sizeof(T));
    for (Size lane = 0; lane < count; lane++) {
      const Size* mine = index + (block + lane) * gate.choices;
      const S* slope = grad + (block + lane) * gate.choices;
      auto chosen = [&](Size k) { return columns[mine[k] * BLOCK<T> + lane]; };
      T factor = share(gate, chosen), along = 0, all = 0;
      if (gate.normalize)
        for (Size k = 0; k < gate.choices; k++) along += load_one(slope + k) * chosen(k) * factor;
      for (Size k = 0; k < gate.choices; k++) {
        T s = chosen(k), of_score = (load_one(slope + k) - along) * (gate.scale * factor);
        all += of_score * s;
        found[mine[k] * BLOCK<T> + lane] = of_score * s * (gate.sigmoids ? 1 - s : 1);
      }
      spread[lane] = gate.sigmoids ? 0 : all;
    }
    if (!gate.sigmoids)
      for (Size i = 0; i < gate.experts * BLOCK<T>; i += LANES<T>)
        store(found + i, load(found + i) - load(columns + i) * load(spread + i % BLOCK<T>));
    unpack_columns(found.data, count, gate.experts, grad_logits + block * gate.experts);
  }
}

}  // namespace

#define GATE(S) \
  Gate<Work<S>> gate { experts, choices, sigmoids != 0, groups, kept_groups, normalize != 0, Work<S>(scale) }
#define EXPORT(S, suffix)                                                                                                  \
  extern "C" void gating_forward_##suffix(                                                                                 \
      const S* logits, Size row, const Work<S>* bias, S* weights, Size* index, Size tokens, Size experts, Size choices,    \
      Size sigmoids, Size groups, Size kept_groups, Size normalize, double scale, Size threads) {                          \
    GATE(S);                                                                                                               \
    split(tokens, parts_of(tokens, 4 * experts, threads), [=](Size, Size from, Size to) {                                  \
      forward<S>(logits, row, bias, weights, index, gate, from, to);                                                       \
    });                                                                                                                    \
  }                                                                                                                        \
  extern "C" void gating_backward_##suffix(                                                                                \
      const S* logits, Size row, const Size* index, const S* grad, S* grad_logits, Size tokens, Size experts,              \
      Size choices, Size sigmoids, Size groups, Size kept_groups, Size normalize, double scale, Size threads) {            \
    GATE(S);                                                                                                               \
    split(tokens, parts_of(tokens, 4 * experts, threads), [=](Size, Size from, Size to) {                                  \
      backward<S>(logits, row, index, grad, grad_logits, gate, from, to);                                                  \
    });                                                                                                                    \
  }

EXPORT(float, float32)
EXPORT(double, float64)
EXPORT(bf16, bfloat16)
