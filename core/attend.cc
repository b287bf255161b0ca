#include "core/attend.h"

#include <initializer_list>

#include "core/checked_math.h"
#include "core/chunked_path.h"
#include "core/explicit_path.h"
#include "core/widthless.h"

namespace attendant::core {

bool ReturnsNothing(const Problem& p) {
  const auto empty = [](std::initializer_list<int64_t> sizes) {
    return CheckedProduct(sizes) == 0;
  };
  return empty({p.batch, p.heads, p.queries, p.value_width}) &&
         (!p.return_weights || empty({p.batch, p.heads, p.queries, p.keys})) &&
         (!p.return_logsumexp || empty({p.batch, p.heads, p.queries})) &&
         (!p.return_key_sums || empty({p.batch, p.heads, p.keys}));
}

template <typename S>
absl::StatusOr<std::vector<Stage>> AttendStages(const Problem& problem,
                                                const AttendTensors<S>& tensors,
                                                const Resources& resources) {
  if (ReturnsNothing(problem)) return std::vector<Stage>();
  switch (problem.path) {
    case Path::kExplicit:
      return ExplicitStages(problem, tensors, resources);
    case Path::kChunked:
      break;
  }
  if (IsWidthless(problem)) return WidthlessStages(problem, tensors);
  return ChunkedStages(problem, tensors, resources);
}

template absl::StatusOr<std::vector<Stage>> AttendStages(const Problem&,
                                                         const AttendTensors<float>&,
                                                         const Resources&);
template absl::StatusOr<std::vector<Stage>> AttendStages(const Problem&,
                                                         const AttendTensors<double>&,
                                                         const Resources&);
template absl::StatusOr<std::vector<Stage>> AttendStages(const Problem&,
                                                         const AttendTensors<Float16>&,
                                                         const Resources&);
template absl::StatusOr<std::vector<Stage>> AttendStages(const Problem&,
                                                         const AttendTensors<BFloat16>&,
                                                         const Resources&);

}  // namespace attendant::core
