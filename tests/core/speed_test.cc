#include "core/speed.h"

#include <gtest/gtest.h>

#include "core/cost.h"
#include "core/workspace.h"

namespace attendant::core {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};
constexpr Path kPaths[] = {Path::kExplicit, Path::kChunked};

Problem Square(Path path, int64_t tokens, DType dtype = DType::kFloat32) {
  Problem p;
  p.dtype = dtype;
  p.path = path;
  p.batch = 2;
  p.heads = p.kv_heads = 3;
  p.queries = p.keys = tokens;
  p.width = 8;
  p.value_width = 4;
  return p;
}

HeadProblem HeadOf(const Problem& attend) {
  HeadProblem head;
  head.attend = attend;
  head.d_model = 16;
  head.x_has_batch = true;
  return head;
}

// Rates that tell each term apart.
Speed MadeUp() {
  Speed speed;
  for (DTypeSpeed& of : speed.of) {
    of.explicit_path = {1, 0x1p-10, 0x1p-12, 0};
    of.chunked_path = {2, 0x1p-9, 0x1p-13, 0x1p-3};
    of.explicit_few = {3, 0x1p-8, 0, 0};
    of.chunked_few = {4, 0x1p-7, 0, 0};
    of.projection_flop_seconds = 0x1p-6;
  }
  speed.read_byte_seconds = 0x1p-5;
  speed.fresh_byte_seconds = 0x1p-20;
  return speed;
}

// Of the products and the pairs of Square: 2 * 3 heads, 8 + 4 wide.
constexpr double kPairs = 6.0 * 100 * 100;
constexpr double kFlops = 2 * kPairs * 12;

TEST(SpeedTest, EachPathHasItsOwnRates) {
  EXPECT_DOUBLE_EQ(SecondsOf(Square(Path::kExplicit, 100), MadeUp()),
                   1 + kFlops * 0x1p-10 + kPairs * 0x1p-12);
  EXPECT_DOUBLE_EQ(SecondsOf(Square(Path::kChunked, 100), MadeUp()),
                   2 + kFlops * 0x1p-9 + kPairs * 0x1p-13);
}

TEST(SpeedTest, WhatACausalMaskHidesCostsTheExplicitPathItsSoftmaxAlone) {
  constexpr double kVisible = 6.0 * 100 * 101 / 2;
  Problem p = Square(Path::kExplicit, 100);
  p.causal = Causal::kTopLeft;
  EXPECT_DOUBLE_EQ(SecondsOf(p, MadeUp()), 1 + 24 * kVisible * 0x1p-10 + kPairs * 0x1p-12);
  // And on the chunked path each query the rest of a block.
  p.path = Path::kChunked;
  EXPECT_DOUBLE_EQ(SecondsOf(p, MadeUp()),
                   2 + 24 * kVisible * 0x1p-9 + kVisible * 0x1p-13 + 600 * 0x1p-3);
}

TEST(SpeedTest, ScoresBeyondWhatIsKeptCostTheirBytes) {
  // 6 heads of 4 bytes a score: 32 MiB are 1182.4 tokens squared.
  const auto more = [](int64_t tokens) {
    const Problem p = Square(Path::kExplicit, tokens);
    Speed slower = MadeUp();
    slower.fresh_byte_seconds *= 2;
    return SecondsOf(p, slower) - SecondsOf(p, MadeUp());
  };
  EXPECT_EQ(more(1182), 0);
  EXPECT_DOUBLE_EQ(more(1183), 4.0 * 6 * 1183 * 1183 * 0x1p-20);
}

TEST(SpeedTest, FewQueriesReadTheirKeysAndValues) {
  for (const Path path : kPaths) {
    Problem p = Square(path, 100);
    p.queries = 1;
    p.kv_heads = 1;
    const double bytes = 4.0 * 2 * 1 * 100 * 12;
    const double flops = 2.0 * 6 * 100 * 12;
    EXPECT_DOUBLE_EQ(SecondsOf(p, MadeUp()), path == Path::kExplicit
                                                 ? 3 + flops * 0x1p-8 + bytes * 0x1p-5
                                                 : 4 + flops * 0x1p-7 + bytes * 0x1p-5);
  }
}

