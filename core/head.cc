#include "core/head.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/checked_math.h"
#include "core/errors.h"
#include "core/gemm.h"
#include "core/softmax.h"
#include "core/tiling.h"

namespace attendant::core {
namespace {

// Rows of a product that are one tile: enough to make packing the weights worth it.
constexpr int64_t kRowBlock = 128;

absl::Status CheckHeads(int64_t heads, const char* field, int64_t columns) {
  if (columns % heads == 0) return absl::OkStatus();
  return InvalidField(
      "heads", absl::StrCat("is ", heads, ", must divide the ", columns, " columns of ", field));
}

absl::Status CheckShapes(const HeadSpec& spec, int64_t heads) {
  const size_t x_rank = spec.x.shape.size();
  if (x_rank != 2 && x_rank != 3) {
    return InvalidField("x.shape", absl::StrCat("has ", x_rank, " dimensions, must have 2 or 3"));
  }
  if (absl::Status status = CheckTensor("x", spec.x, static_cast<int64_t>(x_rank)); !status.ok()) {
    return status;
  }
  const std::pair<const char*, const TensorSpec*> weights[] = {
      {"w_q", &spec.w_q}, {"w_k", &spec.w_k}, {"w_v", &spec.w_v}, {"w_o", &spec.w_o}};
  for (const auto& [name, tensor] : weights) {
    if (absl::Status status = CheckTensor(name, *tensor, 2); !status.ok()) return status;
    absl::Status status = CheckSameDType(name, tensor->dtype, "x", spec.x.dtype);
    if (!status.ok()) return status;
  }
  const int64_t d_model = spec.x.shape.back();
  for (absl::Status status : {
           CheckSize("w_q.shape[0]", spec.w_q.shape[0], d_model, "the width of x"),
           CheckSize("w_k.shape[0]", spec.w_k.shape[0], d_model, "the width of x"),
           CheckSize("w_v.shape[0]", spec.w_v.shape[0], d_model, "the width of x"),
           CheckSize("w_k.shape[1]", spec.w_k.shape[1], spec.w_q.shape[1], "the columns of w_q"),
           CheckSize("w_o.shape[0]", spec.w_o.shape[0], spec.w_v.shape[1], "the columns of w_v"),
           CheckSize("w_o.shape[1]", spec.w_o.shape[1], d_model, "the width of x"),
           CheckHeads(heads, "w_q", spec.w_q.shape[1]),
           CheckHeads(heads, "w_v", spec.w_v.shape[1]),
       }) {
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

template <typename T>
struct HeadJob {
  HeadProblem problem;
  HeadTensors<T> tensors;
  std::vector<Buffer<T>> owned;

  const Problem& attend() const { return problem.attend; }

  MatrixView<const T> X(const Tiling::Block& block) const {
    const int64_t row = block.batch * attend().queries + block.first;
    return {tensors.x + row * problem.d_model, block.count, problem.d_model, problem.d_model};
  }

  // One head's rows of a (B, H, T, width) tensor.
  template <typename U>
  MatrixView<U> Rows(U* tensor, const Tiling::Block& block, int64_t width) const {
    const int64_t row = block.flat_head * attend().queries + block.first;
    return {tensor + row * width, block.count, width, width};
  }

  // x times the head's columns of a weight matrix.
  absl::Status Project(const Tiling::Block& block, const T* weight, int64_t width, T* out) const {
    const int64_t columns = attend().heads * width;
    const MatrixView<const T> head_columns{weight + block.head * width, problem.d_model, width,
                                           columns};
    return Gemm(X(block), head_columns, Transpose::kNo, Rows(out, block, width),
                /*accumulate=*/false);
  }

  absl::Status Logits(const Tiling::Block& block) const {
    const Problem& p = attend();
    const MatrixView<const T> key =
        TensorView<const T>(tensors.key, Layout::kBhtd, p.heads, p.keys, p.width)
            .Head(block.batch, block.head);
    const MatrixView<T> logits = Rows(tensors.logits, block, p.keys);
    absl::Status status = Gemm(Rows<const T>(tensors.query, block, p.width), key, Transpose::kYes,
                               logits, /*accumulate=*/false);
    for (int64_t i = 0; status.ok() && i < block.count; ++i) {
      ScaleRow(logits.Row(i), p.keys, static_cast<T>(p.scale));
    }
    return status;
  }

  // Sums over the heads in their order: the same bits whichever thread does it.
  absl::Status ProjectOutput(const Tiling::Block& block) const {
    const Problem& p = attend();
    const int64_t row = block.batch * p.queries + block.first;
    const MatrixView<T> out{tensors.output + row * problem.d_model, block.count, problem.d_model,
                            problem.d_model};
    // Without a context one empty product, which makes the output 0, does for all heads.
    const int64_t heads = p.value_width == 0 ? 1 : p.heads;
    for (int64_t head = 0; head < heads; ++head) {
      const Tiling::Block in_head{block.batch, head, block.batch * p.heads + head, block.first,
                                  block.count};
      const MatrixView<const T> weight{tensors.w_o + head * p.value_width * problem.d_model,
                                       p.value_width, problem.d_model, problem.d_model};
      absl::Status status = Gemm(Rows<const T>(tensors.context, in_head, p.value_width), weight,
                                 Transpose::kNo, out, /*accumulate=*/head > 0);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // Scratch for each tensor between input and output that is not returned.
  absl::Status AllocateMissing(Workspace& workspace) {
    const Problem& p = attend();
    const int64_t tokens = p.batch * p.heads * p.queries;
    const std::pair<T**, int64_t> parts[] = {{&tensors.query, p.width},
                                             {&tensors.key, p.width},
                                             {&tensors.value, p.value_width},
                                             {&tensors.context, p.value_width}};
    for (const auto& [tensor, width] : parts) {
      if (*tensor != nullptr) continue;
      auto buffer = workspace.Allocate<T>(SaturatingProduct({tokens, width}));
      if (!buffer.ok()) return buffer.status();
      *tensor = buffer->data();
      owned.push_back(*std::move(buffer));
    }
    return absl::OkStatus();
  }

  AttendTensors<T> Attend() const {
    const Problem& p = attend();
    AttendTensors<T> inner;
    inner.query = {tensors.query, Layout::kBhtd, p.heads, p.queries, p.width};
    inner.key = {tensors.key, Layout::kBhtd, p.heads, p.keys, p.width};
    inner.value = {tensors.value, Layout::kBhtd, p.heads, p.keys, p.value_width};
    inner.output = {tensors.context, Layout::kBhtd, p.heads, p.queries, p.value_width};
    inner.weights = tensors.weights;
    inner.mask = tensors.mask;
    return inner;
  }
};

template <typename T>
Stage ProjectionStage(std::shared_ptr<HeadJob<T>> job, const Tiling& tiling) {
  // The three products side by side, so that a short input still occupies every thread.
  // Where no width is left there is nothing to project, however many heads divide nothing.
  const bool nothing = job->attend().width == 0 && job->attend().value_width == 0;
  return {"projections", nothing ? 0 : SaturatingProduct({3, tiling.tiles()}),
          [job, tiling](const TileContext& context) {
            const Problem& p = job->attend();
            const HeadTensors<T>& t = job->tensors;
            const Tiling::Block block = tiling[context.tile / 3];
            switch (context.tile % 3) {
              case 0:
                return job->Project(block, t.w_q, p.width, t.query);
              case 1:
                return job->Project(block, t.w_k, p.width, t.key);
              default:
                return job->Project(block, t.w_v, p.value_width, t.value);
            }
          }};
}

}  // namespace

absl::StatusOr<HeadProblem> MakeHeadProblem(const HeadSpec& spec) {
  if (spec.heads < 0) {
    return InvalidField("heads", absl::StrCat("is ", spec.heads, ", must be 0 or more"));
  }
  if (spec.heads > std::numeric_limits<int32_t>::max()) {
    return InvalidField("heads", absl::StrCat("is ", spec.heads, ", must be at most ",
                                              std::numeric_limits<int32_t>::max()));
  }
  const int64_t heads = std::max<int64_t>(spec.heads, 1);
  if (absl::Status status = CheckShapes(spec, heads); !status.ok()) return status;
  HeadProblem head;
  head.x_has_batch = spec.x.shape.size() == 3;
  head.d_model = spec.x.shape.back();
  head.return_intermediates = spec.return_intermediates;
  Problem& problem = head.attend;
  problem.dtype = spec.x.dtype;
  problem.batch = head.x_has_batch ? spec.x.shape[0] : 1;
  problem.heads = heads;
  problem.kv_heads = heads;
  problem.queries = spec.x.shape[head.x_has_batch ? 1 : 0];
  problem.keys = problem.queries;
  problem.width = spec.w_q.shape[1] / heads;
  problem.value_width = spec.w_v.shape[1] / heads;
  AttendOptions options = spec.options;
  options.layout = Layout::kBhtd;
  options.return_weights = spec.return_intermediates;
  options.return_logsumexp = false;
  options.return_key_sums = false;
  if (absl::Status status = ApplyOptions(options, problem); !status.ok()) return status;
  // Between the input and the output stand (B, H, T, d_k) and (B, H, T, d_v).
  constexpr int64_t kLargestElement = 8;
  if (!CheckedProduct({problem.batch, heads, problem.queries, problem.width, kLargestElement})
           .has_value()) {
    return InvalidField("x.shape", absl::StrCat("with w_q asks for queries of (", problem.batch,
                                                ", ", heads, ", ", problem.queries, ", ",
                                                problem.width, "), whose bytes overflow 63 bits"));
  }
  return head;
}

template <typename T>
absl::StatusOr<std::vector<Stage>> HeadStages(const HeadProblem& problem,
                                              const HeadTensors<T>& tensors,
                                              const Resources& resources) {
  auto job = std::make_shared<HeadJob<T>>();
  job->problem = problem;
  job->tensors = tensors;
  if (absl::Status status = job->AllocateMissing(*resources.workspace); !status.ok()) return status;
  auto attend = AttendStages<T>(problem.attend, job->Attend(), resources);
  if (!attend.ok()) return attend.status();

  const Tiling heads(problem.attend, problem.attend.queries, kRowBlock);
  Problem rows = problem.attend;
  rows.heads = 1;
  const Tiling batches(rows, rows.queries, kRowBlock);
  std::vector<Stage> stages;
  stages.push_back(ProjectionStage(job, heads));
  if (tensors.logits != nullptr) {
    stages.push_back({"logits", heads.tiles(), [job, heads](const TileContext& context) {
                        return job->Logits(heads[context.tile]);
                      }});
  }
  std::move(attend->begin(), attend->end(), std::back_inserter(stages));
  stages.push_back(
      {"output_projection", batches.tiles(), [job, batches](const TileContext& context) {
         return job->ProjectOutput(batches[context.tile]);
       }});
  return stages;
}

template absl::StatusOr<std::vector<Stage>> HeadStages(const HeadProblem&,
                                                       const HeadTensors<float>&, const Resources&);
template absl::StatusOr<std::vector<Stage>> HeadStages(const HeadProblem&,
                                                       const HeadTensors<double>&,
                                                       const Resources&);

}  // namespace attendant::core
