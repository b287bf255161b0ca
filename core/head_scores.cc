#include "core/head_scores.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "core/softmax.h"

namespace attendant::core {
namespace {

// Keys whose part of the mask is read at a time.
constexpr int64_t kMaskKeys = 256;

}  // namespace

template <typename T>
HeadScores<T>::HeadScores(const Problem& problem, const void* mask, int64_t batch, int64_t head)
    : changes_(problem.softcap != 0 || !problem.alibi_slopes.empty() || !problem.sinks.empty() ||
               problem.mask.has_value()),
      scale_(static_cast<T>(problem.ScaleLog2())),
      softcap_(static_cast<T>(problem.SoftcapLog2())),
      slope_(static_cast<T>(problem.SlopeLog2(head))),
      offset_(problem.Offset(batch)),
      sink_(problem.sinks.empty() ? kHiddenBias<double> : problem.sinks[head]),
      mask_(problem, mask, batch, head) {}

template <typename T>
RowScores<T> HeadScores<T>::OfRow(int64_t query, KeyRange seen) const {
  const T shift = mask_.Shift(query, seen);
  return {shift, static_cast<T>((sink_ - static_cast<double>(shift)) * std::numbers::log2e)};
}

template <typename T>
void HeadScores<T>::Apply(int64_t query, KeyRange keys, T shift, T* row) const {
  if (!changes_) return;
  for (int64_t first = keys.begin; first < keys.end; first += kMaskKeys) {
    const KeyRange part{first, std::min(first + kMaskKeys, keys.end)};
    T bias[kMaskKeys];
    if (mask_.present()) mask_.Read(query, part, bias);
    for (int64_t j = part.begin; j < part.end; ++j) {
      T& score = row[j - keys.begin];
      score *= scale_;
      if (softcap_ != 0) score = softcap_ * std::tanh(score / softcap_);
      if (mask_.present()) {
        score += (bias[j - part.begin] - shift) * static_cast<T>(std::numbers::log2e);
      }
      if (slope_ != 0) score -= slope_ * static_cast<T>(std::abs(query + offset_ - j));
      if (mask_.present() && bias[j - part.begin] == kHiddenBias<T>) score = kHiddenBias<T>;
    }
  }
}

template <typename T>
RowSoftmax<T> HeadScores<T>::Softmax(int64_t query, KeyRange seen, int64_t keys, T* row) const {
  std::fill(row, row + seen.begin, T{0});
  std::fill(row + seen.end, row + keys, T{0});
  T* const visible = row + seen.begin;
  const RowScores<T> of_row = OfRow(query, seen);
  Apply(query, seen, of_row.shift, visible);
  const T reference = std::max(DominantScore(visible, seen.size(), scale()), of_row.sink);
  const T sink = Exp2OfSink(of_row.sink, reference);
  const T sum = Exp2OfDifference(visible, seen.size(), scale(), reference) + sink;
  // A row without a visible key, or whose every score is -infinity: 0, and logsumexp -infinity.
  if (sum != 0) ScaleRow(visible, seen.size(), 1 / sum);
  if (std::isnan(sum)) ZeroMasked(query, seen, visible);
  return {NaturalLogSumExp(reference, scale(), sum, of_row.shift), sum == 0 ? T{0} : sink / sum};
}

template <typename T>
void HeadScores<T>::ZeroMasked(int64_t query, KeyRange keys, T* row) const {
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    if (mask_.Hides(query, j)) row[j - keys.begin] = 0;
  }
}

template class HeadScores<float>;
template class HeadScores<double>;

}  // namespace attendant::core
