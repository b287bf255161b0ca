// float16 and bfloat16, on both paths.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "core/attend.h"
#include "core/cost.h"
#include "core/half.h"
#include "core/problem.h"
#include "core/scheduler.h"
#include "tests/core/attend_testing.h"
#include "tests/core/fused_testing.h"
#include "tests/core/testing.h"

namespace attendant::core {
namespace {

template <typename Param>
class AttendHalfTest : public AttendTest<Param> {};
using HalfRuns = testing::Types<Run<Float16, Kernel::kFused>, Run<BFloat16, Kernel::kFused>,
                                Run<Float16, Kernel::kOneDnn>, Run<BFloat16, Kernel::kOneDnn>>;
TYPED_TEST_SUITE(AttendHalfTest, HalfRuns);

TYPED_TEST(AttendHalfTest, MatchesTheOracleAcrossBlocks) {
  const std::pair<int64_t, int64_t> lengths[] = {{1, 1},     {1, 600},  {3, 70},     {65, 257},
                                                 {129, 513}, {300, 40}, {257, 1100}, {5, 0}};
  for (const auto& [queries, keys] : lengths) {
    for (const Layout layout : kBothLayouts) {
      for (const Causal causal : kBothCausal) {
        this->ExpectOracleOnRandom({.batch = 2,
                                    .heads = 2,
                                    .kv_heads = 1,
                                    .queries = queries,
                                    .keys = keys,
                                    .width = 5,
                                    .value_width = 7},
                                   ReturningAll(causal, layout));
      }
    }
  }
}

TYPED_TEST(AttendHalfTest, MatchesTheOracleAtEveryWidth) {
  for (const auto& [width, value_width] :
       {std::pair<int64_t, int64_t>{64, 64}, {80, 96}, {1, 160}, {256, 3}, {0, 8}, {8, 0}}) {
    for (const int64_t queries : {2, 70}) {
      this->ExpectOracleOnRandom(
          {.queries = queries, .keys = 70, .width = width, .value_width = value_width},
          ReturningAll());
    }
  }
}

TYPED_TEST(AttendHalfTest, MatchesTheOracleOnRandomProblems) {
  ExpectOracleOnRandomProblems<typename TestFixture::Real>(this->scheduler_);
}

TYPED_TEST(AttendHalfTest, TakesMasksOfItsOwnTypeAndOfFloat) {
  using S = typename TestFixture::Real;
  for (const DType dtype : {DType::kBool, DTypeOf<S>(), DType::kFloat32}) {
    for (const int64_t queries : {2, 70}) {
      AttendOptions options = ReturningAll();
      options.mask = TensorSpec{dtype, {queries, 300}};
      const Problem problem =
          ProblemOf<S>({.queries = queries, .keys = 300, .width = 4, .value_width = 3}, options);
      Inputs<S> inputs = RandomInputs<S>(problem, 5);
      inputs.mask = RandomMask(*options.mask, 6);
      ExpectOracle(problem, inputs, this->scheduler_);
    }
  }
}

// One query, two keys.
template <typename S>
std::vector<double> Output(const AttendOptions& options, const Inputs<float>& inputs, Path path,
                           Scheduler& scheduler) {
  const auto width = static_cast<int64_t>(inputs.query.size());
  const Problem problem = ProblemOf<S>({.keys = 2, .width = width}, options);
  const Inputs<S> stored{Stored<S>(inputs.query), Stored<S>(inputs.key), Stored<S>(inputs.value)};
  return ToDouble(Compute(On(path, problem), stored, scheduler).output);
}

TYPED_TEST(AttendHalfTest, SumsAreTakenInFloat) {
  using S = typename TestFixture::Real;
  for (const Path path : kBothPaths) {
    // The sum of two values that a half cannot hold.
    const double large = ToDouble(Stored<S>({60000}))[0];
    EXPECT_EQ(Output<S>({}, {{0}, {1, 2}, {60000, 60000}}, path, this->scheduler_)[0], large);
    // Scores that a half cannot hold.
    AttendOptions options;
    options.scale = 1;
    std::vector<float> key(512, 16);
    key.resize(1024, 8);
    EXPECT_EQ(
        Output<S>(options, {std::vector<float>(512, 16), key, {3, 5}}, path, this->scheduler_)[0],
        3);
  }
}

TYPED_TEST(AttendHalfTest, KeysHiddenFromEveryQueryNeverShow) {
  using S = typename TestFixture::Real;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const int64_t queries : {2, 70}) {
    AttendOptions options = ReturningAll();
    options.mask = TensorSpec{DType::kBool, {300}};
    const Problem problem =
        ProblemOf<S>({.queries = queries, .keys = 300, .width = 8, .value_width = 5}, options);
    Inputs<S> clean = RandomInputs<S>(problem, 11);
    clean.mask.assign(300, 1);
    for (const size_t j : {0, 130, 299}) clean.mask[j] = 0;
    for (const Path path : kBothPaths) {
      const auto expected = Compute(On(path, problem), clean, this->scheduler_);
      for (const float poison : {std::numeric_limits<float>::quiet_NaN(), kInfinity, -kInfinity}) {
        const S stored = Stored<S>({poison})[0];
        Inputs<S> poisoned = clean;
        for (const int64_t j : {0, 130, 299}) {
          FillRow(poisoned.key, j, problem.width, stored);
          FillRow(poisoned.value, j, problem.value_width, stored);
        }
        ExpectSameBits(Compute(On(path, problem), poisoned, this->scheduler_), expected);
      }
    }
  }
}

TYPED_TEST(AttendHalfTest, WorkspaceIsWhatTheCostSays) {
  using S = typename TestFixture::Real;
  for (const int64_t queries : {2, 140}) {
    for (const bool weights : {false, true}) {
      AttendOptions options = Options(Causal::kNone, Layout::kBthd);
      options.return_weights = weights;
      const auto problem = ProblemOf<S>({.batch = 2,
                                         .heads = 2,
                                         .kv_heads = 2,
                                         .queries = queries,
                                         .keys = 600,
                                         .width = 4,
                                         .value_width = 4},
                                        options);
      const Inputs<S> inputs = RandomInputs<S>(problem, 16);
      for (const int threads : {1, 2}) {
        Scheduler scheduler(threads);
        for (const Path path : kBothPaths) {
          const int64_t peak = Compute(On(path, problem), inputs, scheduler).peak_workspace_bytes;
          const int64_t stated =
              CostOf(On(path, problem), threads, KernelUnderTest()).workspace_bytes;
          EXPECT_GT(peak, 0);
          EXPECT_EQ(peak, stated) << NameOf(path);
        }
      }
    }
  }
}

// The chunked path's promise: what float computes of the same numbers, rounded.
template <typename Param>
class HalfPathTest : public TargetTest<Param> {};
TYPED_TEST_SUITE(HalfPathTest, FloatTargets, NameOnTarget);

template <typename S>
void ExpectFloatRounded(const Sizes& sizes, AttendOptions options, Scheduler& scheduler) {
  const Problem problem = ProblemOf<S>(sizes, options);
  SCOPED_TRACE(Describe(problem));
  Inputs<S> inputs = RandomInputs<S>(problem, 3);
  Inputs<float> wide{Widened(inputs.query), Widened(inputs.key), Widened(inputs.value)};
  if (options.mask.has_value()) {
    inputs.mask = RandomMask(*options.mask, 4);
    const std::vector<double> numbers = MaskNumbers(problem, inputs.mask);
    options.mask->dtype = DType::kFloat32;
    wide.mask = MaskOf(DType::kFloat32, numbers);
  }
  const Results<S> results = Compute(problem, inputs, scheduler);
  const Results<float> expected = Compute(ProblemOf<float>(sizes, options), wide, scheduler);
  EXPECT_TRUE(SameBits(results.output, Stored<S>(expected.output)));
  EXPECT_TRUE(SameBits(results.weights, Stored<S>(expected.weights)));
  EXPECT_TRUE(SameBits(results.logsumexp, expected.logsumexp));
  EXPECT_TRUE(SameBits(results.key_sums, expected.key_sums));
}

TYPED_TEST(HalfPathTest, HalvesAreComputedAsFloatsAndRoundedOnce) {
  for (const int threads : {1, 8}) {
    Scheduler scheduler(threads);
    for (const auto& [queries, keys] :
         {std::pair<int64_t, int64_t>{1, 430}, {3, 4100}, {40, 430}, {230, 70}}) {
      for (const Layout layout : kBothLayouts) {
        for (const bool more : {false, true}) {
          for (const int64_t width : {6, 160}) {
            if (queries * keys * width > 2'000'000) continue;
            AttendOptions options =
                ReturningAll(more ? Causal::kBottomRight : Causal::kNone, layout);
            options.window = more ? Window{300, std::nullopt} : Window{};
            options.softcap = more ? 3 : 0;
            const Sizes sizes{.heads = 4,
                              .kv_heads = 2,
                              .queries = queries,
                              .keys = keys,
                              .width = width,
                              .value_width = width};
            if (more) options.mask = TensorSpec{DType::kFloat16, {queries, keys}};
            ExpectFloatRounded<Float16>(sizes, options, scheduler);
            if (more) options.mask = TensorSpec{DType::kBFloat16, {queries, keys}};
            ExpectFloatRounded<BFloat16>(sizes, options, scheduler);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace attendant::core
