#include "client/cpp/split.h"

#include <google/protobuf/util/field_mask_util.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/shard_plan.h"
#include "client/cpp/tensor_slice.h"
#include "core/checked_math.h"

namespace attendant {
namespace {

// A tensor of a request by its field.
struct Named {
  const char* name;
  const TensorRef* tensor;
};

// A rectangle of the problem: batches, and key heads.
struct Part {
  Range batch;
  Range kv_heads;
};

// `count` in as few ranges as fit; none where not even one alone does.
// fits: of a range of so many, which shorter ones then do too.
template <typename Fits>
std::vector<Range> FewestParts(int64_t count, const Fits& fits) {
  if (count < 1 || !fits(int64_t{1})) return {};
  int64_t most = 1;
  int64_t too_many = count + 1;
  while (too_many - most > 1) {
    const int64_t middle = most + (too_many - most) / 2;
    (fits(middle) ? most : too_many) = middle;
  }
  return SplitEvenly(count, core::CeilDiv(count, most));
}

// INVALID_ARGUMENT naming a tensor whose bytes are not those of its shape.
absl::Status CheckBytes(const std::vector<Named>& tensors) {
  for (const auto& [name, tensor] : tensors) {
    if (HasItsBytes(*tensor)) continue;
    const std::vector<int64_t>& shape = tensor->shape();
    const bool counted =
        ElementBytes(tensor->dtype()) > 0 &&
        std::all_of(shape.begin(), shape.end(), [](int64_t size) { return size >= 0; });
    if (!counted) continue;  // the server says what is wrong with it
    return absl::InvalidArgumentError(
        absl::StrCat(name, ".data: has ", tensor->bytes().size(), " bytes, must have ",
                     BytesOf(shape, tensor->dtype()), " (the shape's)"));
  }
  return absl::OkStatus();
}

absl::Status TooLarge(absl::string_view what, int64_t bytes, int64_t limit) {
  return absl::ResourceExhaustedError(absl::StrCat("max_message_bytes: ", what, " has ", bytes,
                                                   " bytes in a message, the server takes ",
                                                   limit));
}

TensorRef Bare(const TensorRef& tensor) { return {tensor.dtype(), tensor.shape(), ""}; }

// What a server says of shapes and options alone. Where it finds nothing wrong with them, why the
// problem cannot be sent.
template <typename Result>
absl::Status Refusal(const absl::StatusOr<Result>& answer, int64_t bytes, int64_t limit) {
  const bool of_data = answer.ok() || absl::StrContains(answer.status().message(), ".data:");
  return of_data ? TooLarge("the whole", bytes, limit) : answer.status();
}

std::string LabelOf(const Part& part, bool by_heads) {
  std::string label = absl::StrCat("batch ", part.batch.begin, " to ", part.batch.end - 1);
  if (by_heads) {
    absl::StrAppend(&label, ", key heads ", part.kv_heads.begin, " to ", part.kv_heads.end - 1);
  }
  return label;
}

std::optional<TensorSlice> MaskSlice(const v1::AttendOptions& options) {
  if (!options.has_mask()) return std::nullopt;
  return TensorSlice{MaskOf(options), nullptr};
}

// The options of a part. group: query heads a key head.
v1::AttendOptions CutOptions(const v1::AttendOptions& bare, const std::optional<TensorSlice>& mask,
                             const Part& part, int64_t group) {
  v1::AttendOptions options = bare;
  const Range heads = {part.kv_heads.begin * group, part.kv_heads.end * group};
  KeepBatch(part.batch, &options);
  KeepHeads(heads, &options);
  std::optional<TensorSlice> cut = mask;
  CutMask(0, part.batch, &cut);
  CutMask(1, heads, &cut);
  if (cut.has_value()) SetMask(cut->ref, &options);
  return options;
}

v1::AttendOptions WithoutMask(const v1::AttendOptions& options) {
  v1::AttendOptions bare = WithoutMaskData(options);
  bare.clear_mask();
  return bare;
}

// Backward's problem, if it is one.
class BackwardProblem {
 public:
  BackwardProblem(const BackwardInputs& inputs, const v1::AttendOptions& options)
      : inputs_(inputs), options_(options), mask_(MaskSlice(options)) {}

