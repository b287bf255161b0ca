#include "core/fused_gradient.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "core/checked_math.h"
#include "core/clear_rows.h"
#include "core/fused_kernel.h"
#include "core/fused_path.h"
#include "core/gradient_kernel.h"
#include "core/gradient_rows.h"
#include "core/half.h"
#include "core/mask_gradient.h"
#include "core/scratch_pool.h"
#include "core/tiling.h"

namespace attendant::core {
namespace {

static_assert(MaskGradientTile::kBlock <= kGradientTile);

// Where there are fewer heads than this the ranges are shorter, so that as many tiles can be
// computed at a time. Shorter than kLeastRange costs more than a thread that waits.
constexpr int64_t kTilesWanted = 8;
constexpr int64_t kLeastRange = 192;
// What the kernel computes at a time, of queries and of keys, divides it on every CPU.
constexpr int64_t kRangeUnit = 96;

// A head's queries or keys: as even ranges of at most kGradientTile as there can be. The same
// whatever the batch and the number of threads.
struct Ranges {
  Ranges(const Problem& p, int64_t all) : length(all) {
    const int64_t wanted = CeilDiv(kTilesWanted, std::max<int64_t>(p.kv_heads, 1));
    const int64_t ranges = std::max({CeilDiv(length, kGradientTile),
                                     std::min(wanted, CeilDiv(length, kLeastRange)), int64_t{1}});
    size = std::max<int64_t>(CeilDiv(CeilDiv(length, ranges), kRangeUnit), 1) * kRangeUnit;
    count = CeilDiv(length, size);
  }
  KeyRange operator[](int64_t index) const {
    return {index * size, std::min((index + 1) * size, length)};
  }

  int64_t length;
  int64_t size;
  int64_t count;
};
static_assert(kGradientTile % kRangeUnit == 0);

Ranges KeyRanges(const Problem& p) { return {p, p.keys}; }
Ranges QueryRanges(const Problem& p) { return {p, p.queries}; }

// Ranges of queries of all heads that share a head of keys.
int64_t SharedQueryRanges(const Problem& p) {
  return p.kv_heads == 0 ? 0 : SaturatingProduct({p.heads / p.kv_heads, QueryRanges(p).count});
}
int64_t KvHeads(const Problem& p) { return SaturatingProduct({p.batch, p.kv_heads}); }

// The parts that the query ranges and the key ranges of a head of keys are divided into, so that a
// tile is a part of each: of `ranges` ranges, more than one where there would be more stages than
// anything needs.
struct Diagonal {
  static constexpr int64_t kMostStages = 1024;

  explicit Diagonal(const Problem& p)
      : ranges(std::max<int64_t>(
            CeilDiv(std::max(SharedQueryRanges(p), KeyRanges(p).count), kMostStages), 1)),
        queries(CeilDiv(SharedQueryRanges(p), ranges)),
        keys(CeilDiv(KeyRanges(p).count, ranges)),
        tiles(SaturatingProduct({KvHeads(p), std::min(queries, keys)})) {}
  int64_t stages() const { return tiles == 0 ? 0 : std::max(queries, keys); }

  int64_t ranges;
  int64_t queries;
  int64_t keys;
  int64_t tiles;  // of a stage
};

// Of the stage with scratch that has most.
template <typename S>
int64_t MostTiles(const GradientProblem& g, int threads) {
  const Problem& p = g.attend;
  const int64_t forward = Tiling(p, p.queries, FusedTaskRows<Wide<S>>(p, threads)).tiles();
  const int64_t keys = SaturatingProduct({KvHeads(p), KeyRanges(p).count});
  const int64_t sums = kIsHalf<S>
                           ? std::max(keys, Tiling(p, p.queries, QueryRanges(p).size).tiles())
                           : Diagonal(p).tiles;
  return std::max({forward, sums, g.return_d_mask ? MaskGradientTile::Tiles(p) : int64_t{0}});
}

// What one compute thread works with.
template <typename S, typename T = Wide<S>>
struct Scratch {
  Buffer<T> kernel;
  Buffer<S> d_output;  // rows whose elements do not follow each other
  Buffer<T> sums;      // of half precision: (kGradientTile, D + Dv)
  Buffer<T> d_scores;  // [key][query] of a tile
  Buffer<double> mask_sums;
};

// Elements of those, d_output left aside.
template <typename S>
struct ScratchSizes {
  int64_t kernel;
  int64_t sums;
  int64_t d_scores;
  int64_t mask_sums;

