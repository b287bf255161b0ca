// The assembled server on free loopback ports.
#include "server/server.h"

#include <gmock/gmock.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "tests/no_threads.h"
#include "tests/server/testing.h"
#include "tests/temp_dir.h"

namespace attendant::server {
namespace {

using ::grpc::health::v1::Health;
using ::grpc::health::v1::HealthCheckRequest;
using ::grpc::health::v1::HealthCheckResponse;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::unique_ptr<Server> StartServer(const Config& config = LoopbackConfig()) {
  auto server = Server::Start(config);
  EXPECT_TRUE(server.ok()) << server.status();
  return server.ok() ? *std::move(server) : nullptr;
}

grpc::Status CheckHealth(Health::Stub& stub, const std::string& service,
                         HealthCheckResponse* response) {
  grpc::ClientContext context;
  SetTestDeadline(context);
  HealthCheckRequest request;
  request.set_service(service);
  return stub.Check(&context, request, response);
}

TEST(ServerTest, ServesOnThePortItWasGiven) {
  const auto server = StartServer();
  ASSERT_NE(server, nullptr);
  EXPECT_THAT(server->Description(), HasSubstr(server->address()));
  EXPECT_THAT(server->Description(), HasSubstr(server->metrics_address()));
  const auto stub = v1::Attention::NewStub(ChannelTo(*server));
  grpc::ClientContext context;
  SetTestDeadline(context);
  v1::AttendResponse response;
  const grpc::Status status = stub->Attend(&context, MeanRequest(), &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_THAT(ValuesOf<float>(response.output()), testing::ElementsAre(2));
}

TEST(ServerTest, ATakenPortIsAnErrorThatNamesIt) {
  const auto first = StartServer();
  ASSERT_NE(first, nullptr);
  Config config = LoopbackConfig();
  config.listen = {first->address()};
  const auto grpc_taken = Server::Start(config);
  EXPECT_EQ(grpc_taken.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(grpc_taken.status().message()),
              HasSubstr("--listen=" + first->address()));
  config = LoopbackConfig();
  config.metrics_listen = first->metrics_address();
  const auto metrics_taken = Server::Start(config);
  EXPECT_EQ(metrics_taken.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(metrics_taken.status().message()),
              HasSubstr("--metrics_listen=" + first->metrics_address()));
}

TEST(ServerTest, HealthFollowsReadinessAndLivenessDoesNot) {
  const auto server = StartServer();
  ASSERT_NE(server, nullptr);
  const auto health = Health::NewStub(ChannelTo(*server));
  HealthCheckResponse response;
  for (const char* const service : {"", "attendant.v1.Attention", "liveness"}) {
    ASSERT_TRUE(CheckHealth(*health, service, &response).ok());
    EXPECT_EQ(response.status(), HealthCheckResponse::SERVING) << service;
  }
  EXPECT_EQ(CheckHealth(*health, "nobody", &response).error_code(), grpc::StatusCode::NOT_FOUND);
  server->StopBeingReady();
  for (const char* const service : {"", "attendant.v1.Attention"}) {
    ASSERT_TRUE(CheckHealth(*health, service, &response).ok());
    EXPECT_EQ(response.status(), HealthCheckResponse::NOT_SERVING) << service;
  }
  ASSERT_TRUE(CheckHealth(*health, "liveness", &response).ok());
  EXPECT_EQ(response.status(), HealthCheckResponse::SERVING);
}

TEST(ServerTest, AMessageOverTheLimitIsRefusedAndTheNextCallWorks) {
  Config config = LoopbackConfig();
  config.max_message_bytes = 64 << 10;
  const auto server = StartServer(config);
  ASSERT_NE(server, nullptr);
  const auto stub = v1::Attention::NewStub(ChannelTo(*server));
  v1::AttendRequest request = MeanRequest();
  const auto exactly = [&](size_t bytes) {
    // An unknown field of the right length brings the message to that size.
    request.clear_options();
    const size_t padding = bytes - request.ByteSizeLong() - 5;
    request.GetReflection()->MutableUnknownFields(&request)->AddLengthDelimited(
        100, std::string(padding, 'x'));
    return request.ByteSizeLong();
  };
  ASSERT_EQ(exactly((64 << 10) + 1), (64u << 10) + 1);
  v1::AttendResponse response;
  grpc::ClientContext over;
  SetTestDeadline(over);
  const grpc::Status status = stub->Attend(&over, request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("has 65537 bytes, at most 65536"));
  const auto quota = DetailOf<google::rpc::QuotaFailure>(status);
  ASSERT_EQ(quota.violations_size(), 1);
  EXPECT_EQ(quota.violations(0).subject(), "max_message_bytes");
  EXPECT_THAT(server->metrics_text(),
              HasSubstr("attendant_requests_total{code=\"RESOURCE_EXHAUSTED\",method=\"Attend\","
                        "path=\"none\"} 1"));
  grpc::ClientContext within;
  SetTestDeadline(within);
  EXPECT_TRUE(stub->Attend(&within, MeanRequest(), &response).ok());
}

// Until the server has a job in hand. The call that brings it must not end before it is seen.
void AwaitJob(Server& server) {
  while (server.metrics_text().find("attendant_inflight_flops 0\n") != std::string::npos) {
    std::this_thread::yield();
  }
}

std::future<grpc::Status> StartLongCall(v1::Attention::Stub& stub, const v1::AttendRequest& request,
                                        v1::AttendResponse* response) {
  return std::async(std::launch::async, [&stub, &request, response] {
    grpc::ClientContext context;
    SetTestDeadline(context);
    return stub.Attend(&context, request, response);
  });
}

TEST(ServerTest, ShutdownFinishesWhatRunsAndDoesNotWaitForWatchers) {
  const auto server = StartServer();
  ASSERT_NE(server, nullptr);
  const auto channel = ChannelTo(*server);
  const auto health = Health::NewStub(channel);
  grpc::ClientContext watch_context;
  SetTestDeadline(watch_context);
  const auto watch = health->Watch(&watch_context, HealthCheckRequest());
  HealthCheckResponse seen;
  ASSERT_TRUE(watch->Read(&seen));

  const auto stub = v1::Attention::NewStub(channel);
  const v1::AttendRequest request = ConstantRequest({1, 8, 4096, 32}, 0.5f);
  v1::AttendResponse response;
  auto call = StartLongCall(*stub, request, &response);
  AwaitJob(*server);
  server->StopBeingReady();
  server->Shutdown(absl::Seconds(60));
  const grpc::Status status = call.get();
  EXPECT_TRUE(status.ok()) << status.error_message();
  while (watch->Read(&seen)) {
  }
  EXPECT_FALSE(watch->Finish().ok());
}

TEST(ServerTest, ShutdownDoesNotWaitForStreamsOfWhichNothingCame) {
  const auto server = StartServer();
  ASSERT_NE(server, nullptr);
  const auto stub = v1::Attention::NewStub(ChannelTo(*server));
  grpc::ClientContext context;
  SetTestDeadline(context);
  const auto stream = stub->AttendStream(&context);
  while (!absl::StrContains(server->metrics_text(), "attendant_inflight_requests 1")) {
    std::this_thread::yield();
  }
  // Longer than a test may take.
  server->Shutdown(absl::Minutes(10));
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), HasSubstr("the server is shutting down"));
}

TEST(ServerTest, ShutdownCancelsWhatOutlivesTheTimeout) {
  const auto server = StartServer();
  ASSERT_NE(server, nullptr);
  const auto stub = v1::Attention::NewStub(ChannelTo(*server));
  const v1::AttendRequest request = LongRequest();
  v1::AttendResponse response;
  auto call = StartLongCall(*stub, request, &response);
  AwaitJob(*server);
  server->Shutdown(absl::ZeroDuration());
  const grpc::Status status = call.get();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), HasSubstr("shut down before the call was complete"));
}

