// Which outcomes are tried again, and after how long.
#include "client/cpp/retry.h"

#include <gtest/gtest.h>

#include "absl/strings/cord.h"
#include "google/rpc/error_details.pb.h"

namespace attendant {
namespace {

constexpr absl::Time kNow = absl::UnixEpoch();

Outcome Failed(absl::StatusCode code) { return {absl::Status(code, "no")}; }

Outcome WithRetryInfo(absl::StatusCode code, absl::Duration delay) {
  google::rpc::RetryInfo info;
  info.mutable_retry_delay()->set_seconds(absl::ToInt64Seconds(delay));
  info.mutable_retry_delay()->set_nanos(
      static_cast<int32_t>(absl::ToInt64Nanoseconds(delay % absl::Seconds(1))));
  Outcome outcome = Failed(code);
  outcome.status.SetPayload("type.googleapis.com/google.rpc.RetryInfo",
                            absl::Cord(info.SerializeAsString()));
  return outcome;
}

Outcome WithPushback(absl::StatusCode code, absl::string_view text) {
  Outcome outcome = Failed(code);
  ReadPushback(text, &outcome);
  return outcome;
}

std::optional<absl::Duration> FirstWait(const Outcome& outcome) {
  return Retry({}, kNow + absl::Minutes(1), 1).Next(outcome, kNow);
}

TEST(RetryTest, EachStatusCode) {
  for (int code = 1; code <= 16; ++code) {
    SCOPED_TRACE(code);
    const auto status = static_cast<absl::StatusCode>(code);
    // Full without a time to come again is full for ever.
    EXPECT_EQ(FirstWait(Failed(status)).has_value(), status == absl::StatusCode::kUnavailable);
    const bool helps =
        status == absl::StatusCode::kUnavailable || status == absl::StatusCode::kResourceExhausted;
    EXPECT_EQ(FirstWait(WithRetryInfo(status, absl::Seconds(1))).has_value(), helps);
    EXPECT_EQ(FirstWait(WithPushback(status, "5")).has_value(), helps);
    EXPECT_FALSE(FirstWait(WithPushback(status, "-1")).has_value());
    EXPECT_FALSE(FirstWait(WithPushback(status, "soon")).has_value());
  }
}

TEST(RetryTest, WhatTheServerAsksForIsWaitedAndALittleMore) {
  for (const Outcome& outcome :
       {WithPushback(absl::StatusCode::kResourceExhausted, "1500"),
        WithRetryInfo(absl::StatusCode::kUnavailable, absl::Milliseconds(1500))}) {
    const auto wait = FirstWait(outcome);
    ASSERT_TRUE(wait.has_value());
    EXPECT_GE(*wait, absl::Milliseconds(1500));
    EXPECT_LE(*wait, absl::Milliseconds(1800));
  }
  // The trailer is the newer word.
  Outcome both = WithRetryInfo(absl::StatusCode::kUnavailable, absl::Seconds(9));
  ReadPushback("1500", &both);
  EXPECT_LE(*FirstWait(both), absl::Milliseconds(1800));
}

// Else a server that says a short time, and is as full then, would soon have had all attempts.
TEST(RetryTest, ItIsNeverLessThanTheBackoff) {
  Retry retry({}, kNow + absl::Hours(1), 1);
  for (const int milliseconds : {100, 200, 400, 800, 1600}) {
    const auto wait = retry.Next(WithPushback(absl::StatusCode::kResourceExhausted, "10"), kNow);
    ASSERT_TRUE(wait.has_value());
    EXPECT_GE(*wait, 0.8 * absl::Milliseconds(milliseconds));
    EXPECT_LE(*wait, 1.2 * absl::Milliseconds(milliseconds));
  }
}

TEST(RetryTest, BackoffDoublesUpToItsLongest) {
  RetryOptions options;
  options.max_attempts = 10;
  options.initial_backoff = absl::Milliseconds(100);
  options.max_backoff = absl::Milliseconds(500);
  Retry retry(options, kNow + absl::Hours(1), 1);
  for (const int milliseconds : {100, 200, 400, 500, 500}) {
    const auto wait = retry.Next(Failed(absl::StatusCode::kUnavailable), kNow);
    ASSERT_TRUE(wait.has_value());
    EXPECT_GE(*wait, 0.8 * absl::Milliseconds(milliseconds));
    EXPECT_LE(*wait, 1.2 * absl::Milliseconds(milliseconds));
  }
}

TEST(RetryTest, CallersRefusedTogetherDoNotComeAgainTogether) {
  const Outcome outcome = WithPushback(absl::StatusCode::kResourceExhausted, "1000");
  const auto deadline = kNow + absl::Minutes(1);
  EXPECT_NE(Retry({}, deadline, 1).Next(outcome, kNow), Retry({}, deadline, 2).Next(outcome, kNow));
}

TEST(RetryTest, AttemptsAndTheDeadlineBoundIt) {
  RetryOptions options;
  options.max_attempts = 3;
  Retry retry(options, kNow + absl::Minutes(1), 1);
  const Outcome gone = Failed(absl::StatusCode::kUnavailable);
  EXPECT_TRUE(retry.Next(gone, kNow).has_value());
  EXPECT_TRUE(retry.Next(gone, kNow).has_value());
  EXPECT_FALSE(retry.Next(gone, kNow).has_value());
  EXPECT_EQ(retry.attempts(), 3);
  Retry late(options, kNow + absl::Seconds(1), 1);
  EXPECT_FALSE(late.Next(WithPushback(absl::StatusCode::kUnavailable, "1000"), kNow).has_value());
}

}  // namespace
}  // namespace attendant