  ScratchSizes(const Problem& p, bool return_d_mask)
      : kernel(std::max(FusedScratchElements<Wide<S>>(p), GradientScratchElements<Wide<S>>(p))),
        sums(kIsHalf<S>
                 ? SaturatingProduct({kGradientTile, SaturatingSum({p.width, p.value_width})})
                 : 0),
        d_scores(return_d_mask ? MaskGradientTile::kSums : 0),
        mask_sums(return_d_mask ? MaskGradientTile::kSums : 0) {}
};

template <typename S>
class FusedGradientJob {
  using T = Wide<S>;

 public:
  FusedGradientJob(const GradientProblem& problem, const GradientTensors<S>& tensors,
                   const Resources& resources)
      : problem_(problem.attend),
        given_(problem.given),
        return_d_mask_(problem.return_d_mask),
        tensors_(tensors),
        workspace_(resources.workspace),
        scratch_(resources.threads, MostTiles<S>(problem, resources.threads)) {}

  absl::Status Allocate() { return rows_.Allocate(problem_, *workspace_); }

  // What the forward sweep leaves of the rows, and their gradients' start.
  absl::Status Rows(const Tiling::Block& block, const TileContext& context) {
    const auto scratch = GetScratch(context.worker);
    if (!scratch.ok()) return scratch.status();
    const MatrixView<S> d_query =
        tensors_.d_query.Head(block.batch, block.head).Rows(block.first, block.count);
    ClearRows(d_query);
    if (given_) {
      TakeRows(block);
    } else {
      Forward(block, **scratch, context);
    }
    return absl::OkStatus();
  }

  // The same of a range of keys and values.
  void ClearKeys(int64_t tile) {
    const Ranges ranges = KeyRanges(problem_);
    const KeyRange keys = ranges[tile % ranges.count];
    const int64_t batch = tile / ranges.count / problem_.kv_heads;
    const int64_t head = tile / ranges.count % problem_.kv_heads;
    ClearRows(OfKeys(tensors_.d_key, batch, head, keys));
    ClearRows(OfKeys(tensors_.d_value, batch, head, keys));
  }

  // A tile of stage `diagonal`. REQUIRES: S is not half precision.
  absl::Status AddTile(int64_t diagonal, const TileContext& context) {
    const auto scratch = GetScratch(context.worker);
    if (!scratch.ok()) return scratch.status();
    const Diagonal parts(problem_);
    const int64_t here = std::min(parts.queries, parts.keys);
    const int64_t i = context.tile % here;
    const int64_t across = (i + diagonal) % std::max({parts.queries, parts.keys, int64_t{1}});
    const int64_t query = parts.queries <= parts.keys ? i : across;
    const int64_t key = parts.queries <= parts.keys ? across : i;
    const int64_t batch = context.tile / here / problem_.kv_heads;
    const int64_t kv_head = context.tile / here % problem_.kv_heads;
    const auto end = [&](int64_t part, int64_t all) {
      return std::min((part + 1) * parts.ranges, all);
    };
    for (int64_t q = query * parts.ranges; q < end(query, SharedQueryRanges(problem_)); ++q) {
      for (int64_t k = key * parts.ranges; k < end(key, KeyRanges(problem_).count); ++k) {
        if (context.stopped()) return absl::OkStatus();
        AddRanges(batch, kv_head, q, k, **scratch, context);
      }
    }
    return absl::OkStatus();
  }

  // What a range of queries and one of keys add to each other's gradients.
  void AddRanges(int64_t batch, int64_t kv_head, int64_t query, int64_t key,
                 const Scratch<S>& scratch, const TileContext& context) const {
    GradientGroup<S> group = SharedGroup(batch, kv_head, query, scratch);
    group.keys = KeyRanges(problem_)[key];
    if constexpr (!kIsHalf<S>) {
      group.d_query =
          tensors_.d_query.Head(batch, group.head).Rows(group.first_query, group.query.rows);
      group.d_key = OfKeys(tensors_.d_key, batch, kv_head, group.keys);
      group.d_value = OfKeys(tensors_.d_value, batch, kv_head, group.keys);
    }
    FusedGradient(group, scratch.kernel.data(), context.checkpoint());
  }

