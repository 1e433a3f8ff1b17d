// Embedding: rows copied by their ids, and a gradient whose rows are the sums of those of their ids, in one pass.
//
// A process holds the rows first .. first + rows of all `total`.
#include <limits>
#include <vector>
#include "matmul.h"
#include "rows.h"

namespace {

constexpr Size ZEROED = 32768;  // bytes: rows that are zeroed at once, as that is faster, are near when some get their sums

template <class S>
void forward(
    const Size* ids, Rows<const S> weight, S* out, Size rows, Size width, Size first, Size total, Size from, Size to) {
  for (Size i = from; i < to; i++) {
    Size row = ids[i] - first;
    S* found = out + i * width;
    if (row >= 0 && row < rows) {
      std::memcpy((void*)found, weight[row], width * sizeof(S));
      continue;
    }
    S rest;  // of an id that another process has, or nobody
    store_one(&rest, ids[i] >= 0 && ids[i] < total ? Work<S>(0) : std::numeric_limits<Work<S>>::quiet_NaN());
    std::fill(found, found + width, rest);
  }
}

// The gradients by row, those of one in the order of their ids: row r sums grads[starts[r]] .. grads[starts[r + 1] - 1].
template <class S>
struct Sorted {
  std::vector<Size> starts;
  std::vector<const S*> grads;

  Sorted(const Size* ids, Rows<const S> grad, Size count, Size rows, Size first, Size padding)
      : starts(rows + 1), grads(count) {
    auto here = [=](Size id) { return id >= first && id < first + rows && id != padding; };
    for (Size i = 0; i < count; i++)
      if (here(ids[i])) starts[ids[i] - first + 1]++;
    for (Size r = 0; r < rows; r++) starts[r + 1] += starts[r];
    std::vector<Size> next(starts);
    for (Size i = 0; i < count; i++)
      if (here(ids[i])) grads[next[ids[i] - first]++] = grad[i];
  }

  Size rows() const { return Size(starts.size()) - 1; }
  Size work() const { return rows() + starts[rows()]; }  // a row is written, and each of its gradients read

  // The first row that has so much work before it.
  Size row_at(Size work) const {
    Size low = 0, high = rows();
    while (low < high) {
      Size middle = (low + high) / 2;
      if (middle + starts[middle] < work) low = middle + 1;
      else high = middle;
    }
    return low;
  }
};

// found = the sum of a row's gradients, of which there is at least one.
template <class S, class T = Work<S>>
void add_up(const S* const* grads, Size count, Size width, T* sums, S* found) {
  if (count == 1) {
    std::memcpy((void*)found, grads[0], width * sizeof(S));
    return;
  }
  copy_row(grads[0], width, width, sums);
  for (Size k = 1; k < count; k++)
    each<T>(width, [=, grad = grads[k]](Size j, auto part) {
      give(sums + j, take(sums + j, part) + take(grad + j, part), part);
    });
  write_row(sums, width, found);
}

template <class S, class T = Work<S>>
void backward(const Sorted<S>& sorted, S* grad_weight, Size width, Size from, Size to) {
  Buffer<T> sums(width);
  Size block = std::max<Size>(ZEROED / (width * Size(sizeof(S))), 1);
  for (Size r = from; r < to; r++) {
    S* found = grad_weight + r * width;
    if ((r - from) % block == 0) std::memset((void*)found, 0, std::min(block, to - r) * width * sizeof(S));
    Size start = sorted.starts[r], count = sorted.starts[r + 1] - start;
    if (count) add_up(&sorted.grads[start], count, width, sums.data, found);
  }
}

}  // namespace

#define EXPORT(S, suffix)                                                                                                  \
  extern "C" void embedding_forward_##suffix(                                                                              \
      const Size* ids, ROWS_OF(const S, weight), S* out, Size count, Size rows, Size width, Size first, Size total,        \
      Size threads) {                                                                                                      \
    auto given = GIVEN_ROWS(const S, weight);                                                                              \
    split(count, parts_of(count, width, threads), [=](Size, Size from, Size to) {                                          \
      forward<S>(ids, given, out, rows, width, first, total, from, to);                                                    \
    });                                                                                                                    \
  }                                                                                                                        \
  extern "C" void embedding_backward_##suffix(                                                                             \
      const Size* ids, ROWS_OF(const S, grad), S* grad_weight, Size count, Size rows, Size width, Size first,              \
      Size padding, Size threads) {                                                                                        \
    Sorted<S> sorted(ids, GIVEN_ROWS(const S, grad), count, rows, first, padding);                                         \
    split(sorted.work(), parts_of(sorted.work(), width, threads), [&](Size, Size from, Size to) {                          \
      backward<S>(sorted, grad_weight, width, sorted.row_at(from), sorted.row_at(to));                                     \
    });                                                                                                                    \
  }

EXPORT(float, float32)
EXPORT(double, float64)
EXPORT(bf16, bfloat16)
