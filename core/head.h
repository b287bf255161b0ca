// A whole attention layer: projections, attention within each head, output projection.
//
//   Q = X W_q,  K = X W_k,  V = X W_v      each head owns a range of the columns
//   S = scale * Q K^T,  A = softmax(S),  C = A V      within each head
//   output = [C_1 .. C_H] W_o
//
// Axis letters: B batch, T tokens, H heads, d_k width of a query and key, d_v width of a value.
#ifndef ATTENDANT_CORE_HEAD_H_
#define ATTENDANT_CORE_HEAD_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "core/attend.h"
#include "core/job.h"
#include "core/problem.h"

namespace attendant::core {

struct HeadSpec {
  TensorSpec x;       // (B, T, d_model) or (T, d_model)
  TensorSpec w_q;     // (d_model, H * d_k)
  TensorSpec w_k;     // (d_model, H * d_k)
  TensorSpec w_v;     // (d_model, H * d_v)
  TensorSpec w_o;     // (H * d_v, d_model)
  int64_t heads = 0;  // 0 means 1
  AttendOptions options;
  bool return_intermediates = false;
};

struct HeadProblem {
  // The attention inside: (B, H, T, d_k) head-major; returns weights where intermediates are asked.
  Problem attend;
  int64_t d_model = 0;
  bool x_has_batch = false;
  bool return_intermediates = false;
};

// Returns INVALID_ARGUMENT naming the field, as MakeProblem does.
absl::StatusOr<HeadProblem> MakeHeadProblem(const HeadSpec& spec);

// Memory of one problem, row-major, its numbers stored as S: float, double, Float16 or BFloat16.
// Owned by the caller, who keeps it until the job is done.
template <typename S>
struct HeadTensors {
  const S* x = nullptr;
  const S* w_q = nullptr;
  const S* w_k = nullptr;
  const S* w_v = nullptr;
  const S* w_o = nullptr;
  const void* mask = nullptr;  // as the problem's mask says, or null
  S* output = nullptr;         // (B, T, d_model)
  // All of them where intermediates are returned, else all null.
  S* query = nullptr;    // (B, H, T, d_k)
  S* key = nullptr;      // (B, H, T, d_k)
  S* value = nullptr;    // (B, H, T, d_v)
  S* logits = nullptr;   // (B, H, T, T), scaled
  S* weights = nullptr;  // (B, H, T, T)
  S* context = nullptr;  // (B, H, T, d_v)
};

// Bytes of workspace beside those of the attention inside.
int64_t HeadWorkspaceBytes(const HeadProblem& problem, int threads);

// Half precision is widened block by block, and what stands between x and the output is not rounded
// but where it is returned. Returns RESOURCE_EXHAUSTED where the workspace does not suffice.
template <typename S>
absl::StatusOr<std::vector<Stage>> HeadStages(const HeadProblem& problem,
                                              const HeadTensors<S>& tensors,
                                              const Resources& resources);

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_HEAD_H_
