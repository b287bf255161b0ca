#include "core/explicit_gradient.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "core/checked_math.h"
#include "core/gemm.h"
#include "core/gradient_rows.h"
#include "core/half.h"
#include "core/head_scores.h"
#include "core/long_product.h"
#include "core/mask_gradient.h"
#include "core/scratch_pool.h"
#include "core/softmax.h"
#include "core/tiling.h"
#include "core/value_product.h"

namespace attendant::core {
namespace {

// Rows of a tile, queries or keys, and rows that one product of it sums over.
constexpr int64_t kTileRows = 64;
constexpr int64_t kSummedRows = 512;

// What one compute thread works with.
template <typename S, typename T = Wide<S>>
struct Scratch {
  Buffer<T> tile;      // half precision, widened: (kTileRows, D or Dv)
  Buffer<T> summed;    // the same: (kSummedRows, D or Dv)
  Buffer<T> sums;      // what is rounded to it: (kTileRows, D or Dv)
  Buffer<S> d_output;  // rows whose elements do not follow each other: (kSummedRows, Dv)
  Buffer<double> mask_sums;
};

template <typename S>
struct ScratchSizes {
  int64_t tile = 0;
  int64_t summed = 0;
  int64_t mask_sums = 0;

  explicit ScratchSizes(const GradientProblem& g) {
    const int64_t widest = std::max(g.attend.width, g.attend.value_width);
    if (kIsHalf<S>) {
      tile = SaturatingProduct({kTileRows, widest});
      summed = SaturatingProduct({kSummedRows, widest});
    }
    if (g.return_d_mask) mask_sums = MaskGradientTile::kSums;
  }
};

Tiling QueryTiles(const Problem& p) { return {p, p.queries, kTileRows}; }
int64_t KeyBlocks(const Problem& p) { return CeilDiv(p.keys, kTileRows); }
int64_t KeyTiles(const Problem& p) {
  return SaturatingProduct({p.batch, p.kv_heads, KeyBlocks(p)});
}
int64_t MostTiles(const GradientProblem& g) {
  return std::max({QueryTiles(g.attend).tiles(), KeyTiles(g.attend),
                   g.return_d_mask ? MaskGradientTile::Tiles(g.attend) : int64_t{0}});
}
int64_t Pairs(const Problem& p) { return SaturatingProduct({p.batch, p.heads, p.queries, p.keys}); }
int64_t Rows(const Problem& p) { return SaturatingProduct({p.batch, p.heads, p.queries}); }

// Tensors are stored as S.
template <typename S>
class ExplicitGradientJob {
  using T = Wide<S>;

 public:
  ExplicitGradientJob(const GradientProblem& problem, const GradientTensors<S>& tensors,
                      const Resources& resources)
      : gradient_(problem),
        tensors_(tensors),
        workspace_(*resources.workspace),
        scratch_(resources.threads, MostTiles(problem)) {}

  absl::Status Allocate() {
    absl::Status status =
        workspace_.AllocateAll<T>({{&weights_, Pairs(problem_)}, {&d_scores_, Pairs(problem_)}});
    if (!status.ok() || problem_.sinks.empty()) return status;
    return workspace_.AllocateAll<double>({{&sink_gradients_, Rows(problem_)}});
  }

  // weights_ = Q K^T, not scaled.
  absl::Status Scores(const Tiling::Block& block, const TileContext& context) {
    const auto scratch = GetScratch(context.worker);
    if (!scratch.ok()) return scratch.status();
    const auto query =
        WidenRows(tensors_.query.Head(block.batch, block.head).Rows(block.first, block.count),
                  (*scratch)->tile.data());
    return Products(query, tensors_.key, PairsOf(weights_, block), **scratch, context);
  }

  // d_scores_ = d_O V^T, which is d_P.
  absl::Status WeightGradients(const Tiling::Block& block, const TileContext& context) {
    const auto scratch = GetScratch(context.worker);
    if (!scratch.ok()) return scratch.status();
    const auto d_output = WidenRows(
        DOutput(block.batch, block.head, {block.first, block.first + block.count}, **scratch),
        (*scratch)->tile.data());
    return Products(d_output, tensors_.value, PairsOf(d_scores_, block), **scratch, context);
  }

