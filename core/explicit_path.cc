#include "core/explicit_path.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/checked_math.h"
#include "core/chunked_path.h"
#include "core/errors.h"
#include "core/gemm.h"
#include "core/head_scores.h"
#include "core/softmax.h"
#include "core/tiling.h"
#include "core/value_product.h"

namespace attendant::core {
namespace {

// 64 queries by 2048 keys of width 64 are about a millisecond of a product on the slowest CPU
// known.
constexpr int64_t kQueryBlock = 64;
// Keys that one tile sums: a strip of 2 KiB a row, read in order.
constexpr int64_t kKeyBlock = 512;

template <typename T>
struct ExplicitJob {
  Problem problem;
  AttendTensors<T> tensors;
  Workspace* workspace = nullptr;
  Buffer<T> scratch;
  T* scores = nullptr;  // (B, H, Tq, Tk): becomes the weights

  MatrixView<T> Scores(const Tiling::Block& block, KeyRange keys) const {
    return {scores + (block.flat_head * problem.queries + block.first) * problem.keys + keys.begin,
            block.count, keys.size(), problem.keys};
  }

  absl::Status ComputeScores(const Tiling::Block& block) const {
    const KeyRange keys = problem.VisibleKeysOfAny(block.batch, block.first, block.count);
    const auto query = tensors.query.Head(block.batch, block.head).Rows(block.first, block.count);
    const auto key = tensors.key.Head(block.batch, problem.KvHead(block.head));
    return Gemm(query, key.Rows(keys.begin, keys.size()), Transpose::kYes, Scores(block, keys),
                /*accumulate=*/false);
  }

  absl::Status ComputeSoftmax(const Tiling::Block& block) const {
    const MatrixView<T> rows = Scores(block, {0, problem.keys});
    const HeadScores<T> scores_of(problem, tensors.mask, block.batch, block.head);
    for (int64_t i = 0; i < block.count; ++i) {
      const int64_t query = block.first + i;
      const KeyRange seen = problem.VisibleKeys(block.batch, query);
      const T logsumexp = SoftmaxRow(rows.Row(i), query, seen, scores_of);
      if (tensors.logsumexp != nullptr) {
        tensors.logsumexp[block.flat_head * problem.queries + block.first + i] = logsumexp;
      }
    }
    return absl::OkStatus();
  }

  // Turns a query's row of products into weights; returns its logsumexp.
  T SoftmaxRow(T* row, int64_t query, KeyRange seen, const HeadScores<T>& scores_of) const {
    std::fill(row, row + seen.begin, T{0});
    std::fill(row + seen.end, row + problem.keys, T{0});
    T* const visible = row + seen.begin;
    const T scale = scores_of.scale();
    const RowScores<T> of_row = scores_of.OfRow(query, seen);
    scores_of.Apply(query, seen, of_row, visible);
    const T reference = std::max(DominantScore(visible, seen.size(), scale), of_row.sink);
    const T sum = Exp2OfDifference(visible, seen.size(), scale, reference) +
                  Exp2OfSink(of_row.sink, reference);
    // A row without a visible key, or whose every score is -infinity: 0, and logsumexp -infinity.
    if (sum != 0) ScaleRow(visible, seen.size(), 1 / sum);
    if (std::isnan(sum)) scores_of.ZeroMasked(query, seen, visible);
    return NaturalLogSumExp(reference, scale, sum, of_row.shift);
  }

  absl::Status ComputeValues(const Tiling::Block& block) const {
    const KeyRange keys = problem.VisibleKeysOfAny(block.batch, block.first, block.count);
    const MatrixView<T> weights = Scores(block, keys);
    const auto value = tensors.value.Head(block.batch, problem.KvHead(block.head));
    return ValueProduct<T>(
        problem, {block.batch, block.first, keys, {problem, tensors.mask, block.batch, block.head}},
        {weights.data, weights.rows, weights.columns, weights.stride},
        value.Rows(keys.begin, keys.size()),
        tensors.output.Head(block.batch, block.head).Rows(block.first, block.count),
        /*accumulate=*/false, *workspace);
  }

  absl::Status ComputeKeySums(const Tiling::Block& block) const {
    T* const sums = tensors.key_sums + block.flat_head * problem.keys + block.first;
    std::fill_n(sums, block.count, T{0});
    const T* weights = scores + block.flat_head * problem.queries * problem.keys + block.first;
    for (int64_t query = 0; query < problem.queries; ++query) {
      AddRow(sums, weights + query * problem.keys, block.count);
    }
    return absl::OkStatus();
  }
};

// Where the scores can never fit: what would.
absl::Status WithAdvice(const absl::Status& status, const Problem& problem,
                        const Resources& resources) {
  const int64_t chunked = ChunkedWorkspaceBytes(problem, resources.threads, resources.kernel);
  if (!LimitOf(status).has_value() || chunked >= ExplicitWorkspaceBytes(problem)) return status;
  return OverLimit(*LimitOf(status),
                   absl::StrCat(DescriptionOf(status), "; PATH_CHUNKED needs ", chunked));
}

}  // namespace

int64_t ExplicitWorkspaceBytes(const Problem& p) {
  if (p.return_weights) return 0;
  return SaturatingProduct({p.batch, p.heads, p.queries, p.keys, SizeOf(p.dtype)});
}

template <typename T>
absl::StatusOr<std::vector<Stage>> ExplicitStages(const Problem& problem,
                                                  const AttendTensors<T>& tensors,
                                                  const Resources& resources) {
  auto job = std::make_shared<ExplicitJob<T>>();
  job->problem = problem;
  job->tensors = tensors;
  job->workspace = resources.workspace;
  job->scores = tensors.weights;
  if (job->scores == nullptr) {
    auto scratch = resources.workspace->Allocate<T>(ExplicitWorkspaceBytes(problem) /
                                                    static_cast<int64_t>(sizeof(T)));
    if (!scratch.ok()) return WithAdvice(scratch.status(), problem, resources);
    job->scratch = *std::move(scratch);
    job->scores = job->scratch.data();
  }
  const Tiling queries(problem, problem.queries, kQueryBlock);
  const auto stage = [&](const char* name, const Tiling& tiling, auto method) {
    return Stage{name, tiling.tiles(), [job, tiling, method](const TileContext& context) {
                   return ((*job).*method)(tiling[context.tile]);
                 }};
  };
  std::vector<Stage> stages;
  stages.push_back(stage("scores", queries, &ExplicitJob<T>::ComputeScores));
  stages.push_back(stage("softmax", queries, &ExplicitJob<T>::ComputeSoftmax));
  stages.push_back(stage("values", queries, &ExplicitJob<T>::ComputeValues));
  if (tensors.key_sums != nullptr) {
    stages.push_back(stage("key_sums", Tiling(problem, problem.keys, kKeyBlock),
                           &ExplicitJob<T>::ComputeKeySums));
  }
  return stages;
}

template absl::StatusOr<std::vector<Stage>> ExplicitStages(const Problem&,
                                                           const AttendTensors<float>&,
                                                           const Resources&);
template absl::StatusOr<std::vector<Stage>> ExplicitStages(const Problem&,
                                                           const AttendTensors<double>&,
                                                           const Resources&);

}  // namespace attendant::core
