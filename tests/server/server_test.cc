// The assembled server on free loopback ports.
#include "server/server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "grpc/health/v1/health.grpc.pb.h"
#include "tests/server/testing.h"

namespace attendant::server {
namespace {

using ::grpc::health::v1::Health;
using ::grpc::health::v1::HealthCheckRequest;
using ::grpc::health::v1::HealthCheckResponse;
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
  EXPECT_THAT(std::string(grpc_taken.status().message()), HasSubstr(first->address()));
  config = LoopbackConfig();
  config.metrics_listen = first->metrics_address();
  const auto metrics_taken = Server::Start(config);
  EXPECT_EQ(metrics_taken.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(metrics_taken.status().message()), HasSubstr(first->metrics_address()));
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
  EXPECT_THAT(status.error_message(), HasSubstr("65537 vs. 65536"));
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

}  // namespace
}  // namespace attendant::server