  // d_query of some rows, over all keys.
  absl::Status QuerySums(const Tiling::Block& block, const TileContext& context) {
    const auto scratch = GetScratch(context.worker);
    if (!scratch.ok()) return scratch.status();
    GradientGroup<S> group =
        Group(block.batch, block.head, {block.first, block.first + block.count}, **scratch);
    group.d_query = Sums((*scratch)->sums.data(), block.count, problem_.width);
    const Ranges ranges = KeyRanges(problem_);
    for (int64_t i = 0; i < ranges.count && !context.stopped(); ++i) {
      group.keys = ranges[i];
      FusedGradient(group, (*scratch)->kernel.data(), context.checkpoint());
    }
    StoreRows(group.d_query,
              tensors_.d_query.Head(block.batch, block.head).Rows(block.first, block.count));
    return absl::OkStatus();
  }

  // d_key and d_value of some keys, over all queries of all heads that share them.
  absl::Status KeySums(const TileContext& context) {
    const auto scratch = GetScratch(context.worker);
    if (!scratch.ok()) return scratch.status();
    const Ranges ranges = KeyRanges(problem_);
    const KeyRange keys = ranges[context.tile % ranges.count];
    const int64_t batch = context.tile / ranges.count / problem_.kv_heads;
    const int64_t kv_head = context.tile / ranges.count % problem_.kv_heads;
    T* const sums = (*scratch)->sums.data();
    const MatrixView<T> d_key = Sums(sums, keys.size(), problem_.width);
    const MatrixView<T> d_value =
        Sums(sums + keys.size() * problem_.width, keys.size(), problem_.value_width);
    for (int64_t i = 0; i < SharedQueryRanges(problem_) && !context.stopped(); ++i) {
      GradientGroup<S> group = SharedGroup(batch, kv_head, i, **scratch);
      group.keys = keys;
      group.d_key = d_key;
      group.d_value = d_value;
      FusedGradient(group, (*scratch)->kernel.data(), context.checkpoint());
    }
    StoreRows(d_key, OfKeys(tensors_.d_key, batch, kv_head, keys));
    StoreRows(d_value, OfKeys(tensors_.d_value, batch, kv_head, keys));
    return absl::OkStatus();
  }

  // A part of d_mask, whose scores are computed once more.
  absl::Status MaskSums(const TileContext& context) {
    const auto scratch = GetScratch(context.worker);
    if (!scratch.ok()) return scratch.status();
    MaskGradientTile part(problem_, context.tile, (*scratch)->mask_sums.data());
    part.ForScores([&](int64_t batch, int64_t head, KeyRange queries, KeyRange keys) {
      if (context.checkpoint().ToStop()) return false;
      GradientGroup<S> group = Group(batch, head, queries, **scratch);
      group.keys = keys;
      T* const d_scores = (*scratch)->d_scores.data();
      FusedScoreGradients(group, (*scratch)->kernel.data(), d_scores, queries.size());
      part.Add(queries, keys, d_scores, 1, queries.size());
      return true;
    });
    part.Store(tensors_.d_mask);
    return absl::OkStatus();
  }

  void SinkSum(const TileContext& context) const {
    const int64_t head = context.tile;
    SumSinkGradient(
        problem_, context, head,
        [&](int64_t row) {
          return SinkGradient(SinkWeight(problem_, head, rows_.Of(row)),
                              static_cast<double>(rows_.delta()[row]));
        },
        tensors_.d_sinks + head);
  }

