#include "bench/echo.h"

#include <google/protobuf/io/coded_stream.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "attendant/v1/attention.grpc.pb.h"

namespace attendant::bench {
namespace {

// Not zeros: what was never written is one page of memory, however long it is.
std::string Bytes(int64_t count) { return std::string(static_cast<size_t>(count), '\x5a'); }

class EchoService final
    : public v1::Attention::WithRawCallbackMethod_Attend<v1::Attention::Service> {
 public:
  explicit EchoService(int64_t largest) : bytes_(Bytes(largest)) {}

  grpc::ServerUnaryReactor* Attend(grpc::CallbackServerContext* context,
                                   const grpc::ByteBuffer* request,
                                   grpc::ByteBuffer* response) override {
    grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
    reactor->Finish(Answer(*request, response));
    return reactor;
  }

 private:
  grpc::Status Answer(const grpc::ByteBuffer& request, grpc::ByteBuffer* response) const {
    // Whatever lengths the slices have in which it arrived.
    grpc::ByteBuffer bytes = request;
    grpc::ProtoBufferReader reader(&bytes);
    google::protobuf::io::CodedInputStream input(&reader);
    int64_t size = 0;
    if (!input.ReadRaw(&size, sizeof(size))) {
      return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "no size");
    }
    if (size < 0 || static_cast<size_t>(size) > bytes_.size()) {
      return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "no such size");
    }
    const grpc::Slice slice(bytes_.data(), static_cast<size_t>(size), grpc::Slice::STATIC_SLICE);
    *response = grpc::ByteBuffer(&slice, 1);
    return grpc::Status::OK;
  }

  const std::string bytes_;
};

}  // namespace

struct EchoServer::Grpc {
  explicit Grpc(int64_t largest) : service(largest) {}
  EchoService service;
  std::unique_ptr<grpc::Server> server;
};

EchoServer::EchoServer(std::unique_ptr<Grpc> grpc, std::vector<std::string> addresses)
    : grpc_(std::move(grpc)), addresses_(std::move(addresses)) {}

EchoServer::~EchoServer() = default;

absl::StatusOr<std::unique_ptr<EchoServer>> EchoServer::Start(
    const std::vector<std::string>& listen, int64_t largest) {
  auto grpc = std::make_unique<Grpc>(largest);
  std::vector<int> ports(listen.size());
  grpc::ServerBuilder builder;
  for (size_t i = 0; i < listen.size(); ++i) {
    builder.AddListeningPort(listen[i], grpc::InsecureServerCredentials(), &ports[i]);
  }
  builder.RegisterService(&grpc->service);
  builder.SetMaxReceiveMessageSize(-1);
  builder.SetMaxSendMessageSize(-1);
  grpc->server = builder.BuildAndStart();
  if (grpc->server == nullptr || std::count(ports.begin(), ports.end(), 0) > 0) {
    return absl::UnavailableError("the echo could not start");
  }
  std::vector<std::string> addresses = listen;
  for (size_t i = 0; i < listen.size(); ++i) {
    if (absl::StartsWith(listen[i], "unix:")) continue;
    addresses[i] = absl::StrCat(listen[i].substr(0, listen[i].rfind(':')), ":", ports[i]);
  }
  return std::unique_ptr<EchoServer>(new EchoServer(std::move(grpc), std::move(addresses)));
}

struct EchoClient::Grpc {
  Grpc(const std::string& address, int64_t request_bytes, int64_t response_bytes)
      : bytes(Bytes(request_bytes)) {
    std::memcpy(bytes.data(), &response_bytes, sizeof(response_bytes));
    const grpc::Slice slice(bytes.data(), bytes.size(), grpc::Slice::STATIC_SLICE);
    request = grpc::ByteBuffer(&slice, 1);
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    arguments.SetMaxSendMessageSize(-1);
    stub = std::make_unique<grpc::GenericStub>(
        grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments));
  }

  std::string bytes;
  grpc::ByteBuffer request;
  std::unique_ptr<grpc::GenericStub> stub;
  grpc::CompletionQueue queue;
};

EchoClient::EchoClient(const std::string& address, int64_t request_bytes, int64_t response_bytes)
    : grpc_(std::make_unique<Grpc>(address, request_bytes, response_bytes)) {}

EchoClient::~EchoClient() = default;

absl::Status EchoClient::Call() {
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  grpc::ByteBuffer response;
  grpc::Status status;
  const auto call = grpc_->stub->PrepareUnaryCall(&context, "/attendant.v1.Attention/Attend",
                                                  grpc_->request, &grpc_->queue);
  call->StartCall();
  call->Finish(&response, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  grpc_->queue.Next(&tag, &ok);
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

}  // namespace attendant::bench
