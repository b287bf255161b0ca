// Attention as stages of a job, on the path that the problem names.
#ifndef ATTENDANT_CORE_ATTEND_H_
#define ATTENDANT_CORE_ATTEND_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "core/job.h"
#include "core/kernel.h"
#include "core/problem.h"
#include "core/tensor_view.h"
#include "core/workspace.h"

namespace attendant::core {

// The memory of one problem, its numbers stored as S: float, double, Float16 or BFloat16. Owned by
// the caller, who keeps it until the job is done.
template <typename S>
struct AttendTensors {
  TensorView<const S> query;   // (B, H, Tq, D)
  TensorView<const S> key;     // (B, Hkv, Tk, D)
  TensorView<const S> value;   // (B, Hkv, Tk, Dv)
  const void* mask = nullptr;  // as the problem's mask says, or null
  TensorView<S> output;        // (B, H, Tq, Dv)
  // Where the problem's return_* asks for them, else null. Row-major, head-major in either layout.
  S* weights = nullptr;          // (B, H, Tq, Tk)
  Wide<S>* logsumexp = nullptr;  // (B, H, Tq)
  Wide<S>* key_sums = nullptr;   // (B, H, Tk)
};

// What a set of stages runs with.
struct Resources {
  Workspace* workspace = nullptr;  // outlives the stages
  int threads = 1;                 // of the scheduler that runs them
  Kernel kernel = Kernel::kFused;  // of the chunked path
};

// Whether every tensor that would be returned is empty: then there is no stage.
bool ReturnsNothing(const Problem& problem);

// The stages that compute a problem. They may write to the output at any time, and have written
// all of it when the last of them is complete.
// Returns RESOURCE_EXHAUSTED where the workspace does not suffice.
// REQUIRES: the tensors have the problem's sizes and dtype.
template <typename S>
absl::StatusOr<std::vector<Stage>> AttendStages(const Problem& problem,
                                                const AttendTensors<S>& tensors,
                                                const Resources& resources);

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_ATTEND_H_