TEST(ServerTest, ServesOnEveryAddress) {
  const TempDir folder;
  const std::string socket = "unix:" + folder.PathOf("socket");
  Config config = LoopbackConfig();
  config.listen = {"127.0.0.1:0", socket, "127.0.0.1:0"};
  const auto server = StartServer(config);
  ASSERT_NE(server, nullptr);
  ASSERT_EQ(server->addresses().size(), 3u);
  EXPECT_EQ(server->addresses()[1], socket);
  EXPECT_NE(server->addresses()[0], server->addresses()[2]);
  for (const std::string& address : server->addresses()) {
    EXPECT_THAT(server->Description(), HasSubstr(address));
    const auto stub =
        v1::Attention::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    SetTestDeadline(context);
    v1::AttendResponse response;
    const grpc::Status status = stub->Attend(&context, MeanRequest(), &response);
    EXPECT_TRUE(status.ok()) << address << ": " << status.error_message();
  }
}

TEST(ServerTest, ASocketOfALivingServerIsAnErrorThatNamesIt) {
  const TempDir folder;
  Config config = LoopbackConfig();
  config.listen = {"unix:" + folder.PathOf("socket")};
  auto first = StartServer(config);
  ASSERT_NE(first, nullptr);
  Config other = LoopbackConfig();
  other.listen = {"127.0.0.1:0", config.listen[0]};
  const auto taken = Server::Start(other);
  EXPECT_EQ(taken.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(taken.status().message()), HasSubstr(config.listen[0]));
  first.reset();
  EXPECT_NE(StartServer(config), nullptr);
}

