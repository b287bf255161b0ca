#include "core/fused_path.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "core/checked_math.h"
#include "core/fused_kernel.h"
#include "core/tiling.h"

namespace attendant::core {
namespace {

// A multiple of every vector's lanes: groups of such a size leave no lane idle but at the end.
constexpr int64_t kMostLanes = 16;

// Queries of a tile: a head's divided evenly, so that no thread waits for a large last one.
template <typename T>
int64_t GroupRows(int64_t queries) {
  const int64_t groups = std::max<int64_t>(CeilDiv(queries, FusedGroupRows<T>()), 1);
  const int64_t even = CeilDiv(CeilDiv(queries, groups), kMostLanes) * kMostLanes;
  return std::min(std::max<int64_t>(even, 1), FusedGroupRows<T>());
}

bool NeedsSecondSweep(const Problem& problem) {
  return problem.return_weights || problem.return_key_sums;
}

// Elements of one block's weights, [key][query].
template <typename T>
int64_t BlockWeights(const Problem& problem) {
  return NeedsSecondSweep(problem) ? kFusedBlock * GroupRows<T>(problem.queries) : 0;
}

template <typename T>
int64_t WorkspaceBytes(const Problem& p, int threads) {
  const int64_t rows =
      NeedsSecondSweep(p) ? SaturatingProduct({2, p.batch, p.heads, p.queries}) : 0;
  const int64_t scratch = SaturatingSum({FusedScratchElements<T>(p), BlockWeights<T>(p)});
  return SaturatingProduct(
      {SizeOf(p.dtype), SaturatingSum({rows, SaturatingProduct({threads, scratch})})});
}

// What one compute thread works with.
template <typename T>
struct Scratch {
  Buffer<T> kernel;
  Buffer<T> weights;
};

template <typename T>
class FusedJob {
 public:
  FusedJob(const Problem& problem, const AttendTensors<T>& tensors, const Resources& resources)
      : problem_(problem),
        tensors_(tensors),
        workspace_(resources.workspace),
        scratch_(resources.threads) {}

  // Room for each row's reference and 1 / l, from the first sweep to the second.
  absl::Status AllocateRows() {
    const int64_t rows = problem_.batch * problem_.heads * problem_.queries;
    for (Buffer<T>* const buffer : {&reference_, &inverse_sum_}) {
      auto allocated = workspace_->Allocate<T>(rows);
      if (!allocated.ok()) return allocated.status();
      *buffer = *std::move(allocated);
    }
    return absl::OkStatus();
  }

  // First sweep: a group of queries against all their keys.
  absl::Status Forward(const Tiling::Block& block, const TileContext& context) {
    absl::StatusOr<Scratch<T>*> scratch = GetScratch(context.worker);
    if (!scratch.ok()) return scratch.status();
    FusedForward(Group(block.batch, block.head, block.first, block.count),
                 (*scratch)->kernel.data(), *context.stop);
    return absl::OkStatus();
  }

  // Second sweep: a block of keys against all queries, in query order.
  absl::Status Weights(const Tiling::Block& block, const TileContext& context) {
    absl::StatusOr<Scratch<T>*> scratch = GetScratch(context.worker);
    if (!scratch.ok()) return scratch.status();
    T* const weights = (*scratch)->weights.data();
    const KeyRange keys{block.first, block.first + block.count};
    T* const sums = tensors_.key_sums == nullptr
                        ? nullptr
                        : tensors_.key_sums + block.flat_head * problem_.keys + keys.begin;
    if (sums != nullptr) std::fill_n(sums, keys.size(), T{0});
    const int64_t most = GroupRows<T>(problem_.queries);
    for (int64_t first = 0; first < problem_.queries; first += most) {
      if (context.stopped()) return absl::OkStatus();
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
  absl::StatusOr<Scratch<T>*> GetScratch(int worker) {
    return scratch_.Get(worker, [&]() -> absl::StatusOr<Scratch<T>> {
      Scratch<T> scratch;
      const std::pair<Buffer<T>*, int64_t> parts[] = {
          {&scratch.kernel, FusedScratchElements<T>(problem_)},
          {&scratch.weights, BlockWeights<T>(problem_)},
      };
      for (const auto& [buffer, count] : parts) {
        auto allocated = workspace_->Allocate<T>(count);
        if (!allocated.ok()) return allocated.status();
        *buffer = *std::move(allocated);
      }
      return scratch;
    });
  }

  FusedGroup<T> Group(int64_t batch, int64_t head, int64_t first, int64_t count) const {
    const int64_t row = (batch * problem_.heads + head) * problem_.queries + first;
    FusedGroup<T> group;
    group.problem = &problem_;
    group.first_query = first;
    group.query = tensors_.query.Head(batch, head).Rows(first, count);
    group.key = tensors_.key.Head(batch, problem_.KvHead(head));
    group.value = tensors_.value.Head(batch, problem_.KvHead(head));
    group.output = tensors_.output.Head(batch, head).Rows(first, count);
    if (NeedsSecondSweep(problem_)) {
      group.reference = reference_.data() + row;
      group.inverse_sum = inverse_sum_.data() + row;
    }
    if (tensors_.logsumexp != nullptr) group.logsumexp = tensors_.logsumexp + row;
    return group;
  }

  static void AddToSums(const T* weights, int64_t keys, int64_t queries, T* sums) {
    for (int64_t j = 0; j < keys; ++j) {
      for (int64_t i = 0; i < queries; ++i) sums[j] += weights[j * queries + i];
    }
  }

  void StoreWeights(const T* weights, KeyRange keys, int64_t queries, int64_t first_row) const {
    for (int64_t i = 0; i < queries; ++i) {
      T* const row = tensors_.weights + (first_row + i) * problem_.keys + keys.begin;
      for (int64_t j = 0; j < keys.size(); ++j) row[j] = weights[j * queries + i];
    }
  }

  const Problem problem_;
  const AttendTensors<T> tensors_;
  Workspace* const workspace_;
  PerWorker<Scratch<T>> scratch_;
  Buffer<T> reference_;    // (B, H, Tq)
  Buffer<T> inverse_sum_;  // (B, H, Tq)
};

}  // namespace

int64_t FusedWorkspaceBytes(const Problem& problem, int threads) {
  return problem.dtype == DType::kFloat64 ? WorkspaceBytes<double>(problem, threads)
                                          : WorkspaceBytes<float>(problem, threads);
}

template <typename T>
absl::StatusOr<std::vector<Stage>> FusedStages(const Problem& problem,
                                               const AttendTensors<T>& tensors,
                                               const Resources& resources) {
  auto job = std::make_shared<FusedJob<T>>(problem, tensors, resources);
  std::vector<Stage> stages;
  const Tiling queries(problem, problem.queries, GroupRows<T>(problem.queries));
  stages.push_back({"forward", queries.tiles(), [job, queries](const TileContext& context) {
                      // The last groups of a causal head see most: they go first, so that no
                      // thread ends with a long one.
                      return job->Forward(queries[queries.tiles() - 1 - context.tile], context);
                    }});
  if (NeedsSecondSweep(problem)) {
    if (absl::Status status = job->AllocateRows(); !status.ok()) return status;
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

}  // namespace attendant::core
