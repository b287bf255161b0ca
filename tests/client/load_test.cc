// attend_load's schedule and summary.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "bench/load/schedule.h"
#include "bench/load/summary.h"

namespace attendant::load {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

TEST(ScheduleTest, SizesAndPhasesAreRead) {
  const auto sizes = ParseSizes("1x8x128x64:9,1x2x3x4:0.5,5x6x7x8");
  ASSERT_TRUE(sizes.ok()) << sizes.status();
  ASSERT_EQ(sizes->size(), 3u);
  EXPECT_THAT((*sizes)[0].shape, ElementsAre(1, 8, 128, 64));
  EXPECT_EQ((*sizes)[0].weight, 9);
  EXPECT_EQ((*sizes)[1].weight, 0.5);
  EXPECT_EQ((*sizes)[2].name(), "5x6x7x8");
  const auto phases = ParsePhases("50:10s,0.5:1m");
  ASSERT_TRUE(phases.ok()) << phases.status();
  EXPECT_EQ((*phases)[1].rate, 0.5);
  EXPECT_EQ((*phases)[1].duration, absl::Minutes(1));
  for (const char* const bad : {"", "1x2x3", "1x2x3x4x5", "0x1x1x1", "axbxcxd", "1x2x3x4:0",
                                "1x2x3x4:1:1", "1x2x3x4,", "1x1x2000000x2000"}) {
    EXPECT_FALSE(ParseSizes(bad).ok()) << bad;
  }
  for (const char* const bad : {"", "50", "0:1s", "-1:1s", "nan:1s", "50:0s", "50:inf", "50:x"}) {
    EXPECT_FALSE(ParsePhases(bad).ok()) << bad;
  }
}

TEST(ScheduleTest, ConstantArrivalsAreEvenlySpaced) {
  const auto schedule = MakeSchedule({{10, absl::Seconds(1)}, {100, absl::Milliseconds(50)}},
                                     {{{1, 1, 1, 1}, 1}}, Arrivals::kConstant, 1);
  ASSERT_TRUE(schedule.ok());
  ASSERT_EQ(schedule->size(), 15u);
  EXPECT_EQ((*schedule)[0].at, absl::ZeroDuration());
  EXPECT_NEAR(absl::ToDoubleSeconds((*schedule)[9].at), 0.9, 1e-9);
  EXPECT_NEAR(absl::ToDoubleSeconds((*schedule)[10].at), 1, 1e-9);
  EXPECT_NEAR(absl::ToDoubleSeconds((*schedule)[14].at), 1.04, 1e-9);
  EXPECT_EQ((*schedule)[9].phase, 0u);
  EXPECT_EQ((*schedule)[10].phase, 1u);
}

// 50,000 exponential gaps: their mean and deviation are both 1 / rate, to within 5 of their own
// standard errors, and sizes come as often as they weigh.
TEST(ScheduleTest, PoissonArrivalsHaveExponentialGaps) {
  constexpr double kCount = 50000;
  const auto schedule = MakeSchedule({{100, absl::Seconds(kCount / 100)}},
                                     {{{1, 1, 1, 1}, 3}, {{2, 2, 2, 2}, 1}}, Arrivals::kPoisson, 7);
  ASSERT_TRUE(schedule.ok());
  EXPECT_NEAR(static_cast<double>(schedule->size()), kCount, 5 * std::sqrt(kCount));
  double sum = 0, squares = 0, larger = 0;
  absl::Duration before;
  for (const Arrival& arrival : *schedule) {
    const double gap = absl::ToDoubleSeconds(arrival.at - before) * 100;
    ASSERT_GE(gap, 0);
    sum += gap;
    squares += gap * gap;
    larger += arrival.size == 1 ? 1 : 0;
    before = arrival.at;
  }
  const auto n = static_cast<double>(schedule->size());
  EXPECT_NEAR(sum / n, 1, 5 / std::sqrt(n));
  EXPECT_NEAR(squares / n, 2, 5 * std::sqrt(20 / n));  // E[gap^4] - E[gap^2]^2 = 24 - 4
  EXPECT_NEAR(larger / n, 0.25, 5 * std::sqrt(0.1875 / n));
  const auto again =
      MakeSchedule({{100, absl::Seconds(1)}}, {{{1, 1, 1, 1}, 1}}, Arrivals::kPoisson, 7);
  const auto other =
      MakeSchedule({{100, absl::Seconds(1)}}, {{{1, 1, 1, 1}, 1}}, Arrivals::kPoisson, 8);
  EXPECT_EQ((*schedule)[0].at, (*again)[0].at);
  EXPECT_NE((*schedule)[0].at, (*other)[0].at);
}

TEST(ScheduleTest, TooManyCallsAreRefused) {
  const auto schedule =
      MakeSchedule({{1e6, absl::Hours(1)}}, {{{1, 1, 1, 1}, 1}}, Arrivals::kPoisson, 1);
  EXPECT_THAT(std::string(schedule.status().message()), HasSubstr("3.6e+09 calls"));
}

TEST(SummaryTest, PercentilesAreExact) {
  std::vector<double> numbers(1000);
  std::iota(numbers.begin(), numbers.end(), 1);
  EXPECT_EQ(Percentile(numbers, 0), 1);
  EXPECT_EQ(Percentile(numbers, 0.5), 500);
  EXPECT_EQ(Percentile(numbers, 0.99), 990);
  EXPECT_EQ(Percentile(numbers, 0.999), 999);
  EXPECT_EQ(Percentile(numbers, 0.9991), 1000);
  EXPECT_EQ(Percentile(numbers, 1), 1000);
  EXPECT_EQ(Percentile({5}, 0.5), 5);
  const Latencies of_three = LatenciesOf({3, 1, 2});
  EXPECT_EQ(of_three.p50, 2);
  EXPECT_EQ(of_three.max, 3);
  EXPECT_EQ(LatenciesOf({}).max, 0);
}

Record Made(double at, size_t phase, double seconds, absl::StatusCode code) {
  return {{absl::Seconds(at), phase % 2, phase}, absl::Seconds(seconds), code};
}

TEST(SummaryTest, CountsByPhaseSizeStatusAndSecond) {
  const std::vector<Record> records = {
      Made(0.5, 0, 9, absl::StatusCode::kOk), Made(1.5, 0, 1, absl::StatusCode::kOk),
      Made(2.5, 1, 2, absl::StatusCode::kOk), Made(2.6, 1, 4, absl::StatusCode::kOk),
      Made(2.7, 1, 7, absl::StatusCode::kResourceExhausted)};
  const Summary summary =
      Summarize(records, {{1, absl::Seconds(2)}, {3, absl::Seconds(2)}},
                {{{1, 1, 1, 1}, 1}, {{2, 2, 2, 2}, 1}}, absl::Seconds(1), absl::Seconds(3.5));
  EXPECT_EQ(summary.all.calls, 4);
  EXPECT_DOUBLE_EQ(summary.all.seconds, 2.5);
  EXPECT_DOUBLE_EQ(summary.all.goodput, 3 / 2.5);
  EXPECT_EQ(summary.all.answered.max, 4);
  EXPECT_EQ(summary.all.refused.count, 1);
  EXPECT_THAT(summary.all.statuses, ElementsAre(Pair("OK", 3), Pair("RESOURCE_EXHAUSTED", 1)));
  ASSERT_EQ(summary.phases.size(), 2u);
  EXPECT_DOUBLE_EQ(summary.phases[0].seconds, 1);
  EXPECT_DOUBLE_EQ(summary.phases[1].goodput, 2 / 1.5);
  EXPECT_EQ(summary.sizes[1].calls, 3);
  ASSERT_EQ(summary.timeline.size(), 3u);
  EXPECT_EQ(summary.timeline[0].answered, 1);  // warm-up
  EXPECT_EQ(summary.timeline[2].calls, 3);
  EXPECT_EQ(summary.timeline[2].p50, 2);
  const Health health{LatenciesOf({0.001}), 2};
  const std::string text = ToText(summary, &health);
  EXPECT_THAT(text, HasSubstr("RESOURCE_EXHAUSTED     1"));
  EXPECT_THAT(text, HasSubstr("health checks failed   2"));
  const std::string json = ToJson(summary, &health);
  EXPECT_THAT(json, HasSubstr(R"("calls": 4, "failed": 1, "goodput": 1.2)"));
  EXPECT_THAT(json, HasSubstr(R"("failed": 2})"));
}

}  // namespace
}  // namespace attendant::load
