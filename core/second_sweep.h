// What the first sweep of a chunked path leaves for the second, which makes the softmax weights.
#ifndef ATTENDANT_CORE_SECOND_SWEEP_H_
#define ATTENDANT_CORE_SECOND_SWEEP_H_

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "core/checked_math.h"
#include "core/problem.h"
#include "core/workspace.h"

namespace attendant::core {

inline bool NeedsSecondSweep(const Problem& problem) {
  return problem.return_weights || problem.return_key_sums;
}

// Each row's reference m, 1 / l (0 where l is 0), and where a mask is added its shift.
// Thread-compatible.
template <typename T>
class RowStates {
 public:
  static int64_t Elements(const Problem& p) {
    return NeedsSecondSweep(p) ? SaturatingProduct({Arrays(p), p.batch, p.heads, p.queries}) : 0;
  }

  // Without a second sweep there is nothing to allocate.
  absl::Status Allocate(const Problem& problem, Workspace& workspace) {
    auto allocated = workspace.Allocate<T>(Elements(problem));
    if (!allocated.ok()) return allocated.status();
    memory_ = *std::move(allocated);
    arrays_ = Arrays(problem);
    return absl::OkStatus();
  }

  // Arrays of (B, H, Tq), or null.
  T* references() const { return memory_.data(); }
  T* inverse_sums() const { return Array(1); }
  T* shifts() const { return Array(2); }

 private:
  static int64_t Arrays(const Problem& p) { return p.AddsMask() ? 3 : 2; }
  T* Array(int64_t index) const {
    const bool kept = memory_.data() != nullptr && index < arrays_;
    return kept ? memory_.data() + index * (memory_.size() / arrays_) : nullptr;
  }

  Buffer<T> memory_;
  int64_t arrays_ = 2;
};

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_SECOND_SWEEP_H_
