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
#include "core/half.h"
#include "core/head_scores.h"
#include "core/long_product.h"
#include "core/scratch_pool.h"
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

// What one compute thread widens half precision into.
template <typename T>
struct WideScratch {
  Buffer<T> query;   // (kQueryBlock, D)
  Buffer<T> rows;    // (kKeyBlock, D or Dv)
  Buffer<T> output;  // (kQueryBlock, Dv)
};

int64_t WideRows(const Problem& p) {
  return SaturatingProduct({std::min(kKeyBlock, p.keys), std::max(p.width, p.value_width)});
}

int64_t QueryTiles(const Problem& p) { return Tiling(p, p.queries, kQueryBlock).tiles(); }

// Tensors are stored as S.
template <typename S>
struct ExplicitJob {
  using T = Wide<S>;

  ExplicitJob(const Problem& p, int threads) : problem(p), wide(threads, QueryTiles(p)) {}

  Problem problem;
  AttendTensors<S> tensors;
  Workspace* workspace = nullptr;
  Buffer<T> scratch;
  T* scores = nullptr;  // (B, H, Tq, Tk): becomes the weights
  ScratchPool<WideScratch<T>> wide;

  MatrixView<T> Scores(const Tiling::Block& block, KeyRange keys) const {
    return {scores + (block.flat_head * problem.queries + block.first) * problem.keys + keys.begin,
            block.count, keys.size(), problem.keys};
  }

  auto GetWide(int worker) {
    return wide.Take(worker, [&]() -> absl::StatusOr<WideScratch<T>> {
      WideScratch<T> made;
      if constexpr (kIsHalf<S>) {
        const int64_t rows = std::min(kQueryBlock, problem.queries);
        absl::Status status = workspace->AllocateAll<T>({
            {&made.query, SaturatingProduct({rows, problem.width})},
            {&made.rows, WideRows(problem)},
            {&made.output, SaturatingProduct({rows, problem.value_width})},
        });
        if (!status.ok()) return status;
      }
      return made;
    });
  }

  absl::Status ComputeScores(const Tiling::Block& block, const TileContext& context) {
    const auto scratch_of = GetWide(context.worker);
    if (!scratch_of.ok()) return scratch_of.status();
    const KeyRange keys = problem.VisibleKeysOfAny(block.batch, block.first, block.count);
    const auto query =
        WidenRows(tensors.query.Head(block.batch, block.head).Rows(block.first, block.count),
                  (*scratch_of)->query.data());
    const auto key = tensors.key.Head(block.batch, problem.KvHead(block.head));
    return ForWideRows(key, keys, WideRowsIn(**scratch_of), context.checkpoint(),
                       [&](const MatrixView<const T>& rows, KeyRange part) {
                         return Gemm(query, rows, Transpose::kYes, Scores(block, part),
                                     /*accumulate=*/false);
                       });
  }

  absl::Status ComputeSoftmax(const Tiling::Block& block, const TileContext& context) {
    const MatrixView<T> rows = Scores(block, {0, problem.keys});
    const HeadScores<T> scores_of(problem, tensors.mask, block.batch, block.head);
    for (int64_t i = 0; i < block.count; ++i) {
      if (IsDue(i, problem.keys) && context.checkpoint().ToStop()) return StoppedError();
      const int64_t query = block.first + i;
      const KeyRange seen = problem.VisibleKeys(block.batch, query);
      const T logsumexp = scores_of.Softmax(query, seen, problem.keys, rows.Row(i)).logsumexp;
      const int64_t row = block.flat_head * problem.queries + query;
      if (tensors.logsumexp != nullptr) tensors.logsumexp[row] = logsumexp;
      if (kIsHalf<S> && tensors.weights != nullptr) {
        Store(rows.Row(i), problem.keys, tensors.weights + row * problem.keys);
      }
    }
    return absl::OkStatus();
  }

  absl::Status ComputeValues(const Tiling::Block& block, const TileContext& context) {
    const auto scratch_of = GetWide(context.worker);
    if (!scratch_of.ok()) return scratch_of.status();
    const KeyRange keys = problem.VisibleKeysOfAny(block.batch, block.first, block.count);
    const auto value = tensors.value.Head(block.batch, problem.KvHead(block.head));
    const MatrixView<S> output =
        tensors.output.Head(block.batch, block.head).Rows(block.first, block.count);
    const MatrixView<T> wide_output = WideOutput(output, **scratch_of);
    absl::Status status = ForWideRows(
        value, keys, WideRowsIn(**scratch_of), context.checkpoint(),
        [&](const MatrixView<const T>& rows, KeyRange part) {
          const MatrixView<T> weights = Scores(block, part);
          const WeightsPart<T> of{
              block.batch, block.first, part, {problem, tensors.mask, block.batch, block.head}};
          return ValueProduct<T>(
              problem, of, {weights.data, weights.rows, weights.columns, weights.stride}, rows,
              wide_output, /*accumulate=*/part.begin > keys.begin, *workspace);
        });
    for (int64_t i = 0; status.ok() && kIsHalf<S> && i < output.rows; ++i) {
      Store(wide_output.Row(i), output.columns, output.Row(i));
    }
    return status;
  }

