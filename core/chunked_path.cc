#include "core/chunked_path.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "core/checked_math.h"
#include "core/fused_path.h"
#include "core/gemm.h"
#include "core/half.h"
#include "core/head_scores.h"
#include "core/scratch_pool.h"
#include "core/second_sweep.h"
#include "core/softmax.h"
#include "core/tiling.h"
#include "core/value_product.h"

namespace attendant::core {
namespace {

// A tile's scores, 128 x 256 floats, are 128 KiB: they stay in an L2 cache of 256 KiB beside the 64
// KiB of a key or value block of width 64.
constexpr int64_t kQueryBlock = 128;
constexpr int64_t kKeyBlock = 256;

// A group of queries of one head and its running state.
template <typename T>
struct QueryGroup {
  explicit QueryGroup(const HeadScores<T>& head_scores) : scores_of(head_scores) {}
  HeadScores<T> scores_of;
  int64_t batch = 0;
  int64_t first = 0;          // of the group's queries, within the head
  MatrixView<const T> query;  // (rows, D)
  T* reference = nullptr;     // (rows): the dominant score so far, m = scale * reference
  T* sum = nullptr;           // (rows): l
  T* shift = nullptr;         // (rows): of RowScores
  T* sink = nullptr;          // (rows): of RowScores
  MatrixView<T> output;       // (rows, Dv): O
  T* scores = nullptr;        // (rows, kKeyBlock): the block at hand
};

// What one compute thread works with.
template <typename T>
struct Scratch {
  Buffer<T> query;  // where half precision is widened into; empty for others
  Buffer<T> rows;
  Buffer<T> scores;
  Buffer<T> output;
  Buffer<T> reference;
  Buffer<T> sum;
  Buffer<T> shift;
  Buffer<T> sink;
};

// Rows and columns of a tile: less than a block where the problem has less.
int64_t TileRows(const Problem& problem) { return std::min(kQueryBlock, problem.queries); }
int64_t TileKeys(const Problem& problem) { return std::min(kKeyBlock, problem.keys); }

// Elements of the queries, and the keys or values, of a tile; 0 where they are read in place.
int64_t WideQueries(const Problem& p) {
  return IsHalf(p.dtype) ? SaturatingProduct({TileRows(p), p.width}) : 0;
}
int64_t WideRows(const Problem& p) {
  return IsHalf(p.dtype) ? SaturatingProduct({TileKeys(p), std::max(p.width, p.value_width)}) : 0;
}

int64_t ScratchElements(const Problem& problem) {
  const int64_t rows = TileRows(problem);
  return SaturatingSum({SaturatingProduct({rows, TileKeys(problem)}),
                        SaturatingProduct({rows, problem.value_width}), 4 * rows,
                        WideQueries(problem), WideRows(problem)});
}

// Of the stage that has most.
int64_t MostTiles(const Problem& p) {
  const int64_t weights = NeedsSecondSweep(p) ? Tiling(p, p.keys, kKeyBlock).tiles() : 0;
  return std::max(Tiling(p, p.queries, kQueryBlock).tiles(), weights);
}

// Tensors are stored as S.
template <typename S>
class ChunkedJob {
  using T = Wide<S>;

 public:
  ChunkedJob(const Problem& problem, const AttendTensors<S>& tensors, const Resources& resources)
      : problem_(problem),
        tensors_(tensors),
        workspace_(resources.workspace),
        scratch_(resources.threads, MostTiles(problem)) {}

  absl::Status Allocate() { return rows_.Allocate(problem_, *workspace_); }

  // First sweep: a block of queries against all their keys.
  absl::Status Forward(const Tiling::Block& block, const TileContext& context) {
    const auto scratch = GetScratch(context.worker);
    if (!scratch.ok()) return scratch.status();
    QueryGroup<T> group = Start(block, **scratch);
    const KeyRange seen = problem_.VisibleKeysOfAny(block.batch, block.first, block.count);
    const auto key = tensors_.key.Head(block.batch, problem_.KvHead(block.head));
    const auto value = tensors_.value.Head(block.batch, problem_.KvHead(block.head));
    for (int64_t first = seen.begin / kKeyBlock * kKeyBlock; first < seen.end; first += kKeyBlock) {
      if (context.checkpoint().ToStop()) return absl::OkStatus();
      // The whole block, although nobody may see its end: the second sweep takes the same, and only
      // products of the same shape are sure to round a score in the same way.
      const KeyRange keys{first, std::min(first + kKeyBlock, problem_.keys)};
      absl::Status status =
          AbsorbKeys(group, keys, key.Rows(keys.begin, keys.size()),
                     value.Rows(keys.begin, keys.size()), (*scratch)->rows.data());
      if (!status.ok()) return status;
    }
    Finish(block, group);
    return absl::OkStatus();
  }

