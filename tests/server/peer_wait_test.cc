#include "server/peer_wait.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace attendant::server {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

constexpr PeerLimits kLimits = {.idle = seconds(60), .slowest = 1000};

class PeerWaitTest : public testing::Test {
 protected:
  absl::Status At(int second) const { return wait_.Check(kLimits, start_ + seconds(second)); }

  PeerWait wait_;
  const PeerWait::Clock::time_point start_ = PeerWait::Clock::now();
};

TEST_F(PeerWaitTest, ACallThatWaitsForNobodyIsNeverTooSlow) {
  EXPECT_EQ(At(1'000'000), absl::OkStatus());
  wait_.Begin(1, PeerWait::Steps::kSeen, start_);
  wait_.End();
  EXPECT_EQ(At(1'000'000), absl::OkStatus());
}

TEST_F(PeerWaitTest, APeerThatMovesNothingIsIdle) {
  wait_.Begin(1'000'000, PeerWait::Steps::kSeen, start_);
  EXPECT_EQ(At(59), absl::OkStatus());
  EXPECT_EQ(At(60).code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(At(60).message()), HasSubstr("taken for 60 s"));
  wait_.Moved(start_ + seconds(30));
  EXPECT_EQ(At(89), absl::OkStatus());
  EXPECT_EQ(At(90).code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(PeerWaitTest, APeerThatMovesTooLittleIsTooSlow) {
  wait_.Begin(100'000, PeerWait::Steps::kSeen, start_);
  wait_.Moved(start_ + seconds(150));
  EXPECT_EQ(At(159), absl::OkStatus());
  EXPECT_EQ(At(160).code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(At(160).message()),
              HasSubstr("100000 bytes were not sent or taken within 160 s"));
}

TEST_F(PeerWaitTest, WhatNobodySeesHasTheWholeTime) {
  wait_.Begin(100'000, PeerWait::Steps::kUnseen, start_);
  EXPECT_EQ(At(159), absl::OkStatus());
  EXPECT_EQ(At(160).code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(PeerWaitTest, WhatComesNextHasItsOwnTime) {
  wait_.Begin(0, PeerWait::Steps::kSeen, start_);
  wait_.Begin(100'000, PeerWait::Steps::kSeen, start_ + seconds(50));
  wait_.Moved(start_ + seconds(200));
  EXPECT_EQ(At(209), absl::OkStatus());
  EXPECT_EQ(At(210).code(), absl::StatusCode::kDeadlineExceeded);
}

}  // namespace
}  // namespace attendant::server
