#include "core/widthless.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "core/cost.h"
#include "core/fused_path.h"
#include "core/speed.h"
#include "tests/core/testing.h"

namespace attendant::core {
namespace {

template <typename S>
Problem Widthless(int64_t queries, int64_t keys, AttendOptions options = {}) {
  options.return_logsumexp = true;
  return ProblemOf<S>({2, 3, 1, queries, keys, 0, 0}, options);
}

// As the kernel computes them from keys without numbers.
template <typename S>
std::vector<Wide<S>> ByTheKernel(const Problem& p, Scheduler& scheduler) {
  Memory<S> memory(p, {});
  Workspace workspace;
  auto stages = FusedStages<S>(p, memory.Tensors(), {&workspace, scheduler.threads()});
  EXPECT_EQ(stages.ok() ? scheduler.Run(*std::move(stages)) : stages.status(), absl::OkStatus());
  return memory.results.logsumexp;
}

template <typename S>
class WidthlessTest : public testing::Test {};
using Types = testing::Types<float, double, Float16, BFloat16>;
TYPED_TEST_SUITE(WidthlessTest, Types);

TYPED_TEST(WidthlessTest, HasTheBitsOfTheKernel) {
  using S = TypeParam;
  Scheduler scheduler(2);
  AttendOptions causal;
  causal.causal = Causal::kBottomRight;
  AttendOptions window;
  window.window = {5, 200};
  AttendOptions sinks;
  sinks.sinks = {0.5, -std::numeric_limits<double>::infinity(), 3};
  AttendOptions lengths = sinks;
  lengths.key_lengths = {0, 7};
  lengths.causal = Causal::kTopLeft;
  lengths.softcap = 2;
  for (const AttendOptions& options : {AttendOptions(), causal, window, sinks, lengths}) {
    for (const auto& [queries, keys] :
         {std::pair<int64_t, int64_t>{1, 1}, {70, 500}, {5000, 10000}}) {
      const Problem p = Widthless<S>(queries, std::max<int64_t>(keys, 7), options);
      ASSERT_TRUE(IsWidthless(p));
      const Results<S> results = Compute<S>(p, {}, scheduler);
      EXPECT_TRUE(SameBits(results.logsumexp, ByTheKernel<S>(p, scheduler)));
      EXPECT_EQ(results.peak_workspace_bytes, CostOf(p, 2).workspace_bytes);
    }
  }
}

TEST(WidthlessTest, TakesNoTimeForManyKeys) {
  // 2^48 pairs.
  const auto p = Widthless<double>(int64_t{1} << 16, (int64_t{1} << 31) - 1);
  Scheduler scheduler(2);
  const Results<double> results = Compute<double>(p, {}, scheduler);
  const double expected = std::log(static_cast<double>(p.keys));
  EXPECT_TRUE(
      Near(results.logsumexp, std::vector<double>(results.logsumexp.size(), expected), 1e-14));
}

TEST(WidthlessTest, WhatIsNotClosedIsNotTakenForShort) {
  Speed speed;
  for (DTypeSpeed& of : speed.of) {
    of.chunked_path = of.chunked_few = of.explicit_path = of.explicit_few = {1e-6, 1e-11, 0, 0};
  }
  AttendOptions options;
  options.return_key_sums = true;
  for (const int64_t queries : {1, 1 << 20}) {
    const Problem p = Widthless<float>(queries, (int64_t{1} << 31) - 1, options);
    EXPECT_FALSE(IsWidthless(p));
    EXPECT_GT(SecondsOf(p, speed), 1e-2);
    const Problem closed = Widthless<float>(queries, (int64_t{1} << 31) - 1);
    EXPECT_LT(SecondsOf(closed, speed), 1e-3);
    EXPECT_GT(SecondsOf(closed, speed), 0);
  }
}

}  // namespace
}  // namespace attendant::core
