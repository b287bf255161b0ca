// What the tests of a service under load share: a service with bounds, and calls that are made
// while others are in hand.
#ifndef ATTENDANT_TESTS_SERVER_SERVING_H_
#define ATTENDANT_TESTS_SERVER_SERVING_H_

#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>

#include <chrono>
#include <latch>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/mutex.h"
#include "core/scheduler.h"
#include "server/attention_service.h"
#include "tests/server/testing.h"

namespace attendant::server {

// How long a test waits for what must come, before it fails.
constexpr auto kGuard = std::chrono::seconds(60);

// Waits until condition() holds, or kGuard has passed; returns whether it holds.
template <typename Condition>
bool Eventually(const Condition& condition) {
  const auto end = std::chrono::steady_clock::now() + kGuard;
  while (!condition()) {
    if (std::chrono::steady_clock::now() >= end) return condition();
    std::this_thread::yield();
  }
  return true;
}

// One call of Attend in the background. Ends it, and waits for that, when destroyed. Thread-safe.
class PendingAttend {
 public:
  PendingAttend(v1::Attention::Stub& stub, v1::AttendRequest request,
                std::chrono::system_clock::duration allowed = kGuard)
      : request_(std::move(request)) {
    context_.set_deadline(std::chrono::system_clock::now() + allowed);
    stub.async()->Attend(&context_, &request_, &response_, [this](const grpc::Status& status) {
      core::MutexLock lock(mutex_);
      status_ = status;
      ended_.NotifyAll();
    });
  }
  ~PendingAttend() {
    Cancel();
    Await();
  }

  void Cancel() { context_.TryCancel(); }
  bool over() {
    core::MutexLock lock(mutex_);
    return status_.has_value();
  }
  grpc::Status Await() {
    core::MutexLock lock(mutex_);
    while (!status_.has_value()) ended_.Wait(mutex_);
    return *status_;
  }
  // Once it is over.
  const grpc::ClientContext& context() const { return context_; }
  const v1::AttendResponse& response() const { return response_; }

 private:
  grpc::ClientContext context_;
  const v1::AttendRequest request_;
  v1::AttendResponse response_;
  core::Mutex mutex_;
  core::CondVar ended_;
  std::optional<grpc::Status> status_ ABSL_GUARDED_BY(mutex_);
};

// The trailer grpc-retry-pushback-ms, "" without one.
inline std::string PushbackOf(const grpc::ClientContext& context) {
  const auto& trailers = context.GetServerTrailingMetadata();
  const auto found = trailers.find("grpc-retry-pushback-ms");
  return found == trailers.end() ? "" : std::string(found->second.data(), found->second.size());
}

// A refusal that another try may mend: RESOURCE_EXHAUSTED, the limit's QuotaFailure, and a delay
// that RetryInfo and the trailer agree on.
inline void ExpectTryAgain(const grpc::Status& status, const grpc::ClientContext& context,
                           const std::string& limit) {
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  const auto quota = DetailOf<google::rpc::QuotaFailure>(status);
  ASSERT_EQ(quota.violations_size(), 1) << status.error_message();
  EXPECT_EQ(quota.violations(0).subject(), limit);
  const auto delay = DetailOf<google::rpc::RetryInfo>(status).retry_delay();
  const int64_t milliseconds = delay.seconds() * 1000 + delay.nanos() / 1'000'000;
  EXPECT_GE(milliseconds, 1);
  EXPECT_EQ(PushbackOf(context), absl::StrCat(milliseconds));
  EXPECT_LT(status.error_details().size(), size_t{6} << 10);
}

// Some 10^10 pairs of a query and a key from 1.5 MB: seconds of compute.
inline v1::AttendRequest SlowRequest() {
  constexpr int64_t kHeads = 64;
  constexpr int64_t kQueries = 1024;
  constexpr int64_t kKeys = 131072;
  v1::AttendRequest request;
  SetTensor(v1::DATA_TYPE_FLOAT32, {1, kHeads, kQueries, 1},
            std::vector<float>(kHeads * kQueries, 0.5f), request.mutable_query());
  SetTensor(v1::DATA_TYPE_FLOAT32, {1, 1, kKeys, 1}, std::vector<float>(kKeys, 0.5f),
            request.mutable_key());
  SetTensor(v1::DATA_TYPE_FLOAT32, {1, 1, kKeys, 1}, std::vector<float>(kKeys, 1),
            request.mutable_value());
  return request;
}

// Every compute thread inside a tile that waits, until Release or the end. Thread-compatible.
class HeldThreads {
 public:
  explicit HeldThreads(core::Scheduler& scheduler)
      : state_(std::make_shared<State>(scheduler.threads())) {
    const absl::Status status = scheduler.Submit(std::make_shared<core::Job>(
        std::vector<core::Stage>{{"hold", scheduler.threads(),
                                  [state = state_](const core::TileContext&) {
                                    state->entered.count_down();
                                    state->release.wait();
                                    return absl::OkStatus();
                                  }}},
        [](const absl::Status&, const core::JobTimes&) {}));
    EXPECT_EQ(status, absl::OkStatus());
    if (status.ok()) state_->entered.wait();
  }
  ~HeldThreads() { Release(); }
  HeldThreads(const HeldThreads&) = delete;
  HeldThreads& operator=(const HeldThreads&) = delete;

