#include "server/admission.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/errors.h"
#include "server/status.h"

namespace attendant::server {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class AdmissionTest : public testing::Test {
 protected:
  // What the metrics page says of it.
  testing::AssertionResult Reserved(int64_t bytes) const {
    const std::string line = absl::StrCat("\nattendant_memory_reserved_bytes ", bytes, "\n");
    if (absl::StrContains(metrics_.Text(), line)) return testing::AssertionSuccess();
    return testing::AssertionFailure() << metrics_.Text();
  }

  Metrics metrics_{{"test", "test", "test"}};
  Admission admission_{1000, [] { return absl::Milliseconds(250); }, metrics_};
};

TEST_F(AdmissionTest, AReservationIsGivenBackAtItsEnd) {
  EXPECT_THAT(metrics_.Text(), HasSubstr("attendant_memory_budget_bytes 1000\n"));
  {
    auto reservation =
        admission_.Reserve({.request_bytes = 1, .workspace_bytes = 2, .response_bytes = 997});
    ASSERT_EQ(reservation.status(), absl::OkStatus());
    EXPECT_TRUE(Reserved(1000));
  }
  EXPECT_TRUE(Reserved(0));
}

TEST_F(AdmissionTest, TheMetricsOutliveTheBudget) {
  std::optional<Admission> other;
  other.emplace(10, nullptr, metrics_);
  {
    const auto reservation = other->Reserve({.request_bytes = 7});
    EXPECT_TRUE(Reserved(7));
  }
  other.reset();
  EXPECT_TRUE(Reserved(0));
}

TEST_F(AdmissionTest, AMovedReservationIsGivenBackOnce) {
  auto first = admission_.Reserve({.workspace_bytes = 600});
  ASSERT_EQ(first.status(), absl::OkStatus());
  Reservation held = *std::move(first);
  {
    Reservation other = std::move(held);
    held = std::move(other);
  }
  EXPECT_TRUE(Reserved(600));
  held = Reservation();
  EXPECT_TRUE(Reserved(0));
}

TEST_F(AdmissionTest, AReservationShrinksToWhatIsStillHeld) {
  auto reservation = admission_.Reserve({.request_bytes = 500, .response_bytes = 100});
  ASSERT_EQ(reservation.status(), absl::OkStatus());
  reservation->Keep(100);
  EXPECT_TRUE(Reserved(100));
  reservation->Keep(200);  // it never grows
  EXPECT_TRUE(Reserved(100));
  reservation->Keep(0);
  EXPECT_TRUE(Reserved(0));
  Reservation().Keep(0);
}

TEST_F(AdmissionTest, WhatIsTakenNowIsWorthAnotherTry) {
  const auto held = admission_.Reserve({.workspace_bytes = 600});
  const auto refused =
      admission_.Reserve({.request_bytes = 200, .workspace_bytes = 200, .response_bytes = 1});
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status()));
  EXPECT_EQ(core::LimitOf(refused.status()), "memory_budget");
  EXPECT_EQ(RetryDelayOf(refused.status()), absl::Milliseconds(250));
  EXPECT_THAT(std::string(refused.status().message()),
              AllOf(HasSubstr("needs 401 bytes (request 200, workspace 200, response 1)"),
                    HasSubstr("400 of 1000 are free at the moment")));
  EXPECT_EQ(ShedReasonOf(refused.status()), ShedReason::kMemory);
  EXPECT_EQ(admission_.Reserve({.workspace_bytes = 400}).status(), absl::OkStatus());
}