TEST(ServerTest, OfSeveralAddressesTheTakenOneIsNamed) {
  const auto first = StartServer();
  ASSERT_NE(first, nullptr);
  Config config = LoopbackConfig();
  config.listen = {"127.0.0.1:0", first->address()};
  const auto taken = Server::Start(config);
  EXPECT_EQ(taken.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(taken.status().message()), HasSubstr(first->address()));
}

TEST(ServerTest, SizesThatCannotHoldTogetherAreRefused) {
  Config config = LoopbackConfig();
  config.memory_budget = 1 << 20;
  config.max_message_bytes = 1 << 20;
  const auto server = Server::Start(config);
  EXPECT_EQ(server.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(server.status().message()), HasSubstr("--memory_budget=1048576"));
}

TEST(ServerTest, ThreadsThatTheSystemHasNotAreAnErrorThatNamesTheFlag) {
  Config config = LoopbackConfig();
  config.compute_threads = 7;
  {
    const NoThreads none;
    const auto server = Server::Start(config);
    EXPECT_EQ(server.status().code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(server.status().message()),
                AllOf(HasSubstr("--compute_threads=7 and "), HasSubstr("the system has 0")));
  }
  EXPECT_NE(StartServer(config), nullptr);
}

TEST(ServerTest, ACallWithoutAMessageIsNoFaultOfOurs) {
  const auto server = StartServer();
  ASSERT_NE(server, nullptr);
  grpc::GenericStub stub(ChannelTo(*server));
  for (const char* const method : {"Attend", "Info"}) {
    grpc::ClientContext context;
    SetTestDeadline(context);
    grpc::CompletionQueue queue;
    const auto call =
        stub.PrepareCall(&context, absl::StrCat("/attendant.v1.Attention/", method), &queue);
    void* tag = nullptr;
    bool ok = false;
    grpc::Status status;
    call->StartCall(nullptr);
    ASSERT_TRUE(queue.Next(&tag, &ok));
    call->WritesDone(nullptr);
    ASSERT_TRUE(queue.Next(&tag, &ok));
    call->Finish(&status, nullptr);
    ASSERT_TRUE(queue.Next(&tag, &ok));
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), HasSubstr("request: is unset: no message came"));
  }
}