  // weights_ = P, and d_scores_ = d_Z.
  absl::Status Softmax(const Tiling::Block& block, const TileContext& context) {
    const HeadScores<T> scores_of(problem_, tensors_.mask, block.batch, block.head);
    for (int64_t i = 0; i < block.count; ++i) {
      if (IsDue(i, problem_.keys) && context.checkpoint().ToStop()) return StoppedError();
      const int64_t query = block.first + i;
      const int64_t row = block.flat_head * problem_.queries + query;
      const KeyRange seen = problem_.VisibleKeys(block.batch, query);
      T* const weights = weights_.data() + row * problem_.keys;
      T* const d_scores = d_scores_.data() + row * problem_.keys;
      const double sink_weight =
          gradient_.given ? GivenWeights(block, query, scores_of, seen, weights)
                          : static_cast<double>(
                                scores_of.Softmax(query, seen, problem_.keys, weights).sink_weight);
      const T delta = gradient_.given ? GivenDelta(block, query) : DeltaOf(weights, d_scores);
      for (int64_t j = 0; j < problem_.keys; ++j) {
        // A hidden key takes no part, whatever its value.
        d_scores[j] = weights[j] == 0 ? T{0} : weights[j] * (d_scores[j] - delta);
      }
      if (!problem_.sinks.empty()) {
        sink_gradients_.data()[row] = SinkGradient(sink_weight, static_cast<double>(delta));
      }
    }
    return absl::OkStatus();
  }

  // d_V of some keys, over all queries of all heads that share them.
  absl::Status ValueGradients(const TileContext& context) {
    const auto scratch = GetScratch(context.worker);
    if (!scratch.ok()) return scratch.status();
    return KeySide(context, weights_, tensors_.d_value, **scratch,
                   [&](int64_t batch, int64_t head, KeyRange queries) {
                     return DOutput(batch, head, queries, **scratch);
                   });
  }

  // The same of d_K.
  absl::Status KeyGradients(const TileContext& context) {
    const auto scratch = GetScratch(context.worker);
    if (!scratch.ok()) return scratch.status();
    return KeySide(context, d_scores_, tensors_.d_key, **scratch,
                   [&](int64_t batch, int64_t head, KeyRange queries) {
                     return tensors_.query.Head(batch, head).Rows(queries.begin, queries.size());
                   });
  }

  // A part of d_mask.
  absl::Status MaskSums(const TileContext& context) {
    const auto scratch = GetScratch(context.worker);
    if (!scratch.ok()) return scratch.status();
    MaskGradientTile part(problem_, context.tile, (*scratch)->mask_sums.data());
    part.ForScores([&](int64_t batch, int64_t head, KeyRange queries, KeyRange keys) {
      if (context.checkpoint().ToStop()) return false;
      const int64_t row = (batch * problem_.heads + head) * problem_.queries + queries.begin;
      part.Add(queries, keys, d_scores_.data() + row * problem_.keys + keys.begin, problem_.keys,
               1);
      return true;
    });
    part.Store(tensors_.d_mask);
    return absl::OkStatus();
  }

  // d_scores_ becomes scale d_S. REQUIRES: with a softcap, weights_ = Q K^T again.
  absl::Status Chain(const Tiling::Block& block, const TileContext& context) {
    const auto scale = static_cast<T>(problem_.scale);
    const auto softcap = static_cast<T>(problem_.softcap);
    for (int64_t i = 0; i < block.count; ++i) {
      if (IsDue(i, problem_.keys) && context.checkpoint().ToStop()) return StoppedError();
      const int64_t row = block.flat_head * problem_.queries + block.first + i;
      T* const d_scores = d_scores_.data() + row * problem_.keys;
      const T* const products = weights_.data() + row * problem_.keys;
      for (int64_t j = 0; j < problem_.keys; ++j) {
        if (d_scores[j] == 0) continue;
        T factor = scale;
        if (softcap != 0) {
          const T capped = std::tanh(scale * products[j] / softcap);
          factor *= 1 - capped * capped;
        }
        d_scores[j] *= factor;
      }
    }
    return absl::OkStatus();
  }