  static WidePart<T> WideRowsIn(const WideScratch<T>& scratch) {
    return {scratch.rows.data(), kKeyBlock};
  }

  // Where values are summed: the output, or what is rounded to it.
  static MatrixView<T> WideOutput(const MatrixView<S>& output, const WideScratch<T>& to) {
    if constexpr (kIsHalf<S>) {
      return {to.output.data(), output.rows, output.columns, output.columns};
    } else {
      return output;
    }
  }

  absl::Status ComputeKeySums(const Tiling::Block& block, const TileContext& context) {
    T* const sums = tensors.key_sums + block.flat_head * problem.keys + block.first;
    std::fill_n(sums, block.count, T{0});
    const T* weights = scores + block.flat_head * problem.queries * problem.keys + block.first;
    for (int64_t query = 0; query < problem.queries; ++query) {
      if (IsDue(query, block.count) && context.checkpoint().ToStop()) return StoppedError();
      AddRow(sums, weights + query * problem.keys, block.count);
    }
    return absl::OkStatus();
  }
};

// Where the scores can never fit: what would.
absl::Status WithAdvice(const absl::Status& status, const Problem& problem,
                        const Resources& resources) {
  const int64_t chunked = ChunkedWorkspaceBytes(problem, resources.threads, resources.kernel);
  if (!LimitOf(status).has_value() ||
      chunked >= ExplicitWorkspaceBytes(problem, resources.threads)) {
    return status;
  }
  return OverLimit(*LimitOf(status),
                   absl::StrCat(DescriptionOf(status), "; PATH_CHUNKED needs ", chunked));
}

}  // namespace

namespace {

// Elements of the scores, where they are not made in the response.
int64_t ScoresElements(const Problem& p) {
  if (p.return_weights && !IsHalf(p.dtype)) return 0;
  return SaturatingProduct({p.batch, p.heads, p.queries, p.keys});
}

}  // namespace

int64_t ExplicitWorkspaceBytes(const Problem& p, int threads) {
  const int64_t rows = std::min(kQueryBlock, p.queries);
  const int64_t wide =
      IsHalf(p.dtype)
          ? SaturatingSum(
                {SaturatingProduct({rows, SaturatingSum({p.width, p.value_width})}), WideRows(p)})
          : int64_t{0};
  return SaturatingProduct(
      {SizeOf(WideOf(p.dtype)),
       SaturatingSum(
           {ScoresElements(p), SaturatingProduct({ScratchCount(threads, QueryTiles(p)), wide})})});
}

template <typename S>
absl::StatusOr<std::vector<Stage>> ExplicitStages(const Problem& problem,
                                                  const AttendTensors<S>& tensors,
                                                  const Resources& resources) {
  using T = Wide<S>;
  auto job = std::make_shared<ExplicitJob<S>>(problem, resources.threads);
  job->tensors = tensors;
  job->workspace = resources.workspace;
  if constexpr (!kIsHalf<S>) job->scores = tensors.weights;
  if (job->scores == nullptr) {
    auto scratch = resources.workspace->Allocate<T>(ScoresElements(problem));
    if (!scratch.ok()) return WithAdvice(scratch.status(), problem, resources);
    job->scratch = *std::move(scratch);
    job->scores = job->scratch.data();
  }
  const Tiling queries(problem, problem.queries, kQueryBlock);
  const auto stage = [&](const char* name, const Tiling& tiling, auto method) {
    return Stage{name, tiling.tiles(), [job, tiling, method](const TileContext& context) {
                   return ((*job).*method)(tiling[context.tile], context);
                 }};
  };
  std::vector<Stage> stages;
  stages.push_back(stage("scores", queries, &ExplicitJob<S>::ComputeScores));
  stages.push_back(stage("softmax", queries, &ExplicitJob<S>::ComputeSoftmax));
  stages.push_back(stage("values", queries, &ExplicitJob<S>::ComputeValues));
  if (tensors.key_sums != nullptr) {
    stages.push_back(stage("key_sums", Tiling(problem, problem.keys, kKeyBlock),
                           &ExplicitJob<S>::ComputeKeySums));
  }
  return stages;
}

template absl::StatusOr<std::vector<Stage>> ExplicitStages(const Problem&,
                                                           const AttendTensors<float>&,
                                                           const Resources&);
template absl::StatusOr<std::vector<Stage>> ExplicitStages(const Problem&,
                                                           const AttendTensors<double>&,
                                                           const Resources&);
template absl::StatusOr<std::vector<Stage>> ExplicitStages(const Problem&,
                                                           const AttendTensors<Float16>&,
                                                           const Resources&);
template absl::StatusOr<std::vector<Stage>> ExplicitStages(const Problem&,
                                                           const AttendTensors<BFloat16>&,
                                                           const Resources&);

}  // namespace attendant::core
