// What a caller is told under load, for each way a call can end; and that whatever happens to a
// call, its threads and its bytes come back.
#include "tests/server/serving.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "core/scheduler.h"

namespace attendant::server {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

Serving::Options Plain() {
  Serving::Options options;
  options.limits.max_message_bytes = 4 << 20;
  return options;
}

grpc::Status Attend(Serving& serving, const v1::AttendRequest& request,
                    v1::AttendResponse* response) {
  grpc::ClientContext context;
  SetTestDeadline(context);
  return serving.stub().Attend(&context, request, response);
}

// Right answers, one after another.
void ExpectRightAnswers(Serving& serving, int count) {
  for (int i = 0; i < count; ++i) {
    v1::AttendResponse response;
    const grpc::Status status = Attend(serving, MeanRequest(), &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    ASSERT_THAT(ValuesOf<float>(response.output()), ElementsAre(2));
  }
}

// The scores of T tokens, on the explicit path.
v1::AttendRequest ExplicitRequest(int64_t tokens) {
  v1::AttendRequest request = ConstantRequest({1, 1, tokens, 1}, 0.5f);
  request.mutable_options()->set_path(v1::PATH_EXPLICIT);
  return request;
}

// Not short: 3e8 operations, of which a slow core does 3e7 in a millisecond.
v1::AttendRequest WaitingRequest() { return ConstantRequest({1, 4, 512, 64}, 0.5f); }

TEST(ServingTest, WhatNeverFitsIsToldBytesNeededBytesAllowedAndThePathThatFits) {
  Serving::Options options = Plain();
  options.limits.memory_budget_bytes = 3 << 20;
  Serving serving(options);
  grpc::ClientContext context;
  SetTestDeadline(context);
  v1::AttendResponse response;
  v1::AttendRequest request = ExplicitRequest(1024);  // 4 MiB of scores
  const grpc::Status status = serving.stub().Attend(&context, request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(),
              AllOf(StartsWith("memory_budget: the call needs "), HasSubstr("3145728 are allowed"),
                    HasSubstr("PATH_CHUNKED needs ")));
  EXPECT_EQ(DetailOf<google::rpc::QuotaFailure>(status).violations(0).subject(), "memory_budget");
  EXPECT_FALSE(DetailOf<google::rpc::RetryInfo>(status).has_retry_delay());
  EXPECT_EQ(PushbackOf(context), "-1");
  EXPECT_TRUE(serving.Shows("attendant_shed_total{reason=\"never_fits\"} 1"));
  // The advice is good, and the refusal held nothing.
  request.mutable_options()->set_path(v1::PATH_CHUNKED);
  EXPECT_TRUE(Attend(serving, request, &response).ok());
  EXPECT_TRUE(Eventually([&] { return serving.IsIdle(); }));
}

TEST(ServingTest, AResponseThatFitsNoMessageIsNotToBeSentAgain) {
  Serving serving(Plain());
  v1::AttendRequest request = ConstantRequest({1, 2, 1024, 1}, 0);
  request.mutable_options()->set_return_weights(true);  // 8 MiB, of 4 that a message may have
  grpc::ClientContext context;
  SetTestDeadline(context);
  v1::AttendResponse response;
  const grpc::Status status = serving.stub().Attend(&context, request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(DetailOf<google::rpc::QuotaFailure>(status).violations(0).subject(),
            "max_message_bytes");
  EXPECT_EQ(PushbackOf(context), "-1");
  EXPECT_TRUE(serving.Shows("attendant_shed_total{reason=\"never_fits\"} 1"));
}

// The paths by library products copy rows without what is not finite: that is reserved as well.
TEST(ServingTest, NumbersThatAreNotFiniteStayWithinWhatIsReserved) {
  for (const core::Kernel kernel : {core::Kernel::kFused, core::Kernel::kOneDnn}) {
    Serving::Options options = Plain();
    options.limits.kernel = kernel;
    Serving serving(options);
    for (const v1::Path path : {v1::PATH_EXPLICIT, v1::PATH_CHUNKED}) {
      v1::AttendRequest request = ConstantRequest({2, 3, 150, 8}, 0.5f);
      request.mutable_options()->set_path(path);
      request.mutable_options()->set_causal(v1::CAUSAL_TOP_LEFT);
      v1::BackwardRequest backward;
      *backward.mutable_d_output() = request.query();
      std::vector<float> numbers(2 * 3 * 150 * 8, 0.5f);
      for (size_t i = 0; i < numbers.size(); i += 97) numbers[i] = NAN;
      for (v1::Tensor* tensor :
           {request.mutable_query(), request.mutable_key(), request.mutable_value()}) {
        SetTensor(v1::DATA_TYPE_FLOAT32, {2, 3, 150, 8}, numbers, tensor);
      }
      v1::AttendResponse response;
      grpc::Status status = Attend(serving, request, &response);
      EXPECT_TRUE(status.ok()) << status.error_message();
      *backward.mutable_query() = request.query();
      *backward.mutable_key() = request.key();
      *backward.mutable_value() = request.value();
      *backward.mutable_options() = request.options();
      grpc::ClientContext context;
      SetTestDeadline(context);
      v1::BackwardResponse gradients;
      status = serving.stub().Backward(&context, backward, &gradients);
      EXPECT_TRUE(status.ok()) << status.error_message();
    }
  }
}

TEST(ServingTest, AFullBudgetIsWorthAnotherTry) {
  Serving::Options options = Plain();
  options.limits.memory_budget_bytes = 6 << 20;
  Serving serving(options);
  HeldThreads held(serving.scheduler());
  PendingAttend first(serving.stub(), ExplicitRequest(1024));  // more than 4 MiB
  ASSERT_TRUE(serving.AwaitJob(first, 2));
  PendingAttend second(serving.stub(), ExplicitRequest(1024));
  ExpectTryAgain(second.Await(), second.context(), "memory_budget");
  EXPECT_THAT(second.Await().error_message(), HasSubstr("free at the moment"));
  EXPECT_TRUE(serving.Shows("attendant_shed_total{reason=\"memory\"} 1"));
  held.Release();
  EXPECT_TRUE(first.Await().ok()) << first.Await().error_message();
  EXPECT_TRUE(Eventually([&] { return serving.IsIdle(); }));
  v1::AttendResponse response;
  EXPECT_TRUE(Attend(serving, ExplicitRequest(1024), &response).ok());
}

TEST(ServingTest, AFullQueueIsWorthAnotherTry) {
  Serving::Options options = Plain();
  options.scheduler.max_running = 1;
  options.scheduler.max_queue = 1;
  Serving serving(options);
  HeldThreads held(serving.scheduler());
  PendingAttend queued(serving.stub(), WaitingRequest());
  ASSERT_TRUE(serving.AwaitJob(queued, 2));
  PendingAttend refused(serving.stub(), WaitingRequest());
  ExpectTryAgain(refused.Await(), refused.context(), "max_queue");
  EXPECT_TRUE(serving.Shows("attendant_shed_total{reason=\"queue_full\"} 1"));
  held.Release();
  EXPECT_TRUE(queued.Await().ok()) << queued.Await().error_message();
  EXPECT_TRUE(Eventually([&] { return serving.IsIdle(); }));
}

TEST(ServingTest, WhoWaitedTooLongIsToldToComeAgainAndIsNotComputed) {
  Serving::Options options = Plain();
  options.scheduler.max_running = 1;
  options.scheduler.max_queue_wait = std::chrono::milliseconds(1);
  Serving serving(options);
  HeldThreads held(serving.scheduler());
  PendingAttend call(serving.stub(), WaitingRequest());
  ASSERT_TRUE(serving.AwaitJob(call, 2));
  const auto waited = std::chrono::steady_clock::now() + std::chrono::milliseconds(2);
  Eventually([&] { return std::chrono::steady_clock::now() > waited; });
  held.Release();
  ExpectTryAgain(call.Await(), call.context(), "max_queue_wait");
  EXPECT_TRUE(serving.Shows("attendant_shed_total{reason=\"queue_wait\"} 1"));
  EXPECT_TRUE(serving.Shows("attendant_flops_total{path=\"chunked\"} 0"));
  EXPECT_TRUE(Eventually([&] { return serving.IsIdle(); }));
}

TEST(ServingTest, ADeadlineInTheQueueIsNeverComputed) {
  Serving serving(Plain());
  HeldThreads held(serving.scheduler());
  // On a busy machine a deadline can pass before the call arrives: longer ones, until one is
  // queued.
  bool queued = false;
  for (auto allowed = std::chrono::milliseconds(50); !queued; allowed *= 2) {
    PendingAttend call(serving.stub(), MeanRequest(), allowed);
    Eventually([&] {
      queued = queued || serving.scheduler().queued() + serving.scheduler().running() >= 2;
      return call.over();
    });
    EXPECT_EQ(call.Await().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  }
  held.Release();
  EXPECT_TRUE(Eventually([&] { return serving.IsIdle(); }));
  EXPECT_TRUE(serving.Shows("attendant_flops_total{path=\"chunked\"} 0"));
  ExpectRightAnswers(serving, 1);
}

TEST(ServingTest, ACancelALittleBeforeTheDeadlineIsTheDeadlines) {
  using std::chrono::milliseconds;
  EXPECT_TRUE(IsOfDeadline(milliseconds(-1), milliseconds(1000)));
  EXPECT_TRUE(IsOfDeadline(milliseconds(20), milliseconds(20)));
  EXPECT_TRUE(IsOfDeadline(milliseconds(619), milliseconds(40000)));
  EXPECT_FALSE(IsOfDeadline(milliseconds(621), milliseconds(40000)));
  EXPECT_FALSE(IsOfDeadline(milliseconds(36), milliseconds(1000)));
  const auto none = std::chrono::system_clock::time_point::max() - std::chrono::system_clock::now();
  EXPECT_FALSE(IsOfDeadline(none, none));
}

// Some 10^10 pairs of a query and a key, of no width: seconds of compute from a few bytes.
v1::AttendRequest SlowRequestOfFewBytes() {
  constexpr int64_t kTokens = int64_t{1} << 17;
  v1::AttendRequest request = ConstantRequest({1, 1, kTokens, 0}, 0);
  SetTensor<uint8_t>(v1::DATA_TYPE_BOOL, {1}, {1}, request.mutable_options()->mutable_mask());
  request.mutable_options()->set_return_logsumexp(true);
  return request;
}

TEST(ServingTest, ACancelIsCountedByHowNearTheDeadlineIs) {
  Serving serving(Plain());
  const auto counted = [&](const std::string& code, const std::string& path) {
    const std::string none = absl::StrCat("attendant_requests_total{code=\"", code,
                                          "\",method=\"Attend\",path=\"", path, "\"} 0");
    return !serving.Shows(none);
  };
  const auto cancel = [&](std::chrono::system_clock::duration allowed) {
    PendingAttend call(serving.tcp_stub(), SlowRequestOfFewBytes(), allowed);
    Eventually([&] { return call.over() || serving.scheduler().running() > 0; });
    call.Cancel();
    call.Await();
    EXPECT_TRUE(Eventually([&] { return serving.IsIdle(); }));
  };
  // So little time that any cancel is the deadline's. Some calls do not even arrive.
  EXPECT_TRUE(Eventually([&] {
    cancel(std::chrono::milliseconds(15));
    return counted("DEADLINE_EXCEEDED", "chunked");
  }));
  EXPECT_FALSE(counted("CANCELLED", "none"));
  EXPECT_FALSE(counted("CANCELLED", "chunked"));
  EXPECT_TRUE(Eventually([&] {
    cancel(kGuard);
    return counted("CANCELLED", "chunked");
  }));
}

TEST(ServingTest, ADrainingServerSaysWhenToComeAgainButNotToThisOne) {
  Serving serving(Plain());
  serving.service().StopAccepting();
  grpc::ClientContext context;
  SetTestDeadline(context);
  v1::AttendResponse response;
  const grpc::Status status = serving.stub().Attend(&context, MeanRequest(), &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_TRUE(DetailOf<google::rpc::RetryInfo>(status).has_retry_delay());
  EXPECT_EQ(PushbackOf(context), "");
  EXPECT_TRUE(serving.Shows("attendant_shed_total{reason=\"draining\"} 1"));
}

TEST(ServingTest, WhatIsShortIsKnownWhereNothingWasMeasuredAndNobodyIsToldOfIt) {
  Serving::Options options = Plain();
  options.scheduler.threads = options.scheduler.max_running = 1;
  Serving serving(options);
  // The one place and the one thread, for seconds. The short call waits for neither.
  PendingAttend call(serving.stub(), SlowRequest());
  ASSERT_TRUE(serving.AwaitJob(call));
  ExpectRightAnswers(serving, 1);
  EXPECT_FALSE(call.over());
  grpc::ClientContext context;
  SetTestDeadline(context);
  v1::EstimateRequest request;
  for (const auto set : {&v1::EstimateRequest::set_batch, &v1::EstimateRequest::set_heads,
                         &v1::EstimateRequest::set_queries, &v1::EstimateRequest::set_keys,
                         &v1::EstimateRequest::set_width}) {
    (request.*set)(1);
  }
  v1::EstimateResponse estimate;
  ASSERT_TRUE(serving.stub().Estimate(&context, request, &estimate).ok());
  EXPECT_EQ(estimate.chunked_path().seconds(), 0);
  EXPECT_EQ(estimate.explicit_path().seconds(), 0);
}

// The limit's QuotaFailure, and that no other try helps.
void ExpectTakesTooLong(const grpc::Status& status, const grpc::ClientContext& context) {
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  const auto quota = DetailOf<google::rpc::QuotaFailure>(status);
  ASSERT_EQ(quota.violations_size(), 1) << status.error_message();
  EXPECT_EQ(quota.violations(0).subject(), "max_compute_time");
  EXPECT_FALSE(DetailOf<google::rpc::RetryInfo>(status).has_retry_delay());
  EXPECT_EQ(PushbackOf(context), "-1");
}

TEST(ServingTest, ACallThatComputesForTooLongIsStoppedAndNotToBeSentAgain) {
  Serving::Options options = Plain();
  options.limits.max_compute_time = std::chrono::milliseconds(1);
  Serving serving(options);
  PendingAttend call(serving.stub(), SlowRequest());
  const grpc::Status status = call.Await();
  ExpectTakesTooLong(status, call.context());
  EXPECT_THAT(status.error_message(), AllOf(StartsWith("max_compute_time: the call has computed "),
                                            HasSubstr("at most 0.001 s are allowed")));
  EXPECT_TRUE(Eventually([&] { return serving.IsIdle(); }));
  EXPECT_TRUE(serving.Shows("attendant_cancelled_total{stage=\"compute\"} 1"));
  EXPECT_TRUE(serving.Shows("attendant_shed_total{reason=\"never_fits\"} 1"));
  EXPECT_TRUE(serving.Shows("attendant_flops_total{path=\"chunked\"} 0"));
}

// A second for each pair of a query and a key, and for each operation of the products.
Serving::Options SlowMachine() {
  Serving::Options options = Plain();
  for (core::DTypeSpeed& of : options.limits.speed.of) {
    of.explicit_path = of.chunked_path = {.flop_seconds = 1, .pair_seconds = 1};
    of.projection_flop_seconds = 1;
  }
  return options;
}

TEST(ServingTest, WhatIsExpectedToTakeTwiceAsLongIsRefusedBeforeItTakesMemory) {
  // 64 tokens, width 1: 4096 pairs, 4 operations each.
  constexpr int kSeconds = 5 * 64 * 64;
  Serving::Options options = SlowMachine();
  options.limits.max_compute_time = std::chrono::seconds(kSeconds / 2 - 1);
  Serving serving(options);
  const v1::AttendRequest request = ConstantRequest({1, 1, 64, 1}, 1);
  v1::BackwardRequest backward;
  *backward.mutable_query() = *backward.mutable_key() = request.query();
  *backward.mutable_value() = *backward.mutable_d_output() = request.query();
  v1::HeadRequest head;
  SetTensor(v1::DATA_TYPE_FLOAT32, {64, 1}, std::vector<float>(64), head.mutable_x());
  for (v1::Tensor* const weight :
       {head.mutable_w_q(), head.mutable_w_k(), head.mutable_w_v(), head.mutable_w_o()}) {
    SetTensor<float>(v1::DATA_TYPE_FLOAT32, {1, 1}, {1}, weight);
  }
  v1::AttendStreamRequest header;
  *header.mutable_header() = request;
  for (v1::Tensor* const tensor :
       {header.mutable_header()->mutable_query(), header.mutable_header()->mutable_key(),
        header.mutable_header()->mutable_value()}) {
    tensor->clear_data();
  }
  const auto expect_refusal = [](const auto& call) {
    grpc::ClientContext context;
    SetTestDeadline(context);
    const grpc::Status status = call(&context);
    ExpectTakesTooLong(status, context);
    return status.error_message();
  };
  v1::AttendResponse response;
  const int64_t copied = CopiedTensorBytes();
  const std::string message = expect_refusal([&](grpc::ClientContext* context) {
    return serving.stub().Attend(context, request, &response);
  });
  EXPECT_THAT(message, AllOf(HasSubstr("expected to compute for 20480 s"),
                             HasSubstr("at most 10239 s are allowed")));
  expect_refusal([&](grpc::ClientContext* context) {
    v1::BackwardResponse gradients;
    return serving.stub().Backward(context, backward, &gradients);
  });
  expect_refusal([&](grpc::ClientContext* context) {
    v1::HeadResponse answer;
    return serving.stub().Head(context, head, &answer);
  });
  expect_refusal([&](grpc::ClientContext* context) {
    const auto stream = serving.stub().AttendStream(context);
    stream->Write(header);
    return stream->Finish();
  });
  EXPECT_EQ(CopiedTensorBytes(), copied);
  EXPECT_TRUE(serving.Shows("attendant_shed_total{reason=\"never_fits\"} 4"));
  EXPECT_TRUE(serving.Shows("attendant_cancelled_total{stage=\"queue\"} 0"));
  // A mask may hide keys, whose products are then not computed.
  v1::AttendRequest masked = request;
  SetTensor<uint8_t>(v1::DATA_TYPE_BOOL, {1}, {1}, masked.mutable_options()->mutable_mask());
  EXPECT_TRUE(Attend(serving, masked, &response).ok());
  EXPECT_TRUE(Attend(serving, ConstantRequest({1, 1, 63, 1}, 1), &response).ok());
}

TEST(ServingTest, WhatCallsTookIsWhatIsExpectedOfTheNext) {
  Serving::Options options = SlowMachine();
  options.limits.max_message_bytes = 64 << 20;
  const v1::AttendRequest request = ConstantRequest({1, 2, 4096, 32}, 0.5f);
  constexpr int64_t kSeconds = int64_t{2} * 4096 * 4096 * (1 + 2 * (32 + 32));
  options.limits.max_compute_time = std::chrono::seconds(kSeconds);
  Serving serving(options);
  const v1::AttendRequest longer = ConstantRequest({1, 2, 8192, 32}, 0.5f);
  {
    PendingAttend refused(serving.stub(), longer);
    ExpectTakesTooLong(refused.Await(), refused.context());
  }
  // It took far less.
  v1::AttendResponse response;
  EXPECT_TRUE(Attend(serving, request, &response).ok());
  PendingAttend admitted(serving.stub(), longer);
  serving.AwaitJob(admitted);
}

TEST(ServingTest, AnAnswerThatIsNotReadIsNotHeldForEver) {
  Serving::Options options;
  options.limits.max_message_bytes = 64 << 20;
  Serving serving(options);
  // 18 MiB of output: more than the transport takes from a server whose client does not read.
  constexpr int64_t kHeads = 144;
  constexpr int64_t kWidth = 16384;
  v1::AttendRequest request = ConstantRequest({1, kHeads, 2, 1}, 1);
  SetTensor(v1::DATA_TYPE_FLOAT32, {1, kHeads, 2, kWidth},
            std::vector<float>(kHeads * 2 * kWidth, 3), request.mutable_value());
  grpc::ClientContext context;
  SetTestDeadline(context);
  grpc::CompletionQueue queue;
  const auto call = serving.tcp_stub().PrepareAsyncAttend(&context, request, &queue);
  call->StartCall();
  call->ReadInitialMetadata(&context);  // and so is sent
  // The connection moves while somebody waits for the queue.
  void* tag = nullptr;
  bool ok = false;
  const auto waits = [&] {
    const auto soon = std::chrono::system_clock::now() + std::chrono::milliseconds(1);
    return queue.AsyncNext(&tag, &ok, soon) != grpc::CompletionQueue::SHUTDOWN;
  };
  const char* const answered =
      "attendant_requests_total{code=\"OK\",method=\"Attend\",path=\"chunked\"} 1";
  EXPECT_TRUE(Eventually([&] { return waits() && serving.Shows(answered); }));
  // A slow reader may still be at it when nothing was seen to move for a minute.
  serving.service().EndSlowCalls(PeerWait::Clock::now() + PeerLimits().idle);
  EXPECT_FALSE(serving.IsIdle());
  EXPECT_TRUE(serving.Shows("attendant_cancelled_total{stage=\"send\"} 0"));
  // Its memory comes back though nobody has asked for the answer yet.
  const std::chrono::seconds moving((int64_t{18} << 20) / PeerLimits().slowest + 1);
  for (int i = 0; i < 2; ++i) {  // the second finds nothing to do
    serving.service().EndSlowCalls(PeerWait::Clock::now() + PeerLimits().idle + moving);
  }
  EXPECT_TRUE(Eventually([&] { return waits() && serving.IsIdle(); }));
  EXPECT_TRUE(serving.Shows("attendant_cancelled_total{stage=\"send\"} 1"));
  v1::AttendResponse response;
  grpc::Status status;
  call->Finish(&response, &status, &status);
  while (tag != &status) ASSERT_TRUE(queue.Next(&tag, &ok));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED) << status.error_message();
  queue.Shutdown();
  while (queue.Next(&tag, &ok)) {
  }
}

// S13, S14: sizes that are no sizes.
TEST(ServingTest, WrongSizesNameTheirFieldAndBothNumbers) {
  Serving serving(Plain());
  struct Wrong {
    std::vector<int64_t> shape;
    const char* field;
    std::vector<const char*> numbers;
  };
  const Wrong all[] = {
      {{1, 1, -1, 1}, "query.shape[2]", {"-1"}},
      {{1, 1, 0, 1}, "query.data", {"4", "0"}},
      {{1, 1, 1, int64_t{1} << 40}, "query", {"1099511627776"}},
      {{1, 1, int64_t{1} << 32, int64_t{1} << 32}, "query", {"4294967296"}},
      {{INT64_MAX, INT64_MAX, INT64_MAX, INT64_MAX}, "query", {"9223372036854775807"}},
      {{1, 1, 1}, "query.shape", {"3", "4"}},
      {{1, 1, 3, 1}, "query.data", {"4", "12"}},
  };
  for (const Wrong& wrong : all) {
    v1::AttendRequest request = MeanRequest();
    request.mutable_query()->clear_shape();
    for (const int64_t size : wrong.shape) request.mutable_query()->add_shape(size);
    grpc::ClientContext context;
    SetTestDeadline(context);
    v1::AttendResponse response;
    const grpc::Status status = serving.stub().Attend(&context, request, &response);
    SCOPED_TRACE(status.error_message());
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    const auto detail = DetailOf<google::rpc::BadRequest>(status);
    ASSERT_EQ(detail.field_violations_size(), 1);
    EXPECT_THAT(detail.field_violations(0).field(), StartsWith(wrong.field));
    for (const char* const number : wrong.numbers) {
      EXPECT_THAT(detail.field_violations(0).description(), HasSubstr(number));
    }
    EXPECT_EQ(PushbackOf(context), "");
  }
  ExpectRightAnswers(serving, 1);
}

TEST(ServingTest, ACancelledOrLateCallFreesItsThreads) {
  Serving serving(Plain());
  for (const bool late : {false, true}) {
    SCOPED_TRACE(late ? "late" : "cancelled");
    // Long enough to be computing by then, far shorter than the computation.
    PendingAttend call(serving.stub(), SlowRequest(),
                       late ? std::chrono::milliseconds(250) : std::chrono::milliseconds(60000));
    if (!late) {
      ASSERT_TRUE(serving.AwaitJob(call));
      call.Cancel();
    }
    EXPECT_EQ(call.Await().error_code(),
              late ? grpc::StatusCode::DEADLINE_EXCEEDED : grpc::StatusCode::CANCELLED);
    EXPECT_TRUE(Eventually([&] { return serving.IsIdle(); }));
    EXPECT_TRUE(serving.Shows("attendant_flops_total{path=\"chunked\"} 0"));
  }
  EXPECT_TRUE(Eventually([] { return core::Workspace::Process().current_bytes() == 0; }));
  ExpectRightAnswers(serving, 1);
}

// S7. Random moments of calls that take about a millisecond each, several at a time.
TEST(ServingTest, FiveHundredCancelsThenAHundredRightAnswers) {
  Serving serving(Plain());
  std::mt19937 rng(7);
  constexpr int kAtATime = 10;
  for (int round = 0; round < 500 / kAtATime; ++round) {
    std::vector<std::unique_ptr<PendingAttend>> calls;
    calls.reserve(kAtATime);
    for (int i = 0; i < kAtATime; ++i) {
      calls.push_back(
          std::make_unique<PendingAttend>(serving.stub(), ConstantRequest({1, 4, 256, 8}, 0.5f)));
    }
    const auto moment = std::chrono::steady_clock::now() + std::chrono::microseconds(rng() % 4000);
    Eventually([&] { return std::chrono::steady_clock::now() >= moment; });
    for (const auto& call : calls) call->Cancel();
    for (const auto& call : calls) {
      const grpc::Status status = call->Await();
      EXPECT_TRUE(status.ok() || status.error_code() == grpc::StatusCode::CANCELLED)
          << status.error_code() << " " << status.error_message();
    }
  }
  ExpectRightAnswers(serving, 100);
  EXPECT_TRUE(Eventually([&] { return serving.IsIdle(); }));
  EXPECT_TRUE(Eventually([] { return core::Workspace::Process().current_bytes() == 0; }));
}

// S17. Each value tensor is one number everywhere, which comes back whatever the weights are.
TEST(ServingTest, SixtyFourCallersGetTheirOwnAnswers) {
  constexpr int kCallers = 64;
  constexpr int kCalls = 10;
  Serving serving(Plain());
  std::atomic<int> wrong = 0;
  std::vector<std::thread> callers;
  callers.reserve(kCallers);
  for (int caller = 0; caller < kCallers; ++caller) {
    callers.emplace_back([&, caller] {
      for (int i = 0; i < kCalls; ++i) {
        const auto number = static_cast<float>(1 + caller * kCalls + i);
        const int64_t tokens = 1 + (caller + 7 * i) % 60;
        v1::AttendRequest request = ConstantRequest({1, 2, tokens, 4}, 0.25f);
        SetTensor(v1::DATA_TYPE_FLOAT32, {1, 2, tokens, 4},
                  std::vector<float>(static_cast<size_t>(8 * tokens), number),
                  request.mutable_value());
        v1::AttendResponse response;
        const bool ok = Attend(serving, request, &response).ok();
        const std::vector<float> answer = ValuesOf<float>(response.output());
        const bool right = ok && answer.size() == static_cast<size_t>(8 * tokens) &&
                           std::all_of(answer.begin(), answer.end(), [&](float x) {
                             return std::abs(x - number) <= 1e-5f * number;
                           });
        if (!right) ++wrong;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_TRUE(Eventually([&] { return serving.IsIdle(); }));
}

}  // namespace
}  // namespace attendant::server