 private:
  auto GetScratch(int worker) {
    return scratch_.Take(worker, [&]() -> absl::StatusOr<Scratch<S>> {
      const ScratchSizes<S> sizes(problem_, return_d_mask_);
      Scratch<S> scratch;
      absl::Status status = workspace_->AllocateAll<T>({{&scratch.kernel, sizes.kernel},
                                                        {&scratch.sums, sizes.sums},
                                                        {&scratch.d_scores, sizes.d_scores}});
      if (!status.ok()) return status;
      status = workspace_->AllocateAll<S>({{&scratch.d_output, DenseElements()}});
      if (!status.ok()) return status;
      status = workspace_->AllocateAll<double>({{&scratch.mask_sums, sizes.mask_sums}});
      if (!status.ok()) return status;
      return scratch;
    });
  }
  // Rows of d_output that are copied, because their elements do not follow each other.
  int64_t DenseElements() const {
    return tensors_.d_output.width_stride == 1
               ? 0
               : SaturatingProduct(
                     {std::max(kGradientTile, FusedGroupRows<T>(problem_)), problem_.value_width});
  }
  MatrixView<const S> DOutput(int64_t batch, int64_t head, KeyRange queries,
                              const Scratch<S>& scratch) const {
    return DenseRows(tensors_.d_output, batch, head, queries.begin, queries.size(),
                     problem_.value_width, scratch.d_output.data());
  }

  int64_t RowOf(int64_t batch, int64_t head, int64_t query) const {
    return (batch * problem_.heads + head) * problem_.queries + query;
  }

  // Rows of the caller's output and logsumexp.
  void TakeRows(const Tiling::Block& block) const {
    const HeadMask<T> mask(problem_, tensors_.mask, block.batch, block.head);
    const MatrixView<const S> output = tensors_.output.Head(block.batch, block.head);
    for (int64_t query = block.first; query < block.first + block.count; ++query) {
      const int64_t row = RowOf(block.batch, block.head, query);
      rows_.Set(row, ReferenceOf(tensors_.logsumexp[row], mask, query,
                                 problem_.VisibleKeys(block.batch, query)));
      rows_.delta()[row] =
          Delta(output.Row(query), tensors_.d_output.Row(block.batch, block.head, query),
                problem_.value_width, tensors_.d_output.width_stride);
    }
  }

  void Forward(const Tiling::Block& block, const Scratch<S>& scratch,
               const TileContext& context) const {
    FusedForward(Group<FusedGroup<S>>(block.batch, block.head,
                                      {block.first, block.first + block.count}, scratch),
                 scratch.kernel.data(), context.checkpoint());
  }

  // What the forward's group and the gradient's have in common: all of a tile but its sums, and the
  // latter's keys.
  template <typename Kind = GradientGroup<S>>
  Kind Group(int64_t batch, int64_t head, KeyRange queries, const Scratch<S>& scratch) const {
    const int64_t row = RowOf(batch, head, queries.begin);
    Kind group;
    group.problem = &problem_;
    group.batch = batch;
    group.head = head;
    group.first_query = queries.begin;
    group.query = tensors_.query.Head(batch, head).Rows(queries.begin, queries.size());
    group.key = tensors_.key.Head(batch, problem_.KvHead(head));
    group.value = tensors_.value.Head(batch, problem_.KvHead(head));
    group.d_output = DOutput(batch, head, queries, scratch);
    group.mask = HeadMask<T>(problem_, tensors_.mask, batch, head);
    group.reference = rows_.reference() + row;
    group.inverse_sum = rows_.inverse_sum() + row;
    group.delta = rows_.delta() + row;
    if (rows_.shift() != nullptr) group.shift = rows_.shift() + row;
    return group;
  }
  // index: of SharedQueryRanges.
  GradientGroup<S> SharedGroup(int64_t batch, int64_t kv_head, int64_t index,
                               const Scratch<S>& scratch) const {
    const Ranges ranges = QueryRanges(problem_);
    const int64_t head = kv_head * (problem_.heads / problem_.kv_heads) + index / ranges.count;
    return Group(batch, head, ranges[index % ranges.count], scratch);
  }

  static MatrixView<S> OfKeys(const TensorView<S>& tensor, int64_t batch, int64_t kv_head,
                              KeyRange keys) {
    return tensor.Head(batch, kv_head).Rows(keys.begin, keys.size());
  }
  static MatrixView<T> Sums(T* sums, int64_t rows, int64_t columns) {
    std::fill_n(sums, rows * columns, T{0});
    return {sums, rows, columns, columns};
  }
  static void StoreRows(const MatrixView<T>& from, const MatrixView<S>& to) {
    for (int64_t i = 0; i < from.rows; ++i) Store(from.Row(i), from.columns, to.Row(i));
  }

