// The gradient's chunked path, on the fused kernels: which queries and keys a tile is, and in which
// order tiles add to the same gradients.
//
// A tile is a range of queries and one of keys; it adds to the gradients of both. Tiles that share
// neither run together, as a stage: with n ranges of keys and m <= n of queries (those of all heads
// that share the keys, one after the other), stage s has the tiles (i, (i + s) mod n). So every sum
// is taken in one order, on any number of threads, without a lock or a buffer of its own.
//
// Half precision cannot be summed where it is returned: there a sweep over keys makes d_query, and
// one over queries the others, each with its sums in float beside it.
#ifndef ATTENDANT_CORE_FUSED_GRADIENT_H_
#define ATTENDANT_CORE_FUSED_GRADIENT_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "core/gradient.h"

namespace attendant::core {

// As GradientWorkspaceBytes.
int64_t FusedGradientWorkspaceBytes(const GradientProblem& problem, int threads);

// As GradientStages.
template <typename S>
absl::StatusOr<std::vector<Stage>> FusedGradientStages(const GradientProblem& problem,
                                                       const GradientTensors<S>& tensors,
                                                       const Resources& resources);

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_FUSED_GRADIENT_H_