  // Second sweep: a block of keys against all queries, in query order.
  absl::Status Weights(const Tiling::Block& block, const TileContext& context) {
    const auto scratch = GetScratch(context.worker);
    if (!scratch.ok()) return scratch.status();
    const KeyRange keys{block.first, block.first + block.count};
    const auto query = tensors_.query.Head(block.batch, block.head);
    const auto key = WidenRows(
        tensors_.key.Head(block.batch, problem_.KvHead(block.head)).Rows(keys.begin, keys.size()),
        (*scratch)->rows.data());
    T* const sums = tensors_.key_sums == nullptr
                        ? nullptr
                        : tensors_.key_sums + block.flat_head * problem_.keys + keys.begin;
    if (sums != nullptr) std::fill_n(sums, keys.size(), T{0});
    const HeadScores<T> scores_of(problem_, tensors_.mask, block.batch, block.head);
    for (int64_t first = 0; first < problem_.queries; first += kQueryBlock) {
      if (context.checkpoint().ToStop()) return absl::OkStatus();
      const int64_t count = std::min(kQueryBlock, problem_.queries - first);
      const MatrixView<T> weights = WeightsBlock(block.flat_head, first, count, keys, **scratch);
      if (problem_.Ask(block.batch, first, count, keys) != Visibility::kNone) {
        absl::Status status = Gemm(WidenRows(query.Rows(first, count), (*scratch)->query.data()),
                                   key, Transpose::kYes, weights, /*accumulate=*/false);
        if (!status.ok()) return status;
      }
      for (int64_t i = 0; i < count; ++i) {
        WeightsOfRow(block, scores_of, first + i, keys, weights.Row(i));
        if (sums != nullptr) AddRow(sums, weights.Row(i), keys.size());
        if (kIsHalf<S> && tensors_.weights != nullptr) {
          const int64_t row = block.flat_head * problem_.queries + first + i;
          Store(weights.Row(i), keys.size(), tensors_.weights + row * problem_.keys + keys.begin);
        }
      }
    }
    return absl::OkStatus();
  }

 private:
  auto GetScratch(int worker) {
    return scratch_.Take(worker, [&]() -> absl::StatusOr<Scratch<T>> {
      Scratch<T> scratch;
      absl::Status status = workspace_->AllocateAll<T>({
          {&scratch.query, WideQueries(problem_)},
          {&scratch.rows, WideRows(problem_)},
          {&scratch.scores, SaturatingProduct({TileRows(problem_), TileKeys(problem_)})},
          {&scratch.output, SaturatingProduct({TileRows(problem_), problem_.value_width})},
          {&scratch.reference, TileRows(problem_)},
          {&scratch.sum, TileRows(problem_)},
          {&scratch.shift, TileRows(problem_)},
          {&scratch.sink, TileRows(problem_)},
      });
      if (!status.ok()) return status;
      return scratch;
    });
  }

  QueryGroup<T> Start(const Tiling::Block& block, const Scratch<T>& scratch) const {
    QueryGroup<T> group(HeadScores<T>(problem_, tensors_.mask, block.batch, block.head));
    group.batch = block.batch;
    group.first = block.first;
    group.query =
        WidenRows(tensors_.query.Head(block.batch, block.head).Rows(block.first, block.count),
                  scratch.query.data());
    group.reference = scratch.reference.data();
    group.sum = scratch.sum.data();
    group.output = {scratch.output.data(), block.count, problem_.value_width, problem_.value_width};
    group.scores = scratch.scores.data();
    group.shift = scratch.shift.data();
    group.sink = scratch.sink.data();
    for (int64_t i = 0; i < block.count; ++i) {
      const int64_t query = block.first + i;
      const RowScores<T> row =
          group.scores_of.OfRow(query, problem_.VisibleKeys(block.batch, query));
      group.shift[i] = row.shift;
      group.sink[i] = row.sink;
    }
    std::fill_n(group.reference, block.count, NoScore(group.scores_of.scale()));
    std::fill_n(group.sum, block.count, T{0});
    std::fill_n(group.output.data, block.count * problem_.value_width, T{0});
    return group;
  }

