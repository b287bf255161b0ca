#include "client/cpp/client.h"

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

#include <chrono>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "attendant/v1/attention.grpc.pb.h"
#include "client/cpp/call_group.h"
#include "grpc/health/v1/health.grpc.pb.h"

namespace attendant {
namespace {

absl::Status ToStatus(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

void Fill(const TensorRef& from, v1::Tensor* to) {
  to->set_dtype(from.dtype());
  to->mutable_shape()->Add(from.shape().begin(), from.shape().end());
  to->set_data(from.bytes().data(), from.bytes().size());
}

void Fill(const HeadInputs& inputs, const v1::AttendOptions& options, v1::HeadRequest* to) {
  Fill(inputs.x, to->mutable_x());
  Fill(inputs.w_q, to->mutable_w_q());
  Fill(inputs.w_k, to->mutable_w_k());
  Fill(inputs.w_v, to->mutable_w_v());
  Fill(inputs.w_o, to->mutable_w_o());
  to->set_heads(inputs.heads);
  to->set_return_intermediates(inputs.return_intermediates);
  *to->mutable_options() = options;
}

Tensor Take(v1::Tensor* from) {
  return {from->dtype(),
          {from->shape().begin(), from->shape().end()},
          std::move(*from->mutable_data())};
}

// gRPC keeps a message's length in 31 bits and aborts beyond. Checked before anything is copied.
absl::Status CheckSize(absl::Span<const TensorRef* const> tensors) {
  // For shapes, options and lengths.
  constexpr uint64_t kOverhead = 1 << 20;
  constexpr uint64_t kLargest = std::numeric_limits<int32_t>::max() - kOverhead;
  uint64_t bytes = 0;
  for (const TensorRef* const tensor : tensors) bytes += tensor->bytes().size();
  if (bytes <= kLargest) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("the tensors have ", bytes, " bytes, a message can hold ", kLargest));
}

}  // namespace

struct Client::Stubs {
  explicit Stubs(const std::shared_ptr<grpc::Channel>& c)
      : channel(c),
        attention(v1::Attention::NewStub(c)),
        health(grpc::health::v1::Health::NewStub(c)) {}

  // call: (ClientContext*) -> grpc::Status.
  template <typename Call>
  absl::Status Run(const ClientOptions& options, const Call& call, CallGroup* group = nullptr) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() +
                         absl::ToChronoNanoseconds(options.call_timeout));
    std::optional<CallGroup::Member> member;
    if (group != nullptr) {
      context.set_deadline(absl::ToChronoTime(group->deadline()));
      member.emplace(*group, [&context] { context.TryCancel(); });
    }
    return ToStatus(call(&context));
  }

  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::Attention::Stub> attention;
  std::unique_ptr<grpc::health::v1::Health::Stub> health;
};

Client::Client(std::unique_ptr<Stubs> stubs, const ClientOptions& options)
    : stubs_(std::move(stubs)), options_(options) {}

Client::~Client() = default;

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(const std::string& target,
                                                        const ClientOptions& options) {
  grpc::ChannelArguments arguments;
  // The server knows its limit and names it; the client's own default of 4 MiB would not.
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  if (options.round_robin) arguments.SetLoadBalancingPolicyName("round_robin");
  auto channel = grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments);
  const auto deadline =
      std::chrono::system_clock::now() + absl::ToChronoNanoseconds(options.connect_timeout);
  if (!channel->WaitForConnected(deadline)) {
    return absl::UnavailableError(absl::StrCat("no server answered at ", target, " within ",
                                               absl::FormatDuration(options.connect_timeout)));
  }
  return std::unique_ptr<Client>(new Client(std::make_unique<Stubs>(std::move(channel)), options));
}

