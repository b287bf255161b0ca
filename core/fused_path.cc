#include "core/fused_path.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "core/checked_math.h"
#include "core/fused_kernel.h"
#include "core/half.h"
#include "core/mask.h"
#include "core/scratch_pool.h"
#include "core/second_sweep.h"
#include "core/tiling.h"

namespace attendant::core {
namespace {

// Keys and values of (batch, tokens, heads, width) are copied head by head where more groups than
// this read them: the rows of a head lie so far apart that each group would ask for the address of
// every page again. Measured, 8 heads of width 64: with 11 groups (2048 tokens) 0.83 of the peak
// against 0.76 without, and 0.86 for contiguous heads; with 3 the copy costs what it gains.
constexpr int64_t kGroupsUncopied = 4;
// Larger copies are not made. 64 MiB are 16384 tokens of 8 heads of width 64.
constexpr int64_t kMostCopiedBytes = int64_t{64} << 20;
// Tokens of a task that copies.
constexpr int64_t kCopiedTokens = 64;

// The keys that some query sees end here.
int64_t SeenKeys(const Problem& p) {
  int64_t seen = 0;
  for (int64_t batch = 0; batch < p.batch && p.queries > 0; ++batch) {
    seen = std::max(seen, p.VisibleKeys(batch, p.queries - 1).end);
    if (p.key_lengths.empty()) break;  // every batch is the same
  }
  return seen;
}

// Elements of such a copy of keys or values; 0 where they are read from where they lie.
template <typename S>
int64_t CopiedElements(const Problem& p, int threads, int64_t width) {
  using T = Wide<S>;
  if (p.layout == Layout::kBhtd || p.kv_heads <= 1 || FusedFewQueries<T>(p)) return 0;
  const int64_t groups = p.heads / p.kv_heads * CeilDiv(p.queries, FusedTaskRows<T>(p, threads));
  const int64_t tokens = SaturatingProduct({p.batch, p.kv_heads, SeenKeys(p)});
  const int64_t bytes = SaturatingProduct(
      {tokens, SaturatingSum({p.width, p.value_width}), static_cast<int64_t>(sizeof(S))});
  return groups > kGroupsUncopied && bytes <= kMostCopiedBytes ? SaturatingProduct({tokens, width})
                                                               : 0;
}

// Elements of one block's weights, [key][query].
template <typename T>
int64_t BlockWeights(const Problem& problem, int threads) {
  return NeedsSecondSweep(problem) ? kFusedBlock * FusedTaskRows<T>(problem, threads) : 0;
}

int64_t Segments(const Problem& problem) {
  return std::max<int64_t>(CeilDiv(problem.keys, kFusedSegment), 1);
}

// Elements of the states of one task's rows.
int64_t TaskStates(const Problem& problem) {
  return SaturatingProduct({FusedRowsOfTask(problem), FusedStateElements(problem.value_width)});
}

// Elements of every row's states, where the segments of few queries are computed apart.
template <typename T>
int64_t AllStates(const Problem& p) {
  if (!FusedFewQueries<T>(p) || Segments(p) == 1) return 0;
  return SaturatingProduct(
      {p.batch, p.heads, p.queries, Segments(p), FusedStateElements(p.value_width)});
}

// Rows of few queries: those of the heads that share keys, a few a task, and each segment apart.
int64_t RowsOfKeys(const Problem& p) {
  return p.kv_heads == 0 ? 0 : p.heads / p.kv_heads * p.queries;
}
int64_t RowTasks(const Problem& p) { return CeilDiv(RowsOfKeys(p), kFusedMostRows); }
int64_t RowsTiles(const Problem& p) {
  return SaturatingProduct({p.batch, p.kv_heads, Segments(p), RowTasks(p)});
}

// Of the stage with scratch that has most.
template <typename T>
int64_t MostTiles(const Problem& p, int threads) {
  const int64_t forward = FusedFewQueries<T>(p)
                              ? RowsTiles(p)
                              : Tiling(p, p.queries, FusedTaskRows<T>(p, threads)).tiles();
  return std::max(forward,
                  NeedsSecondSweep(p) ? Tiling(p, p.keys, kFusedBlock).tiles() : int64_t{0});
}

template <typename S>
int64_t WorkspaceBytes(const Problem& p, int threads) {
  using T = Wide<S>;
  const int64_t states = FusedFewQueries<T>(p) ? TaskStates(p) : 0;
  const int64_t scratch =
      SaturatingSum({FusedScratchElements<T>(p), states, BlockWeights<T>(p, threads)});
  const int64_t workers = ScratchCount(threads, MostTiles<T>(p, threads));
  const int64_t copies = SaturatingSum(
      {CopiedElements<S>(p, threads, p.width), CopiedElements<S>(p, threads, p.value_width)});
  return SaturatingSum(
      {SaturatingProduct({static_cast<int64_t>(sizeof(S)), copies}),
       SaturatingProduct({static_cast<int64_t>(sizeof(T)),
                          SaturatingSum({RowStates<T>::Elements(p), AllStates<T>(p),
                                         SaturatingProduct({workers, scratch})})})});
}

// What one compute thread works with.
template <typename T>
struct Scratch {
  Buffer<T> kernel;
  Buffer<T> weights;
  Buffer<T> states;
};

// Tensors are stored as S.
template <typename S>
class FusedJob {
  using T = Wide<S>;

