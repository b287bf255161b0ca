#include "client/cpp/client.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/async.h"
#include "client/cpp/call_group.h"
#include "client/cpp/calls.h"
#include "client/cpp/shard_plan.h"
#include "client/cpp/split.h"
#include "client/cpp/tensor_slice.h"
#include "client/cpp/wire.h"
#include "core/checked_math.h"
#include "grpc/health/v1/health.pb.h"

namespace attendant {
namespace {

using google::protobuf::io::CodedInputStream;

// The group that a call ends with: the caller's, or one of its own.
class GroupOf {
 public:
  GroupOf(CallGroup* group, absl::Duration timeout) : group_(group) {
    if (group == nullptr) group_ = &own_.emplace(timeout);
  }
  CallGroup& operator*() { return *group_; }

 private:
  std::optional<CallGroup> own_;
  CallGroup* group_;
};

// A problem of Attend, and where its answer goes.
struct AttendCall {
  const TensorRef& query;
  const TensorRef& key;
  const TensorRef& value;
  const v1::AttendOptions& options;
  const AttendOutputs* outputs = nullptr;
};

// A tensor of Attend's answer.
struct Expected {
  const char* name;
  v1::PieceTensor piece;
  bool asked;
  v1::DataType dtype;
  std::vector<int64_t> shape;  // as the request's shapes say
  std::optional<absl::Span<char>> into;