  void Release() {
    if (!std::exchange(released_, true)) state_->release.count_down();
  }

 private:
  struct State {
    explicit State(int threads) : entered(threads) {}
    std::latch entered;
    std::latch release{1};
  };
  const std::shared_ptr<State> state_;
  bool released_ = false;
};

// A service with its own metrics and compute threads. Thread-compatible.
class Serving {
 public:
  struct Options {
    core::SchedulerOptions scheduler = {.threads = 2};
    AttentionService::Limits limits;
  };

  explicit Serving(const Options& options)
      : scheduler_(options.scheduler), service_(options.limits, scheduler_, metrics_) {
    grpc::ServerBuilder builder;
    builder.RegisterService(&service_);
    builder.SetMaxReceiveMessageSize(-1);
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    server_ = builder.BuildAndStart();
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    stub_ = v1::Attention::NewStub(server_->InProcessChannel(arguments));
    tcp_stub_ = v1::Attention::NewStub(grpc::CreateCustomChannel(
        absl::StrCat("127.0.0.1:", port), grpc::InsecureChannelCredentials(), arguments));
  }
  ~Serving() {
    // Whatever a test started is stopped, not waited for.
    service_.StopRunning();
    server_->Shutdown(std::chrono::system_clock::now());
    server_->Wait();
  }

  Metrics& metrics() { return metrics_; }
  core::Scheduler& scheduler() { return scheduler_; }
  AttentionService& service() { return service_; }
  // In process, and over a connection.
  v1::Attention::Stub& stub() { return *stub_; }
  v1::Attention::Stub& tcp_stub() { return *tcp_stub_; }

  // Whether the metrics page has that line.
  bool Shows(const std::string& line) const {
    return absl::StrContains(metrics_.Text(), absl::StrCat("\n", line, "\n"));
  }
  // Nothing in hand, nothing held.
  bool IsIdle() const {
    const std::string page = metrics_.Text();
    for (const char* const gauge :
         {"inflight_requests", "inflight_flops", "memory_reserved_bytes"}) {
      if (!absl::StrContains(page, absl::StrCat("\nattendant_", gauge, " 0\n"))) return false;
    }
    return scheduler_.queued() == 0 && scheduler_.running() == 0;
  }

  // Waits until a job is with the scheduler; false, with a failure that says how it ended, where
  // the call is over before.
  bool AwaitJob(PendingAttend& call, int jobs = 1) {
    const bool there = Eventually(
        [&] { return call.over() || scheduler_.queued() + scheduler_.running() >= jobs; });
    if (there && !call.over()) return true;
    if (call.over()) {
      const grpc::Status status = call.Await();
      ADD_FAILURE() << "the call is over: " << status.error_code() << " " << status.error_message();
    } else {
      ADD_FAILURE() << "no job came";
    }
    return false;
  }

 private:
  Metrics metrics_{{"test", "test", "test"}};
  core::Scheduler scheduler_;
  AttentionService service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<v1::Attention::Stub> stub_;
  std::unique_ptr<v1::Attention::Stub> tcp_stub_;
};

}  // namespace attendant::server

#endif  // ATTENDANT_TESTS_SERVER_SERVING_H_