  // The seam: folds a range of at most kKeyBlock keys into the state of a group of queries.
  absl::Status AbsorbKeys(QueryGroup<T>& group, KeyRange keys, const MatrixView<const S>& key,
                          const MatrixView<const S>& value, T* wide) const {
    const int64_t rows = group.query.rows;
    const MatrixView<T> scores{group.scores, rows, keys.size(), keys.size()};
    absl::Status status =
        Gemm(group.query, WidenRows(key, wide), Transpose::kYes, scores, /*accumulate=*/false);
    if (!status.ok()) return status;
    for (int64_t i = 0; i < rows; ++i) AbsorbRow(group, i, keys, scores.Row(i));
    return ValueProduct<T>(problem_, {group.batch, group.first, keys, group.scores_of.mask()},
                           {scores.data, scores.rows, scores.columns, scores.stride},
                           WidenRows(value, wide), group.output, /*accumulate=*/true, *workspace_);
  }

  // Turns a row of unscaled scores into exponentials relative to the new maximum.
  void AbsorbRow(QueryGroup<T>& group, int64_t i, KeyRange keys, T* row) const {
    const KeyRange seen = SeenWithin(group.batch, group.first + i, keys);
    ZeroHidden(row, keys, seen);
    T* const visible = row + (seen.begin - keys.begin);
    group.scores_of.Apply(group.first + i, seen, group.shift[i], visible);
    const T scale = group.scores_of.scale();
    const T before = group.reference[i];
    const T now = StrongerScore(before, DominantScore(visible, seen.size(), scale), scale);
    const T sum = Exp2OfDifference(visible, seen.size(), scale, now);
    MoveReference(group, i, now);
    group.sum[i] += sum;
  }

  static void MoveReference(QueryGroup<T>& group, int64_t i, T now) {
    const T before = group.reference[i];
    if (now == before) return;
    const T scale = group.scores_of.scale();
    // Before the first score there is nothing to correct; a NaN seen by then stays.
    const T correction = before == NoScore(scale) ? T{1} : std::exp2(scale * (before - now));
    group.sum[i] *= correction;
    ScaleRow(group.output.Row(i), group.output.columns, correction);
    group.reference[i] = now;
  }

  void Finish(const Tiling::Block& block, QueryGroup<T>& group) const {
    const auto output = tensors_.output.Head(block.batch, block.head);
    const int64_t first_row = block.flat_head * problem_.queries + block.first;
    for (int64_t i = 0; i < block.count; ++i) {
      const T sink = group.sink[i];
      MoveReference(group, i, std::max(group.reference[i], sink));
      group.sum[i] += Exp2OfSink(sink, group.reference[i]);
      // A row without a visible key: 0, and logsumexp -infinity.
      const T inverse = group.sum[i] == 0 ? T{0} : 1 / group.sum[i];
      ScaleRow(group.output.Row(i), group.output.columns, inverse);
      Store(group.output.Row(i), group.output.columns, output.Row(block.first + i));
      if (tensors_.logsumexp != nullptr) {
        tensors_.logsumexp[first_row + i] = NaturalLogSumExp(
            group.reference[i], group.scores_of.scale(), group.sum[i], group.shift[i]);
      }
      if (NeedsSecondSweep(problem_)) {
        rows_.references()[first_row + i] = group.reference[i];
        rows_.inverse_sums()[first_row + i] = inverse;
        if (rows_.shifts() != nullptr) rows_.shifts()[first_row + i] = group.shift[i];
      }
    }
  }

