// The chunked path on the fused kernel: which queries and keys a tile is.
#ifndef ATTENDANT_CORE_FUSED_PATH_H_
#define ATTENDANT_CORE_FUSED_PATH_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "core/attend.h"
#include "core/checked_math.h"
#include "core/fused_kernel.h"

namespace attendant::core {

// A multiple of every vector's lanes: groups of such a size leave no lane idle but at the end.
inline constexpr int64_t kMostLanes = 16;
// The last thread to finish waits for one task at most: so many a thread make that little.
inline constexpr int64_t kTasksPerThread = 8;

// Queries of a task, where they fill vectors: a head's divided evenly, into as many groups as the
// kernel's limit and the threads ask for.
template <typename T>
int64_t FusedTaskRows(const Problem& problem, int threads) {
  const int64_t most = FusedGroupRows<T>(problem);
  const int64_t heads = std::max<int64_t>(SaturatingProduct({problem.batch, problem.heads}), 1);
  const int64_t groups = std::max<int64_t>(
      {CeilDiv(problem.queries, most), CeilDiv(kTasksPerThread * threads, heads), 1});
  const int64_t even = CeilDiv(CeilDiv(problem.queries, groups), kMostLanes) * kMostLanes;
  return std::min(std::max(even, kMostLanes), most);
}

// As ChunkedWorkspaceBytes.
int64_t FusedWorkspaceBytes(const Problem& problem, int threads);

// As ChunkedStages.
template <typename S>
absl::StatusOr<std::vector<Stage>> FusedStages(const Problem& problem,
                                               const AttendTensors<S>& tensors,
                                               const Resources& resources);

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_FUSED_PATH_H_