 public:
  FusedJob(const Problem& problem, const AttendTensors<S>& tensors, const Resources& resources)
      : problem_(problem),
        tensors_(tensors),
        workspace_(resources.workspace),
        threads_(resources.threads),
        segments_(Segments(problem)),
        rows_of_keys_(RowsOfKeys(problem)),
        row_tasks_(RowTasks(problem)),
        seen_(SeenKeys(problem)),
        copies_(CopiedElements<S>(problem, resources.threads, 1) > 0),
        scratch_(resources.threads, MostTiles<T>(problem, resources.threads)) {}

  absl::Status Allocate() {
    absl::Status status = workspace_->AllocateAll<S>({
        {&key_copy_, CopiedElements<S>(problem_, threads_, problem_.width)},
        {&value_copy_, CopiedElements<S>(problem_, threads_, problem_.value_width)},
    });
    if (!status.ok()) return status;
    status = workspace_->AllocateAll<T>({{&states_, AllStates<T>(problem_)}});
    if (!status.ok()) return status;
    return rows_.Allocate(problem_, *workspace_);
  }

  // Puts a few tokens' keys and values where those of a head follow each other.
  int64_t CopyTiles() const {
    return copies_ ? SaturatingProduct({problem_.batch, CeilDiv(seen_, kCopiedTokens)}) : 0;
  }
  void Copy(int64_t tile) {
    const int64_t blocks = CeilDiv(seen_, kCopiedTokens);
    const int64_t batch = tile / blocks;
    const int64_t first = tile % blocks * kCopiedTokens;
    const int64_t count = std::min(kCopiedTokens, seen_ - first);
    const auto copy = [&](const TensorView<const S>& from, const TensorView<S>& to) {
      for (int64_t head = 0; head < problem_.kv_heads; ++head) {
        const MatrixView<const S> rows = from.Head(batch, head).Rows(first, count);
        const MatrixView<S> copied = to.Head(batch, head).Rows(first, count);
        for (int64_t i = 0; i < count; ++i) std::copy_n(rows.Row(i), rows.columns, copied.Row(i));
      }
    };
    copy(tensors_.key, CopyOf<S>(key_copy_, problem_.width));
    copy(tensors_.value, CopyOf<S>(value_copy_, problem_.value_width));
  }

  // First sweep: a group of queries against all their keys. The last groups of a causal head see
  // most: they go first, so that no thread ends with a long one.
  absl::Status Forward(const Tiling& queries, const TileContext& context) {
    const auto scratch = GetScratch(context.worker);
    if (!scratch.ok()) return scratch.status();
    const int64_t tile = queries.tiles() - 1 - context.tile;
    FusedGroup<S> group = GroupOf(queries[InTurn(queries, tile)]);
    if (tile >= threads_) {
      const FusedGroup<S> next = GroupOf(queries[InTurn(queries, tile - threads_)]);
      const KeyRange seen =
          problem_.VisibleKeysOfAny(next.batch, next.first_query, next.query.rows);
      group.next_query = next.query;
      group.next_key = next.key.Rows(seen.begin, seen.size());
      group.next_value = next.value.Rows(seen.begin, seen.size());
    }
    FusedForward(group, (*scratch)->kernel.data(), context.checkpoint());
    return absl::OkStatus();
  }