  absl::Status QueryGradients(const Tiling::Block& block, const TileContext& context) {
    const auto scratch = GetScratch(context.worker);
    if (!scratch.ok()) return scratch.status();
    const KeyRange keys = problem_.VisibleKeysOfAny(block.batch, block.first, block.count);
    const MatrixView<S> to =
        tensors_.d_query.Head(block.batch, block.head).Rows(block.first, block.count);
    const MatrixView<T> sums = SumsFor(to, **scratch);
    absl::Status status = ForWideRows(
        tensors_.key.Head(block.batch, problem_.KvHead(block.head)), keys, WideRowsIn(**scratch),
        context.checkpoint(), [&](const MatrixView<const T>& rows, KeyRange part) {
          const MatrixView<T> d_scores = Block(d_scores_, block, part);
          return ValueProduct<T>(problem_, PartOf(block.batch, block.head, block.first, part),
                                 {d_scores.data, d_scores.rows, d_scores.columns, d_scores.stride},
                                 rows, sums,
                                 /*accumulate=*/part.begin > keys.begin, workspace_);
        });
    StoreSums(sums, to);
    return status;
  }

  void SinkSum(const TileContext& context) const {
    const int64_t head = context.tile;
    SumSinkGradient(
        problem_, context, head, [&](int64_t row) { return sink_gradients_.data()[row]; },
        tensors_.d_sinks + head);
  }

 private:
  auto GetScratch(int worker) {
    return scratch_.Take(worker, [&]() -> absl::StatusOr<Scratch<S>> {
      const ScratchSizes<S> sizes(gradient_);
      Scratch<S> scratch;
      absl::Status status = workspace_.AllocateAll<T>({{&scratch.tile, sizes.tile},
                                                       {&scratch.summed, sizes.summed},
                                                       {&scratch.sums, sizes.tile}});
      if (!status.ok()) return status;
      const bool dense = tensors_.d_output.width_stride == 1;
      status = workspace_.AllocateAll<S>(
          {{&scratch.d_output,
            dense ? 0 : SaturatingProduct({kSummedRows, problem_.value_width})}});
      if (!status.ok()) return status;
      status = workspace_.AllocateAll<double>({{&scratch.mask_sums, sizes.mask_sums}});
      if (!status.ok()) return status;
      return scratch;
    });
  }

  MatrixView<const S> DOutput(int64_t batch, int64_t head, KeyRange queries,
                              const Scratch<S>& scratch) const {
    return DenseRows(tensors_.d_output, batch, head, queries.begin, queries.size(),
                     problem_.value_width, scratch.d_output.data());
  }

  // The part of a (B, H, Tq, Tk) matrix that a block of queries and some keys are.
  MatrixView<T> Block(const Buffer<T>& matrix, const Tiling::Block& block, KeyRange keys) const {
    T* const first =
        matrix.data() + (block.flat_head * problem_.queries + block.first) * problem_.keys;
    return {first + keys.begin, block.count, keys.size(), problem_.keys};
  }
  WeightsPart<T> PartOf(int64_t batch, int64_t head, int64_t first_query, KeyRange keys) const {
    return {batch, first_query, keys, {problem_, tensors_.mask, batch, head}};
  }

  static WidePart<T> WideRowsIn(const Scratch<S>& scratch) {
    return {scratch.summed.data(), kSummedRows};
  }

  // A block of queries of a (B, H, Tq, Tk) matrix.
  struct PairsOf {
    PairsOf(const Buffer<T>& of_matrix, const Tiling::Block& of_block)
        : matrix(of_matrix), block(of_block) {}
    const Buffer<T>& matrix;
    const Tiling::Block& block;
  };
  // It = rows times the keys or values that some of the queries see.
  absl::Status Products(const MatrixView<const T>& rows, const TensorView<const S>& keys_or_values,
                        const PairsOf& products, const Scratch<S>& scratch,
                        const TileContext& context) const {
    const Tiling::Block& block = products.block;
    const KeyRange keys = problem_.VisibleKeysOfAny(block.batch, block.first, block.count);
    return ForWideRows(
        keys_or_values.Head(block.batch, problem_.KvHead(block.head)), keys, WideRowsIn(scratch),
        context.checkpoint(), [&](const MatrixView<const T>& part, KeyRange range) {
          return Gemm(rows, part, Transpose::kYes, Block(products.matrix, block, range),
                      /*accumulate=*/false);
        });
  }

