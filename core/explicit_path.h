// The explicit path: scores, softmax, values, one after the other, with the Tq x Tk scores of every
// head in memory at once.
//
//   S = scale * Q K^T,  A = softmax(S) along each row,  O = A V
//
// Memory grows with Tq * Tk: this is the path to look at attention with, not to run it at length.
#ifndef ATTENDANT_CORE_EXPLICIT_PATH_H_
#define ATTENDANT_CORE_EXPLICIT_PATH_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "core/attend.h"

namespace attendant::core {

// Bytes of workspace: the scores, which become the weights in place. None for them where the
// weights are returned as they are computed, since the response then holds them. Half precision is
// widened on each thread block by block. A head's values are copied beside it where a hidden one is
// not finite.
int64_t ExplicitWorkspaceBytes(const Problem& problem, int threads);

// See AttendStages.
template <typename S>
absl::StatusOr<std::vector<Stage>> ExplicitStages(const Problem& problem,
                                                  const AttendTensors<S>& tensors,
                                                  const Resources& resources);

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_EXPLICIT_PATH_H_