  absl::Status ForwardRows(int64_t tile, const TileContext& context) {
    const auto scratch = GetScratch(context.worker);
    if (!scratch.ok()) return scratch.status();
    // The tasks that read the same keys follow each other.
    const int64_t task = tile % row_tasks_;
    const int64_t segment = tile / row_tasks_ % segments_;
    const int64_t keys = tile / row_tasks_ / segments_;
    const int64_t first = keys * rows_of_keys_ + task * kFusedMostRows;
    const int64_t count = std::min(kFusedMostRows, rows_of_keys_ - task * kFusedMostRows);
    T* const states = (*scratch)->states.data();
    FusedRowsSegment(RowsOf(first, count), segment * kFusedSegment, (*scratch)->kernel.data(),
                     context.checkpoint(), states);
    if (context.stopped()) return absl::OkStatus();
    const int64_t size = FusedStateElements(problem_.value_width);
    for (int64_t i = 0; i < count; ++i) {
      if (apart()) {
        std::copy_n(states + i * size, size,
                    states_.data() + ((first + i) * segments_ + segment) * size);
      } else {
        Finish(first + i, states + i * size, **scratch, context);
      }
    }
    return absl::OkStatus();
  }
  // The rows of one batch and head of keys, whose segments are complete.
  absl::Status MergeRows(int64_t keys, const TileContext& context) {
    const auto scratch = GetScratch(context.worker);
    if (!scratch.ok()) return scratch.status();
    const int64_t size = segments_ * FusedStateElements(problem_.value_width);
    for (int64_t row = keys * rows_of_keys_; row < (keys + 1) * rows_of_keys_; ++row) {
      Finish(row, states_.data() + row * size, **scratch, context);
    }
    return absl::OkStatus();
  }
  bool apart() const { return segments_ > 1; }

  // Second sweep: a block of keys against all queries, in query order.
  absl::Status Weights(const Tiling::Block& block, const TileContext& context) {
    const auto scratch = GetScratch(context.worker);
    if (!scratch.ok()) return scratch.status();
    T* const weights = (*scratch)->weights.data();
    const KeyRange keys{block.first, block.first + block.count};
    T* const sums = tensors_.key_sums == nullptr
                        ? nullptr
                        : tensors_.key_sums + block.flat_head * problem_.keys + keys.begin;
    if (sums != nullptr) std::fill_n(sums, keys.size(), T{0});
    const int64_t most = FusedTaskRows<T>(problem_, threads_);
    for (int64_t first = 0; first < problem_.queries; first += most) {
      if (context.checkpoint().ToStop()) return absl::OkStatus();
      const int64_t count = std::min(most, problem_.queries - first);
      FusedWeights(Group(block.batch, block.head, first, count), keys, (*scratch)->kernel.data(),
                   weights, count);
      if (sums != nullptr) AddToSums(weights, keys.size(), count, sums);
      if (tensors_.weights != nullptr) {
        StoreWeights(weights, keys, count, block.flat_head * problem_.queries + first);
      }
    }
    return absl::OkStatus();
  }

 private:
  auto GetScratch(int worker) {
    return scratch_.Take(worker, [&]() -> absl::StatusOr<Scratch<T>> {
      Scratch<T> scratch;
      absl::Status status = workspace_->AllocateAll<T>({
          {&scratch.kernel, FusedScratchElements<T>(problem_)},
          {&scratch.weights, BlockWeights<T>(problem_, threads_)},
          {&scratch.states, FusedFewQueries<T>(problem_) ? TaskStates(problem_) : 0},
      });
      if (!status.ok()) return status;
      return scratch;
    });
  }

  // The heads that share a mask take a group of its rows one after the other, so that it is read
  // from memory once.
  int64_t InTurn(const Tiling& queries, int64_t tile) const {
    if (!problem_.mask.has_value() || problem_.mask->head_stride != 0) return tile;
    const int64_t sharing =
        problem_.mask->batch_stride == 0 ? problem_.batch * problem_.heads : problem_.heads;
    const int64_t groups = queries.tiles() / (problem_.batch * problem_.heads);
    const int64_t head = tile / (groups * sharing) * sharing + tile % sharing;
    return head * groups + tile / sharing % groups;
  }