  // Where the second sweep puts a block of weights: in the response, or in scratch if only their
  // sums are asked for.
  MatrixView<T> WeightsBlock(int64_t flat_head, int64_t first, int64_t count, KeyRange keys,
                             const Scratch<T>& scratch) const {
    if constexpr (!kIsHalf<S>) {
      if (tensors_.weights != nullptr) {
        const int64_t row = flat_head * problem_.queries + first;
        return {tensors_.weights + row * problem_.keys + keys.begin, count, keys.size(),
                problem_.keys};
      }
    }
    return {scratch.scores.data(), count, keys.size(), keys.size()};
  }

  // Turns a row of unscaled scores into weights, by what the first sweep found.
  void WeightsOfRow(const Tiling::Block& block, const HeadScores<T>& scores_of, int64_t query,
                    KeyRange keys, T* row) const {
    const KeyRange seen = SeenWithin(block.batch, query, keys);
    ZeroHidden(row, keys, seen);
    const int64_t index = block.flat_head * problem_.queries + query;
    T* const visible = row + (seen.begin - keys.begin);
    const T shift = rows_.shifts() == nullptr ? T{0} : rows_.shifts()[index];
    scores_of.Apply(query, seen, shift, visible);
    Exp2OfDifference(visible, seen.size(), scores_of.scale(), rows_.references()[index]);
    const T inverse = rows_.inverse_sums()[index];
    ScaleRow(visible, seen.size(), inverse);
    if (std::isnan(inverse)) scores_of.ZeroMasked(query, seen, visible);
  }

  // The part of `keys` that the query sees; empty ranges lie within `keys` as well.
  KeyRange SeenWithin(int64_t batch, int64_t query, KeyRange keys) const {
    const KeyRange seen = problem_.VisibleKeys(batch, query);
    const int64_t begin = std::clamp(seen.begin, keys.begin, keys.end);
    return {begin, std::clamp(seen.end, begin, keys.end)};
  }

  static void ZeroHidden(T* row, KeyRange keys, KeyRange seen) {
    std::fill(row, row + (seen.begin - keys.begin), T{0});
    std::fill(row + (seen.end - keys.begin), row + keys.size(), T{0});
  }

  const Problem problem_;
  const AttendTensors<S> tensors_;
  Workspace* const workspace_;
  ScratchPool<Scratch<T>> scratch_;
  RowStates<T> rows_;
};

}  // namespace

int64_t ChunkedWorkspaceBytes(const Problem& p, int threads, Kernel kernel) {
  if (kernel == Kernel::kFused) return FusedWorkspaceBytes(p, threads);
  return SaturatingProduct({SizeOf(WideOf(p.dtype)),
                            SaturatingSum({RowStates<float>::Elements(p),
                                           SaturatingProduct({ScratchCount(threads, MostTiles(p)),
                                                              ScratchElements(p)})})});
}

template <typename S>
absl::StatusOr<std::vector<Stage>> ChunkedStages(const Problem& problem,
                                                 const AttendTensors<S>& tensors,
                                                 const Resources& resources) {
  if (resources.kernel == Kernel::kFused) return FusedStages(problem, tensors, resources);
  auto job = std::make_shared<ChunkedJob<S>>(problem, tensors, resources);
  if (absl::Status status = job->Allocate(); !status.ok()) return status;
  std::vector<Stage> stages;
  const Tiling queries(problem, problem.queries, kQueryBlock);
  stages.push_back({"forward", queries.tiles(), [job, queries](const TileContext& context) {
                      return job->Forward(queries[context.tile], context);
                    }});
  if (NeedsSecondSweep(problem)) {
    const Tiling keys(problem, problem.keys, kKeyBlock);
    stages.push_back({"weights", keys.tiles(), [job, keys](const TileContext& context) {
                        return job->Weights(keys[context.tile], context);
                      }});
  }
  return stages;
}

template absl::StatusOr<std::vector<Stage>> ChunkedStages(const Problem&,
                                                          const AttendTensors<float>&,
                                                          const Resources&);
template absl::StatusOr<std::vector<Stage>> ChunkedStages(const Problem&,
                                                          const AttendTensors<double>&,
                                                          const Resources&);
template absl::StatusOr<std::vector<Stage>> ChunkedStages(const Problem&,
                                                          const AttendTensors<Float16>&,
                                                          const Resources&);
template absl::StatusOr<std::vector<Stage>> ChunkedStages(const Problem&,
                                                          const AttendTensors<BFloat16>&,
                                                          const Resources&);

}  // namespace attendant::core
