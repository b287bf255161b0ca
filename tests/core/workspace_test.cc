#include "core/workspace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <latch>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "core/errors.h"

namespace attendant::core {
namespace {

bool IsAligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 64 == 0; }

// An account without a parent: what other tests do to the process's does not show.
class WorkspaceTest : public testing::Test {
 protected:
  Workspace root_{nullptr};
};

TEST_F(WorkspaceTest, BuffersStandOnA64ByteBoundary) {
  std::vector<Buffer<float>> kept;
  for (int64_t count = 1; count <= 100; ++count) {
    auto buffer = root_.Allocate<float>(count);
    ASSERT_TRUE(buffer.ok()) << buffer.status();
    EXPECT_TRUE(IsAligned(buffer->data())) << count;
    EXPECT_EQ(buffer->size(), count);
    for (int64_t i = 0; i < count; ++i) buffer->data()[i] = 1;
    kept.push_back(*std::move(buffer));
  }
}

TEST_F(WorkspaceTest, CountsWhatIsHeldAndTheMostThatWas) {
  EXPECT_EQ(root_.current_bytes(), 0);
  EXPECT_EQ(root_.peak_bytes(), 0);
  {
    const auto a = root_.Allocate<float>(10);
    ASSERT_TRUE(a.ok());
    EXPECT_EQ(root_.current_bytes(), 40);
    {
      const auto b = root_.Allocate<double>(5);
      ASSERT_TRUE(b.ok());
      EXPECT_EQ(root_.current_bytes(), 80);
    }
    EXPECT_EQ(root_.current_bytes(), 40);
  }
  EXPECT_EQ(root_.current_bytes(), 0);
  EXPECT_EQ(root_.peak_bytes(), 80);
}

TEST_F(WorkspaceTest, ChildrenDrawOnTheirParent) {
  Workspace first(&root_);
  Workspace second(&root_);
  {
    const auto a = first.Allocate<char>(100);
    const auto b = second.Allocate<char>(30);
    ASSERT_TRUE(a.ok() && b.ok());
    EXPECT_EQ(first.current_bytes(), 100);
    EXPECT_EQ(second.current_bytes(), 30);
    EXPECT_EQ(root_.current_bytes(), 130);
  }
  EXPECT_EQ(root_.current_bytes(), 0);
  EXPECT_EQ(first.peak_bytes(), 100);
  EXPECT_EQ(second.peak_bytes(), 30);
  EXPECT_EQ(root_.peak_bytes(), 130);
}

TEST_F(WorkspaceTest, DrawsOnTheProcessUnlessTold) {
  const int64_t before = Workspace::Process().current_bytes();
  Workspace workspace;
  {
    const auto buffer = workspace.Allocate<char>(1000);
    ASSERT_TRUE(buffer.ok());
    EXPECT_EQ(Workspace::Process().current_bytes(), before + 1000);
    EXPECT_GE(Workspace::Process().peak_bytes(), before + 1000);
  }
  EXPECT_EQ(Workspace::Process().current_bytes(), before);
}

TEST_F(WorkspaceTest, HasNoLimitUntilItIsSet) {
  EXPECT_EQ(root_.limit_bytes(), INT64_MAX);
  root_.SetLimit(7);
  EXPECT_EQ(root_.limit_bytes(), 7);
}

TEST_F(WorkspaceTest, AllOfTheLimitMayBeHeld) {
  root_.SetLimit(100);
  EXPECT_TRUE(root_.Allocate<char>(100).ok());
  EXPECT_FALSE(root_.Allocate<char>(101).ok());
}

TEST_F(WorkspaceTest, NamesTheLimitWhereWaitingCannotHelp) {
  root_.SetLimit(100);
  const absl::Status status = root_.Allocate<char>(101).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(LimitOf(status), "workspace_bytes");
  EXPECT_THAT(std::string(status.message()),
              testing::AllOf(testing::HasSubstr("101"), testing::HasSubstr("100")));
}

TEST_F(WorkspaceTest, DoesNotNameTheLimitWhereItIsOnlyFullNow) {
  root_.SetLimit(100);
  {
    const auto held = root_.Allocate<char>(60);
    ASSERT_TRUE(held.ok());
    const absl::Status status = root_.Allocate<char>(41).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(LimitOf(status), std::nullopt);
    EXPECT_THAT(std::string(status.message()),
                testing::AllOf(testing::HasSubstr("41 bytes needed"),
                               testing::HasSubstr("40 of 100 free")));
    EXPECT_TRUE(root_.Allocate<char>(40).ok());
  }
  EXPECT_TRUE(root_.Allocate<char>(41).ok());
}

TEST_F(WorkspaceTest, TheParentsLimitHoldsForItsChildren) {
  root_.SetLimit(100);
  Workspace first(&root_);
  Workspace second(&root_);
  EXPECT_EQ(LimitOf(first.Allocate<char>(101).status()), "workspace_bytes");
  const auto held = first.Allocate<char>(60);
  ASSERT_TRUE(held.ok());
  const absl::Status status = second.Allocate<char>(50).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(LimitOf(status), std::nullopt);
}

TEST_F(WorkspaceTest, ALowerLimitAffectsLaterAllocationsOnly) {
  auto held = root_.Allocate<char>(60);
  ASSERT_TRUE(held.ok());
  root_.SetLimit(50);
  EXPECT_EQ(root_.current_bytes(), 60);
  const absl::Status status = root_.Allocate<char>(1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(LimitOf(status), std::nullopt);
  { const Buffer<char> released = *std::move(held); }
  EXPECT_TRUE(root_.Allocate<char>(50).ok());
}

TEST_F(WorkspaceTest, ARefusalLeavesNoTraceInAnyAccount) {
  Workspace middle(&root_);
  Workspace leaf(&middle);
  const auto held = leaf.Allocate<char>(10);
  ASSERT_TRUE(held.ok());
  for (Workspace* limited : {&root_, &middle, &leaf}) {
    limited->SetLimit(100);
    EXPECT_FALSE(leaf.Allocate<char>(101).ok());
    EXPECT_FALSE(leaf.Allocate<char>(91).ok());
    limited->SetLimit(INT64_MAX);
    for (const Workspace* account : {&root_, &middle, &leaf}) {
      EXPECT_EQ(account->current_bytes(), 10);
      EXPECT_EQ(account->peak_bytes(), 10);
    }
  }
}

TEST_F(WorkspaceTest, TheMachinesRefusalLeavesNoTraceInAnyAccount) {
  Workspace leaf(&root_);
  const absl::Status status = leaf.Allocate<char>(int64_t{1} << 62).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  for (const Workspace* account : {&root_, &leaf}) {
    EXPECT_EQ(account->current_bytes(), 0);
    EXPECT_EQ(account->peak_bytes(), 0);
  }
}

TEST_F(WorkspaceTest, ACountWhoseBytesOverflowCanNeverFit) {
  const absl::Status status = root_.Allocate<double>(int64_t{1} << 61).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(LimitOf(status), "workspace_bytes");
  EXPECT_EQ(root_.current_bytes(), 0);
  EXPECT_EQ(root_.peak_bytes(), 0);
}

TEST_F(WorkspaceTest, ACountOfZeroGivesAnEmptyBuffer) {
  root_.SetLimit(0);
  const auto buffer = root_.Allocate<float>(0);
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  EXPECT_EQ(buffer->size(), 0);
  EXPECT_EQ(root_.current_bytes(), 0);
  EXPECT_EQ(root_.peak_bytes(), 0);
}

TEST_F(WorkspaceTest, AMovedBufferIsGivenBackOnce) {
  {
    auto made = root_.Allocate<float>(10);
    ASSERT_TRUE(made.ok());
    float* const data = made->data();
    Buffer<float> a = *std::move(made);
    EXPECT_EQ(a.data(), data);
    EXPECT_EQ(a.size(), 10);
    Buffer<float> b;
    EXPECT_EQ(b.data(), nullptr);
    EXPECT_EQ(b.size(), 0);
    b = std::move(a);
    EXPECT_EQ(b.data(), data);
    EXPECT_EQ(b.size(), 10);
    EXPECT_EQ(root_.current_bytes(), 40);
  }
  EXPECT_EQ(root_.current_bytes(), 0);
}

TEST_F(WorkspaceTest, MovingOverABufferGivesBothBackToTheirOwnAccounts) {
  Workspace other(nullptr);
  {
    auto a = root_.Allocate<char>(10);
    auto b = other.Allocate<char>(20);
    ASSERT_TRUE(a.ok() && b.ok());
    *a = *std::move(b);
    EXPECT_EQ(a->size(), 20);
  }
  EXPECT_EQ(root_.current_bytes(), 0);
  EXPECT_EQ(other.current_bytes(), 0);
}

TEST_F(WorkspaceTest, CountsWhatManyThreadsTakeAtOnce) {
  constexpr int kThreads = 4;
  Workspace shared(&root_);
  root_.SetLimit(kThreads * 64);
  std::latch holding(kThreads);
  std::latch begin(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      {
        const auto held = shared.Allocate<char>(64);
        EXPECT_TRUE(held.ok());
        holding.arrive_and_wait();
      }
      begin.arrive_and_wait();
      for (int i = 0; i < 2000; ++i) {
        const auto buffer = shared.Allocate<char>(1 + i % 64);
        ASSERT_TRUE(buffer.ok()) << buffer.status();
        buffer->data()[0] = 1;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Workspace* account : {&shared, &root_}) {
    EXPECT_EQ(account->current_bytes(), 0);
    EXPECT_EQ(account->peak_bytes(), kThreads * 64);
  }
}

TEST_F(WorkspaceTest, ManyThreadsNeverHoldMoreThanTheLimit) {
  constexpr int kThreads = 4;
  root_.SetLimit(100);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      Workspace own(&root_);
      for (int i = 0; i < 2000; ++i) {
        const auto buffer = own.Allocate<char>(1 + (i * 7 + t * 13) % 60);
        EXPECT_LE(root_.current_bytes(), 100);
        if (!buffer.ok()) {
          EXPECT_EQ(LimitOf(buffer.status()), std::nullopt);
        }
      }
      EXPECT_EQ(own.current_bytes(), 0);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(root_.current_bytes(), 0);
  EXPECT_LE(root_.peak_bytes(), 100);
  EXPECT_GT(root_.peak_bytes(), 0);
}

}  // namespace
}  // namespace attendant::core