  FusedGroup<S> GroupOf(const Tiling::Block& block) const {
    return Group(block.batch, block.head, block.first, block.count);
  }
  FusedGroup<S> Group(int64_t batch, int64_t head, int64_t first, int64_t count) const {
    const int64_t row = (batch * problem_.heads + head) * problem_.queries + first;
    FusedGroup<S> group;
    group.problem = &problem_;
    group.batch = batch;
    group.head = head;
    group.first_query = first;
    group.query = tensors_.query.Head(batch, head).Rows(first, count);
    const int64_t kv_head = problem_.KvHead(head);
    group.key = Keys().Head(batch, kv_head);
    group.value = Values().Head(batch, kv_head);
    group.mask = HeadMask<T>(problem_, tensors_.mask, batch, head);
    group.output = tensors_.output.Head(batch, head).Rows(first, count);
    if (NeedsSecondSweep(problem_)) {
      group.reference = rows_.references() + row;
      group.inverse_sum = rows_.inverse_sums() + row;
      if (rows_.shifts() != nullptr) group.shift = rows_.shifts() + row;
    }
    if (tensors_.logsumexp != nullptr) group.logsumexp = tensors_.logsumexp + row;
    return group;
  }

  template <typename Element>
  TensorView<Element> CopyOf(const Buffer<S>& copy, int64_t width) const {
    return {copy.data(), Layout::kBhtd, problem_.kv_heads, seen_, width};
  }
  // As the forward sweep reads them.
  TensorView<const S> Keys() const {
    return copies_ ? CopyOf<const S>(key_copy_, problem_.width) : tensors_.key;
  }
  TensorView<const S> Values() const {
    return copies_ ? CopyOf<const S>(value_copy_, problem_.value_width) : tensors_.value;
  }

  // Rows of (B, H, Tq), which is also (B, Hkv, row of keys), that share a head of keys.
  FusedRows<S> RowsOf(int64_t first, int64_t count) const {
    const int64_t batch = first / problem_.queries / problem_.heads;
    FusedRows<S> rows;
    rows.problem = &problem_;
    rows.batch = batch;
    rows.count = count;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t head = (first + i) / problem_.queries % problem_.heads;
      rows.head[i] = head;
      rows.index[i] = (first + i) % problem_.queries;
      rows.query[i] = tensors_.query.Head(batch, head).Row(rows.index[i]);
      rows.mask[i] = HeadMask<T>(problem_, tensors_.mask, batch, head);
    }
    rows.key = tensors_.key.Head(batch, problem_.KvHead(rows.head[0]));
    rows.value = tensors_.value.Head(batch, problem_.KvHead(rows.head[0]));
    return rows;
  }

  // Finishes a row from the states of its segments, which it computes again where the row's mask
  // has a shift.
  void Finish(int64_t row, T* states, const Scratch<T>& scratch, const TileContext& context) const {
    const int64_t batch = row / problem_.queries / problem_.heads;
    const int64_t query = row % problem_.queries;
    T reference = 0;
    FusedRowResult<S> to;
    to.problem = &problem_;
    to.head = row / problem_.queries % problem_.heads;
    to.output = tensors_.output.Head(batch, to.head).Row(query);
    to.reference = &reference;
    to.total = scratch.kernel.data();
    if (NeedsSecondSweep(problem_)) to.inverse_sum = rows_.inverse_sums() + row;
    if (tensors_.logsumexp != nullptr) to.logsumexp = tensors_.logsumexp + row;
    const int64_t size = FusedStateElements(problem_.value_width);
    FusedFinishRow(states, segments_, size, to);
    if (problem_.AddsMask() && !(std::abs(reference) < kFar<T>)) {
      to.shift = HeadMask<T>(problem_, tensors_.mask, batch, to.head)
                     .Shift(query, problem_.VisibleKeys(batch, query));
    }
    if (to.shift != 0) {
      FusedRows<S> rows = RowsOf(row, 1);
      rows.shift[0] = to.shift;
      for (int64_t segment = 0; segment < segments_; ++segment) {
        FusedRowsSegment(rows, segment * kFusedSegment, scratch.kernel.data(), context.checkpoint(),
                         states + segment * size);
        if (context.stopped()) return;
      }
      FusedFinishRow(states, segments_, size, to);
    }
    if (NeedsSecondSweep(problem_)) rows_.references()[row] = reference;
    if (NeedsSecondSweep(problem_) && rows_.shifts() != nullptr) rows_.shifts()[row] = to.shift;
  }