TEST(SpeedTest, ReturnedWeightsAreASecondSweepOfTheChunkedPath) {
  for (bool Problem::*wanted : {&Problem::return_weights, &Problem::return_key_sums}) {
    for (const Path path : kPaths) {
      Problem p = Square(path, 100);
      const double once = SecondsOf(p, MadeUp());
      p.*wanted = true;
      const double scores = 2 * kPairs * 8;
      EXPECT_DOUBLE_EQ(SecondsOf(p, MadeUp()) - once,
                       path == Path::kExplicit ? 0 : 2 + scores * 0x1p-9 + kPairs * 0x1p-13);
    }
  }
}

TEST(SpeedTest, AHeadAddsItsProjections) {
  for (const Path path : kPaths) {
    const Problem p = Square(path, 100);
    // Two inputs, six heads, 2 * 8 + 2 * 4 columns of each.
    const double flops = 2.0 * 100 * 16 * 6 * 24;
    EXPECT_DOUBLE_EQ(SecondsOf(HeadOf(p), MadeUp()), SecondsOf(p, MadeUp()) + flops * 0x1p-6);
  }
  // Inside, half precision is as wide as it is computed.
  Speed speed = MadeUp();
  speed.of[static_cast<size_t>(DType::kFloat16)].chunked_path = {};
  EXPECT_DOUBLE_EQ(SecondsOf(HeadOf(Square(Path::kChunked, 100, DType::kFloat16)), speed),
                   SecondsOf(HeadOf(Square(Path::kChunked, 100)), MadeUp()));
}

TEST(SpeedTest, AGradientTakesAsLongAsItsProductsAreMore) {
  GradientProblem gradient;
  gradient.attend = Square(Path::kChunked, 100);
  const double more = static_cast<double>(ProductFlops(gradient)) / kFlops;
  EXPECT_GT(more, 2);
  EXPECT_DOUBLE_EQ(SecondsOf(gradient, MadeUp()), more * SecondsOf(gradient.attend, MadeUp()));
  EXPECT_EQ(SecondsOf(gradient, Speed()), 0);
  gradient.attend.width = gradient.attend.value_width = 0;
  EXPECT_EQ(SecondsOf(gradient, MadeUp()), 0);
}

TEST(SpeedTest, AMergeReadsItsTensors) {
  const MergeProblem merge{DType::kFloat32,  /*parts=*/2, /*batch=*/1, /*heads=*/3, /*queries=*/5,
                           /*value_width=*/7};
  // Two parts and the whole, rows of 7 numbers and one more.
  EXPECT_DOUBLE_EQ(SecondsOf(merge, MadeUp()), 3 * (15 * 4 * (7 + 1)) * 0x1p-5);
  EXPECT_EQ(SecondsOf(merge, Speed()), 0);
}

TEST(SpeedTest, WhatWasNotMeasuredAndWhatIsNothingTakeNone) {
  for (const Path path : kPaths) {
    EXPECT_EQ(SecondsOf(Square(path, 100), Speed()), 0);
    EXPECT_EQ(SecondsOf(HeadOf(Square(path, 100)), Speed()), 0);
    EXPECT_EQ(SecondsOf(Square(path, 0), MadeUp()), 0);
    Speed attention_alone = MadeUp();
    for (DTypeSpeed& of : attention_alone.of) of.projection_flop_seconds = 0;
    EXPECT_EQ(SecondsOf(HeadOf(Square(path, 100)), attention_alone), 0);
  }
}

