#include "core/head.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/checked_math.h"
#include "core/errors.h"
#include "core/gemm.h"
#include "core/half.h"
#include "core/long_product.h"
#include "core/scratch_pool.h"
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

// Rows of a head's weights, or of x, that one product takes.
int64_t RowsOf(const Problem& p) { return std::min(kRowBlock, p.queries); }

// What one compute thread widens half precision into.
template <typename T>
struct WideScratch {
  Buffer<T> x;       // (kRowBlock, d_model): rows of x, or of the output
  Buffer<T> weight;  // (d_model, d_k or d_v), or (d_v, d_model)
  Buffer<T> logits;  // (kRowBlock, T)
};

int64_t WideX(const HeadProblem& h) { return SaturatingProduct({RowsOf(h.attend), h.d_model}); }
int64_t WideWeight(const HeadProblem& h) {
  return SaturatingProduct({h.d_model, std::max(h.attend.width, h.attend.value_width)});
}
int64_t WideLogits(const HeadProblem& h) {
  return h.return_intermediates ? SaturatingProduct({RowsOf(h.attend), h.attend.keys}) : 0;
}

// No stage has more: the products of x side by side, so that a short input still occupies every
// thread.
int64_t ProjectionTiles(const HeadProblem& h) {
  return SaturatingProduct({3, Tiling(h.attend, h.attend.queries, kRowBlock).tiles()});
}

// Tensors are stored as S.
template <typename S>
struct HeadJob {
  using T = Wide<S>;

  HeadJob(const HeadProblem& h, int threads) : problem(h), wide(threads, ProjectionTiles(h)) {}

  HeadProblem problem;
  HeadTensors<S> tensors;
  // Between x and the output, (B, H, T, width): the caller's where they are asked for and stored as
  // they are computed.
  T* query = nullptr;
  T* key = nullptr;
  T* value = nullptr;
  T* context = nullptr;
  T* weights = nullptr;  // (B, H, T, T); null where they are not asked for
  Workspace* workspace = nullptr;
  std::vector<Buffer<T>> owned;
  ScratchPool<WideScratch<T>> wide;

  const Problem& attend() const { return problem.attend; }

  auto GetWide(int worker) {
    return wide.Take(worker, [&]() -> absl::StatusOr<WideScratch<T>> {
      WideScratch<T> made;
      if constexpr (kIsHalf<S>) {
        absl::Status status = workspace->AllocateAll<T>({{&made.x, WideX(problem)},
                                                         {&made.weight, WideWeight(problem)},
                                                         {&made.logits, WideLogits(problem)}});
        if (!status.ok()) return status;
      }
      return made;
    });
  }

  MatrixView<const S> X(const Tiling::Block& block) const {
    const int64_t row = block.batch * attend().queries + block.first;
    return {tensors.x + row * problem.d_model, block.count, problem.d_model, problem.d_model};
  }

  // One head's rows of a (B, H, T, width) tensor.
  template <typename U>
  MatrixView<U> Rows(U* tensor, const Tiling::Block& block, int64_t width) const {
    const int64_t row = block.flat_head * attend().queries + block.first;
    return {tensor + row * width, block.count, width, width};
  }

  // Where rows are computed: in what is returned, or in what is rounded to it.
  static MatrixView<T> WideRows(const MatrixView<S>& rows, T* to) {
    if constexpr (kIsHalf<S>) {
      return {to, rows.rows, rows.columns, rows.columns};
    } else {
      return rows;
    }
  }
  // Rounds them. rows: null where they are not returned.
  static void Return(const MatrixView<T>& computed, const MatrixView<S>& rows) {
    if (!kIsHalf<S> || rows.data == nullptr) return;
    for (int64_t i = 0; i < rows.rows; ++i) Store(computed.Row(i), rows.columns, rows.Row(i));
  }
  // The same rows of a tensor that may not be returned.
  MatrixView<S> ReturnedRows(S* tensor, const Tiling::Block& block, int64_t width) const {
    return tensor == nullptr ? MatrixView<S>{} : Rows(tensor, block, width);
  }

  // A weight may be large: where it is widened, in parts.
  static absl::StatusOr<MatrixView<const T>> WidenWeight(const MatrixView<const S>& weight, T* to,
                                                         const TileContext& tile) {
    if constexpr (kIsHalf<S>) {
      for (int64_t row = 0; row < weight.rows; ++row) {
        if (IsDue(row, weight.columns) && tile.checkpoint().ToStop()) return StoppedError();
        WidenRows(weight.Rows(row, 1), to + row * weight.columns);
      }
      return MatrixView<const T>{to, weight.rows, weight.columns, weight.columns};
    } else {
      return weight;
    }
  }