TEST(ServerTest, WhatIsNotServedIsRefusedAndCountedUnderOneName) {
  const auto server = StartServer();
  ASSERT_NE(server, nullptr);
  grpc::GenericStub stub(ChannelTo(*server));
  for (const char* const method : {"/attendant.v1.Attention/Guess", "/x/y", "/x/z"}) {
    grpc::ClientContext context;
    SetTestDeadline(context);
    grpc::CompletionQueue queue;
    const auto call = stub.PrepareUnaryCall(&context, method, grpc::ByteBuffer(nullptr, 0), &queue);
    call->StartCall();
    grpc::ByteBuffer response;
    grpc::Status status;
    call->Finish(&response, &status, nullptr);
    void* tag = nullptr;
    bool ok = false;
    ASSERT_TRUE(queue.Next(&tag, &ok));
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
    EXPECT_THAT(status.error_message(), HasSubstr(method));
  }
  EXPECT_THAT(server->metrics_text(),
              HasSubstr("attendant_requests_total{code=\"UNIMPLEMENTED\",method=\"unknown\",path="
                        "\"none\"} 3\n"));
  EXPECT_THAT(server->metrics_text(), HasSubstr("attendant_inflight_requests 0\n"));
}

size_t LinesIn(const std::string& text) {
  return static_cast<size_t>(std::count(text.begin(), text.end(), '\n'));
}

TEST(ServerTest, TenThousandShapesAddNoSeries) {
  const auto server = StartServer();
  ASSERT_NE(server, nullptr);
  const auto stub = v1::Attention::NewStub(ChannelTo(*server));
  const size_t before = LinesIn(server->metrics_text());
  for (int shape = 0; shape < 10'000; ++shape) {
    grpc::ClientContext context;
    SetTestDeadline(context);
    if (shape % 10 == 0) {
      v1::AttendRequest request = MeanRequest();
      // The key's tokens change, and so every other request is refused.
      request.mutable_key()->set_shape(2, shape / 10 % 2 == 0 ? 2 : shape);
      v1::AttendResponse response;
      (void)stub->Attend(&context, request, &response);
      continue;
    }
    v1::EstimateRequest request;
    request.set_batch(1);
    request.set_heads(1 + shape % 7);
    request.set_queries(shape);
    request.set_keys(10 * shape);
    request.set_width(1 + shape % 100);
    v1::EstimateResponse response;
    ASSERT_TRUE(stub->Estimate(&context, request, &response).ok());
  }
  EXPECT_EQ(LinesIn(server->metrics_text()), before);
}

TEST(ServerTest, AnOldConnectionMovesWithoutAFailedCall) {
  Config config = LoopbackConfig();
  config.max_connection_age = absl::Milliseconds(100);
  const auto server = StartServer(config);
  ASSERT_NE(server, nullptr);
  const auto channel = ChannelTo(*server);
  ASSERT_TRUE(
      channel->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(60)));
  const auto stub = v1::Attention::NewStub(channel);
  // Longer than the connection may get, on its first.
  const v1::AttendRequest long_request = ConstantRequest({1, 8, 4096, 32}, 0.5f);
  v1::AttendResponse long_response;
  auto long_call = StartLongCall(*stub, long_request, &long_response);
  for (int moves = 0; moves < 2; ++moves) {
    grpc::CompletionQueue queue;
    channel->NotifyOnStateChange(GRPC_CHANNEL_READY,
                                 std::chrono::system_clock::now() + std::chrono::seconds(60),
                                 &queue, nullptr);
    void* tag = nullptr;
    bool moved = false;
    while (queue.AsyncNext(&tag, &moved, std::chrono::system_clock::now()) ==
           grpc::CompletionQueue::TIMEOUT) {
      grpc::ClientContext context;
      SetTestDeadline(context);
      v1::AttendResponse response;
      const grpc::Status status = stub->Attend(&context, MeanRequest(), &response);
      ASSERT_TRUE(status.ok()) << status.error_message();
    }
    EXPECT_TRUE(moved);
    ASSERT_TRUE(
        channel->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(60)));
  }
  const grpc::Status status = long_call.get();
  EXPECT_TRUE(status.ok()) << status.error_message();
}

}  // namespace
}  // namespace attendant::server
