// What a problem costs, by arithmetic alone: floating-point operations and bytes, step by step.
//
// A multiply-add counts as 2. Positions that a causal mask hides are not counted. Everything
// saturates at 2^63 - 1.
#ifndef ATTENDANT_CORE_COST_H_
#define ATTENDANT_CORE_COST_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/head.h"
#include "core/problem.h"

namespace attendant::core {

struct StepCost {
  std::string name;
  int64_t flops = 0;
  int64_t bytes = 0;  // of what the step makes
};

struct PathCost {
  std::vector<StepCost> steps;  // in the order they run
  int64_t workspace_bytes = 0;  // most scratch held at one time

  int64_t flops() const;  // of all steps
};

// scores, softmax, values; on problem.path.
//   scores   2 * pairs * D flops, softmax  kSoftmaxFlops * pairs, values  2 * pairs * Dv
// where pairs = VisiblePairs. `threads`: of the scheduler; `kernel`: of the chunked path, whose
// scores and weights pass through its workspace.
PathCost CostOf(const Problem& problem, int threads, Kernel kernel = Kernel::kFused);

// projections and output_projection around them:
//   projections  2 * B * T * d_model * H * (2 d_k + d_v) flops, output  2 * B * T * H * d_v *
//   d_model
PathCost CostOf(const HeadProblem& problem, int threads, Kernel kernel = Kernel::kFused);

// Beyond workspace_bytes: what the paths by library products may hold where numbers that are not
// finite stand at positions that a query does not see. A copy of one head's rows a thread, without
// them; none on the chunked path by our own kernel.
int64_t CopyBytes(const Problem& problem, int threads, Kernel kernel);

// Scale, compare, subtract, exponentiate, add.
inline constexpr int64_t kSoftmaxFlops = 5;

// Visible query-key pairs of all heads and batches.
int64_t VisiblePairs(const Problem& problem);

// Those of the four projections alone.
int64_t ProjectionFlops(const HeadProblem& problem);

// The matrix products alone: what the field counts when it speaks of attention's FLOP/s.
int64_t ProductFlops(const Problem& problem);
int64_t ProductFlops(const HeadProblem& problem);

// Bytes of the tensors in a request, the mask among them.
int64_t RequestBytes(const Problem& problem);
int64_t RequestBytes(const HeadProblem& problem);

// Bytes of what a problem has beside its sizes: numbers of a batch or head of its own.
int64_t OptionBytes(const Problem& problem);

// Bytes of the tensors in a response.
int64_t ResponseBytes(const Problem& problem);
int64_t ResponseBytes(const HeadProblem& problem);

// The number of tokens T from which on the products quadratic in T cost at least as much as the
// projections, which are linear in it: 2 * d_model without a causal mask or window, whatever the
// widths and the number of heads. Lengths and masks are left aside. 0 where that never happens: in
// a window that is too narrow, or beyond the largest T there is.
double CrossoverTokens(const HeadProblem& problem);

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_COST_H_