  // Turns a row of products into weights by the caller's logsumexp; returns the sink's weight.
  double GivenWeights(const Tiling::Block& block, int64_t query, const HeadScores<T>& scores_of,
                      KeyRange seen, T* row) const {
    const T logsumexp = tensors_.logsumexp[block.flat_head * problem_.queries + query];
    const RowReference<T> of = ReferenceOf(logsumexp, scores_of.mask(), query, seen);
    std::fill(row, row + seen.begin, T{0});
    std::fill(row + seen.end, row + problem_.keys, T{0});
    T* const visible = row + seen.begin;
    scores_of.Apply(query, seen, of.shift, visible);
    ScaleRow(visible, seen.size(), scores_of.scale());
    Exp2OfDifference(visible, seen.size(), T{1}, of.reference);
    ScaleRow(visible, seen.size(), of.inverse_sum);
    if (std::isnan(of.inverse_sum)) scores_of.ZeroMasked(query, seen, visible);
    return SinkWeight(problem_, block.head, of);
  }
  T GivenDelta(const Tiling::Block& block, int64_t query) const {
    return Delta(tensors_.output.Head(block.batch, block.head).Row(query),
                 tensors_.d_output.Row(block.batch, block.head, query), problem_.value_width,
                 tensors_.d_output.width_stride);
  }
  T DeltaOf(const T* weights, const T* d_weights) const {
    double sum = 0;
    for (int64_t j = 0; j < problem_.keys; ++j) {
      if (weights[j] != 0) {
        sum += static_cast<double>(weights[j]) * static_cast<double>(d_weights[j]);
      }
    }
    return static_cast<T>(sum);
  }

  // to = matrix^T * rows over all queries of the heads that share a block of keys.
  template <typename RowsOf>
  absl::Status KeySide(const TileContext& context, const Buffer<T>& matrix, const TensorView<S>& to,
                       const Scratch<S>& scratch, const RowsOf& rows_of) {
    const int64_t blocks = KeyBlocks(problem_);
    const int64_t tile = context.tile;
    const int64_t first_key = tile % blocks * kTileRows;
    const KeyRange keys{first_key, std::min(first_key + kTileRows, problem_.keys)};
    const int64_t batch = tile / blocks / problem_.kv_heads;
    const int64_t kv_head = tile / blocks % problem_.kv_heads;
    const int64_t shared = problem_.heads / problem_.kv_heads;
    const MatrixView<S> rounded = to.Head(batch, kv_head).Rows(keys.begin, keys.size());
    const MatrixView<T> sums = SumsFor(rounded, scratch);
    bool accumulate = false;
    for (int64_t head = kv_head * shared; head < (kv_head + 1) * shared; ++head) {
      for (int64_t first = 0; first < problem_.queries || !accumulate; first += kSummedRows) {
        if (context.checkpoint().ToStop()) return StoppedError();
        const KeyRange queries{first, std::min(first + kSummedRows, problem_.queries)};
        const int64_t row = (batch * problem_.heads + head) * problem_.queries + queries.begin;
        const MatrixView<const T> part{matrix.data() + row * problem_.keys + keys.begin,
                                       queries.size(), keys.size(), problem_.keys};
        absl::Status status =
            QueryProduct<T>(problem_, PartOf(batch, head, queries.begin, keys), part,
                            WidenRows(rows_of(batch, head, queries), scratch.summed.data()), sums,
                            accumulate, workspace_);
        if (!status.ok()) return status;
        accumulate = true;
      }
    }
    StoreSums(sums, rounded);
    return absl::OkStatus();
  }

  // Where a gradient is summed: where it is returned, or what is rounded to that.
  static MatrixView<T> SumsFor(const MatrixView<S>& to, const Scratch<S>& scratch) {
    if constexpr (kIsHalf<S>) {
      return {scratch.sums.data(), to.rows, to.columns, to.columns};
    } else {
      return to;
    }
  }
  static void StoreSums(const MatrixView<T>& sums, const MatrixView<S>& to) {
    for (int64_t i = 0; kIsHalf<S> && i < to.rows; ++i) Store(sums.Row(i), to.columns, to.Row(i));
  }