TEST_F(AdmissionTest, WhatNeverFitsIsToldThePathThatWould) {
  const auto refused = admission_.Reserve({.request_bytes = 100,
                                           .workspace_bytes = 5000,
                                           .response_bytes = 50,
                                           .chunked_workspace_bytes = 800});
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status()));
  EXPECT_EQ(core::LimitOf(refused.status()), "memory_budget");
  EXPECT_EQ(RetryDelayOf(refused.status()), std::nullopt);
  EXPECT_THAT(std::string(refused.status().message()),
              AllOf(HasSubstr("needs 5150 bytes"), HasSubstr("1000 are allowed"),
                    HasSubstr("PATH_CHUNKED needs 950 bytes")));
  EXPECT_EQ(ShedReasonOf(refused.status()), ShedReason::kNeverFits);
}

TEST_F(AdmissionTest, WhatFitsOnNoPathIsToldSo) {
  for (const std::optional<int64_t> chunked :
       {std::optional<int64_t>(), std::optional<int64_t>(901)}) {
    const auto refused = admission_.Reserve(
        {.request_bytes = 100, .workspace_bytes = 5000, .chunked_workspace_bytes = chunked});
    EXPECT_THAT(std::string(refused.status().message()), HasSubstr("no path fits"));
  }
  // Sums beyond 2^63 - 1 are refused, not wrapped.
  EXPECT_FALSE(admission_.Reserve({.request_bytes = INT64_MAX, .workspace_bytes = INT64_MAX}).ok());
}

TEST_F(AdmissionTest, RefusalsOfTheQueueGetTheDelay) {
  for (const auto& [limit, reason] : {std::pair("max_queue", ShedReason::kQueueFull),
                                      std::pair("max_queue_wait", ShedReason::kQueueWait)}) {
    const absl::Status status = admission_.Explain(core::OverLimit(limit, "why"));
    EXPECT_EQ(core::LimitOf(status), limit);
    EXPECT_EQ(RetryDelayOf(status), absl::Milliseconds(250));
    EXPECT_EQ(ShedReasonOf(status), reason);
  }
}

TEST_F(AdmissionTest, TheMachinesMemoryIsALimitToo) {
  const absl::Status status = admission_.Explain(absl::ResourceExhaustedError("no 8 bytes left"));
  EXPECT_EQ(core::LimitOf(status), "machine_memory");
  EXPECT_EQ(core::DescriptionOf(status), "no 8 bytes left");
  EXPECT_EQ(RetryDelayOf(status), absl::Milliseconds(250));
  EXPECT_EQ(ShedReasonOf(status), ShedReason::kMemory);
}

TEST_F(AdmissionTest, OtherStatusesStay) {
  for (const absl::Status& status :
       {absl::OkStatus(), absl::InternalError("fault"), absl::CancelledError("gone"),
        absl::DeadlineExceededError("late"), core::InvalidField("query", "is unset")}) {
    EXPECT_EQ(admission_.Explain(status), status);
    EXPECT_EQ(ShedReasonOf(status), std::nullopt);
  }
  const absl::Status too_large = core::OverLimit("max_message_bytes", "9 of 8");
  EXPECT_EQ(admission_.Explain(too_large), too_large);
  EXPECT_EQ(ShedReasonOf(too_large), ShedReason::kNeverFits);
}

TEST_F(AdmissionTest, ManyThreadsNeverHoldMoreThanTheBudget) {
  std::atomic<int64_t> held = 0;
  std::atomic<int64_t> most = 0;
  std::vector<std::thread> threads;
  for (int64_t thread = 0; thread < 8; ++thread) {
    threads.emplace_back([&, thread] {
      for (int64_t i = 0; i < 2000; ++i) {
        const int64_t bytes = 1 + (thread * 37 + i * 101) % 600;
        const auto reservation = admission_.Reserve({.workspace_bytes = bytes});
        if (!reservation.ok()) continue;
        const int64_t now = held.fetch_add(bytes) + bytes;
        int64_t before = most.load();
        while (before < now && !most.compare_exchange_weak(before, now)) {
        }
        std::this_thread::yield();
        held.fetch_sub(bytes);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(most, 1000);
  EXPECT_GT(most, 0);
  EXPECT_TRUE(Reserved(0));
}

}  // namespace
}  // namespace attendant::server
