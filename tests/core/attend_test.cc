#include "core/attend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <vector>

#include "core/cost.h"
#include "core/scheduler.h"
#include "core/workspace.h"
#include "tests/core/attend_testing.h"
#include "tests/core/oracle.h"
#include "tests/core/testing.h"

namespace attendant::core {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

TYPED_TEST_SUITE(AttendTest, Runs);

// Blocks are 64 queries on the explicit path, 128 on the chunked one; 256 keys on the chunked one,
// 512 where the explicit one sums them.
TYPED_TEST(AttendTest, MatchesTheOracleAtEveryLength) {
  const std::pair<int64_t, int64_t> lengths[] = {
      {0, 0},     {0, 5},     {5, 0},     {1, 1},     {1, 257},   {257, 1},   {63, 255},
      {64, 256},  {65, 257},  {127, 511}, {128, 512}, {129, 513}, {193, 127}, {256, 128},
      {255, 63},  {511, 64},  {512, 65},  {513, 129}, {385, 385}, {1, 1025},  {3, 1537},
      {257, 769}, {129, 129}, {300, 40},  {40, 300},
  };
  for (const auto& [queries, keys] : lengths) {
    for (const Causal causal : kBothCausal) {
      this->ExpectOracleOnRandom({.queries = queries, .keys = keys, .width = 5, .value_width = 6},
                                 ReturningAll(causal));
    }
  }
}

TYPED_TEST(AttendTest, MatchesTheOracleAtEveryWidth) {
  const std::pair<int64_t, int64_t> widths[] = {
      {1, 1},   {3, 8},   {8, 3},    {64, 64},  {80, 96},   {96, 80}, {128, 160}, {160, 128},
      {256, 1}, {1, 256}, {512, 64}, {64, 512}, {512, 512}, {0, 3},   {3, 0},     {0, 0},
  };
  for (const auto& [width, value_width] : widths) {
    for (const Causal causal : kBothCausal) {
      this->ExpectOracleOnRandom(
          {.queries = 66, .keys = 70, .width = width, .value_width = value_width},
          ReturningAll(causal));
    }
  }
  this->ExpectOracleOnRandom({.queries = 130, .keys = 260, .width = 80, .value_width = 96},
                             ReturningAll());
}

TYPED_TEST(AttendTest, GroupsOfQueryHeadsShareAKeyHeadInBothLayouts) {
  const std::pair<int64_t, int64_t> heads[] = {{4, 4}, {4, 2}, {4, 1}, {3, 1}};
  for (const auto& [query_heads, kv_heads] : heads) {
    for (const Layout layout : kBothLayouts) {
      for (const Causal causal : kBothCausal) {
        this->ExpectOracleOnRandom({.batch = 2,
                                    .heads = query_heads,
                                    .kv_heads = kv_heads,
                                    .queries = 67,
                                    .keys = 70,
                                    .width = 4,
                                    .value_width = 7},
                                   ReturningAll(causal, layout));
      }
    }
  }
}

// Consecutive query heads share a key head: a head's value is its index.
TYPED_TEST(AttendTest, QueryHeadsReadTheKeyHeadOfTheirGroup) {
  using T = typename TestFixture::Real;
  const Problem problem = ProblemOf<T>({.heads = 4, .kv_heads = 2}, {});
  const Inputs<T> inputs{{0, 0, 0, 0}, {1, 1}, {0, 1}};
  for (const Path path : kBothPaths) {
    const auto results = Compute(On(path, problem), inputs, this->scheduler_);
    EXPECT_THAT(results.output, ElementsAre(0, 0, 1, 1)) << NameOf(path);
  }
}

// Which keys a query sees, in every combination.
TYPED_TEST(AttendTest, MatchesTheOracleWhereSomeKeysAreSeen) {
  const std::pair<int64_t, int64_t> all[] = {{1, 300}, {3, 70}, {130, 300}, {300, 130}, {70, 70}};
  const Window windows[] = {{}, {0, 0}, {5, 2}, {std::nullopt, 0}, {64, std::nullopt}};
  for (const auto& [queries, keys] : all) {
    for (const Causal causal : {Causal::kNone, Causal::kTopLeft, Causal::kBottomRight}) {
      for (const Window& window : windows) {
        for (const bool shorter : {false, true}) {
          AttendOptions options = ReturningAll(causal);
          options.window = window;
          if (shorter) options.key_lengths = {0, keys / 2 + 1, keys};
          this->ExpectOracleOnRandom({.batch = 3,
                                      .heads = 2,
                                      .queries = queries,
                                      .keys = keys,
                                      .width = 3,
                                      .value_width = 2},
                                     options);
        }
      }
    }
  }
}

// One element a token, every live score equal: a row's output is the mean of the values it sees.
template <typename T>
void ExpectMeans(const Sizes& sizes, const AttendOptions& options, const std::vector<T>& values,
                 const std::vector<double>& means, Scheduler& scheduler) {
  const Problem problem = ProblemOf<T>(sizes, options);
  SCOPED_TRACE(Describe(problem));
  Inputs<T> inputs = RandomInputs<T>(problem, 1);
  inputs.query.assign(inputs.query.size(), 0);
  inputs.value = values;
  for (const Path path : kBothPaths) {
    EXPECT_TRUE(Near(Compute(On(path, problem), inputs, scheduler).output, means, 0, 1e-6))
        << NameOf(path);
  }
}

TYPED_TEST(AttendTest, CausalCountsFromTheTopLeftOrTheBottomRight) {
  using T = typename TestFixture::Real;
  const std::vector<T> values = {0, 1, 2, 3};
  const Sizes one{.queries = 1, .keys = 4};
  ExpectMeans<T>(one, Options(Causal::kTopLeft), values, {0}, this->scheduler_);
  ExpectMeans<T>(one, Options(Causal::kBottomRight), values, {1.5}, this->scheduler_);
  ExpectMeans<T>({.queries = 5, .keys = 2}, Options(Causal::kBottomRight), {2, 4}, {0, 0, 0, 2, 3},
                 this->scheduler_);
}

TYPED_TEST(AttendTest, LengthsEndTheKeysOfEachBatch) {
  using T = typename TestFixture::Real;
  AttendOptions options;
  options.key_lengths = {1, 3};
  ExpectMeans<T>({.batch = 2, .keys = 3}, options, {1, 10, 100, 1, 10, 100}, {1, 37},
                 this->scheduler_);
}

// Softcap, ALiBi and sinks, each alone and all of them together.
TYPED_TEST(AttendTest, MatchesTheOracleWhereScoresAreChanged) {
  const std::pair<int64_t, int64_t> all[] = {{1, 300}, {3, 70}, {130, 300}, {300, 130}, {5, 0}};
  for (const auto& [queries, keys] : all) {
    for (const Causal causal : {Causal::kNone, Causal::kTopLeft, Causal::kBottomRight}) {
      for (int changes = 1; changes < 8; ++changes) {
        AttendOptions options = ReturningAll(causal);
        options.scale = 2;
        if ((changes & 1) != 0) options.softcap = 3;
        if ((changes & 2) != 0) options.alibi_slopes = {0.25, 0, -0.01, 0.5};
        if ((changes & 4) != 0) {
          options.sinks = {0.5, -20, -std::numeric_limits<double>::infinity(), 4};
        }
        this->ExpectOracleOnRandom({.batch = 2,
                                    .heads = 4,
                                    .kv_heads = 2,
                                    .queries = queries,
                                    .keys = keys,
                                    .width = 3,
                                    .value_width = 2},
                                   options);
      }
    }
  }
}

TYPED_TEST(AttendTest, AlibiCountsTheDistanceFromTheOffset) {
  using T = typename TestFixture::Real;
  AttendOptions options = ReturningAll(Causal::kBottomRight);
  options.alibi_slopes = {0.5};
  const Problem problem = ProblemOf<T>({.queries = 1, .keys = 3}, options);
  Inputs<T> inputs = RandomInputs<T>(problem, 1);
  inputs.query = {0};
  for (const Path path : kBothPaths) {
    const auto weights = Compute(On(path, problem), inputs, this->scheduler_).weights;
    EXPECT_TRUE(Near(weights, {0.186, 0.307, 0.506}, 6e-4)) << NameOf(path);
  }
}

TYPED_TEST(AttendTest, ASinkTakesWeightAndGivesNoValue) {
  using T = typename TestFixture::Real;
  AttendOptions options = ReturningAll();
  options.sinks = {std::log(2.0)};
  const Problem problem = ProblemOf<T>({.queries = 1, .keys = 2}, options);
  const Inputs<T> inputs{{0}, {1, 2}, {4, 8}};
  const Problem nothing = ProblemOf<T>({.queries = 1, .keys = 0}, options);
  for (const Path path : kBothPaths) {
    const auto results = Compute(On(path, problem), inputs, this->scheduler_);
    EXPECT_TRUE(Near(results.weights, {0.25, 0.25}, 1e-6)) << NameOf(path);
    EXPECT_TRUE(Near(results.output, {3}, 1e-6)) << NameOf(path);
    EXPECT_TRUE(Near(results.logsumexp, {std::log(4.0)}, 1e-6)) << NameOf(path);
    const auto alone = Compute<T>(On(path, nothing), {{0}, {}, {}}, this->scheduler_);
    EXPECT_EQ(alone.output[0], 0) << NameOf(path);
    EXPECT_TRUE(Near(alone.logsumexp, {std::log(2.0)}, 1e-6)) << NameOf(path);
  }
}

TYPED_TEST(AttendTest, AWindowCountsTheOthersOnEachSide) {
  using T = typename TestFixture::Real;
  AttendOptions options;
  options.window = Window{1, 0};
  ExpectMeans<T>({.queries = 3, .keys = 3}, options, {0, 3, 9}, {0, 1.5, 6}, this->scheduler_);
}

TYPED_TEST(AttendTest, TakesAnyFiniteScale) {
  for (const std::optional<double> scale : {std::optional<double>(), {0.0}, {-0.7}, {2.5}}) {
    AttendOptions options = ReturningAll(Causal::kTopLeft);
    options.scale = scale;
    this->ExpectOracleOnRandom({.queries = 70, .keys = 70, .width = 6, .value_width = 6}, options);
  }
}

TYPED_TEST(AttendTest, ScaleIsOneOverTheRootOfTheWidthByDefault) {
  const Sizes sizes{.queries = 9, .keys = 9, .width = 16, .value_width = 3};
  AttendOptions quarter = ReturningAll();
  quarter.scale = 0.25;
  const Problem problem = ProblemOf<typename TestFixture::Real>(sizes, ReturningAll());
  const auto inputs = RandomInputs<typename TestFixture::Real>(problem, 2);
  ExpectSameBits(
      Compute(problem, inputs, this->scheduler_),
      Compute(ProblemOf<typename TestFixture::Real>(sizes, quarter), inputs, this->scheduler_));
}

TYPED_TEST(AttendTest, ScaleOfZeroAndWidthOfZeroMakeUniformWeights) {
  AttendOptions options = ReturningAll();
  options.scale = 0;
  for (const int64_t width : {0, 3}) {
    const auto problem = ProblemOf<typename TestFixture::Real>(
        {.queries = 5, .keys = 8, .width = width, .value_width = 2}, options);
    for (const Path path : kBothPaths) {
      const auto results =
          Compute(On(path, problem), RandomInputs<typename TestFixture::Real>(problem, 3),
                  this->scheduler_);
      EXPECT_THAT(results.weights, Each(typename TestFixture::Real{0.125}));
    }
  }
}

TYPED_TEST(AttendTest, ReturnsWhatIsAskedForAndNothingElse) {
  for (int asked = 0; asked < 8; ++asked) {
    AttendOptions options = Options(Causal::kTopLeft);
    options.return_weights = (asked & 1) != 0;
    options.return_logsumexp = (asked & 2) != 0;
    options.return_key_sums = (asked & 4) != 0;
    this->ExpectOracleOnRandom(
        {.heads = 2, .queries = 140, .keys = 270, .width = 4, .value_width = 4}, options);
  }
}

TYPED_TEST(AttendTest, OutputDoesNotDependOnWhatElseIsReturned) {
  const Sizes sizes{.heads = 2, .queries = 140, .keys = 270, .width = 4, .value_width = 4};
  const Problem all = ProblemOf<typename TestFixture::Real>(sizes, ReturningAll());
  const auto inputs = RandomInputs<typename TestFixture::Real>(all, 4);
  for (const Path path : kBothPaths) {
    const auto alone = Compute(On(path, ProblemOf<typename TestFixture::Real>(sizes, {})), inputs,
                               this->scheduler_);
    EXPECT_TRUE(SameBits(alone.output, Compute(On(path, all), inputs, this->scheduler_).output));
  }
}

// Of weights whose scores are exact, relative: the part of the tolerance that the scores do not
// add.
template <typename T>
double SumRoundings(int64_t keys) {
  return SumError(keys, UnitRoundoff<T>()) + 16 * UnitRoundoff<T>();
}

TYPED_TEST(AttendTest, EachRowOfWeightsSumsToOne) {
  const Problem problem = ProblemOf<typename TestFixture::Real>(
      {.heads = 2, .queries = 130, .keys = 600, .width = 8, .value_width = 1},
      ReturningAll(Causal::kTopLeft));
  const double tolerance = SumRoundings<typename TestFixture::Real>(problem.keys);
  for (const Path path : kBothPaths) {
    const auto results = Compute(
        On(path, problem), RandomInputs<typename TestFixture::Real>(problem, 5), this->scheduler_);
    for (auto row = results.weights.begin(); row != results.weights.end(); row += problem.keys) {
      double sum = 0;
      for (auto weight = row; weight != row + problem.keys; ++weight) sum += *weight;
      ASSERT_NEAR(sum, 1, tolerance) << NameOf(path);
    }
  }
}

TYPED_TEST(AttendTest, WithoutKeysOutputIsZeroAndLogSumExpMinusInfinity) {
  const auto problem = ProblemOf<typename TestFixture::Real>(
      {.heads = 2, .queries = 130, .keys = 0, .width = 4, .value_width = 3}, ReturningAll());
  for (const Path path : kBothPaths) {
    const auto results = Compute(
        On(path, problem), RandomInputs<typename TestFixture::Real>(problem, 6), this->scheduler_);
    EXPECT_THAT(results.output, Each(typename TestFixture::Real{0}));
    EXPECT_THAT(results.logsumexp,
                Each(-std::numeric_limits<typename TestFixture::Real>::infinity()));
    EXPECT_THAT(results.weights, IsEmpty());
    EXPECT_THAT(results.key_sums, IsEmpty());
  }
}

TYPED_TEST(AttendTest, AnySizeMayBeZero) {
  const Sizes usual{
      .batch = 2, .heads = 2, .kv_heads = 2, .queries = 3, .keys = 4, .width = 5, .value_width = 6};
  for (int64_t Sizes::*size : {&Sizes::batch, &Sizes::heads, &Sizes::queries, &Sizes::keys,
                               &Sizes::width, &Sizes::value_width}) {
    for (const Layout layout : kBothLayouts) {
      for (const Causal causal : kBothCausal) {
        Sizes sizes = usual;
        sizes.*size = 0;
        this->ExpectOracleOnRandom(sizes, ReturningAll(causal, layout));
      }
    }
  }
  Sizes no_heads = usual;
  no_heads.heads = no_heads.kv_heads = 0;
  this->ExpectOracleOnRandom(no_heads, ReturningAll());
}

// Raw scores q.k of -1e4 and 1e4, and their like, by the thousand: e^1e4 is far out of range.
TYPED_TEST(AttendTest, ExtremeScoresStayFiniteAndRight) {
  for (const double scale : {1.0, -1.0, 0.5}) {
    for (const Causal causal : kBothCausal) {
      AttendOptions options = ReturningAll(causal);
      options.scale = scale;
      const Problem problem = ProblemOf<typename TestFixture::Real>(
          {.queries = 140, .keys = 520, .width = 4, .value_width = 3}, options);
      Inputs<typename TestFixture::Real> inputs =
          RandomInputs<typename TestFixture::Real>(problem, 7);
      std::mt19937 rng(8);
      for (auto* tensor : {&inputs.query, &inputs.key}) {
        for (typename TestFixture::Real& x : *tensor)
          x = static_cast<typename TestFixture::Real>(rng() % 2 == 0 ? 50 : -50);
      }
      ExpectOracle(problem, inputs, this->scheduler_);
      for (const Path path : kBothPaths) {
        const auto results = Compute(On(path, problem), inputs, this->scheduler_);
        for (const auto* tensor :
             {&results.output, &results.weights, &results.logsumexp, &results.key_sums}) {
          for (const typename TestFixture::Real x : *tensor)
            ASSERT_TRUE(std::isfinite(x)) << NameOf(path);
        }
      }
    }
  }
}

// A sentinel such as -1e4 is a number like any other: a row of nothing else is uniform.
// The weights of a second sweep belong to the sums of the first: also where scores round a lot.
TYPED_TEST(AttendTest, RowsOfWeightsSumToOneHoweverLargeTheScoresAre) {
  for (const double size : {1.0, 100.0, 1e4, 1e8}) {
    const Problem problem = ProblemOf<typename TestFixture::Real>(
        {.queries = 140, .keys = 700, .width = 128}, ReturningAll(Causal::kTopLeft));
    Inputs<typename TestFixture::Real> inputs =
        RandomInputs<typename TestFixture::Real>(problem, 11);
    for (typename TestFixture::Real& x : inputs.query)
      x *= static_cast<typename TestFixture::Real>(size);
    for (const Path path : kBothPaths) {
      const auto results = Compute(On(path, problem), inputs, this->scheduler_);
      for (int64_t row = 0; row < problem.queries; ++row) {
        double sum = 0;
        for (int64_t j = 0; j < problem.keys; ++j) {
          sum += static_cast<double>(results.weights[row * problem.keys + j]);
        }
        ASSERT_NEAR(sum, 1, 1e-5) << NameOf(path) << " " << size << " row " << row;
      }
    }
  }
}

// One key has all the weight, however large its score is: up to 2^126, the fused kernel's range.
TYPED_TEST(AttendTest, OneKeyGivesItsValueAtAnySizeOfScore) {
  AttendOptions options = ReturningAll();
  options.scale = 1;
  const Problem problem = ProblemOf<typename TestFixture::Real>({}, options);
  for (const double size : {1e4, 5e9, 3e10, 9e15, 3e19, 5e37}) {
    for (const double score : {size, -size}) {
      const Inputs<typename TestFixture::Real> inputs{
          {static_cast<typename TestFixture::Real>(score)}, {1}, {5}};
      for (const Path path : kBothPaths) {
        const auto results = Compute(On(path, problem), inputs, this->scheduler_);
        EXPECT_NEAR(results.output[0], 5, 1e-6) << NameOf(path) << " " << score;
        EXPECT_NEAR(results.weights[0], 1, 1e-6) << NameOf(path) << " " << score;
        EXPECT_NEAR(results.logsumexp[0] / static_cast<typename TestFixture::Real>(score), 1, 1e-6)
            << NameOf(path);
      }
    }
  }
}

// Keys whose score is minus infinity weigh nothing, also where they fill the first blocks.
TYPED_TEST(AttendTest, ScoresOfMinusInfinityWeighNothing) {
  constexpr int64_t kKeys = 600;
  AttendOptions options = ReturningAll();
  options.scale = 1;
  const Problem problem = ProblemOf<typename TestFixture::Real>({.keys = kKeys}, options);
  Inputs<typename TestFixture::Real> inputs{
      {1},
      std::vector<typename TestFixture::Real>(
          kKeys, -std::numeric_limits<typename TestFixture::Real>::infinity()),
      std::vector<typename TestFixture::Real>(kKeys, 7)};
  for (const Path path : kBothPaths) {
    const auto nothing = Compute(On(path, problem), inputs, this->scheduler_);
    EXPECT_EQ(nothing.output[0], 0) << NameOf(path);
    EXPECT_EQ(nothing.logsumexp[0], -std::numeric_limits<typename TestFixture::Real>::infinity())
        << NameOf(path);
    EXPECT_EQ(nothing.weights[0], 0) << NameOf(path);
    Inputs<typename TestFixture::Real> one = inputs;
    one.key.back() = 1;
    one.value.back() = 5;
    const auto last = Compute(On(path, problem), one, this->scheduler_);
    EXPECT_EQ(last.output[0], 5) << NameOf(path);
    EXPECT_NEAR(last.logsumexp[0], 1, 1e-6) << NameOf(path);
    EXPECT_EQ(last.weights.back(), 1) << NameOf(path);
  }
}

// Sizes without an element to return cost nothing, however large they are.
TYPED_TEST(AttendTest, NothingToReturnIsNothingToDo) {
  constexpr int64_t kMany = (int64_t{1} << 31) - 1;
  for (const Path path : kBothPaths) {
    const Problem problem =
        On(path, ProblemOf<typename TestFixture::Real>({.queries = kMany,
                                                        .keys = path == Path::kExplicit ? 0 : kMany,
                                                        .width = 0,
                                                        .value_width = 0},
                                                       {}));
    Workspace workspace;
    const auto stages = AttendStages<typename TestFixture::Real>(problem, {}, {&workspace, 2});
    ASSERT_TRUE(stages.ok()) << stages.status();
    EXPECT_TRUE(stages->empty()) << NameOf(path);
  }
}

TYPED_TEST(AttendTest, RowsOfMinusTenThousandAreUniform) {
  AttendOptions options = ReturningAll();
  options.scale = 1;
  const Problem problem = ProblemOf<typename TestFixture::Real>(
      {.queries = 3, .keys = 512, .width = 1, .value_width = 2}, options);
  Inputs<typename TestFixture::Real> inputs = RandomInputs<typename TestFixture::Real>(problem, 9);
  inputs.query.assign(inputs.query.size(), typename TestFixture::Real{-100});
  inputs.key.assign(inputs.key.size(), typename TestFixture::Real{100});
  for (const Path path : kBothPaths) {
    const auto results = Compute(On(path, problem), inputs, this->scheduler_);
    const std::vector<double> uniform(results.weights.size(), 1.0 / 512);
    EXPECT_TRUE(
        Near(results.weights, uniform, 0, SumRoundings<typename TestFixture::Real>(problem.keys)));
  }
}

// The running maximum rises with every block, by little and by much, or is found in the first one.
TYPED_TEST(AttendTest, MatchesTheOracleWhereTheMaximumMovesFromBlockToBlock) {
  for (const double slope : {0.01, -0.01, 0.25, -0.25}) {
    AttendOptions options = ReturningAll();
    options.scale = slope;
    const Problem problem = ProblemOf<typename TestFixture::Real>(
        {.queries = 2, .keys = 1030, .width = 1, .value_width = 3}, options);
    Inputs<typename TestFixture::Real> inputs =
        RandomInputs<typename TestFixture::Real>(problem, 10);
    inputs.query.assign(inputs.query.size(), typename TestFixture::Real{1});
    for (size_t j = 0; j < inputs.key.size(); ++j)
      inputs.key[j] = static_cast<typename TestFixture::Real>(j);
    ExpectOracle(problem, inputs, this->scheduler_);
  }
}

TYPED_TEST(AttendTest, KeysHiddenFromEveryQueryNeverShow) {
  using T = typename TestFixture::Real;
  AttendOptions short_length = ReturningAll();
  short_length.key_lengths = {130};
  AttendOptions window = ReturningAll(Causal::kBottomRight);
  window.window = Window{20, std::nullopt};
  for (const AttendOptions& options : {ReturningAll(Causal::kTopLeft), short_length, window}) {
    const Problem problem = ProblemOf<T>(
        {.heads = 2, .queries = 130, .keys = 300, .width = 8, .value_width = 5}, options);
    const auto clean = RandomInputs<T>(problem, 11);
    for (const Path path : kBothPaths) {
      SCOPED_TRACE(Describe(On(path, problem)));
      const auto expected = Compute(On(path, problem), clean, this->scheduler_);
      for (const T poison : Poisons<T>()) {
        auto poisoned = clean;
        const KeyRange seen = problem.VisibleKeysOfAny(0, 0, problem.queries);
        ASSERT_LT(seen.size(), problem.keys);
        for (int64_t j = 0; j < problem.keys; ++j) {
          if (seen.begin <= j && j < seen.end) continue;
          FillRow(poisoned.key, j, problem.width, poison);
          FillRow(poisoned.value, j, problem.value_width, poison);
        }
        ExpectSameBits(Compute(On(path, problem), poisoned, this->scheduler_), expected);
      }
    }
  }
}

// The first `count` rows of every head.
template <typename T>
std::vector<T> FirstRows(const std::vector<T>& tensor, int64_t rows, int64_t width, int64_t count) {
  std::vector<T> first;
  for (auto head = tensor.begin(); head != tensor.end(); head += rows * width) {
    first.insert(first.end(), head, head + count * width);
  }
  return first;
}

// Poisons one token of `tensor` (key or value), and looks at the rows before it.
template <typename T>
void ExpectRowsBeforePoisonToKeepTheirBits(std::vector<T> Inputs<T>::*tensor,
                                           Scheduler& scheduler) {
  constexpr int64_t kTokens = 300;
  constexpr int64_t kWidth = 8;
  const Problem problem = ProblemOf<T>(
      {.heads = 2, .queries = kTokens, .keys = kTokens, .width = kWidth, .value_width = kWidth},
      ReturningAll(Causal::kTopLeft));
  const auto clean = RandomInputs<T>(problem, 12);
  for (const Path path : kBothPaths) {
    const auto expected = Compute(On(path, problem), clean, scheduler);
    for (const int64_t token : {1, 63, 100, 256, 299}) {
      for (const T poison : Poisons<T>()) {
        SCOPED_TRACE(::testing::Message() << NameOf(path) << ", " << poison << " at " << token);
        auto poisoned = clean;
        FillRow(poisoned.*tensor, token, kWidth, poison);
        const auto actual = Compute(On(path, problem), poisoned, scheduler);
        const auto before = [&](const std::vector<T>& rows, int64_t width) {
          return FirstRows(rows, kTokens, width, token);
        };
        EXPECT_TRUE(SameBits(before(actual.output, kWidth), before(expected.output, kWidth)));
        EXPECT_TRUE(SameBits(before(actual.weights, kTokens), before(expected.weights, kTokens)));
        EXPECT_TRUE(SameBits(before(actual.logsumexp, 1), before(expected.logsumexp, 1)));
      }
    }
  }
}

TYPED_TEST(AttendTest, RowsThatDoNotSeeAPoisonedKeyKeepTheirBits) {
  ExpectRowsBeforePoisonToKeepTheirBits(&Inputs<typename TestFixture::Real>::key, this->scheduler_);
}

TYPED_TEST(AttendTest, RowsThatDoNotSeeAPoisonedValueKeepTheirBits) {
  ExpectRowsBeforePoisonToKeepTheirBits(&Inputs<typename TestFixture::Real>::value,
                                        this->scheduler_);
}

// Puts one NaN into `tensor` at (head 0, token, column 2): `nan_outputs` elements of the output are
// to be NaN, and all else what the oracle says.
template <typename T>
void ExpectNaNOutputs(const Problem& problem, std::vector<T> Inputs<T>::*tensor, int64_t width,
                      int64_t token, int64_t nan_outputs, Scheduler& scheduler) {
  for (const T nan : NaNs<T>()) {
    auto inputs = RandomInputs<T>(problem, 13);
    (inputs.*tensor)[static_cast<size_t>(token * width + 2)] = nan;
    ExpectOracle(problem, inputs, scheduler);
    for (const Path path : kBothPaths) {
      const auto output = Compute(On(path, problem), inputs, scheduler).output;
      const auto is_nan = [](T x) { return std::isnan(x); };
      EXPECT_EQ(std::count_if(output.begin(), output.end(), is_nan), nan_outputs)
          << NameOf(path) << ", token " << token;
    }
  }
}

constexpr Sizes kNaNSizes{.heads = 2, .queries = 140, .keys = 270, .width = 4, .value_width = 5};

TYPED_TEST(AttendTest, NaNInAQueryMakesItsRowNaNAndNoOther) {
  for (const Causal causal : kBothCausal) {
    const auto problem = ProblemOf<typename TestFixture::Real>(kNaNSizes, ReturningAll(causal));
    for (const int64_t token : {0, 139}) {
      ExpectNaNOutputs(problem, &Inputs<typename TestFixture::Real>::query, problem.width, token,
                       problem.value_width, this->scheduler_);
    }
  }
}

TYPED_TEST(AttendTest, NaNInAKeyMakesTheRowsThatSeeItNaNAndNoOther) {
  for (const int64_t token : {0, 70, 139, 269}) {
    const auto causal =
        ProblemOf<typename TestFixture::Real>(kNaNSizes, ReturningAll(Causal::kTopLeft));
    const int64_t rows = causal.heads * std::max<int64_t>(causal.queries - token, 0);
    ExpectNaNOutputs(causal, &Inputs<typename TestFixture::Real>::key, causal.width, token,
                     rows * causal.value_width, this->scheduler_);
  }
  const auto all_see = ProblemOf<typename TestFixture::Real>(kNaNSizes, ReturningAll());
  ExpectNaNOutputs(all_see, &Inputs<typename TestFixture::Real>::key, all_see.width, 269,
                   all_see.heads * all_see.queries * all_see.value_width, this->scheduler_);
}

TYPED_TEST(AttendTest, NaNInAValueMakesTheOutputElementsThatSeeItNaNAndNoOther) {
  for (const int64_t token : {0, 70, 139, 269}) {
    const auto causal =
        ProblemOf<typename TestFixture::Real>(kNaNSizes, ReturningAll(Causal::kTopLeft));
    const int64_t rows = causal.heads * std::max<int64_t>(causal.queries - token, 0);
    ExpectNaNOutputs(causal, &Inputs<typename TestFixture::Real>::value, causal.value_width, token,
                     rows, this->scheduler_);
  }
  const auto all_see = ProblemOf<typename TestFixture::Real>(kNaNSizes, ReturningAll());
  ExpectNaNOutputs(all_see, &Inputs<typename TestFixture::Real>::value, all_see.value_width, 269,
                   all_see.heads * all_see.queries, this->scheduler_);
}

// A weight of 0 by underflow is live all the same: 0 times NaN is NaN.
TYPED_TEST(AttendTest, NaNInAValueShowsThroughAWeightThatUnderflows) {
  AttendOptions options = ReturningAll();
  options.scale = 1;
  const auto problem = ProblemOf<typename TestFixture::Real>(
      {.queries = 1, .keys = 300, .width = 1, .value_width = 2}, options);
  auto inputs = RandomInputs<typename TestFixture::Real>(problem, 14);
  inputs.query = {1};
  inputs.key.assign(inputs.key.size(), typename TestFixture::Real{0});
  for (const size_t token : {3, 299}) {
    auto poisoned = inputs;
    poisoned.key[token] = -10000;
    poisoned.value[token * 2] = std::numeric_limits<typename TestFixture::Real>::quiet_NaN();
    for (const Path path : kBothPaths) {
      const auto results = Compute(On(path, problem), poisoned, this->scheduler_);
      EXPECT_EQ(results.weights[token], 0);
      EXPECT_TRUE(std::isnan(results.output[0])) << NameOf(path) << ", token " << token;
      EXPECT_FALSE(std::isnan(results.output[1])) << NameOf(path) << ", token " << token;
    }
  }
}

TYPED_TEST(AttendTest, BitsAreTheSameForAnyNumberOfThreadsAndFromRunToRun) {
  for (const Causal causal : kBothCausal) {
    const auto problem = ProblemOf<typename TestFixture::Real>(
        {.batch = 2, .heads = 2, .queries = 300, .keys = 520, .width = 16, .value_width = 12},
        ReturningAll(causal));
    const auto inputs = RandomInputs<typename TestFixture::Real>(problem, 15);
    for (const Path path : kBothPaths) {
      Scheduler one(1);
      const auto expected = Compute(On(path, problem), inputs, one);
      for (const int threads : {1, 2, 8}) {
        SCOPED_TRACE(::testing::Message() << NameOf(path) << " on " << threads << " threads");
        Scheduler scheduler(threads);
        ExpectSameBits(Compute(On(path, problem), inputs, scheduler), expected);
        ExpectSameBits(Compute(On(path, problem), inputs, scheduler), expected);
      }
    }
  }
}

TYPED_TEST(AttendTest, WorkspaceIsWhatTheCostSays) {
  for (const bool weights : {false, true}) {
    for (const bool key_sums : {false, true}) {
      AttendOptions options;
      options.return_weights = weights;
      options.return_key_sums = key_sums;
      const auto problem = ProblemOf<typename TestFixture::Real>(
          {.batch = 2, .heads = 3, .queries = 140, .keys = 270, .width = 4, .value_width = 4},
          options);
      const auto inputs = RandomInputs<typename TestFixture::Real>(problem, 16);
      for (const int threads : {1, 2, 8}) {
        SCOPED_TRACE(::testing::Message() << Describe(problem) << ", threads " << threads);
        Scheduler scheduler(threads);
        const auto peak = [&](Path path) {
          return Compute(On(path, problem), inputs, scheduler).peak_workspace_bytes;
        };
        const auto cost = [&](Path path) {
          return CostOf(On(path, problem), threads, KernelUnderTest()).workspace_bytes;
        };
        EXPECT_EQ(peak(Path::kExplicit), cost(Path::kExplicit));
        EXPECT_EQ(peak(Path::kChunked), cost(Path::kChunked));
        EXPECT_GT(peak(Path::kChunked), 0);
      }
    }
  }
}

TYPED_TEST(AttendTest, WorkspaceGrowsWithTheSquareOfTheLengthOnTheExplicitPathAlone) {
  Scheduler scheduler(1);
  const auto peak = [&](Path path, int64_t tokens) {
    const auto problem = ProblemOf<typename TestFixture::Real>(
        {.queries = tokens, .keys = tokens, .width = 4, .value_width = 4}, {});
    return Compute(On(path, problem), RandomInputs<typename TestFixture::Real>(problem, 17),
                   scheduler)
        .peak_workspace_bytes;
  };
  EXPECT_EQ(peak(Path::kExplicit, 512), 4 * peak(Path::kExplicit, 256));
  EXPECT_EQ(peak(Path::kChunked, 512), peak(Path::kChunked, 256));
}

TYPED_TEST(AttendTest, WorkspaceThatDoesNotSufficeIsAnErrorAndIsGivenBack) {
  const auto problem = ProblemOf<typename TestFixture::Real>(
      {.queries = 70, .keys = 70, .width = 4, .value_width = 4}, {});
  for (const Path path : kBothPaths) {
    Memory<typename TestFixture::Real> memory(
        On(path, problem), RandomInputs<typename TestFixture::Real>(problem, 18));
    Workspace workspace;
    workspace.SetLimit(CostOf(On(path, problem), 1).workspace_bytes - 1);
    Scheduler scheduler(1);
    auto stages =
        AttendStages<typename TestFixture::Real>(memory.problem, memory.Tensors(), {&workspace, 1});
    const absl::Status status = stages.ok() ? scheduler.Run(*std::move(stages)) : stages.status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << NameOf(path);
    EXPECT_EQ(workspace.current_bytes(), 0) << NameOf(path);
  }
}

TYPED_TEST(AttendTest, MatchesTheOracleOnRandomProblems) {
  ExpectOracleOnRandomProblems<typename TestFixture::Real>(this->scheduler_);
}

}  // namespace
}  // namespace attendant::core