  const GradientProblem gradient_;
  const Problem& problem_ = gradient_.attend;
  const GradientTensors<S> tensors_;
  Workspace& workspace_;
  ScratchPool<Scratch<S>> scratch_;
  Buffer<T> weights_;              // (B, H, Tq, Tk)
  Buffer<T> d_scores_;             // (B, H, Tq, Tk)
  Buffer<double> sink_gradients_;  // (B, H, Tq), where there are sinks
};

}  // namespace

int64_t ExplicitGradientWorkspaceBytes(const GradientProblem& g, int threads) {
  const Problem& p = g.attend;
  return WithStored(p.dtype, [&]<typename S>() {
    const ScratchSizes<S> sizes(g);
    const int64_t size = static_cast<int64_t>(sizeof(Wide<S>));
    const int64_t scratch =
        SaturatingSum({SaturatingProduct({size, SaturatingSum({2 * sizes.tile, sizes.summed})}),
                       8 * sizes.mask_sums});
    return SaturatingSum({SaturatingProduct({2, size, Pairs(p)}),
                          p.sinks.empty() ? 0 : SaturatingProduct({8, Rows(p)}),
                          SaturatingProduct({ScratchCount(threads, MostTiles(g)), scratch})});
  });
}

template <typename S>
absl::StatusOr<std::vector<Stage>> ExplicitGradientStages(const GradientProblem& problem,
                                                          const GradientTensors<S>& tensors,
                                                          const Resources& resources) {
  const Problem& p = problem.attend;
  auto job = std::make_shared<ExplicitGradientJob<S>>(problem, tensors, resources);
  if (absl::Status status = job->Allocate(); !status.ok()) return status;
  std::vector<Stage> stages;
  const Tiling queries = QueryTiles(p);
  const auto of_queries = [&](const char* name, auto run) {
    stages.push_back({name, queries.tiles(), [queries, run](const TileContext& context) {
                        return run(queries[context.tile], context);
                      }});
  };
  const auto of_keys = [&](const char* name, auto method) {
    stages.push_back({name, KeyTiles(p), [job, method](const TileContext& context) {
                        return ((*job).*method)(context);
                      }});
  };
  const auto scores = [job](const Tiling::Block& block, const TileContext& context) {
    return job->Scores(block, context);
  };
  of_queries("scores", scores);
  of_queries("d_weights", [job](const Tiling::Block& block, const TileContext& context) {
    return job->WeightGradients(block, context);
  });
  of_queries("softmax", [job](const Tiling::Block& block, const TileContext& context) {
    return job->Softmax(block, context);
  });
  of_keys("d_value", &ExplicitGradientJob<S>::ValueGradients);
  if (problem.return_d_mask) {
    if (MaskGradientTile::Tiles(p) == 0) ClearMaskGradient(p, tensors.d_mask);
    stages.push_back({"d_mask", MaskGradientTile::Tiles(p),
                      [job](const TileContext& context) { return job->MaskSums(context); }});
  }
  if (p.softcap != 0) of_queries("scores", scores);
  of_queries("chain", [job](const Tiling::Block& block, const TileContext& context) {
    return job->Chain(block, context);
  });
  of_queries("d_query", [job](const Tiling::Block& block, const TileContext& context) {
    return job->QueryGradients(block, context);
  });
  of_keys("d_key", &ExplicitGradientJob<S>::KeyGradients);
  if (!p.sinks.empty()) {
    stages.push_back({"d_sinks", p.heads, [job](const TileContext& context) {
                        job->SinkSum(context);
                        return absl::OkStatus();
                      }});
  }
  return stages;
}

template absl::StatusOr<std::vector<Stage>> ExplicitGradientStages(const GradientProblem&,
                                                                   const GradientTensors<float>&,
                                                                   const Resources&);
template absl::StatusOr<std::vector<Stage>> ExplicitGradientStages(const GradientProblem&,
                                                                   const GradientTensors<double>&,
                                                                   const Resources&);
template absl::StatusOr<std::vector<Stage>> ExplicitGradientStages(const GradientProblem&,
                                                                   const GradientTensors<Float16>&,
                                                                   const Resources&);
template absl::StatusOr<std::vector<Stage>> ExplicitGradientStages(const GradientProblem&,
                                                                   const GradientTensors<BFloat16>&,
                                                                   const Resources&);

}  // namespace attendant::core