  int64_t bytes() const { return BytesOf(shape, dtype); }
};

bool HasFourAxes(const AttendCall& call) {
  return call.query.shape().size() == 4 && call.key.shape().size() == 4 &&
         call.value.shape().size() == 4;
}

// The answer's tensors by their fields, from 1; their sizes 0 where the shapes are none.
std::vector<Expected> ExpectedOf(const AttendCall& call) {
  int64_t batch = 0, heads = 0, queries = 0, keys = 0, value_width = 0;
  if (HasFourAxes(call)) {
    const bool bthd = call.options.layout() == v1::LAYOUT_BTHD;
    batch = call.query.shape()[0];
    heads = call.query.shape()[bthd ? 2 : 1];
    queries = call.query.shape()[bthd ? 1 : 2];
    keys = call.key.shape()[bthd ? 1 : 2];
    value_width = call.value.shape()[3];
  }
  const v1::DataType dtype = call.query.dtype();
  const v1::DataType wide = WideOf(dtype);
  const auto into = [&](const std::optional<MutableSpan>& span) {
    return span.has_value() ? std::optional(span->bytes()) : std::nullopt;
  };
  const AttendOutputs* const to = call.outputs;
  const v1::AttendOptions& options = call.options;
  std::vector<int64_t> output = {batch, heads, queries, value_width};
  if (options.layout() == v1::LAYOUT_BTHD) std::swap(output[1], output[2]);
  const std::vector<int64_t> weights = {batch, heads, queries, keys};
  const std::vector<int64_t> rows = {batch, heads, queries};
  const std::vector<int64_t> columns = {batch, heads, keys};
  return {{"output", v1::PIECE_TENSOR_OUTPUT, true, dtype, output,
           to ? into(to->output) : std::nullopt},
          {"weights", v1::PIECE_TENSOR_WEIGHTS, options.return_weights(), dtype, weights,
           to ? into(to->weights) : std::nullopt},
          {"logsumexp", v1::PIECE_TENSOR_LOGSUMEXP, options.return_logsumexp(), wide, rows,
           to ? into(to->logsumexp) : std::nullopt},
          {"key_sums", v1::PIECE_TENSOR_KEY_SUMS, options.return_key_sums(), wide, columns,
           to ? into(to->key_sums) : std::nullopt}};
}

// The caller's memory is as large as what will come. Of shapes that are none the server speaks.
absl::Status CheckMemory(const AttendCall& call, const std::vector<Expected>& expected) {
  if (!HasFourAxes(call)) return absl::OkStatus();
  for (const Expected& tensor : expected) {
    if (!tensor.into.has_value()) continue;
    if (!tensor.asked) {
      return absl::InvalidArgumentError(
          absl::StrCat(tensor.name, ": has memory, but options.return_", tensor.name, " is false"));
    }
    if (static_cast<int64_t>(tensor.into->size()) != tensor.bytes()) {
      return absl::InvalidArgumentError(absl::StrCat(tensor.name, ": the memory for it has ",
                                                     tensor.into->size(), " bytes, it has ",
                                                     tensor.bytes()));
    }
  }
  return absl::OkStatus();
}

int64_t ResponseBytes(const std::vector<Expected>& expected) {
  int64_t bytes = kMessageOverhead;
  for (const Expected& tensor : expected) {
    if (tensor.asked) bytes = core::SaturatingSum({bytes, tensor.bytes()});
  }
  return bytes;
}

OutMessage RequestOf(const AttendCall& call) {
  OutMessage request;
  request.AddTensor(1, call.query);
  request.AddTensor(2, call.key);
  request.AddTensor(3, call.value);
  request.AddMessage(4, call.options);
  return request;
}

OutMessage RequestOf(const HeadInputs& inputs, const v1::AttendOptions& options) {
  OutMessage request;
  request.AddTensor(1, inputs.x);
  request.AddTensor(2, inputs.w_q);
  request.AddTensor(3, inputs.w_k);
  request.AddTensor(4, inputs.w_v);
  request.AddTensor(5, inputs.w_o);
  if (inputs.heads != 0) request.AddNumber(6, static_cast<uint64_t>(inputs.heads));
  request.AddMessage(7, options);
  if (inputs.return_intermediates) request.AddNumber(8, 1);
  return request;
}

OutMessage RequestOf(const BackwardInputs& inputs, const v1::AttendOptions& options) {
  OutMessage request;
  request.AddTensor(1, inputs.query);
  request.AddTensor(2, inputs.key);
  request.AddTensor(3, inputs.value);
  request.AddMessage(4, options);
  request.AddTensor(5, inputs.d_output);
  if (inputs.return_d_mask) request.AddNumber(6, 1);
  if (inputs.output) request.AddTensor(7, *inputs.output);
  if (inputs.logsumexp) request.AddTensor(8, *inputs.logsumexp);
  return request;
}

// options: the call's without its mask's data, which stay as long as the stream.
StreamCall StreamOf(const AttendCall& call, const v1::AttendOptions& options) {
  const auto bare = [](const TensorRef& tensor) {
    return TensorRef(tensor.dtype(), tensor.shape(), "");
  };
  const TensorRef query = bare(call.query), key = bare(call.key), value = bare(call.value);
  StreamCall stream;
  stream.header = RequestOf({query, key, value, options});
  stream.sent = {{v1::PIECE_TENSOR_QUERY, call.query.bytes()},
                 {v1::PIECE_TENSOR_KEY, call.key.bytes()},
                 {v1::PIECE_TENSOR_VALUE, call.value.bytes()},
                 {v1::PIECE_TENSOR_MASK, call.options.mask().data()}};
  return stream;
}

// Reads an answer of tensors, each at its field, and of `others`.
Calls::Reader ReaderOf(std::vector<TensorSink>* sinks, std::vector<InField> others) {
  std::vector<InField> fields = std::move(others);
  fields.reserve(fields.size() + sinks->size());
  for (size_t i = 0; i < sinks->size(); ++i) {
    fields.push_back({static_cast<int>(i) + 1, &(*sinks)[i]});
  }
  return
      [fields = std::move(fields)](CodedInputStream& input) { return ReadMessage(input, fields); };
}

// Attend's answer as it is read.
class AttendAnswer {
 public:
  explicit AttendAnswer(const std::vector<Expected>& expected) : expected_(expected) {
    Tensor* const tensors[] = {&result_.output, &weights_, &logsumexp_, &key_sums_};
    sinks_.reserve(expected.size());
    for (size_t i = 0; i < expected.size(); ++i) sinks_.push_back({tensors[i], expected[i].into});
  }

  std::vector<InField> fields() {
    std::vector<InField> fields = {{5, &result_.stats}};
    fields.reserve(1 + sinks_.size());
    for (size_t i = 0; i < sinks_.size(); ++i) {
      fields.push_back({static_cast<int>(i) + 1, &sinks_[i]});
    }
    return fields;
  }
  std::vector<PieceSink> pieces() {
    std::vector<PieceSink> pieces;
    pieces.reserve(sinks_.size());
    for (size_t i = 0; i < sinks_.size(); ++i) {
      const auto& into = sinks_[i].into;
      pieces.push_back({expected_[i].piece, &sinks_[i],
                        into ? static_cast<int64_t>(into->size()) : expected_[i].bytes()});
    }
    return pieces;
  }

  // INTERNAL where a tensor that was asked for is missing, or one has another shape than it must.
  absl::StatusOr<AttendResult> Take() {
    for (size_t i = 0; i < sinks_.size(); ++i) {
      const TensorSink& sink = sinks_[i];
      const Expected& whole = expected_[i];
      if (!sink.present && !whole.asked) continue;
      const auto read = sink.into ? std::optional(sink.read) : std::nullopt;
      absl::Status status = CheckAnswer(whole.name, *sink.tensor, whole.dtype, whole.shape, read);
      if (!status.ok()) return status;
    }
    if (sinks_[1].present) result_.weights = std::move(weights_);
    if (sinks_[2].present) result_.logsumexp = std::move(logsumexp_);
    if (sinks_[3].present) result_.key_sums = std::move(key_sums_);
    return std::move(result_);
  }