  // Nothing where a server would refuse it.
  static std::optional<BackwardProblem> Of(const BackwardInputs& inputs,
                                           const v1::AttendOptions& options);

  const ShardSizes& sizes() const { return sizes_; }
  bool returns_d_mask() const {
    return inputs_.return_d_mask && mask_.has_value() && mask_->ref.dtype() != v1::DATA_TYPE_BOOL;
  }
  // Whether d_mask would be a sum over parts along this axis of the mask: not cut, since parts of a
  // sum, rounded each, are not the sum.
  bool Sums(size_t axis) const { return returns_d_mask() && mask_->ref.shape()[axis] == 1; }

  // Of a part's request and response, the larger. batch and kv_heads: how many.
  int64_t Bytes(int64_t batch, int64_t kv_heads) const;
  // In the order of the whole; empty where the least does not fit.
  std::vector<Part> Parts(int64_t limit) const;

  BackwardInputs Cut(const Part& part, std::vector<TensorSlice>* copies) const;
  v1::AttendOptions OptionsOf(const v1::AttendOptions& bare, const Part& part) const {
    return CutOptions(bare, mask_, part, group());
  }
  BackwardResult Zeros() const;
  absl::Status Put(const Part& part, const BackwardResult& result, BackwardResult* whole) const;

 private:
  int64_t group() const { return sizes_.kv_heads == 0 ? 1 : sizes_.heads / sizes_.kv_heads; }
  std::vector<int64_t> MaskShape(const Part& part) const;

