// Softmax and cross-entropy of rows of logits, a row at a time while it lies in cache.
//
// The slopes are softmax - onehot, the gradient of a row's loss to its logits; they may be written in place of the logits.
#include <cmath>
#include <limits>
#include "rows.h"

namespace {

constexpr int64_t IGNORED = -100;

// The label's column among those of this process, which begin at `first`; -1 where it is another's or nobody's.
inline Size column_of(int64_t label, Size first, Size columns) {
  Size column = label - first;
  return label != IGNORED && column >= 0 && column < columns ? column : -1;
}

template <class S, class T = Work<S>>
inline T top_of(const S* row, Size columns) {
  constexpr T none = -std::numeric_limits<T>::infinity();
  return largest<T>(gather<T>(
      columns, splat(none), [=](Size j, auto part) { return take(row + j, part, none); },
      [](Vec<T> a, Vec<T> b) { return larger<T>(a, b); }));
}

// Log-sum-exp and target logit (0 without one here) of each row, and its slopes where they are asked for.
template <class S, class T = Work<S>>
void forward(
    Rows<const S> logits, const int64_t* labels, T* lse, T* targets, S* slopes, Size columns, Size first, Size from,
    Size to) {
  constexpr T none = -std::numeric_limits<T>::infinity();
  constexpr bool exact = sizeof(S) == sizeof(T);  // exponentials can be kept where the slopes go
  for (Size r = from; r < to; r++) {
    const S* row = logits[r];
    S* found = slopes ? slopes + r * columns : nullptr;
    Size column = column_of(labels[r], first, columns);
    bool keep = found && labels[r] != IGNORED;
    T top = top_of(row, columns), target = column < 0 ? T(0) : load_one(row + column);
    auto power = [=](Size j, auto part) { return exponential(take(row + j, part, none) - top); };
    T total = !(keep && exact) ? reduce<T>(columns, power) : reduce<T>(columns, [=](Size j, auto part) {
      Vec<T> e = power(j, part);
      give(found + j, e, part);
      return e;
    });
    lse[r] = top + std::log(total);
    targets[r] = target;
    if (found && !keep) std::memset(found, 0, columns * sizeof(S));
    if (!keep) continue;
    T share = 1 / total;
    if (exact)
      each<T>(columns, [=](Size j, auto part) { give(found + j, take(found + j, part) * share, part); });
    else
      each<T>(columns, [=](Size j, auto part) { give(found + j, power(j, part) * share, part); });
    if (column >= 0) store_one(found + column, std::exp(target - top) * share - 1);
  }
}

// The slopes from log-sum-exps that are known, times a factor per row if given.
template <class S, class T = Work<S>>
void backward(
    Rows<const S> logits, const int64_t* labels, const T* lse, const T* factors, S* slopes, Size columns, Size first,
    Size from, Size to) {
  constexpr T none = -std::numeric_limits<T>::infinity();
  for (Size r = from; r < to; r++) {
    const S* row = logits[r];
    S* found = slopes + r * columns;
    if (labels[r] == IGNORED) {
      std::memset(found, 0, columns * sizeof(S));
      continue;
    }
    Size column = column_of(labels[r], first, columns);
    T target = column < 0 ? T(0) : load_one(row + column), factor = factors ? factors[r] : T(1), all = lse[r];
    each<T>(columns, [=](Size j, auto part) {
      give(found + j, exponential(take(row + j, part, none) - all) * factor, part);
    });
    if (column >= 0) store_one(found + column, (std::exp(target - all) - 1) * factor);
  }
}

}  // namespace

#define EXPORT(S, suffix)                                                                                                  \
  extern "C" void cross_entropy_forward_##suffix(                                                                          \
      ROWS_OF(const S, logits), const int64_t* labels, Work<S>* lse, Work<S>* targets, S* slopes, Size rows, Size columns, \
      Size first, Size threads) {                                                                                          \
    auto given = GIVEN_ROWS(const S, logits);                                                                              \
    split(rows, parts_of(rows, columns, threads), [=](Size, Size from, Size to) {                                          \
      forward<S>(given, labels, lse, targets, slopes, columns, first, from, to);                                           \
    });                                                                                                                    \
  }                                                                                                                        \
  extern "C" void cross_entropy_backward_##suffix(                                                                         \
      ROWS_OF(const S, logits), const int64_t* labels, const Work<S>* lse, const Work<S>* factors, S* slopes, Size rows,   \
      Size columns, Size first, Size threads) {                                                                            \
    auto given = GIVEN_ROWS(const S, logits);                                                                              \
    split(rows, parts_of(rows, columns, threads), [=](Size, Size from, Size to) {                                          \
      backward<S>(given, labels, lse, factors, slopes, columns, first, from, to);                                          \
    });                                                                                                                    \
  }

EXPORT(float, float32)
EXPORT(double, float64)
EXPORT(bf16, bfloat16)