 private:
  const std::vector<Expected>& expected_;
  AttendResult result_;
  Tensor weights_;
  Tensor logsumexp_;
  Tensor key_sums_;
  std::vector<TensorSink> sinks_;
};

absl::StatusOr<AttendResult> RunAttend(Calls& calls, const AttendCall& call,
                                       std::optional<int64_t> stream_above, CallGroup& group) {
  const std::vector<Expected> expected = ExpectedOf(call);
  if (absl::Status status = CheckMemory(call, expected); !status.ok()) return status;
  const OutMessage request = RequestOf(call);
  const int64_t bytes = std::max(static_cast<int64_t>(request.size()), ResponseBytes(expected));
  const auto limit = calls.MessageLimit(bytes, group);
  if (!limit.ok()) return limit.status();
  AttendAnswer answer(expected);
  absl::Status status;
  if (bytes > std::min(*limit, stream_above.value_or(*limit))) {
    const v1::AttendOptions options = WithoutMaskData(call.options);
    StreamCall stream = StreamOf(call, options);
    stream.answer = answer.fields();
    stream.received = answer.pieces();
    stream.limit = *limit;
    status = calls.Stream(stream, group);
  } else {
    status = calls.Unary(
        kAttend, request,
        [fields = answer.fields()](CodedInputStream& input) { return ReadMessage(input, fields); },
        group);
  }
  if (!status.ok()) return status;
  return answer.Take();
}

}  // namespace

Client::Client(std::unique_ptr<Calls> calls, const ClientOptions& options)
    : calls_(std::move(calls)),
      options_(options),
      async_(std::make_unique<AsyncCalls>(std::max(options.async_calls, 1))) {}

// While the client is whole: callbacks may make calls of it.
Client::~Client() { async_->End(); }

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(const std::string& target,
                                                        const ClientOptions& options) {
  auto calls = Calls::Connect(target, options);
  if (!calls.ok()) return calls.status();
  return std::unique_ptr<Client>(new Client(*std::move(calls), options));
}

absl::StatusOr<AttendResult> Client::Attend(const TensorRef& query, const TensorRef& key,
                                            const TensorRef& value,
                                            const v1::AttendOptions& options, CallGroup* group) {
  GroupOf ends(group, options_.call_timeout);
  return RunAttend(*calls_, {query, key, value, options}, options_.stream_above, *ends);
}

absl::StatusOr<AttendResult> Client::AttendInto(const TensorRef& query, const TensorRef& key,
                                                const TensorRef& value,
                                                const v1::AttendOptions& options,
                                                const AttendOutputs& outputs, CallGroup* group) {
  GroupOf ends(group, options_.call_timeout);
  return RunAttend(*calls_, {query, key, value, options, &outputs}, options_.stream_above, *ends);
}

void Client::AttendAsync(const TensorRef& query, const TensorRef& key, const TensorRef& value,
                         const v1::AttendOptions& options, const AttendCallback& done) {
  const absl::Status started = async_->Start(
      options_.call_timeout, [this, query, key, value, options, done](CallGroup& group) {
        done(Attend(query, key, value, options, &group));
      });
  if (!started.ok()) done(started);
}

absl::StatusOr<HeadResult> Client::Head(const HeadInputs& inputs,
                                        const v1::AttendOptions& options) {
  CallGroup group(options_.call_timeout);
  const HeadCall call = [&](const HeadInputs& part,
                            const v1::AttendOptions& part_options) -> absl::StatusOr<HeadResult> {
    HeadResult result;
    std::vector<TensorSink> sinks = {{&result.output}, {&result.query},  {&result.key},
                                     {&result.value},  {&result.logits}, {&result.weights},
                                     {&result.context}};
    absl::Status status = calls_->Unary(kHead, RequestOf(part, part_options),
                                        ReaderOf(&sinks, {{8, &result.stats}}), group);
    if (!status.ok()) return status;
    return result;
  };
  const int64_t bytes = LargestMessage(inputs, options);
  const auto limit = calls_->MessageLimit(bytes, group);
  if (!limit.ok()) return limit.status();
  if (bytes > *limit) return HeadInParts(inputs, options, *limit, call);
  return call(inputs, options);
}

absl::StatusOr<BackwardResult> Client::Backward(const BackwardInputs& inputs,
                                                const v1::AttendOptions& options) {
  CallGroup group(options_.call_timeout);
  const BackwardCall call =
      [&](const BackwardInputs& part,
          const v1::AttendOptions& part_options) -> absl::StatusOr<BackwardResult> {
    BackwardResult result;
    Tensor d_mask;
    std::vector<TensorSink> sinks = {
        {&result.d_query}, {&result.d_key}, {&result.d_value}, {&d_mask}};
    absl::Status status =
        calls_->Unary(kBackward, RequestOf(part, part_options),
                      ReaderOf(&sinks, {{5, &result.stats}, {6, &result.d_sinks}}), group);
    if (!status.ok()) return status;
    if (sinks[3].present) result.d_mask = std::move(d_mask);
    return result;
  };
  const int64_t bytes = LargestMessage(inputs, options);
  const auto limit = calls_->MessageLimit(bytes, group);
  if (!limit.ok()) return limit.status();
  if (bytes > *limit) return BackwardInParts(inputs, options, *limit, call);
  return call(inputs, options);
}

absl::StatusOr<MergeResult> Client::Merge(absl::Span<const MergePart> parts, CallGroup* group) {
  GroupOf ends(group, options_.call_timeout);
  OutMessage request;
  for (const MergePart& part : parts) {
    OutMessage message;
    message.AddTensor(1, part.output);
    message.AddTensor(2, part.logsumexp);
    request.AddMessage(1, message);
  }
  MergeResult result;
  std::vector<TensorSink> sinks = {{&result.output}, {&result.logsumexp}};
  absl::Status status = calls_->Unary(kMerge, request, ReaderOf(&sinks, {}), *ends);
  if (!status.ok()) return status;
  return result;
}

absl::StatusOr<v1::CheckResponse> Client::Check(const TensorRef& query, const TensorRef& key,
                                                const TensorRef& value, const TensorRef& candidate,
                                                const v1::AttendOptions& options) {
  CallGroup group(options_.call_timeout);
  OutMessage request = RequestOf({query, key, value, options});
  request.AddTensor(5, candidate);
  v1::CheckResponse response;
  absl::Status status = calls_->Unary(kCheck, request, &response, group);
  if (!status.ok()) return status;
  return response;
}

absl::StatusOr<v1::CheckResponse> Client::CheckHead(const HeadInputs& inputs,
                                                    const HeadCandidate& candidate,
                                                    const v1::AttendOptions& options) {
  CallGroup group(options_.call_timeout);
  OutMessage mine;
  const std::optional<TensorRef>* const tensors[] = {
      &candidate.output, &candidate.query,   &candidate.key,    &candidate.value,
      &candidate.logits, &candidate.weights, &candidate.context};
  for (size_t i = 0; i < std::size(tensors); ++i) {
    if (tensors[i]->has_value()) mine.AddTensor(static_cast<int>(i) + 1, **tensors[i]);
  }
  OutMessage request;
  request.AddMessage(6, RequestOf(inputs, options));
  request.AddMessage(7, mine);
  v1::CheckResponse response;
  absl::Status status = calls_->Unary(kCheck, request, &response, group);
  if (!status.ok()) return status;
  return response;
}

absl::StatusOr<v1::EstimateResponse> Client::Estimate(const v1::EstimateRequest& request) {
  CallGroup group(options_.call_timeout);
  OutMessage message;
  message.Append(request);
  v1::EstimateResponse response;
  absl::Status status = calls_->Unary(kEstimate, message, &response, group);
  if (!status.ok()) return status;
  return response;
}

absl::StatusOr<v1::InfoResponse> Client::Info() {
  CallGroup group(options_.call_timeout);
  v1::InfoResponse response;
  absl::Status status = calls_->Unary(kInfo, OutMessage(), &response, group);
  if (!status.ok()) return status;
  return response;
}

absl::Status Client::CheckHealth(const std::string& service) {
  CallGroup group(options_.call_timeout);
  grpc::health::v1::HealthCheckResponse response;
  OutMessage request;
  if (!service.empty()) request.AddBytes(1, service);
  // How it is now.
  absl::Status status = calls_->Unary(kHealth, request, &response, group, /*most_attempts=*/1);
  if (absl::IsNotFound(status)) {
    return absl::NotFoundError(absl::StrCat("the server has no service '", service, "'"));
  }
  if (!status.ok()) return status;
  if (response.status() == grpc::health::v1::HealthCheckResponse::SERVING) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("the service is ",
                   grpc::health::v1::HealthCheckResponse::ServingStatus_Name(response.status())));
}

}  // namespace attendant