absl::StatusOr<AttendResult> Client::Attend(const TensorRef& query, const TensorRef& key,
                                            const TensorRef& value,
                                            const v1::AttendOptions& options, CallGroup* group) {
  if (absl::Status status = CheckSize({&query, &key, &value}); !status.ok()) return status;
  v1::AttendRequest request;
  v1::AttendResponse response;
  Fill(query, request.mutable_query());
  Fill(key, request.mutable_key());
  Fill(value, request.mutable_value());
  *request.mutable_options() = options;
  const auto call = [&](grpc::ClientContext* context) {
    return stubs_->attention->Attend(context, request, &response);
  };
  absl::Status status = stubs_->Run(options_, call, group);
  if (!status.ok()) return status;
  AttendResult result;
  result.output = Take(response.mutable_output());
  if (response.has_weights()) result.weights = Take(response.mutable_weights());
  if (response.has_logsumexp()) result.logsumexp = Take(response.mutable_logsumexp());
  if (response.has_key_sums()) result.key_sums = Take(response.mutable_key_sums());
  result.stats = std::move(*response.mutable_stats());
  return result;
}

absl::StatusOr<HeadResult> Client::Head(const HeadInputs& inputs,
                                        const v1::AttendOptions& options) {
  absl::Status fits = CheckSize({&inputs.x, &inputs.w_q, &inputs.w_k, &inputs.w_v, &inputs.w_o});
  if (!fits.ok()) return fits;
  v1::HeadRequest request;
  v1::HeadResponse response;
  Fill(inputs, options, &request);
  absl::Status status = stubs_->Run(options_, [&](grpc::ClientContext* context) {
    return stubs_->attention->Head(context, request, &response);
  });
  if (!status.ok()) return status;
  return HeadResult{Take(response.mutable_output()),  Take(response.mutable_query()),
                    Take(response.mutable_key()),     Take(response.mutable_value()),
                    Take(response.mutable_logits()),  Take(response.mutable_weights()),
                    Take(response.mutable_context()), std::move(*response.mutable_stats())};
}

absl::StatusOr<BackwardResult> Client::Backward(const BackwardInputs& inputs,
                                                const v1::AttendOptions& options) {
  v1::BackwardRequest request;
  std::vector<std::pair<const TensorRef*, v1::Tensor*>> tensors = {
      {&inputs.query, request.mutable_query()},
      {&inputs.key, request.mutable_key()},
      {&inputs.value, request.mutable_value()},
      {&inputs.d_output, request.mutable_d_output()}};
  if (inputs.output) tensors.emplace_back(&*inputs.output, request.mutable_output());
  if (inputs.logsumexp) tensors.emplace_back(&*inputs.logsumexp, request.mutable_logsumexp());
  std::vector<const TensorRef*> sizes;
  sizes.reserve(tensors.size());
  for (const auto& tensor : tensors) sizes.push_back(tensor.first);
  if (absl::Status status = CheckSize(sizes); !status.ok()) return status;
  for (const auto& [from, to] : tensors) Fill(*from, to);
  request.set_return_d_mask(inputs.return_d_mask);
  *request.mutable_options() = options;
  v1::BackwardResponse response;
  absl::Status status = stubs_->Run(options_, [&](grpc::ClientContext* context) {
    return stubs_->attention->Backward(context, request, &response);
  });
  if (!status.ok()) return status;
  BackwardResult result;
  result.d_query = Take(response.mutable_d_query());
  result.d_key = Take(response.mutable_d_key());
  result.d_value = Take(response.mutable_d_value());
  if (response.has_d_mask()) result.d_mask = Take(response.mutable_d_mask());
  result.d_sinks.assign(response.d_sinks().begin(), response.d_sinks().end());
  result.stats = std::move(*response.mutable_stats());
  return result;
}