TEST(SpeedTest, NominalRatesKnowShortFromLongOnEveryPath) {
  for (const int threads : {1, 4}) {
    const Speed speed = NominalSpeed(threads);
    for (const DType dtype : kDTypes) {
      for (const Path path : kPaths) {
        for (const int64_t queries : {1, 100}) {
          Problem p = Square(path, 100, dtype);
          p.queries = queries;
          const double seconds = SecondsOf(p, speed);
          EXPECT_GT(seconds, 0);
          EXPECT_LT(seconds, Scheduler::kShortSeconds);
          p.keys = 1'000'000;
          p.queries *= 100;
          EXPECT_GT(SecondsOf(p, speed), Scheduler::kShortSeconds);
          EXPECT_DOUBLE_EQ(SecondsOf(p, NominalSpeed(2 * threads)), SecondsOf(p, speed) / 2);
        }
        EXPECT_GT(SecondsOf(HeadOf(Square(path, 100, dtype)), speed), 0);
      }
    }
    EXPECT_GT(SecondsOf(MergeProblem{DType::kFloat32, 2, 1, 3, 5, 7}, speed), 0);
  }
}

TEST(SpeedCorrectionTest, FollowsWhatIsFasterQuicklyAndWhatIsSlowerSlowly) {
  SpeedCorrection correction;
  EXPECT_EQ(correction.factors().chunked_path, 1);
  correction.Observe(Path::kChunked, 1, 0.0625);
  EXPECT_DOUBLE_EQ(correction.factors().chunked_path, 0.5);
  EXPECT_EQ(correction.factors().explicit_path, 1);
  for (int i = 0; i < 40; ++i) correction.Observe(Path::kChunked, 0.04, 0.01);
  EXPECT_NEAR(correction.factors().chunked_path, 0.25, 1e-3);
  correction.Observe(Path::kExplicit, 1, 65536);
  EXPECT_DOUBLE_EQ(correction.factors().explicit_path, 2);
  for (int i = 0; i < 200; ++i) correction.Observe(Path::kExplicit, 1, 3);
  EXPECT_NEAR(correction.factors().explicit_path, 3, 1e-3);
}

TEST(SpeedCorrectionTest, SmallProblemsAndUnmeasuredOnesSayNothing) {
  SpeedCorrection correction;
  correction.Observe(Path::kChunked, 0, 1);
  correction.Observe(Path::kChunked, 1, 0);
  correction.Observe(Path::kChunked, 1e-3, 1);
  correction.Observe(Path::kChunked, 1, 1e-3);
  EXPECT_EQ(correction.factors().chunked_path, 1);
}

TEST(SpeedTest, EverythingIsMeasuredOnAnyNumberOfThreads) {
  for (const int threads : {1, 3}) {
    for (const Kernel kernel : {Kernel::kFused, Kernel::kOneDnn}) {
      Scheduler scheduler(threads);
      const Speed speed = MeasureSpeed(scheduler, kernel);
      for (const DType dtype : kDTypes) {
        for (const Path path : kPaths) {
          for (const int64_t queries : {1, 100}) {
            Problem p = Square(path, 100, dtype);
            p.queries = queries;
            EXPECT_GT(SecondsOf(p, speed), 0) << threads << NameOf(dtype) << NameOf(path);
          }
          const HeadProblem head = HeadOf(Square(path, 100, dtype));
          EXPECT_GT(SecondsOf(head, speed), 0) << threads << NameOf(dtype) << NameOf(path);
        }
      }
    }
  }
  EXPECT_EQ(Workspace::Process().current_bytes(), 0);
}

TEST(SpeedTest, WithoutMemoryNothingIsMeasuredAndNothingFails) {
  Workspace::Process().SetLimit(1000);
  Scheduler scheduler(1);
  const Speed speed = MeasureSpeed(scheduler, Kernel::kFused);
  Workspace::Process().SetLimit(INT64_MAX);
  for (const DType dtype : kDTypes)
    EXPECT_EQ(SecondsOf(Square(Path::kChunked, 9, dtype), speed), 0);
}

}  // namespace
}  // namespace attendant::core