  // x times the head's columns of a weight matrix. out: (B, H, T, width), as is returned.
  absl::Status Project(const Tiling::Block& block, const S* weight, int64_t width, T* out,
                       S* returned, const TileContext& tile) {
    const auto scratch = GetWide(tile.worker);
    if (!scratch.ok()) return scratch.status();
    const int64_t columns = attend().heads * width;
    const MatrixView<const S> head_columns{weight + block.head * width, problem.d_model, width,
                                           columns};
    const MatrixView<T> rows = Rows(out, block, width);
    const auto wide_weight = WidenWeight(head_columns, (*scratch)->weight.data(), tile);
    if (!wide_weight.ok()) return wide_weight.status();
    absl::Status status = LongGemm(WidenRows(X(block), (*scratch)->x.data()), *wide_weight,
                                   Transpose::kNo, rows, /*accumulate=*/false, tile.checkpoint());
    if (status.ok()) Return(rows, ReturnedRows(returned, block, width));
    return status;
  }

  absl::Status Logits(const Tiling::Block& block, const TileContext& tile) {
    const auto scratch = GetWide(tile.worker);
    if (!scratch.ok()) return scratch.status();
    const Problem& p = attend();
    const MatrixView<const T> keys =
        TensorView<const T>(key, Layout::kBhtd, p.heads, p.keys, p.width)
            .Head(block.batch, block.head);
    const MatrixView<S> returned = Rows(tensors.logits, block, p.keys);
    const MatrixView<T> logits = WideRows(returned, (*scratch)->logits.data());
    absl::Status status = LongGemm(Rows<const T>(query, block, p.width), keys, Transpose::kYes,
                                   logits, /*accumulate=*/false, tile.checkpoint());
    if (!status.ok()) return status;
    for (int64_t i = 0; i < block.count; ++i) {
      if (IsDue(i, p.keys) && tile.checkpoint().ToStop()) return StoppedError();
      ScaleRow(logits.Row(i), p.keys, static_cast<T>(p.scale));
    }
    Return(logits, returned);
    return absl::OkStatus();
  }

  // What the attention inside left, where it is to be rounded.
  void ReturnRest(const Tiling::Block& block) const {
    const Problem& p = attend();
    Return(Rows(context, block, p.value_width),
           ReturnedRows(tensors.context, block, p.value_width));
    if (weights == nullptr) return;
    Return(Rows(weights, block, p.keys), ReturnedRows(tensors.weights, block, p.keys));
  }

  // Sums over the heads in their order: the same bits whichever thread does it.
  absl::Status ProjectOutput(const Tiling::Block& block, const TileContext& tile) {
    const auto scratch = GetWide(tile.worker);
    if (!scratch.ok()) return scratch.status();
    const Problem& p = attend();
    const int64_t row = block.batch * p.queries + block.first;
    const MatrixView<S> returned{tensors.output + row * problem.d_model, block.count,
                                 problem.d_model, problem.d_model};
    const MatrixView<T> out = WideRows(returned, (*scratch)->x.data());
    // Without a context one empty product, which makes the output 0, does for all heads.
    const int64_t heads = p.value_width == 0 ? 1 : p.heads;
    for (int64_t head = 0; head < heads; ++head) {
      const Tiling::Block in_head{block.batch, head, block.batch * p.heads + head, block.first,
                                  block.count};
      const MatrixView<const S> weight{tensors.w_o + head * p.value_width * problem.d_model,
                                       p.value_width, problem.d_model, problem.d_model};
      const auto wide_weight = WidenWeight(weight, (*scratch)->weight.data(), tile);
      if (!wide_weight.ok()) return wide_weight.status();
      absl::Status status = LongGemm(Rows<const T>(context, in_head, p.value_width), *wide_weight,
                                     Transpose::kNo, out,
                                     /*accumulate=*/head > 0, tile.checkpoint());
      if (!status.ok()) return status;
    }
    Return(out, returned);
    return absl::OkStatus();
  }

  // Takes the caller's tensor, or scratch where there is none or it is stored otherwise.
  absl::Status Provide(T*& tensor, S* callers, int64_t elements) {
    if constexpr (!kIsHalf<S>) {
      tensor = callers;
      if (tensor != nullptr) return absl::OkStatus();
    }
    auto buffer = workspace->Allocate<T>(elements);
    if (!buffer.ok()) return buffer.status();
    tensor = buffer->data();
    owned.push_back(*std::move(buffer));
    return absl::OkStatus();
  }

  absl::Status Allocate() {
    const Problem& p = attend();
    const int64_t tokens = p.batch * p.heads * p.queries;
    struct Part {
      T** tensor;
      S* callers;
      int64_t width;
    };
    const Part parts[] = {{&query, tensors.query, p.width},
                          {&key, tensors.key, p.width},
                          {&value, tensors.value, p.value_width},
                          {&context, tensors.context, p.value_width}};
    for (const Part& part : parts) {
      absl::Status status =
          Provide(*part.tensor, part.callers, SaturatingProduct({tokens, part.width}));
      if (!status.ok()) return status;
    }
    if (tensors.weights == nullptr) return absl::OkStatus();
    return Provide(weights, tensors.weights, SaturatingProduct({tokens, p.keys}));
  }

