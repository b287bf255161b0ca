#include "server/codec.h"

#include <bit>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/checked_math.h"
#include "core/errors.h"
#include "server/tensor_data.h"
#include "server/wire.h"

namespace attendant::server {
namespace {

// The contract's bytes are used as they are.
static_assert(std::endian::native == std::endian::little);

// name: the tensor's; empty for the request's own dtype.
absl::StatusOr<core::DType> DTypeFromProto(absl::string_view name, v1::DataType dtype) {
  switch (dtype) {
    case v1::DATA_TYPE_UNSPECIFIED:
      return core::DType::kUnspecified;
    case v1::DATA_TYPE_FLOAT32:
      return core::DType::kFloat32;
    case v1::DATA_TYPE_FLOAT64:
      return core::DType::kFloat64;
    case v1::DATA_TYPE_FLOAT16:
      return core::DType::kFloat16;
    case v1::DATA_TYPE_BFLOAT16:
      return core::DType::kBFloat16;
    case v1::DATA_TYPE_BOOL:
      return core::DType::kBool;
    default:
      return core::InvalidField(
          absl::StrCat(name, name.empty() ? "dtype" : ".dtype"),
          absl::StrCat("is ", static_cast<int>(dtype), ", which is no value of DataType"));
  }
}

v1::DataType DTypeToProto(core::DType dtype) {
  switch (dtype) {
    case core::DType::kFloat32:
      return v1::DATA_TYPE_FLOAT32;
    case core::DType::kFloat64:
      return v1::DATA_TYPE_FLOAT64;
    case core::DType::kFloat16:
      return v1::DATA_TYPE_FLOAT16;
    case core::DType::kBFloat16:
      return v1::DATA_TYPE_BFLOAT16;
    case core::DType::kBool:
      return v1::DATA_TYPE_BOOL;
    case core::DType::kUnspecified:
      break;
  }
  return v1::DATA_TYPE_UNSPECIFIED;
}

absl::Status NoSuchValue(absl::string_view field, int value, absl::string_view type) {
  return core::InvalidField(absl::StrCat("options.", field),
                            absl::StrCat("is ", value, ", which is no value of ", type));
}

template <typename T>
std::vector<T> ToVector(const google::protobuf::RepeatedField<T>& field) {
  return {field.begin(), field.end()};
}

}  // namespace

absl::StatusOr<core::TensorSpec> SpecOf(absl::string_view name, const v1::Tensor& tensor) {
  const auto dtype = DTypeFromProto(name, tensor.dtype());
  if (!dtype.ok()) return dtype.status();
  return core::TensorSpec{*dtype, ToVector(tensor.shape())};
}

absl::StatusOr<core::AttendOptions> OptionsOf(const v1::AttendOptions& options) {
  core::AttendOptions result;
  switch (options.path()) {
    case v1::PATH_UNSPECIFIED:
    case v1::PATH_AUTO:
    case v1::PATH_CHUNKED:
      result.path = core::Path::kChunked;
      break;
    case v1::PATH_EXPLICIT:
      result.path = core::Path::kExplicit;
      break;
    default:
      return NoSuchValue("path", options.path(), "Path");
  }
  switch (options.layout()) {
    case v1::LAYOUT_UNSPECIFIED:
    case v1::LAYOUT_BHTD:
      result.layout = core::Layout::kBhtd;
      break;
    case v1::LAYOUT_BTHD:
      result.layout = core::Layout::kBthd;
      break;
    default:
      return NoSuchValue("layout", options.layout(), "Layout");
  }
  switch (options.causal()) {
    case v1::CAUSAL_UNSPECIFIED:
    case v1::CAUSAL_NONE:
      result.causal = core::Causal::kNone;
      break;
    case v1::CAUSAL_TOP_LEFT:
      result.causal = core::Causal::kTopLeft;
      break;
    case v1::CAUSAL_BOTTOM_RIGHT:
      result.causal = core::Causal::kBottomRight;
      break;
    default:
      return NoSuchValue("causal", options.causal(), "Causal");
  }
  if (options.has_scale()) result.scale = options.scale();
  if (options.has_mask()) {
    auto mask = SpecOf("options.mask", options.mask());
    if (!mask.ok()) return mask.status();
    result.mask = *std::move(mask);
  }
  result.key_lengths = ToVector(options.key_lengths());
  if (options.has_window()) {
    result.window.emplace();
    if (options.window().has_left()) result.window->left = options.window().left();
    if (options.window().has_right()) result.window->right = options.window().right();
  }
  result.softcap = options.softcap();
  result.alibi_slopes = ToVector(options.alibi_slopes());
  result.sinks = ToVector(options.sinks());
  result.return_weights = options.return_weights();
  result.return_logsumexp = options.return_logsumexp();
  result.return_key_sums = options.return_key_sums();
  return result;
}

int64_t BytesOf(const v1::Tensor& tensor) {
  int64_t bytes = core::SizeOf(DTypeFromProto("", tensor.dtype()).value());
  for (const int64_t size : tensor.shape()) bytes = core::SaturatingProduct({bytes, size});
  return bytes;
}

absl::Status CheckBytes(absl::string_view name, const v1::Tensor& tensor) {
  const int64_t bytes = BytesOf(tensor);
  const int64_t actual = PlaceOf(tensor.data()).bytes;
  if (actual == bytes) return absl::OkStatus();
  return core::InvalidField(absl::StrCat(name, ".data"),
                            absl::StrCat("has ", actual, " bytes, shape and dtype say ", bytes));
}

namespace {

absl::Status CheckMaskBytes(const v1::AttendOptions& options) {
  return options.has_mask() ? CheckBytes("options.mask", options.mask()) : absl::OkStatus();
}

// That nothing is sent where pieces follow.
absl::Status CheckNoBytes(absl::string_view name, const v1::Tensor& tensor) {
  if (tensor.data().empty()) return absl::OkStatus();
  return core::InvalidField(absl::StrCat(name, ".data"),
                            absl::StrCat("has ", PlaceOf(tensor.data()).bytes,
                                         " bytes in the header, must be sent in pieces"));
}

}  // namespace

absl::Status ReadSpecs(absl::Span<const TensorPart> parts) {
  for (const TensorPart& part : parts) {
    const v1::Tensor& tensor = *part.tensor;
    if (tensor.dtype() == v1::DATA_TYPE_UNSPECIFIED && tensor.shape().empty() &&
        tensor.data().empty()) {
      return core::InvalidField(part.name, "is not set");
    }
    auto spec = SpecOf(part.name, tensor);
    if (!spec.ok()) return spec.status();
    *part.spec = *std::move(spec);
  }
  return absl::OkStatus();
}

absl::Status CheckBytes(absl::Span<const TensorPart> parts) {
  for (const TensorPart& part : parts) {
    if (absl::Status status = CheckBytes(part.name, *part.tensor); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<core::Problem> AttentionOf(const v1::Tensor& query, const v1::Tensor& key,
                                          const v1::Tensor& value, const v1::AttendOptions& message,
                                          void (*change)(core::AttendOptions&), DataIs data) {
  core::TensorSpec specs[3];
  const TensorPart parts[] = {
      {"query", &query, &specs[0]}, {"key", &key, &specs[1]}, {"value", &value, &specs[2]}};
  if (absl::Status status = ReadSpecs(parts); !status.ok()) return status;
  auto options = OptionsOf(message);
  if (!options.ok()) return options.status();
  if (change != nullptr) change(*options);
  auto problem = core::MakeProblem(specs[0], specs[1], specs[2], *options);
  if (!problem.ok()) return problem;
  if (data == DataIs::kInTheMessage) {
    for (absl::Status status : {CheckBytes(parts), CheckMaskBytes(message)}) {
      if (!status.ok()) return status;
    }
    return problem;
  }
  for (absl::Status status :
       {CheckNoBytes("query", query), CheckNoBytes("key", key), CheckNoBytes("value", value),
        CheckNoBytes("options.mask", message.mask())}) {
    if (!status.ok()) return status;
  }
  return problem;
}

absl::StatusOr<core::Problem> ProblemOf(const v1::AttendRequest& request, DataIs data) {
  return AttentionOf(request.query(), request.key(), request.value(), request.options(), nullptr,
                     data);
}

absl::StatusOr<core::HeadProblem> ProblemOf(const v1::HeadRequest& request) {
  core::HeadSpec spec;
  const TensorPart parts[] = {{"x", &request.x(), &spec.x},
                              {"w_q", &request.w_q(), &spec.w_q},
                              {"w_k", &request.w_k(), &spec.w_k},
                              {"w_v", &request.w_v(), &spec.w_v},
                              {"w_o", &request.w_o(), &spec.w_o}};
  if (absl::Status status = ReadSpecs(parts); !status.ok()) return status;
  const auto options = OptionsOf(request.options());
  if (!options.ok()) return options.status();
  spec.options = *options;
  spec.heads = request.heads();
  spec.return_intermediates = request.return_intermediates();
  auto problem = core::MakeHeadProblem(spec);
  if (!problem.ok()) return problem;
  for (absl::Status status : {CheckBytes(parts), CheckMaskBytes(request.options())}) {
    if (!status.ok()) return status;
  }
  return problem;
}

absl::StatusOr<core::MergeProblem> ProblemOf(const v1::MergeRequest& request) {
  const auto name = [](int index, const char* tensor) {
    return absl::StrCat("parts[", index, "].", tensor);
  };
  std::vector<core::MergePartSpec> parts(static_cast<size_t>(request.parts_size()));
  for (int i = 0; i < request.parts_size(); ++i) {
    auto output = SpecOf(name(i, "output"), request.parts(i).output());
    if (!output.ok()) return output.status();
    auto logsumexp = SpecOf(name(i, "logsumexp"), request.parts(i).logsumexp());
    if (!logsumexp.ok()) return logsumexp.status();
    parts[i] = {*std::move(output), *std::move(logsumexp)};
  }
  auto problem = core::MakeMergeProblem(parts);
  if (!problem.ok()) return problem;
  for (int i = 0; i < request.parts_size(); ++i) {
    const v1::MergePart& part = request.parts(i);
    for (absl::Status status : {CheckBytes(name(i, "output"), part.output()),
                                CheckBytes(name(i, "logsumexp"), part.logsumexp())}) {
      if (!status.ok()) return status;
    }
  }
  return problem;
}

absl::StatusOr<core::GradientProblem> ProblemOf(const v1::BackwardRequest& request) {
  core::GradientSpec spec;
  spec.return_d_mask = request.return_d_mask();
  std::vector<TensorPart> parts = {{"query", &request.query(), &spec.query},
                                   {"key", &request.key(), &spec.key},
                                   {"value", &request.value(), &spec.value},
                                   {"d_output", &request.d_output(), &spec.d_output}};
  if (request.has_output()) parts.push_back({"output", &request.output(), &spec.output.emplace()});
  if (request.has_logsumexp()) {
    parts.push_back({"logsumexp", &request.logsumexp(), &spec.logsumexp.emplace()});
  }
  if (absl::Status status = ReadSpecs(parts); !status.ok()) return status;
  const auto options = OptionsOf(request.options());
  if (!options.ok()) return options.status();
  spec.options = *options;
  auto problem = core::MakeGradientProblem(spec);
  if (!problem.ok()) return problem;
  for (absl::Status status : {CheckBytes(parts), CheckMaskBytes(request.options())}) {
    if (!status.ok()) return status;
  }
  return problem;
}

namespace {

absl::StatusOr<core::EstimateSpec> SpecOf(const v1::EstimateRequest& request) {
  core::EstimateSpec spec;
  if (request.dtype() != v1::DATA_TYPE_UNSPECIFIED) {
    const auto dtype = DTypeFromProto("", request.dtype());
    if (!dtype.ok()) return dtype.status();
    spec.dtype = *dtype;
  }
  auto options = OptionsOf(request.options());
  if (!options.ok()) return options.status();
  spec.options = *std::move(options);
  spec.batch = request.batch();
  spec.heads = request.heads();
  if (request.has_kv_heads()) spec.kv_heads = request.kv_heads();
  spec.queries = request.queries();
  spec.keys = request.keys();
  spec.width = request.width();
  if (request.has_value_width()) spec.value_width = request.value_width();
  if (request.has_d_model()) spec.d_model = request.d_model();
  return spec;
}

void Write(const core::PathEstimate& path, v1::PathCost* cost) {
  for (const core::StepCost& step : path.cost.steps) {
    v1::Step* const to = cost->add_steps();
    to->set_name(step.name);
    to->set_flops(step.flops);
    to->set_bytes(step.bytes);
  }
  cost->set_flops(path.cost.flops());
  cost->set_workspace_bytes(path.cost.workspace_bytes);
  cost->set_seconds(path.seconds);
}

}  // namespace

absl::Status WriteEstimate(const v1::EstimateRequest& request, const core::EstimateBasis& basis,
                           v1::EstimateResponse* response) {
  const auto spec = SpecOf(request);
  if (!spec.ok()) return spec.status();
  const auto estimate = core::MakeEstimate(*spec, basis);
  if (!estimate.ok()) return estimate.status();
  if (!request.options().mask().data().empty()) {
    if (absl::Status status = CheckMaskBytes(request.options()); !status.ok()) return status;
  }
  Write(estimate->explicit_path, response->mutable_explicit_path());
  Write(estimate->chunked_path, response->mutable_chunked_path());
  response->set_crossover_tokens(estimate->crossover_tokens);
  response->set_request_bytes(estimate->request_bytes);
  response->set_response_bytes(estimate->response_bytes);
  return absl::OkStatus();
}

v1::Tensor TensorHead(core::DType dtype, absl::Span<const int64_t> shape) {
  v1::Tensor head;
  head.set_dtype(DTypeToProto(dtype));
  head.mutable_shape()->Add(shape.begin(), shape.end());
  return head;
}

const unsigned char* Read(const v1::Tensor& tensor, CallData& data) { return data.in.Add(tensor); }

const unsigned char* ReadMask(const v1::AttendOptions& options, CallData& data) {
  return options.has_mask() ? Read(options.mask(), data) : nullptr;
}

namespace {

template <typename T>
const T* ReadAs(const v1::Tensor& tensor, CallData& data) {
  return reinterpret_cast<const T*>(Read(tensor, data));
}

template <typename T>
T* Make(int number, core::DType dtype, absl::Span<const int64_t> shape, CallData& data) {
  return reinterpret_cast<T*>(data.out.Add(number, TensorHead(dtype, shape)));
}

// The tensors, if there was room for all.
template <typename Tensors>
absl::StatusOr<Tensors> IfThereIsRoom(Tensors tensors, const CallData& data) {
  if (!data.status().ok()) return data.status();
  return tensors;
}

}  // namespace

template <typename S>
absl::StatusOr<core::AttendTensors<S>> TensorsOf(const core::Problem& p,
                                                 const v1::AttendRequest& request, CallData& data) {
  using Response = v1::AttendResponse;
  core::AttendTensors<S> t;
  t.query = {ReadAs<S>(request.query(), data), p.layout, p.heads, p.queries, p.width};
  t.key = {ReadAs<S>(request.key(), data), p.layout, p.kv_heads, p.keys, p.width};
  t.value = {ReadAs<S>(request.value(), data), p.layout, p.kv_heads, p.keys, p.value_width};
  t.mask = ReadMask(request.options(), data);
  std::vector<int64_t> output_shape = {p.batch, p.heads, p.queries, p.value_width};
  if (p.layout == core::Layout::kBthd) std::swap(output_shape[1], output_shape[2]);
  t.output = {Make<S>(Response::kOutputFieldNumber, p.dtype, output_shape, data), p.layout, p.heads,
              p.queries, p.value_width};
  const auto make_wide = [&](int number, absl::Span<const int64_t> shape) {
    return Make<core::Wide<S>>(number, core::WideOf(p.dtype), shape, data);
  };
  if (p.return_weights) {
    t.weights = Make<S>(Response::kWeightsFieldNumber, p.dtype,
                        {p.batch, p.heads, p.queries, p.keys}, data);
  }
  if (p.return_logsumexp) {
    t.logsumexp = make_wide(Response::kLogsumexpFieldNumber, {p.batch, p.heads, p.queries});
  }
  if (p.return_key_sums) {
    t.key_sums = make_wide(Response::kKeySumsFieldNumber, {p.batch, p.heads, p.keys});
  }
  return IfThereIsRoom(t, data);
}

template <typename T>
absl::StatusOr<core::HeadTensors<T>> TensorsOf(const core::HeadProblem& head,
                                               const v1::HeadRequest& request, CallData& data) {
  using Response = v1::HeadResponse;
  const core::Problem& p = head.attend;
  core::HeadTensors<T> t;
  t.x = ReadAs<T>(request.x(), data);
  t.w_q = ReadAs<T>(request.w_q(), data);
  t.w_k = ReadAs<T>(request.w_k(), data);
  t.w_v = ReadAs<T>(request.w_v(), data);
  t.w_o = ReadAs<T>(request.w_o(), data);
  t.mask = ReadMask(request.options(), data);
  t.output = Make<T>(Response::kOutputFieldNumber, p.dtype, request.x().shape(), data);
  if (!head.return_intermediates) return IfThereIsRoom(t, data);
  const auto per_head = [&](int number, int64_t width) {
    return Make<T>(number, p.dtype, {p.batch, p.heads, p.queries, width}, data);
  };
  t.query = per_head(Response::kQueryFieldNumber, p.width);
  t.key = per_head(Response::kKeyFieldNumber, p.width);
  t.value = per_head(Response::kValueFieldNumber, p.value_width);
  t.logits = per_head(Response::kLogitsFieldNumber, p.keys);
  t.weights = per_head(Response::kWeightsFieldNumber, p.keys);
  t.context = per_head(Response::kContextFieldNumber, p.value_width);
  return IfThereIsRoom(t, data);
}

template <typename S>
absl::StatusOr<core::MergeTensors<S>> TensorsOf(const core::MergeProblem& p,
                                                const v1::MergeRequest& request, CallData& data) {
  using Response = v1::MergeResponse;
  core::MergeTensors<S> t;
  t.parts.reserve(static_cast<size_t>(request.parts_size()));
  for (const v1::MergePart& part : request.parts()) {
    t.parts.push_back(
        {ReadAs<S>(part.output(), data), ReadAs<core::Wide<S>>(part.logsumexp(), data)});
  }
  t.output = Make<S>(Response::kOutputFieldNumber, p.dtype,
                     {p.batch, p.heads, p.queries, p.value_width}, data);
  t.logsumexp = Make<core::Wide<S>>(Response::kLogsumexpFieldNumber, core::WideOf(p.dtype),
                                    {p.batch, p.heads, p.queries}, data);
  return IfThereIsRoom(std::move(t), data);
}

template <typename S>
absl::StatusOr<core::GradientTensors<S>> TensorsOf(const core::GradientProblem& gradient,
                                                   const v1::BackwardRequest& request,
                                                   CallData& data, v1::BackwardResponse* response) {
  using Response = v1::BackwardResponse;
  const core::Problem& p = gradient.attend;
  const auto view = [&](const v1::Tensor& tensor, int64_t heads, int64_t tokens, int64_t width) {
    return core::TensorView<const S>(ReadAs<S>(tensor, data), p.layout, heads, tokens, width);
  };
  const auto make = [&](int number, const v1::Tensor& like, int64_t heads, int64_t tokens,
                        int64_t width) {
    return core::TensorView<S>(Make<S>(number, p.dtype, like.shape(), data), p.layout, heads,
                               tokens, width);
  };
  core::GradientTensors<S> t;
  t.query = view(request.query(), p.heads, p.queries, p.width);
  t.key = view(request.key(), p.kv_heads, p.keys, p.width);
  t.value = view(request.value(), p.kv_heads, p.keys, p.value_width);
  t.mask = ReadMask(request.options(), data);
  t.d_output = view(request.d_output(), p.heads, p.queries, p.value_width).Strided();
  if (gradient.given) {
    t.output = view(request.output(), p.heads, p.queries, p.value_width);
    t.logsumexp = ReadAs<core::Wide<S>>(request.logsumexp(), data);
  }
  t.d_query = make(Response::kDQueryFieldNumber, request.query(), p.heads, p.queries, p.width);
  t.d_key = make(Response::kDKeyFieldNumber, request.key(), p.kv_heads, p.keys, p.width);
  t.d_value =
      make(Response::kDValueFieldNumber, request.value(), p.kv_heads, p.keys, p.value_width);
  if (gradient.return_d_mask) {
    t.d_mask = Make<unsigned char>(Response::kDMaskFieldNumber, p.mask->dtype,
                                   request.options().mask().shape(), data);
  }
  response->mutable_d_sinks()->Resize(static_cast<int>(p.sinks.size()), 0);
  t.d_sinks = response->mutable_d_sinks()->mutable_data();
  return IfThereIsRoom(t, data);
}

template absl::StatusOr<core::AttendTensors<float>> TensorsOf(const core::Problem&,
                                                              const v1::AttendRequest&, CallData&);
template absl::StatusOr<core::HeadTensors<float>> TensorsOf(const core::HeadProblem&,
                                                            const v1::HeadRequest&, CallData&);
template absl::StatusOr<core::MergeTensors<float>> TensorsOf(const core::MergeProblem&,
                                                             const v1::MergeRequest&, CallData&);
template absl::StatusOr<core::GradientTensors<float>> TensorsOf(const core::GradientProblem&,
                                                                const v1::BackwardRequest&,
                                                                CallData&, v1::BackwardResponse*);
template absl::StatusOr<core::AttendTensors<double>> TensorsOf(const core::Problem&,
                                                               const v1::AttendRequest&, CallData&);
template absl::StatusOr<core::HeadTensors<double>> TensorsOf(const core::HeadProblem&,
                                                             const v1::HeadRequest&, CallData&);
template absl::StatusOr<core::MergeTensors<double>> TensorsOf(const core::MergeProblem&,
                                                              const v1::MergeRequest&, CallData&);
template absl::StatusOr<core::GradientTensors<double>> TensorsOf(const core::GradientProblem&,
                                                                 const v1::BackwardRequest&,
                                                                 CallData&, v1::BackwardResponse*);
template absl::StatusOr<core::AttendTensors<core::Float16>> TensorsOf(const core::Problem&,
                                                                      const v1::AttendRequest&,
                                                                      CallData&);
template absl::StatusOr<core::HeadTensors<core::Float16>> TensorsOf(const core::HeadProblem&,
                                                                    const v1::HeadRequest&,
                                                                    CallData&);
template absl::StatusOr<core::MergeTensors<core::Float16>> TensorsOf(const core::MergeProblem&,
                                                                     const v1::MergeRequest&,
                                                                     CallData&);
template absl::StatusOr<core::GradientTensors<core::Float16>> TensorsOf(
    const core::GradientProblem&, const v1::BackwardRequest&, CallData&, v1::BackwardResponse*);
template absl::StatusOr<core::AttendTensors<core::BFloat16>> TensorsOf(const core::Problem&,
                                                                       const v1::AttendRequest&,
                                                                       CallData&);
template absl::StatusOr<core::HeadTensors<core::BFloat16>> TensorsOf(const core::HeadProblem&,
                                                                     const v1::HeadRequest&,
                                                                     CallData&);
template absl::StatusOr<core::MergeTensors<core::BFloat16>> TensorsOf(const core::MergeProblem&,
                                                                      const v1::MergeRequest&,
                                                                      CallData&);
template absl::StatusOr<core::GradientTensors<core::BFloat16>> TensorsOf(
    const core::GradientProblem&, const v1::BackwardRequest&, CallData&, v1::BackwardResponse*);

v1::Path PathOf(core::Path path) {
  return path == core::Path::kExplicit ? v1::PATH_EXPLICIT : v1::PATH_CHUNKED;
}

}  // namespace attendant::server
