// The chunked path on the fused kernel: which queries and keys a tile is.
#ifndef ATTENDANT_CORE_FUSED_PATH_H_
#define ATTENDANT_CORE_FUSED_PATH_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "core/attend.h"

namespace attendant::core {

// As ChunkedWorkspaceBytes.
int64_t FusedWorkspaceBytes(const Problem& problem, int threads);

// As ChunkedStages.
template <typename S>
absl::StatusOr<std::vector<Stage>> FusedStages(const Problem& problem,
                                               const AttendTensors<S>& tensors,
                                               const Resources& resources);

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_FUSED_PATH_H_
