// What both paths of the gradient keep of each query row.
#ifndef ATTENDANT_CORE_GRADIENT_ROWS_H_
#define ATTENDANT_CORE_GRADIENT_ROWS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>
#include <utility>

#include "absl/status/status.h"
#include "core/checked_math.h"
#include "core/gradient.h"
#include "core/half.h"
#include "core/job.h"
#include "core/mask.h"
#include "core/workspace.h"

namespace attendant::core {

// A row's weights are 2^(score - reference) * inverse_sum, of scores in base 2 from whose mask the
// shift was subtracted.
template <typename T>
struct RowReference {
  T reference = 0;
  T inverse_sum = 0;  // 0 where the row sees no key
  T shift = 0;
};

// From here on a logsumexp shares the mask's size: what is left of both once the mask's largest
// number is taken off is more exact than their difference in base 2, of a few units in the last
// place.
template <typename T>
inline constexpr T kLargeLogSumExp = 4096;

// From the row's logsumexp. mask: of the head; seen: the keys that the query sees.
template <typename T>
RowReference<T> ReferenceOf(T logsumexp, const HeadMask<T>& mask, int64_t query, KeyRange seen) {
  RowReference<T> row;
  if (mask.added() && std::abs(logsumexp) >= kLargeLogSumExp<T>) {
    const T largest = mask.Largest(query, seen);
    if (std::isfinite(largest)) row.shift = largest;
  }
  const double base_2 =
      (static_cast<double>(logsumexp) - static_cast<double>(row.shift)) * std::numbers::log2e;
  if (std::isinf(base_2)) return row;  // sees no key; beside +infinity nothing weighs
  const double rounded = std::isnan(base_2) ? 0 : std::rint(base_2);
  row.reference = static_cast<T>(rounded);
  row.inverse_sum = static_cast<T>(std::exp2(static_cast<double>(row.reference) - base_2));
  return row;
}

// The weight of the head's sink in such a row.
template <typename T>
double SinkWeight(const Problem& problem, int64_t head, const RowReference<T>& row) {
  if (row.inverse_sum == 0) return 0;
  const double exponent =
      problem.SinkLog2(head, static_cast<double>(row.shift)) - static_cast<double>(row.reference);
  return std::exp2(exponent) * static_cast<double>(row.inverse_sum);
}

// The part of a row in the gradient of its head's sink. A weight of 0 takes no part.
inline double SinkGradient(double weight, double delta) {
  return weight == 0 ? 0 : -weight * delta;
}

// Of a head: the sum of of_row(row) over its rows of all batches, row of (B, H, Tq). Returns early,
// with d_sink not written, once stopped.
template <typename OfRow>
void SumSinkGradient(const Problem& p, const TileContext& context, int64_t head,
                     const OfRow& of_row, double* d_sink) {
  double sum = 0;
  constexpr int64_t kRows = 4096;  // some hundred microseconds
  for (int64_t batch = 0; p.queries > 0 && batch < p.batch; ++batch) {
    const int64_t first = (batch * p.heads + head) * p.queries;
    for (int64_t row = first; row < first + p.queries; ++row) {
      if ((row - first) % kRows == 0 && context.checkpoint().ToStop()) return;
      sum += of_row(row);
    }
  }
  *d_sink = sum;
}

// Arrays of (B, H, Tq). Thread-compatible.
template <typename T>
class GradientRows {
 public:
  static int64_t Elements(const Problem& p) {
    return SaturatingProduct({Arrays(p), p.batch, p.heads, p.queries});
  }

  absl::Status Allocate(const Problem& problem, Workspace& workspace) {
    auto allocated = workspace.Allocate<T>(Elements(problem));
    if (!allocated.ok()) return allocated.status();
    memory_ = *std::move(allocated);
    size_ = memory_.size() / Arrays(problem);
    shifted_ = problem.AddsMask();
    return absl::OkStatus();
  }

  T* reference() const { return memory_.data(); }
  T* inverse_sum() const { return memory_.data() + size_; }
  T* delta() const { return memory_.data() + 2 * size_; }
  T* shift() const { return shifted_ ? memory_.data() + 3 * size_ : nullptr; }  // or none

  void Set(int64_t row, const RowReference<T>& of) const {
    reference()[row] = of.reference;
    inverse_sum()[row] = of.inverse_sum;
    if (shift() != nullptr) shift()[row] = of.shift;
  }
  RowReference<T> Of(int64_t row) const {
    return {reference()[row], inverse_sum()[row], shift() == nullptr ? T{0} : shift()[row]};
  }

 private:
  static int64_t Arrays(const Problem& p) { return p.AddsMask() ? 4 : 3; }

  Buffer<T> memory_;
  int64_t size_ = 0;
  bool shifted_ = false;
};

// The sum of output * d_output over a row.
template <typename S>
Wide<S> Delta(const S* output, const S* d_output, int64_t width, int64_t d_output_stride) {
  constexpr int64_t kBlock = 64;
  double sum = 0;
  for (int64_t first = 0; first < width; first += kBlock) {
    const int64_t count = std::min(kBlock, width - first);
    S dense[kBlock];
    for (int64_t x = 0; x < count; ++x) dense[x] = d_output[(first + x) * d_output_stride];
    Wide<S> wide[2][kBlock];
    const auto outputs = WidenRows<S>({output + first, 1, count, count}, wide[0]);
    const auto gradients = WidenRows<S>({dense, 1, count, count}, wide[1]);
    for (int64_t x = 0; x < count; ++x) {
      sum += static_cast<double>(outputs.data[x]) * static_cast<double>(gradients.data[x]);
    }
  }
  return static_cast<Wide<S>>(sum);
}

// A block of rows of d_output whose elements follow each other: in place, or copied to `to` where
// they do not.
template <typename S>
MatrixView<const S> DenseRows(const StridedView<const S>& d_output, int64_t batch, int64_t head,
                              int64_t first, int64_t count, int64_t width, S* to) {
  if (d_output.width_stride == 1 || width <= 1) {
    return {d_output.Row(batch, head, first), count, width, d_output.token_stride};
  }
  for (int64_t row = 0; row < count; ++row) {
    const S* const from = d_output.Row(batch, head, first + row);
    for (int64_t x = 0; x < width; ++x) to[row * width + x] = from[x * d_output.width_stride];
  }
  return {to, count, width, width};
}

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_GRADIENT_ROWS_H_
