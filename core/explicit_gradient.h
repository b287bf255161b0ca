// The gradient's explicit path: the Tq x Tk weights and the gradients of the scores of every head
// in memory at once, one step after the other as gradient.h writes them down.
#ifndef ATTENDANT_CORE_EXPLICIT_GRADIENT_H_
#define ATTENDANT_CORE_EXPLICIT_GRADIENT_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "core/gradient.h"

namespace attendant::core {

// As GradientWorkspaceBytes: two numbers a pair of a query and a key, and what half precision is
// widened into.
int64_t ExplicitGradientWorkspaceBytes(const GradientProblem& problem, int threads);

// As GradientStages.
template <typename S>
absl::StatusOr<std::vector<Stage>> ExplicitGradientStages(const GradientProblem& problem,
                                                          const GradientTensors<S>& tensors,
                                                          const Resources& resources);

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_EXPLICIT_GRADIENT_H_