  const Problem problem_;
  const bool given_;
  const bool return_d_mask_;
  const GradientTensors<S> tensors_;
  Workspace* const workspace_;
  ScratchPool<Scratch<S>> scratch_;
  GradientRows<T> rows_;
};

template <typename S>
int64_t WorkspaceBytes(const GradientProblem& g, int threads) {
  const ScratchSizes<S> sizes(g.attend, g.return_d_mask);
  const int64_t size = static_cast<int64_t>(sizeof(Wide<S>));
  const int64_t scratch = SaturatingSum(
      {SaturatingProduct({size, SaturatingSum({sizes.kernel, sizes.sums, sizes.d_scores})}),
       SaturatingProduct({8, sizes.mask_sums})});
  return SaturatingSum(
      {SaturatingProduct({size, GradientRows<Wide<S>>::Elements(g.attend)}),
       SaturatingProduct({ScratchCount(threads, MostTiles<S>(g, threads)), scratch})});
}

}  // namespace

int64_t FusedGradientWorkspaceBytes(const GradientProblem& problem, int threads) {
  return WithStored(problem.attend.dtype,
                    [&]<typename S>() { return WorkspaceBytes<S>(problem, threads); });
}

template <typename S>
absl::StatusOr<std::vector<Stage>> FusedGradientStages(const GradientProblem& problem,
                                                       const GradientTensors<S>& tensors,
                                                       const Resources& resources) {
  const Problem& p = problem.attend;
  auto job = std::make_shared<FusedGradientJob<S>>(problem, tensors, resources);
  if (absl::Status status = job->Allocate(); !status.ok()) return status;
  std::vector<Stage> stages;
  const auto add = [&](const char* name, int64_t tiles, auto run) {
    if (tiles > 0) stages.push_back({name, tiles, std::move(run)});
  };
  const Tiling rows(p, p.queries, FusedTaskRows<Wide<S>>(p, resources.threads));
  add(problem.given ? "rows" : "forward", rows.tiles(),
      [job, rows](const TileContext& context) { return job->Rows(rows[context.tile], context); });
  if constexpr (kIsHalf<S>) {
    const Tiling queries(p, p.queries, QueryRanges(p).size);
    add("d_query", queries.tiles(), [job, queries](const TileContext& context) {
      return job->QuerySums(queries[context.tile], context);
    });
    add("d_key", SaturatingProduct({KvHeads(p), KeyRanges(p).count}),
        [job](const TileContext& context) { return job->KeySums(context); });
  } else {
    const bool empty = SaturatingProduct({p.keys, std::max(p.width, p.value_width)}) == 0;
    add("clear", empty ? 0 : SaturatingProduct({KvHeads(p), KeyRanges(p).count}),
        [job](const TileContext& context) {
          job->ClearKeys(context.tile);
          return absl::OkStatus();
        });
    const Diagonal parts(p);
    for (int64_t diagonal = 0; diagonal < parts.stages(); ++diagonal) {
      add("gradient", parts.tiles,
          [job, diagonal](const TileContext& context) { return job->AddTile(diagonal, context); });
    }
  }
  if (problem.return_d_mask) {
    if (MaskGradientTile::Tiles(p) == 0) ClearMaskGradient(p, tensors.d_mask);
    add("d_mask", MaskGradientTile::Tiles(p),
        [job](const TileContext& context) { return job->MaskSums(context); });
  }
  if (!p.sinks.empty()) {
    add("d_sinks", p.heads, [job](const TileContext& context) {
      job->SinkSum(context);
      return absl::OkStatus();
    });
  }
  return stages;
}

template absl::StatusOr<std::vector<Stage>> FusedGradientStages(const GradientProblem&,
                                                                const GradientTensors<float>&,
                                                                const Resources&);
template absl::StatusOr<std::vector<Stage>> FusedGradientStages(const GradientProblem&,
                                                                const GradientTensors<double>&,
                                                                const Resources&);
template absl::StatusOr<std::vector<Stage>> FusedGradientStages(const GradientProblem&,
                                                                const GradientTensors<Float16>&,
                                                                const Resources&);
template absl::StatusOr<std::vector<Stage>> FusedGradientStages(const GradientProblem&,
                                                                const GradientTensors<BFloat16>&,
                                                                const Resources&);

}  // namespace attendant::core
