#include "core/head_scores.h"

#include <cmath>

namespace attendant::core {

template <typename T>
HeadScores<T>::HeadScores(const Problem& problem, int64_t batch, int64_t head)
    : changes_(problem.ChangesScores() || !problem.sinks.empty()),
      scale_(static_cast<T>(problem.ScaleLog2())),
      softcap_(static_cast<T>(problem.SoftcapLog2())),
      slope_(static_cast<T>(problem.SlopeLog2(head))),
      offset_(problem.Offset(batch)),
      sink_(static_cast<T>(problem.SinkLog2(head))) {}

template <typename T>
void HeadScores<T>::Apply(int64_t query, KeyRange keys, T* row) const {
  if (!changes_) return;
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    T& score = row[j - keys.begin];
    score *= scale_;
    if (softcap_ != 0) score = softcap_ * std::tanh(score / softcap_);
    if (slope_ != 0) score -= slope_ * static_cast<T>(std::abs(query + offset_ - j));
  }
}

template class HeadScores<float>;
template class HeadScores<double>;

}  // namespace attendant::core