  AttendTensors<T> Attend() const {
    const Problem& p = attend();
    AttendTensors<T> inner;
    inner.query = {query, Layout::kBhtd, p.heads, p.queries, p.width};
    inner.key = {key, Layout::kBhtd, p.heads, p.keys, p.width};
    inner.value = {value, Layout::kBhtd, p.heads, p.keys, p.value_width};
    inner.output = {context, Layout::kBhtd, p.heads, p.queries, p.value_width};
    inner.weights = weights;
    inner.mask = tensors.mask;
    return inner;
  }
};

template <typename S>
Stage ProjectionStage(std::shared_ptr<HeadJob<S>> job, const Tiling& tiling) {
  // Where no width is left there is nothing to project, however many heads divide nothing.
  const bool nothing = job->attend().width == 0 && job->attend().value_width == 0;
  return {"projections", nothing ? 0 : ProjectionTiles(job->problem),
          [job, tiling](const TileContext& context) {
            const Problem& p = job->attend();
            const HeadTensors<S>& t = job->tensors;
            const Tiling::Block block = tiling[context.tile / 3];
            switch (context.tile % 3) {
              case 0:
                return job->Project(block, t.w_q, p.width, job->query, t.query, context);
              case 1:
                return job->Project(block, t.w_k, p.width, job->key, t.key, context);
              default:
                return job->Project(block, t.w_v, p.value_width, job->value, t.value, context);
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

int64_t HeadWorkspaceBytes(const HeadProblem& h, int threads) {
  const Problem& p = h.attend;
  const bool half = IsHalf(p.dtype);
  const int64_t tokens = SaturatingProduct({p.batch, p.heads, p.queries});
  const int64_t widths = SaturatingSum({p.width, p.width, p.value_width, p.value_width});
  const bool between = half || !h.return_intermediates;
  const int64_t weights = half && h.return_intermediates ? p.keys : 0;
  const int64_t scratch =
      half ? SaturatingSum({WideX(h), WideWeight(h), WideLogits(h)}) : int64_t{0};
  return SaturatingProduct(
      {SizeOf(WideOf(p.dtype)),
       SaturatingSum({between ? SaturatingProduct({tokens, widths}) : int64_t{0},
                      SaturatingProduct({tokens, weights}),
                      SaturatingProduct({ScratchCount(threads, ProjectionTiles(h)), scratch})})});
}

template <typename S>
absl::StatusOr<std::vector<Stage>> HeadStages(const HeadProblem& problem,
                                              const HeadTensors<S>& tensors,
                                              const Resources& resources) {
  auto job = std::make_shared<HeadJob<S>>(problem, resources.threads);
  job->tensors = tensors;
  job->workspace = resources.workspace;
  if (absl::Status status = job->Allocate(); !status.ok()) return status;
  // Inside, numbers are as they are computed.
  Problem inner = problem.attend;
  inner.dtype = WideOf(inner.dtype);
  auto attend = AttendStages<Wide<S>>(inner, job->Attend(), resources);
  if (!attend.ok()) return attend.status();

  const Tiling heads(problem.attend, problem.attend.queries, kRowBlock);
  Problem rows = problem.attend;
  rows.heads = 1;
  const Tiling batches(rows, rows.queries, kRowBlock);
  std::vector<Stage> stages;
  stages.push_back(ProjectionStage(job, heads));
  if (tensors.logits != nullptr) {
    stages.push_back({"logits", heads.tiles(), [job, heads](const TileContext& context) {
                        return job->Logits(heads[context.tile], context);
                      }});
  }
  std::move(attend->begin(), attend->end(), std::back_inserter(stages));
  if (kIsHalf<S> && problem.return_intermediates) {
    stages.push_back({"rounding", heads.tiles(), [job, heads](const TileContext& context) {
                        job->ReturnRest(heads[context.tile]);
                        return absl::OkStatus();
                      }});
  }
  stages.push_back(
      {"output_projection", batches.tiles(), [job, batches](const TileContext& context) {
         return job->ProjectOutput(batches[context.tile], context);
       }});
  return stages;
}

template absl::StatusOr<std::vector<Stage>> HeadStages(const HeadProblem&,
                                                       const HeadTensors<float>&, const Resources&);
template absl::StatusOr<std::vector<Stage>> HeadStages(const HeadProblem&,
                                                       const HeadTensors<double>&,
                                                       const Resources&);
template absl::StatusOr<std::vector<Stage>> HeadStages(const HeadProblem&,
                                                       const HeadTensors<Float16>&,
                                                       const Resources&);
template absl::StatusOr<std::vector<Stage>> HeadStages(const HeadProblem&,
                                                       const HeadTensors<BFloat16>&,
                                                       const Resources&);

}  // namespace attendant::core