absl::StatusOr<MergeResult> Client::Merge(absl::Span<const MergePart> parts, CallGroup* group) {
  std::vector<const TensorRef*> tensors;
  for (const MergePart& part : parts) {
    tensors.insert(tensors.end(), {&part.output, &part.logsumexp});
  }
  if (absl::Status status = CheckSize(tensors); !status.ok()) return status;
  v1::MergeRequest request;
  v1::MergeResponse response;
  for (const MergePart& part : parts) {
    v1::MergePart* const to = request.add_parts();
    Fill(part.output, to->mutable_output());
    Fill(part.logsumexp, to->mutable_logsumexp());
  }
  const auto call = [&](grpc::ClientContext* context) {
    return stubs_->attention->Merge(context, request, &response);
  };
  absl::Status status = stubs_->Run(options_, call, group);
  if (!status.ok()) return status;
  return MergeResult{Take(response.mutable_output()), Take(response.mutable_logsumexp())};
}

absl::StatusOr<v1::CheckResponse> Client::Check(const TensorRef& query, const TensorRef& key,
                                                const TensorRef& value, const TensorRef& candidate,
                                                const v1::AttendOptions& options) {
  absl::Status fits = CheckSize({&query, &key, &value, &candidate});
  if (!fits.ok()) return fits;
  v1::CheckRequest request;
  Fill(query, request.mutable_query());
  Fill(key, request.mutable_key());
  Fill(value, request.mutable_value());
  Fill(candidate, request.mutable_candidate());
  *request.mutable_options() = options;
  return Check(request);
}

absl::StatusOr<v1::CheckResponse> Client::CheckHead(const HeadInputs& inputs,
                                                    const HeadCandidate& candidate,
                                                    const v1::AttendOptions& options) {
  std::vector<const TensorRef*> tensors = {&inputs.x, &inputs.w_q, &inputs.w_k, &inputs.w_v,
                                           &inputs.w_o};
  v1::CheckRequest request;
  v1::HeadResponse* const to = request.mutable_head_candidate();
  using Mutable = v1::Tensor* (v1::HeadResponse::*)();
  const std::pair<const std::optional<TensorRef>*, Mutable> sent[] = {
      {&candidate.output, &v1::HeadResponse::mutable_output},
      {&candidate.query, &v1::HeadResponse::mutable_query},
      {&candidate.key, &v1::HeadResponse::mutable_key},
      {&candidate.value, &v1::HeadResponse::mutable_value},
      {&candidate.logits, &v1::HeadResponse::mutable_logits},
      {&candidate.weights, &v1::HeadResponse::mutable_weights},
      {&candidate.context, &v1::HeadResponse::mutable_context}};
  for (const auto& [tensor, field] : sent) {
    if (tensor->has_value()) tensors.push_back(&**tensor);
  }
  if (absl::Status status = CheckSize(tensors); !status.ok()) return status;
  for (const auto& [tensor, field] : sent) {
    if (tensor->has_value()) Fill(**tensor, (to->*field)());
  }
  Fill(inputs, options, request.mutable_head());
  return Check(request);
}

absl::StatusOr<v1::CheckResponse> Client::Check(const v1::CheckRequest& request) {
  v1::CheckResponse response;
  absl::Status status = stubs_->Run(options_, [&](grpc::ClientContext* context) {
    return stubs_->attention->Check(context, request, &response);
  });
  if (!status.ok()) return status;
  return response;
}

absl::StatusOr<v1::EstimateResponse> Client::Estimate(const v1::EstimateRequest& request) {
  v1::EstimateResponse response;
  absl::Status status = stubs_->Run(options_, [&](grpc::ClientContext* context) {
    return stubs_->attention->Estimate(context, request, &response);
  });
  if (!status.ok()) return status;
  return response;
}

absl::StatusOr<v1::InfoResponse> Client::Info() {
  v1::InfoResponse response;
  absl::Status status = stubs_->Run(options_, [&](grpc::ClientContext* context) {
    return stubs_->attention->Info(context, {}, &response);
  });
  if (!status.ok()) return status;
  return response;
}

absl::Status Client::CheckHealth(const std::string& service) {
  grpc::health::v1::HealthCheckRequest request;
  grpc::health::v1::HealthCheckResponse response;
  request.set_service(service);
  absl::Status status = stubs_->Run(options_, [&](grpc::ClientContext* context) {
    return stubs_->health->Check(context, request, &response);
  });
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
