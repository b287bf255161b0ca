// Attention over disjoint ranges of keys, merged into attention over all of them. Row by row, over
// the parts p:
//
//   m = max_p logsumexp_p,  w_p = exp(logsumexp_p - m),
//   output = sum_p w_p output_p / sum_p w_p,  logsumexp = m + ln(sum_p w_p)
//
// Source: Dao, Haziza, Massa, Sizov, Flash-Decoding for long-context inference (2023); Rabe and
// Staats, Self-attention does not need O(n^2) memory (2021), section 3.
//
// A part whose logsumexp is -infinity saw no key of the row: it counts for nothing, whatever its
// output. A row of such parts alone is 0, its logsumexp -infinity.
#ifndef ATTENDANT_CORE_MERGE_H_
#define ATTENDANT_CORE_MERGE_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "core/job.h"
#include "core/problem.h"
#include "core/tensor_view.h"

namespace attendant::core {

struct MergePartSpec {
  TensorSpec output;     // (B, H, Tq, Dv)
  TensorSpec logsumexp;  // (B, H, Tq), in the type that the output is computed in
};

// Checked.
struct MergeProblem {
  DType dtype = DType::kUnspecified;  // of the outputs
  int64_t parts = 0;
  int64_t batch = 0;
  int64_t heads = 0;
  int64_t queries = 0;
  int64_t value_width = 0;

  int64_t rows() const { return batch * heads * queries; }
};

// Returns INVALID_ARGUMENT naming the field, such as "parts[1].output.shape[2]".
absl::StatusOr<MergeProblem> MakeMergeProblem(const std::vector<MergePartSpec>& parts);

// Numbers stored as S. Owned by the caller, who keeps them until the job is done.
template <typename S>
struct MergeTensors {
  struct Part {
    const S* output = nullptr;
    const Wide<S>* logsumexp = nullptr;
  };
  std::vector<Part> parts;
  S* output = nullptr;
  Wide<S>* logsumexp = nullptr;
};

// The stages that merge. A result has the same bits for any number of threads; another order of the
// parts gives it to within their rounding.
template <typename S>
std::vector<Stage> MergeStages(const MergeProblem& problem, MergeTensors<S> tensors);

// Multiplications and additions of the outputs, 2 a part and element.
int64_t MergeFlops(const MergeProblem& problem);

// Bytes of the tensors in a request, and in a response.
int64_t RequestBytes(const MergeProblem& problem);
int64_t ResponseBytes(const MergeProblem& problem);

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_MERGE_H_
