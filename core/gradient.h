// The gradient of a scalar loss L through attention: from d_output = dL/d(output) to the gradients
// of query, key, value, and on request of an additive mask and of sinks.
//
// For one head, with Z the masked scores, P = softmax(Z), O = P V, and d_x for dL/dx:
//
//   d_V = P^T d_O
//   d_P = d_O V^T
//   d_Z = P * (d_P - delta),  delta_i = sum_j P_ij d_P_ij = sum_x O_ix d_O_ix    (row by row)
//   d_S = d_Z * (1 - (C / softcap)^2),  C the capped scores; d_S = d_Z without a softcap
//   d_Q = scale d_S K,  d_K = scale d_S^T Q
//   d_mask = d_Z, summed over the axes that it was broadcast along
//   d_sink = -sum_i e^(sink - logsumexp_i) delta_i
//
// Keys and values that several query heads share get the sum over those. A hidden pair takes no
// part, and a row that sees no key has the gradient 0.
#ifndef ATTENDANT_CORE_GRADIENT_H_
#define ATTENDANT_CORE_GRADIENT_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "core/attend.h"
#include "core/job.h"
#include "core/problem.h"
#include "core/tensor_view.h"

namespace attendant::core {

struct GradientSpec {
  TensorSpec query;  // as for MakeProblem
  TensorSpec key;
  TensorSpec value;
  AttendOptions options;                // return_* are ignored
  TensorSpec d_output;                  // (B, H, Tq, Dv) in options.layout
  std::optional<TensorSpec> output;     // as d_output
  std::optional<TensorSpec> logsumexp;  // (B, H, Tq)
  bool return_d_mask = false;           // ignored without an additive mask
};

struct GradientProblem {
  Problem attend;
  bool given = false;  // output and logsumexp are the caller's: no forward runs
  bool return_d_mask = false;
};

// Returns INVALID_ARGUMENT naming the field, as MakeProblem does.
absl::StatusOr<GradientProblem> MakeGradientProblem(const GradientSpec& spec);

// Memory of one problem, its numbers stored as S: float, double, Float16 or BFloat16. Owned by the
// caller, who keeps it until the job is done.
template <typename S>
struct GradientTensors {
  TensorView<const S> query;           // (B, H, Tq, D)
  TensorView<const S> key;             // (B, Hkv, Tk, D)
  TensorView<const S> value;           // (B, Hkv, Tk, Dv)
  const void* mask = nullptr;          // as the problem's mask says, or null
  StridedView<const S> d_output;       // (B, H, Tq, Dv)
  TensorView<const S> output;          // (B, H, Tq, Dv), where given
  const Wide<S>* logsumexp = nullptr;  // (B, H, Tq), where given
  TensorView<S> d_query;               // (B, H, Tq, D)
  TensorView<S> d_key;                 // (B, Hkv, Tk, D)
  TensorView<S> d_value;               // (B, Hkv, Tk, Dv)
  void* d_mask = nullptr;              // of the mask's dtype and shape, where returned
  double* d_sinks = nullptr;           // (H), where there are sinks
};

// On the path that the problem names. Results have the same bits for any number of threads and any
// batch. Returns RESOURCE_EXHAUSTED where the workspace does not suffice.
template <typename S>
absl::StatusOr<std::vector<Stage>> GradientStages(const GradientProblem& problem,
                                                  const GradientTensors<S>& tensors,
                                                  const Resources& resources);

// Most scratch held at one time, in bytes, but for a copy of a few rows of d_output a thread where
// its width_stride is not 1. Of the chunked path a constant a thread, and 12 bytes a query row, 16
// with an additive mask (FLOAT64: twice that).
int64_t GradientWorkspaceBytes(const GradientProblem& problem, int threads);

// The matrix products over visible pairs, 2 a multiply-add: five, of which one is the scores, and
// on the chunked path two more where the forward runs inside. A softcap's further product of the
// explicit path is not counted.
int64_t ProductFlops(const GradientProblem& problem);

// Bytes of the tensors in a request, and in a response.
int64_t RequestBytes(const GradientProblem& problem);
int64_t ResponseBytes(const GradientProblem& problem);

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_GRADIENT_H_