  BackwardInputs inputs_;
  const v1::AttendOptions& options_;
  std::optional<TensorSlice> mask_;  // with four axes
  ShardSizes sizes_;
};

std::optional<BackwardProblem> BackwardProblem::Of(const BackwardInputs& inputs,
                                                   const v1::AttendOptions& options) {
  const auto sizes = SizesOf(inputs.query, inputs.key, inputs.value, options);
  if (!sizes.has_value() || inputs.output.has_value() != inputs.logsumexp.has_value()) {
    return std::nullopt;
  }
  const auto is = [](const TensorRef& tensor, v1::DataType dtype,
                     const std::vector<int64_t>& shape) {
    return tensor.dtype() == dtype && tensor.shape() == shape && HasItsBytes(tensor);
  };
  const auto output = OutputShape(*sizes, sizes->batch, sizes->queries);
  bool fits = is(inputs.d_output, sizes->dtype, output);
  if (inputs.output.has_value()) {
    fits =
        fits && is(*inputs.output, sizes->dtype, output) &&
        is(*inputs.logsumexp, WideOf(sizes->dtype), {sizes->batch, sizes->heads, sizes->queries});
  }
  if (!fits) return std::nullopt;
  BackwardProblem problem(inputs, options);
  problem.sizes_ = *sizes;
  return problem;
}

int64_t BackwardProblem::Bytes(int64_t batch, int64_t kv_heads) const {
  const int64_t heads = kv_heads * group();
  const int64_t width = inputs_.query.shape()[3];
  const auto of = [&](int64_t h, int64_t tokens, int64_t w) {
    return BytesOf({batch, h, tokens, w}, sizes_.dtype);
  };
  const int64_t query = of(heads, sizes_.queries, width);
  const int64_t key = of(kv_heads, sizes_.keys, width);
  const int64_t value = of(kv_heads, sizes_.keys, sizes_.value_width);
  const int64_t output = of(heads, sizes_.queries, sizes_.value_width);
  int64_t mask = 0;
  if (mask_.has_value()) {
    const std::vector<int64_t>& shape = mask_->ref.shape();
    mask = BytesOf({std::min(shape[0], batch), std::min(shape[1], heads), shape[2], shape[3]},
                   mask_->ref.dtype());
  }
  // One number a batch or head, and the bytes of shapes.
  const int64_t other =
      kMessageOverhead + int64_t{10} * (options_.key_lengths_size() + options_.alibi_slopes_size() +
                                        options_.sinks_size());
  int64_t request = core::SaturatingSum({query, key, value, output, mask, other});
  if (inputs_.output.has_value()) {
    request = core::SaturatingSum(
        {request, output, BytesOf({batch, heads, sizes_.queries}, WideOf(sizes_.dtype))});
  }
  const int64_t response =
      core::SaturatingSum({query, key, value, returns_d_mask() ? mask : 0, other});
  return std::max(request, response);
}

std::vector<Part> BackwardProblem::Parts(int64_t limit) const {
  std::vector<Part> parts;
  const Range all_heads = {0, sizes_.kv_heads};
  if (!Sums(0)) {
    for (const Range batch :
         FewestParts(sizes_.batch, [&](int64_t n) { return Bytes(n, sizes_.kv_heads) <= limit; })) {
      parts.push_back({batch, all_heads});
    }
  }
  if (!parts.empty() || Sums(1)) return parts;
  const std::vector<Range> batches =
      SplitEvenly(sizes_.batch, Sums(0) ? 1 : std::max<int64_t>(sizes_.batch, 1));
  const int64_t batch = batches.empty() ? 0 : batches[0].size();
  const std::vector<Range> heads =
      FewestParts(sizes_.kv_heads, [&](int64_t n) { return Bytes(batch, n) <= limit; });
  for (const Range b : batches) {
    for (const Range h : heads) parts.push_back({b, h});
  }
  return parts;
}

BackwardInputs BackwardProblem::Cut(const Part& part, std::vector<TensorSlice>* copies) const {
  const Range heads = {part.kv_heads.begin * group(), part.kv_heads.end * group()};
  const auto cut = [&](const TensorRef& tensor, size_t heads_axis, Range range) {
    const TensorSlice batches = SliceOf({tensor, nullptr}, 0, part.batch);
    copies->push_back(SliceOf(batches, heads_axis, range));
    return copies->back().ref;
  };
  BackwardInputs inputs{cut(inputs_.query, sizes_.heads_axis, heads),
                        cut(inputs_.key, sizes_.heads_axis, part.kv_heads),
                        cut(inputs_.value, sizes_.heads_axis, part.kv_heads),
                        cut(inputs_.d_output, sizes_.heads_axis, heads)};
  if (inputs_.output) inputs.output = cut(*inputs_.output, sizes_.heads_axis, heads);
  if (inputs_.logsumexp) inputs.logsumexp = cut(*inputs_.logsumexp, 1, heads);
  inputs.return_d_mask = inputs_.return_d_mask;
  return inputs;
}

std::vector<int64_t> BackwardProblem::MaskShape(const Part& part) const {
  std::vector<int64_t> shape = mask_->ref.shape();
  shape[0] = std::min(shape[0], part.batch.size());
  shape[1] = std::min(shape[1], part.kv_heads.size() * group());
  return shape;
}

BackwardResult BackwardProblem::Zeros() const {
  BackwardResult whole;
  whole.d_query = ZerosOf(sizes_.dtype, inputs_.query.shape());
  whole.d_key = ZerosOf(sizes_.dtype, inputs_.key.shape());
  whole.d_value = ZerosOf(sizes_.dtype, inputs_.value.shape());
  if (returns_d_mask()) whole.d_mask = ZerosOf(mask_->ref.dtype(), mask_->ref.shape());
  whole.d_sinks.resize(static_cast<size_t>(options_.sinks_size()));
  return whole;
}

absl::Status BackwardProblem::Put(const Part& part, const BackwardResult& result,
                                  BackwardResult* whole) const {
  const int64_t first_head = part.kv_heads.begin * group();
  const auto put = [&](const char* name, const Tensor& from, const std::vector<int64_t>& shape,
                       int64_t batch, size_t axis, int64_t head, Tensor* to) {
    absl::Status status = CheckAnswer(name, from, to->dtype, shape);
    if (status.ok()) Place(from, batch, axis, head, to);
    return status;
  };
  const auto cut = [&](const Tensor& tensor, int64_t heads) {
    std::vector<int64_t> shape = tensor.shape;
    shape[0] = part.batch.size();
    shape[sizes_.heads_axis] = heads;
    return shape;
  };
  const int64_t kv_heads = part.kv_heads.size();
  const int64_t batch = part.batch.begin;
  const size_t axis = sizes_.heads_axis;
  absl::Status status = put("d_query", result.d_query, cut(whole->d_query, kv_heads * group()),
                            batch, axis, first_head, &whole->d_query);
  status.Update(put("d_key", result.d_key, cut(whole->d_key, kv_heads), batch, axis,
                    part.kv_heads.begin, &whole->d_key));
  status.Update(put("d_value", result.d_value, cut(whole->d_value, kv_heads), batch, axis,
                    part.kv_heads.begin, &whole->d_value));
  if (whole->d_mask.has_value()) {
    const std::vector<int64_t>& shape = mask_->ref.shape();
    status.Update(put("d_mask", result.d_mask.value_or(Tensor{}), MaskShape(part),
                      shape[0] == 1 ? 0 : batch, 1, shape[1] == 1 ? 0 : first_head,
                      &*whole->d_mask));
  }
  for (size_t i = 0; i < result.d_sinks.size(); ++i) {
    const size_t head = static_cast<size_t>(first_head) + i;
    if (head < whole->d_sinks.size()) whole->d_sinks[head] += result.d_sinks[i];
  }
  AddStats(result.stats, /*at_once=*/false, &whole->stats);
  return status;
}

std::vector<Named> TensorsOf(const BackwardInputs& inputs) {
  std::vector<Named> tensors = {{"query", &inputs.query},
                                {"key", &inputs.key},
                                {"value", &inputs.value},
                                {"d_output", &inputs.d_output}};
  if (inputs.output) tensors.push_back({"output", &*inputs.output});
  if (inputs.logsumexp) tensors.push_back({"logsumexp", &*inputs.logsumexp});
  return tensors;
}

std::vector<Named> TensorsOf(const HeadInputs& inputs) {
  return {{"x", &inputs.x},
          {"w_q", &inputs.w_q},
          {"w_k", &inputs.w_k},
          {"w_v", &inputs.w_v},
          {"w_o", &inputs.w_o}};
}

int64_t RequestBytes(const std::vector<Named>& tensors, const v1::AttendOptions& options) {
  int64_t bytes = kMessageOverhead + static_cast<int64_t>(options.ByteSizeLong());
  for (const Named& named : tensors) bytes += static_cast<int64_t>(named.tensor->bytes().size());
  return bytes;
}

// Head's sizes; nothing where a server would refuse the problem.
std::optional<ShardSizes> SizesOf(const HeadInputs& inputs, const v1::AttendOptions& options) {
  const std::vector<Named> tensors = TensorsOf(inputs);
  for (const Named& named : tensors) {
    if (!HasItsBytes(*named.tensor)) return std::nullopt;
  }
  const std::vector<int64_t>& x = inputs.x.shape();
  const std::vector<int64_t>& w_q = inputs.w_q.shape();
  const std::vector<int64_t>& w_v = inputs.w_v.shape();
  if ((x.size() != 2 && x.size() != 3) || w_q.size() != 2 || w_v.size() != 2 || inputs.heads < 0) {
    return std::nullopt;
  }
  ShardSizes sizes;
  sizes.batch = x.size() == 3 ? x[0] : 1;
  sizes.heads = std::max<int64_t>(inputs.heads, 1);
  const bool fits = w_q[0] == x.back() && w_v[0] == x.back() && inputs.w_k.shape() == w_q &&
                    inputs.w_o.shape() == std::vector<int64_t>{w_v[1], x.back()} &&
                    w_q[1] % sizes.heads == 0 && w_v[1] % sizes.heads == 0;
  if (!fits) return std::nullopt;
  sizes.kv_heads = sizes.heads;
  sizes.queries = x[x.size() - 2];
  sizes.keys = sizes.queries;
  sizes.value_width = w_v[1] / sizes.heads;
  sizes.dtype = inputs.x.dtype();
  if (!OptionsFit(sizes, options)) return std::nullopt;
  return sizes;
}

// Of `batch` batches, the larger of request and response.
int64_t HeadBytes(const HeadInputs& inputs, const v1::AttendOptions& options,
                  const ShardSizes& sizes, int64_t batch) {
  const auto mask = MaskSlice(options);
  const bool mask_cut = mask.has_value() && mask->ref.shape()[0] > 1;
  const int64_t shared = RequestBytes(TensorsOf(inputs), options) -
                         static_cast<int64_t>(inputs.x.bytes().size()) -
                         (mask_cut ? static_cast<int64_t>(mask->ref.bytes().size()) : 0);
  const int64_t each = sizes.batch == 0
                           ? 0
                           : (static_cast<int64_t>(inputs.x.bytes().size()) +
                              (mask_cut ? static_cast<int64_t>(mask->ref.bytes().size()) : 0)) /
                                 sizes.batch;
  const int64_t request = core::SaturatingSum({shared, core::SaturatingProduct({batch, each})});
  int64_t numbers = core::SaturatingProduct({sizes.queries, inputs.x.shape().back()});
  if (inputs.return_intermediates) {
    const int64_t d_k = inputs.w_q.shape()[1];  // of all heads
    const int64_t d_v = inputs.w_v.shape()[1];
    const int64_t scores = core::SaturatingProduct({sizes.heads, sizes.queries, sizes.keys});
    numbers =
        core::SaturatingSum({numbers, core::SaturatingProduct({sizes.queries, 2, d_k}),
                             core::SaturatingProduct({sizes.queries, 2, d_v}), scores, scores});
  }
  const int64_t response =
      core::SaturatingSum({kMessageOverhead, BytesOf({batch, numbers}, sizes.dtype)});
  return std::max(request, response);
}

// The parts' results under one another. Each tensor's first axis is the batch.
absl::Status Append(const HeadResult& part, const std::string& label, HeadResult* whole) {
  const auto append = [&](const char* name, const Tensor& from, Tensor* to) -> absl::Status {
    if (to->shape.empty()) {
      *to = from;
      return absl::OkStatus();
    }
    std::vector<int64_t> shape = to->shape;
    if (!from.shape.empty()) shape[0] = from.shape[0];
    if (absl::Status status = CheckAnswer(name, from, to->dtype, shape); !status.ok()) {
      return Labelled(label, status);
    }
    to->shape[0] += from.shape[0];
    to->bytes += from.bytes;
    return absl::OkStatus();
  };
  absl::Status status = append("output", part.output, &whole->output);
  status.Update(append("query", part.query, &whole->query));
  status.Update(append("key", part.key, &whole->key));
  status.Update(append("value", part.value, &whole->value));
  status.Update(append("logits", part.logits, &whole->logits));
  status.Update(append("weights", part.weights, &whole->weights));
  status.Update(append("context", part.context, &whole->context));
  AddStats(part.stats, /*at_once=*/false, &whole->stats);
  return status;
}

}  // namespace

v1::AttendOptions WithoutMaskData(const v1::AttendOptions& options) {
  if (!options.has_mask()) return options;
  using google::protobuf::util::FieldMaskUtil;
  google::protobuf::FieldMask kept;
  const auto* const descriptor = v1::AttendOptions::descriptor();
  for (int i = 0; i < descriptor->field_count(); ++i) {
    const std::string& name = descriptor->field(i)->name();
    if (name != "mask") kept.add_paths(name);
  }
  kept.add_paths("mask.dtype");
  kept.add_paths("mask.shape");
  v1::AttendOptions bare;
  FieldMaskUtil::MergeMessageTo(options, kept, FieldMaskUtil::MergeOptions(), &bare);
  return bare;
}

int64_t LargestMessage(const HeadInputs& inputs, const v1::AttendOptions& options) {
  const auto sizes = SizesOf(inputs, options);
  if (!sizes.has_value()) return RequestBytes(TensorsOf(inputs), options);
  return HeadBytes(inputs, options, *sizes, sizes->batch);
}

int64_t LargestMessage(const BackwardInputs& inputs, const v1::AttendOptions& options) {
  const auto problem = BackwardProblem::Of(inputs, options);
  if (!problem.has_value()) return RequestBytes(TensorsOf(inputs), options);
  return problem->Bytes(problem->sizes().batch, problem->sizes().kv_heads);
}

absl::StatusOr<HeadResult> HeadInParts(const HeadInputs& inputs, const v1::AttendOptions& options,
                                       int64_t limit, const HeadCall& call) {
  const auto sizes = SizesOf(inputs, options);
  if (!sizes.has_value()) {
    if (absl::Status status = CheckBytes(TensorsOf(inputs)); !status.ok()) return status;
    const HeadInputs bare{Bare(inputs.x),   Bare(inputs.w_q), Bare(inputs.w_k),
                          Bare(inputs.w_v), Bare(inputs.w_o), inputs.heads};
    return Refusal(call(bare, WithoutMaskData(options)), RequestBytes(TensorsOf(inputs), options),
                   limit);
  }
  const std::vector<Range> batches = FewestParts(
      sizes->batch, [&](int64_t n) { return HeadBytes(inputs, options, *sizes, n) <= limit; });
  if (batches.empty()) {
    return TooLarge("one batch of the head", HeadBytes(inputs, options, *sizes, 1), limit);
  }
  const auto mask = MaskSlice(options);
  const v1::AttendOptions bare = WithoutMask(options);
  HeadResult whole;
  for (const Range batch : batches) {
    const Part part = {batch, {0, sizes->heads}};
    HeadInputs cut = inputs;
    if (inputs.x.shape().size() == 3) cut.x = SliceOf({inputs.x, nullptr}, 0, batch).ref;
    const auto result = call(cut, CutOptions(bare, mask, part, 1));
    const std::string label = LabelOf(part, false);
    if (!result.ok()) return Labelled(label, result.status());
    if (absl::Status status = Append(*result, label, &whole); !status.ok()) return status;
  }
  return whole;
}

absl::StatusOr<BackwardResult> BackwardInParts(const BackwardInputs& inputs,
                                               const v1::AttendOptions& options, int64_t limit,
                                               const BackwardCall& call) {
  const auto problem = BackwardProblem::Of(inputs, options);
  if (!problem.has_value()) {
    if (absl::Status status = CheckBytes(TensorsOf(inputs)); !status.ok()) return status;
    BackwardInputs bare{Bare(inputs.query), Bare(inputs.key), Bare(inputs.value),
                        Bare(inputs.d_output)};
    if (inputs.output) bare.output = Bare(*inputs.output);
    if (inputs.logsumexp) bare.logsumexp = Bare(*inputs.logsumexp);
    return Refusal(call(bare, WithoutMaskData(options)), RequestBytes(TensorsOf(inputs), options),
                   limit);
  }
  const std::vector<Part> parts = problem->Parts(limit);
  if (parts.empty()) {
    const bool sums = problem->Sums(0) || problem->Sums(1);
    return TooLarge(sums ? "the part that d_mask sums over" : "one batch of one key head",
                    problem->Bytes(problem->Sums(0) ? problem->sizes().batch : 1,
                                   problem->Sums(1) ? problem->sizes().kv_heads : 1),
                    limit);
  }
  const bool by_heads = parts[0].kv_heads.size() < problem->sizes().kv_heads;
  const v1::AttendOptions bare = WithoutMask(options);
  BackwardResult whole = problem->Zeros();
  for (const Part& part : parts) {
    std::vector<TensorSlice> copies;  // as long as the call
    const auto result = call(problem->Cut(part, &copies), problem->OptionsOf(bare, part));
    absl::Status status =
        result.ok() ? problem->Put(part, *result, &whole) : absl::Status(result.status());
    if (!status.ok()) return Labelled(LabelOf(part, by_heads), status);
  }
  if (whole.d_mask.has_value()) {
    whole.d_mask->shape.assign(options.mask().shape().begin(), options.mask().shape().end());
  }
  return whole;
}

}  // namespace attendant
