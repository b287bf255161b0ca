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

// Each row's reference m and 1 / l (0 where l is 0). Thread-compatible.
template <typename T>
class RowStates {
 public:
  static int64_t Elements(const Problem& p) {
    return NeedsSecondSweep(p) ? SaturatingProduct({2, p.batch, p.heads, p.queries}) : 0;
  }

  // Without a second sweep there is nothing to allocate.
  absl::Status Allocate(const Problem& problem, Workspace& workspace) {
    auto allocated = workspace.Allocate<T>(Elements(problem));
    if (!allocated.ok()) return allocated.status();
    memory_ = *std::move(allocated);
    return absl::OkStatus();
  }

  // Arrays of (B, H, Tq), or null.
  T* references() const { return memory_.data(); }
  T* inverse_sums() const {
    return memory_.data() == nullptr ? nullptr : memory_.data() + memory_.size() / 2;
  }

 private:
  Buffer<T> memory_;
};

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_SECOND_SWEEP_H_