  static void AddToSums(const T* weights, int64_t keys, int64_t queries, T* sums) {
    for (int64_t j = 0; j < keys; ++j) {
      for (int64_t i = 0; i < queries; ++i) sums[j] += weights[j * queries + i];
    }
  }

  void StoreWeights(const T* weights, KeyRange keys, int64_t queries, int64_t first_row) const {
    for (int64_t i = 0; i < queries; ++i) {
      S* const row = tensors_.weights + (first_row + i) * problem_.keys + keys.begin;
      if constexpr (kIsHalf<S>) {
        T wide[kFusedBlock];
        for (int64_t j = 0; j < keys.size(); ++j) wide[j] = weights[j * queries + i];
        Narrow(wide, keys.size(), row);
      } else {
        for (int64_t j = 0; j < keys.size(); ++j) row[j] = weights[j * queries + i];
      }
    }
  }

  const Problem problem_;
  const AttendTensors<S> tensors_;
  Workspace* const workspace_;
  const int threads_;
  const int64_t segments_;
  const int64_t rows_of_keys_;  // of the heads that share keys, where queries are few
  const int64_t row_tasks_;
  const int64_t seen_;  // keys up to the last that some query sees
  const bool copies_;   // those are copied first
  ScratchPool<Scratch<T>> scratch_;
  Buffer<T> states_;      // (B, H, Tq, segments, FusedStateElements)
  Buffer<S> key_copy_;    // (B, Hkv, seen_, D)
  Buffer<S> value_copy_;  // (B, Hkv, seen_, Dv)
  RowStates<T> rows_;
};

}  // namespace

int64_t FusedWorkspaceBytes(const Problem& problem, int threads) {
  return WithStored(problem.dtype,
                    [&]<typename S>() { return WorkspaceBytes<S>(problem, threads); });
}

template <typename S>
absl::StatusOr<std::vector<Stage>> FusedStages(const Problem& problem,
                                               const AttendTensors<S>& tensors,
                                               const Resources& resources) {
  auto job = std::make_shared<FusedJob<S>>(problem, tensors, resources);
  if (absl::Status status = job->Allocate(); !status.ok()) return status;
  std::vector<Stage> stages;
  if (FusedFewQueries<Wide<S>>(problem)) {
    stages.push_back({"forward", RowsTiles(problem), [job](const TileContext& context) {
                        return job->ForwardRows(context.tile, context);
                      }});
    if (job->apart()) {
      stages.push_back(
          {"merge", SaturatingProduct({problem.batch, problem.kv_heads}),
           [job](const TileContext& context) { return job->MergeRows(context.tile, context); }});
    }
  } else {
    if (job->CopyTiles() > 0) {
      stages.push_back({"copy", job->CopyTiles(), [job](const TileContext& context) {
                          job->Copy(context.tile);
                          return absl::OkStatus();
                        }});
    }
    const Tiling queries(problem, problem.queries,
                         FusedTaskRows<Wide<S>>(problem, resources.threads));
    stages.push_back({"forward", queries.tiles(), [job, queries](const TileContext& context) {
                        return job->Forward(queries, context);
                      }});
  }
  if (NeedsSecondSweep(problem)) {
    const Tiling keys(problem, problem.keys, kFusedBlock);
    stages.push_back({"weights", keys.tiles(), [job, keys](const TileContext& context) {
                        return job->Weights(keys[context.tile], context);
                      }});
  }
  return stages;
}

template absl::StatusOr<std::vector<Stage>> FusedStages(const Problem&, const AttendTensors<float>&,
                                                        const Resources&);
template absl::StatusOr<std::vector<Stage>> FusedStages(const Problem&,
                                                        const AttendTensors<double>&,
                                                        const Resources&);
template absl::StatusOr<std::vector<Stage>> FusedStages(const Problem&,
                                                        const AttendTensors<Float16>&,
                                                        const Resources&);
template absl::StatusOr<std::vector<Stage>> FusedStages(const Problem&,
                                                        const AttendTensors<BFloat16>&,
                                                        const Resources&);

}  // namespace attendant::core
