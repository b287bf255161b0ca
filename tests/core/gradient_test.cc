// The gradient, on both paths: against its definition, against central differences, and what the
// two promise each other.
#include "core/gradient.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/errors.h"
#include "tests/core/flags.h"
#include "tests/core/gradient_testing.h"
#include "tests/core/random_problems.h"
#include "tests/core/testing.h"

namespace attendant::core {
namespace {

// What a test runs with.
template <typename S, Path kPath>
struct OnPath {
  using Stored = S;
  static constexpr Path path = kPath;
};

template <typename Param>
class GradientTest : public testing::Test {
 protected:
  using Real = typename Param::Stored;

  // With and without the forward's results.
  void ExpectOracle(Problem p, const Inputs<Real>& inputs) {
    p.path = Param::path;
    SCOPED_TRACE(Describe(p));
    const std::vector<Real> d_output = RandomDOutput<Real>(p, 1);
    const OracleGradients oracle = GradientOracleOf(p, inputs, d_output);
    for (const bool given : {false, true}) {
      SCOPED_TRACE(given ? "given" : "forward inside");
      const GradientProblem problem = GradientOf(p, given, /*return_d_mask=*/true);
      const Given<Real> forward = given ? Forward(p, inputs, scheduler_) : Given<Real>();
      const Gradients<Real> actual =
          ComputeGradients(problem, inputs, Dense(p, d_output), scheduler_, forward);
      ExpectGradients(problem, inputs, actual, oracle);
      EXPECT_EQ(actual.peak_workspace_bytes, GradientWorkspaceBytes(problem, scheduler_.threads()));
    }
  }
  void ExpectOracleOnRandom(const Sizes& sizes, const AttendOptions& options) {
    const Problem p = ProblemOf<Real>(sizes, options);
    Inputs<Real> inputs = RandomInputs<Real>(p, 1);
    if (options.mask.has_value()) inputs.mask = RandomMask(*options.mask, 1);
    ExpectOracle(p, inputs);
  }

  Gradients<Real> Compute(Problem p, const Inputs<Real>& inputs, const std::vector<Real>& d_output,
                          bool return_d_mask = false) {
    p.path = Param::path;
    return ComputeGradients(GradientOf(p, false, return_d_mask), inputs, Dense(p, d_output),
                            scheduler_);
  }

  Scheduler scheduler_{2};
};

using AllRuns = testing::Types<OnPath<float, Path::kChunked>, OnPath<double, Path::kChunked>,
                               OnPath<Float16, Path::kChunked>, OnPath<BFloat16, Path::kChunked>,
                               OnPath<float, Path::kExplicit>, OnPath<double, Path::kExplicit>,
                               OnPath<Float16, Path::kExplicit>, OnPath<BFloat16, Path::kExplicit>>;
TYPED_TEST_SUITE(GradientTest, AllRuns);

TYPED_TEST(GradientTest, MatchesTheOracleAcrossTiles) {
  const std::pair<int64_t, int64_t> lengths[] = {{1, 1},     {1, 200},   {5, 0},    {0, 5},
                                                 {47, 97},   {48, 96},   {49, 95},  {193, 191},
                                                 {192, 193}, {400, 100}, {100, 400}};
  for (const auto& [queries, keys] : lengths) {
    for (const Layout layout : kBothLayouts) {
      for (const Causal causal : kBothCausal) {
        this->ExpectOracleOnRandom({.batch = 1,
                                    .heads = 2,
                                    .kv_heads = 1,
                                    .queries = queries,
                                    .keys = keys,
                                    .width = 5,
                                    .value_width = 7},
                                   Options(causal, layout));
      }
    }
  }
}

TYPED_TEST(GradientTest, MatchesTheOracleAtEveryWidth) {
  for (const auto& [width, value_width] : {std::pair<int64_t, int64_t>{64, 64},
                                           {16, 32},
                                           {80, 96},
                                           {1, 160},
                                           {256, 3},
                                           {0, 8},
                                           {8, 0}}) {
    this->ExpectOracleOnRandom(
        {.queries = 60, .keys = 70, .width = width, .value_width = value_width},
        Options(Causal::kNone));
  }
}

TYPED_TEST(GradientTest, MatchesTheOracleOnRandomProblems) {
  using S = typename TypeParam::Stored;
  uint32_t seed = TheFlags().seed;
  // A gradient costs four times what attention does, and is computed twice.
  for (int64_t n = 0; n < TheFlags().problems / 6 && !testing::Test::HasFailure(); ++n, ++seed) {
    SCOPED_TRACE(absl::StrCat("--problems=6 --seed=", seed));
    TensorSpec mask;
    const Problem p = RandomProblems(seed).Next<S>(mask);
    Inputs<S> inputs = RandomInputs<S>(p, seed);
    inputs.mask = RandomMask(mask, seed);
    this->ExpectOracle(p, inputs);
  }
}

// Every option at once, and the mask of every broadcast shape.
TYPED_TEST(GradientTest, TheMasksGradientIsSummedOverWhatItWasBroadcastTo) {
  using S = typename TypeParam::Stored;
  const Sizes sizes{.batch = 2,
                    .heads = 2,
                    .kv_heads = 1,
                    .queries = 200,
                    .keys = 110,
                    .width = 4,
                    .value_width = 3};
  AttendOptions options = Options(Causal::kBottomRight);
  options.softcap = 3;
  options.sinks = {0.5, -1};
  options.alibi_slopes = {0.1, -0.1};
  options.key_lengths = {110, 81};
  options.window = Window{90, std::nullopt};
  for (int64_t b : {int64_t{1}, sizes.batch}) {
    for (int64_t h : {int64_t{1}, sizes.heads}) {
      for (int64_t i : {int64_t{1}, sizes.queries}) {
        for (int64_t j : {int64_t{1}, sizes.keys}) {
          options.mask = TensorSpec{DTypeOf<S>(), {b, h, i, j}};
          this->ExpectOracleOnRandom(sizes, options);
        }
      }
    }
  }
}

// d_output of any strides: transposed, and one number for all. (CASES A14)
TYPED_TEST(GradientTest, TheOutputsGradientMayHaveAnyStrides) {
  using S = typename TypeParam::Stored;
  const Sizes sizes{.batch = 2,
                    .heads = 2,
                    .kv_heads = 2,
                    .queries = 210,
                    .keys = 20,
                    .width = 4,
                    .value_width = 6};
  Problem p = ProblemOf<S>(sizes, Options(Causal::kNone));
  p.path = TypeParam::path;
  const Inputs<S> inputs = RandomInputs<S>(p, 1);
  const GradientProblem problem = GradientOf(p);
  const auto expect_same = [&](const StridedView<const S>& strided,
                               const std::vector<S>& contiguous) {
    const auto a = ComputeGradients(problem, inputs, strided, this->scheduler_);
    const auto b = ComputeGradients(problem, inputs, Dense(p, contiguous), this->scheduler_);
    EXPECT_TRUE(SameBits(a.query, b.query));
    EXPECT_TRUE(SameBits(a.key, b.key));
    EXPECT_TRUE(SameBits(a.value, b.value));
  };
  const std::vector<S> one = Stored<S>({Wide<S>{0.75}});
  const auto count = static_cast<size_t>(p.batch * p.heads * p.queries * p.value_width);
  expect_same({one.data(), 0, 0, 0, 0}, std::vector<S>(count, one[0]));

  // (B, Dv, Tq, H): tokens and width far apart, heads next to each other.
  const std::vector<S> numbers = RandomDOutput<S>(p, 2);
  const StridedView<const S> transposed{numbers.data(), p.value_width * p.queries * p.heads, 1,
                                        p.heads, p.queries * p.heads};
  std::vector<S> contiguous;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.heads; ++h) {
      for (int64_t i = 0; i < p.queries; ++i) {
        for (int64_t x = 0; x < p.value_width; ++x) {
          contiguous.push_back(transposed.Row(b, h, i)[x * transposed.width_stride]);
        }
      }
    }
  }
  expect_same(transposed, contiguous);
}

// The same bits for any number of threads, and for a batch of one as within a larger one.
TYPED_TEST(GradientTest, HasTheSameBitsOnAnyNumberOfThreads) {
  using S = typename TypeParam::Stored;
  const Sizes sizes{.batch = 3,
                    .heads = 4,
                    .kv_heads = 2,
                    .queries = 450,
                    .keys = 410,
                    .width = 9,
                    .value_width = 10};
  AttendOptions options = Options(Causal::kTopLeft);
  options.sinks = {0, 1, 2, 3};
  options.mask = TensorSpec{DTypeOf<S>(), {sizes.queries, sizes.keys}};
  Problem p = ProblemOf<S>(sizes, options);
  p.path = TypeParam::path;
  Inputs<S> inputs = RandomInputs<S>(p, 3);
  inputs.mask = RandomMask(*options.mask, 3);
  const std::vector<S> d_output = RandomDOutput<S>(p, 3);
  const Gradients<S> two = this->Compute(p, inputs, d_output, true);
  for (const int threads : {1, 8}) {
    Scheduler scheduler(threads);
    const auto other =
        ComputeGradients(GradientOf(p, false, true), inputs, Dense(p, d_output), scheduler);
    EXPECT_TRUE(SameBits(two.query, other.query));
    EXPECT_TRUE(SameBits(two.key, other.key));
    EXPECT_TRUE(SameBits(two.value, other.value));
    EXPECT_EQ(two.mask, other.mask);
    EXPECT_TRUE(SameBits(two.sinks, other.sinks));
  }
  Problem last = p;
  last.batch = 1;
  const auto tail = [](const std::vector<S>& all) {
    return std::vector<S>(all.end() - static_cast<int64_t>(all.size() / 3), all.end());
  };
  const Gradients<S> alone =
      this->Compute(last, {tail(inputs.query), tail(inputs.key), tail(inputs.value), inputs.mask},
                    tail(d_output));
  EXPECT_TRUE(SameBits(alone.query, tail(two.query)));
  EXPECT_TRUE(SameBits(alone.key, tail(two.key)));
  EXPECT_TRUE(SameBits(alone.value, tail(two.value)));
}

// A hidden pair takes no part, whatever stands in its query, key, value or d_output; a row that
// sees no key has no gradient.
TYPED_TEST(GradientTest, HiddenPairsAreInert) {
  using S = typename TypeParam::Stored;
  constexpr int64_t kTokens = 60;
  const Sizes sizes{.queries = kTokens, .keys = kTokens, .width = 3, .value_width = 4};
  for (const bool by_mask : {false, true}) {
    AttendOptions options = Options(by_mask ? Causal::kNone : Causal::kTopLeft);
    if (by_mask) options.mask = TensorSpec{DTypeOf<S>(), {kTokens, kTokens}};
    const Problem p = ProblemOf<S>(sizes, options);
    Inputs<S> inputs = RandomInputs<S>(p, 4);
    if (by_mask) {
      // The same triangle.
      std::vector<double> numbers(kTokens * kTokens);
      for (int64_t i = 0; i < kTokens; ++i) {
        for (int64_t j = i + 1; j < kTokens; ++j) {
          numbers[i * kTokens + j] = -std::numeric_limits<double>::infinity();
        }
      }
      inputs.mask = MaskOf(DTypeOf<S>(), numbers);
    }
    std::vector<S> d_output = RandomDOutput<S>(p, 4);
    const Gradients<S> clean = this->Compute(p, inputs, d_output);
    const std::vector<S> poison = Stored<S>(
        {std::numeric_limits<Wide<S>>::quiet_NaN(), std::numeric_limits<Wide<S>>::infinity()});
    for (const S& bad : poison) {
      SCOPED_TRACE(by_mask ? "mask" : "causal");
      // The last key is seen by the last query alone; the first query sees the first key alone.
      Inputs<S> with_key = inputs;
      with_key.key[(kTokens - 1) * 3] = bad;
      with_key.value[(kTokens - 1) * 4 + 1] = bad;
      const Gradients<S> key = this->Compute(p, with_key, d_output);
      for (int64_t i = 0; i < (kTokens - 1) * 3; ++i) {
        EXPECT_NEAR(ToDouble(key.query)[i], ToDouble(clean.query)[i], 1e-2) << i;
      }
      Inputs<S> with_query = inputs;
      with_query.query[0] = bad;
      std::vector<S> with_d_output = d_output;
      with_d_output[1] = bad;
      const Gradients<S> query = this->Compute(p, with_query, with_d_output);
      for (int64_t i = 3; i < kTokens * 3; ++i) {
        EXPECT_NEAR(ToDouble(query.key)[i], ToDouble(clean.key)[i], 1e-2) << i;
      }
      for (int64_t i = 4; i < kTokens * 4; ++i) {
        EXPECT_NEAR(ToDouble(query.value)[i], ToDouble(clean.value)[i], 1e-2) << i;
      }
      // The first query sees the first key. (An infinite query may have a score of -infinity.)
      if (std::isnan(ToDouble(std::vector<S>{bad})[0])) {
        EXPECT_TRUE(std::isnan(ToDouble(query.value)[1]));
      }
    }
  }
}

TYPED_TEST(GradientTest, ARowThatSeesNoKeyHasNoGradient) {
  using S = typename TypeParam::Stored;
  const Sizes sizes{.queries = 3, .keys = 2, .width = 2, .value_width = 2};
  AttendOptions options;
  options.mask = TensorSpec{DType::kBool, {3, 1}};
  const Problem p = ProblemOf<S>(sizes, options);
  Inputs<S> inputs = RandomInputs<S>(p, 5);
  inputs.mask = {0, 1, 1};
  std::vector<S> d_output = RandomDOutput<S>(p, 5);
  const S nan = Stored<S>({std::numeric_limits<Wide<S>>::quiet_NaN()})[0];
  inputs.query[0] = nan;
  d_output[1] = nan;
  const Gradients<S> g = this->Compute(p, inputs, d_output);
  EXPECT_EQ(ToDouble(g.query)[0], 0);
  EXPECT_EQ(ToDouble(g.query)[1], 0);
  for (const auto* gradient : {&g.query, &g.key, &g.value}) {
    for (const double number : ToDouble(*gradient)) EXPECT_TRUE(std::isfinite(number));
  }
}

// A NaN at a live position: its own row, and the keys that row sees.
TYPED_TEST(GradientTest, ALiveNaNShows) {
  using S = typename TypeParam::Stored;
  const Sizes sizes{.queries = 50, .keys = 4, .width = 2, .value_width = 2};
  const Problem p = ProblemOf<S>(sizes, {});
  Inputs<S> inputs = RandomInputs<S>(p, 6);
  inputs.query[2 * 7] = Stored<S>({std::numeric_limits<Wide<S>>::quiet_NaN()})[0];
  const Gradients<S> g = this->Compute(p, inputs, RandomDOutput<S>(p, 6));
  for (int64_t i = 0; i < 50; ++i) {
    EXPECT_EQ(std::isnan(ToDouble(g.query)[2 * i]), i == 7) << i;
  }
  for (const double number : ToDouble(g.value)) EXPECT_TRUE(std::isnan(number));
}

// Four equal keys, all at -1e9, d_output 1: each d_value is 1/4. One float logsumexp would lose ln
// 4 beside 1e9; the forward inside keeps the two apart.
TYPED_TEST(GradientTest, EqualSentinelsShareTheGradient) {
  using S = typename TypeParam::Stored;
  const Sizes sizes{.queries = 1, .keys = 4, .width = 2, .value_width = 1};
  for (const double sentinel : {-1e4, -1e9, -3e38}) {
    if (std::is_same_v<S, Float16> && sentinel < -1e4) continue;
    AttendOptions options;
    options.mask = TensorSpec{DTypeOf<S>(), {1, 4}};
    const Problem p = ProblemOf<S>(sizes, options);
    Inputs<S> inputs = RandomInputs<S>(p, 7);
    for (int j = 1; j < 4; ++j) std::copy_n(inputs.key.begin(), 2, inputs.key.begin() + 2 * j);
    inputs.mask = MaskOf(DTypeOf<S>(), {sentinel, sentinel, sentinel, sentinel});
    const std::vector<S> ones = Stored<S>({Wide<S>{1}});
    const Gradients<S> g = this->Compute(p, inputs, ones);
    for (const double d_value : ToDouble(g.value)) EXPECT_NEAR(d_value, 0.25, 1e-6) << sentinel;
  }
}

// A request of no bytes asks for no work.
TEST(GradientStagesTest, EmptyGradientsCostNothing) {
  for (const Path path : kBothPaths) {
    Problem p =
        ProblemOf<float>({.queries = 1 << 30, .keys = 1 << 30, .width = 0, .value_width = 0}, {});
    p.path = path;
    EXPECT_EQ(GradientWorkspaceBytes(GradientOf(p), 2), 0);
    const auto stages = GradientStages<float>(GradientOf(p), {}, {});
    ASSERT_TRUE(stages.ok());
    EXPECT_TRUE(stages->empty());
    p.batch = 1 << 30;
    p.queries = p.keys = 0;
    p.width = p.value_width = 4;
    p.sinks = {1};
    double d_sink = -1;
    GradientTensors<float> tensors;
    tensors.d_sinks = &d_sink;
    Workspace workspace;
    Scheduler scheduler(2);
    auto sinks = GradientStages<float>(GradientOf(p), tensors, {&workspace, 2, {}});
    ASSERT_TRUE(sinks.ok());
    EXPECT_TRUE(scheduler.Run(*std::move(sinks)).ok());
    EXPECT_EQ(d_sink, 0);
  }
}

// However many heads share a head of keys, or ranges of tokens there are.
TEST(GradientStagesTest, TheNumberOfStagesIsBounded) {
  Scheduler scheduler(2);
  const Problem p = ProblemOf<float>(
      {.heads = 3000, .kv_heads = 1, .queries = 1, .keys = 3, .width = 1, .value_width = 1}, {});
  const Inputs<float> inputs = RandomInputs<float>(p, 9);
  const std::vector<float> d_output = RandomDOutput<float>(p, 9);
  std::vector<float> d_query(3000), d_key(3), d_value(3);
  GradientTensors<float> tensors;
  tensors.query = {inputs.query.data(), p.layout, 3000, 1, 1};
  tensors.key = {inputs.key.data(), p.layout, 1, 3, 1};
  tensors.value = {inputs.value.data(), p.layout, 1, 3, 1};
  tensors.d_output = Dense(p, d_output);
  tensors.d_query = {d_query.data(), p.layout, 3000, 1, 1};
  tensors.d_key = {d_key.data(), p.layout, 1, 3, 1};
  tensors.d_value = {d_value.data(), p.layout, 1, 3, 1};
  Workspace workspace;
  auto stages = GradientStages<float>(GradientOf(p), tensors, {&workspace, 2, {}});
  ASSERT_TRUE(stages.ok());
  EXPECT_LE(stages->size(), 1030u);
  ASSERT_TRUE(scheduler.Run(*std::move(stages)).ok());
  Gradients<float> actual;
  actual.query = d_query;
  actual.key = d_key;
  actual.value = d_value;
  ExpectGradients(GradientOf(p), inputs, actual, GradientOracleOf(p, inputs, d_output));
}

// What the caller's own float logsumexp loses there, as docs/gradient.md says: -1e9 + ln 4 is -1e9,
// so each weight is 1.
TEST(GradientGivenTest, OneFloatLogsumexpLosesTheSumBesideASentinel) {
  AttendOptions options;
  options.mask = TensorSpec{DType::kFloat32, {1, 4}};
  Scheduler scheduler(1);
  for (const Path path : kBothPaths) {
    Problem p = ProblemOf<float>({.queries = 1, .keys = 4, .width = 2, .value_width = 1}, options);
    p.path = path;
    Inputs<float> inputs{{0, 0}, std::vector<float>(8), {1, 2, 3, 4}, {}};
    inputs.mask = MaskOf(DType::kFloat32, {-1e9, -1e9, -1e9, -1e9});
    const std::vector<float> one = {1};
    const Gradients<float> g = ComputeGradients(GradientOf(p, true), inputs, Dense(p, one),
                                                scheduler, Forward(p, inputs, scheduler));
    for (const float d_value : g.value) EXPECT_NEAR(d_value, 1, 1e-6);
  }
}

// As one weight of a row approaches 1, the gradient of every score of the row approaches 0.
TYPED_TEST(GradientTest, SaturationStopsTheScoresGradient) {
  using S = typename TypeParam::Stored;
  const Sizes sizes{.queries = 1, .keys = 5, .width = 1, .value_width = 3};
  AttendOptions options;
  options.scale = 1;
  options.mask = TensorSpec{DType::kFloat32, {5}};
  if (std::is_same_v<S, double>) options.mask->dtype = DType::kFloat64;
  const Problem p = ProblemOf<S>(sizes, options);
  Inputs<S> inputs = RandomInputs<S>(p, 8);
  const std::vector<S> d_output = RandomDOutput<S>(p, 8);
  double before = std::numeric_limits<double>::infinity();
  for (const double lead : {0.0, 4.0, 8.0, 16.0, 60.0}) {
    inputs.mask = MaskOf(options.mask->dtype, {0, 0, lead, 0, 0});
    inputs.query[0] = Stored<S>({0})[0];
    const Gradients<S> g = this->Compute(p, inputs, d_output, true);
    double largest = 0;
    for (const double number : MaskNumbers(p, g.mask))
      largest = std::max(largest, std::abs(number));
    EXPECT_LT(largest, before) << lead;
    before = largest;
  }
  // Of the size of the largest weight's distance from 1, or of its rounding.
  EXPECT_LT(before, 1e-5);
}

// bfloat16, lengths that no tile divides, a mask of another type. (CASES A15)
TYPED_TEST(GradientTest, UnevenEdges) {
  AttendOptions options;
  options.mask = TensorSpec{
      std::is_same_v<typename TypeParam::Stored, double> ? DType::kFloat64 : DType::kFloat32,
      {1030, 17}};
  this->ExpectOracleOnRandom(
      {.heads = 3, .kv_heads = 3, .queries = 1030, .keys = 17, .width = 8, .value_width = 8},
      options);
}

// Central differences of the oracle, which knows nothing of gradients.
class GradientCheckTest : public testing::TestWithParam<Path> {};

TEST_P(GradientCheckTest, AgreesWithCentralDifferences) {
  constexpr double kStep = 1e-6;
  Scheduler scheduler(2);
  uint32_t seed = TheFlags().seed;
  for (int64_t n = 0; n < TheFlags().problems / 6 && !HasFailure(); ++n, ++seed) {
    SCOPED_TRACE(absl::StrCat("--problems=6 --seed=", seed));
    TensorSpec mask_spec;
    Problem p = RandomProblems(seed, /*small=*/true).Next<double>(mask_spec);
    p.path = GetParam();
    SCOPED_TRACE(Describe(p));
    Inputs<double> inputs = RandomInputs<double>(p, seed);
    inputs.mask = RandomMask(mask_spec, seed);
    const std::vector<double> d_output = RandomDOutput<double>(p, seed);
    const Gradients<double> g =
        ComputeGradients(GradientOf(p, false, true), inputs, Dense(p, d_output), scheduler);
    std::vector<double> mask = MaskNumbers(p, inputs.mask);
    Problem moved = p;
    const auto loss = [&] {
      const auto output = Oracle(moved, inputs.query, inputs.key, inputs.value, mask).output;
      return std::inner_product(output.begin(), output.end(), d_output.begin(), 0.0);
    };
    const auto expect = [&](const char* name, std::vector<double>& variables,
                            const std::vector<double>& gradient) {
      std::vector<double> differences;
      double largest = 0;
      for (double& variable : variables) {
        const double x = variable;
        variable = x + kStep;
        const double above = loss();
        variable = x - kStep;
        const double below = loss();
        variable = x;
        // A hidden one has none.
        differences.push_back(std::isfinite(x) ? (above - below) / (2 * kStep) : 0);
        largest = std::max(largest, std::abs(differences.back()));
      }
      EXPECT_TRUE(Near(gradient, differences, 1e-6 * std::max(largest, 1.0))) << name;
    };
    expect("d_query", inputs.query, g.query);
    expect("d_key", inputs.key, g.key);
    expect("d_value", inputs.value, g.value);
    expect("d_sinks", moved.sinks, g.sinks);
    if (p.AddsMask()) expect("d_mask", mask, MaskNumbers(p, g.mask));
  }
}

INSTANTIATE_TEST_SUITE_P(Paths, GradientCheckTest, testing::ValuesIn(kBothPaths),
                         [](const auto& of) { return std::string(NameOf(of.param)); });

// A constant a thread, and 16 bytes a query row.
TEST(GradientCostTest, TheChunkedPathsWorkspaceIsOfConstantSizeBesideTheRows) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const auto bytes = [&](int64_t tokens, int threads) {
      Problem p = ProblemOf<float>({.heads = 8,
                                    .kv_heads = 8,
                                    .queries = tokens,
                                    .keys = tokens,
                                    .width = 64,
                                    .value_width = 64},
                                   Options(Causal::kTopLeft));
      p.dtype = dtype;
      return GradientWorkspaceBytes(GradientOf(p), threads);
    };
    for (const int threads : {1, 2, 8}) {
      const int64_t constant = bytes(1024, threads) - 8 * 1024 * 12;
      EXPECT_LE(constant, threads * (int64_t{2} << 20));
      for (const int64_t tokens : {2048, 4096, 16384}) {
        EXPECT_EQ(bytes(tokens, threads), constant + 8 * tokens * 12) << tokens;
      }
    }
  }
}

TEST(GradientProblemTest, NamesTheFieldThatIsWrong) {
  const auto tensor = [](std::vector<int64_t> shape) {
    return TensorSpec{DType::kFloat32, std::move(shape)};
  };
  GradientSpec right;
  right.query = tensor({1, 2, 3, 4});
  right.key = tensor({1, 2, 5, 4});
  right.value = tensor({1, 2, 5, 6});
  right.d_output = tensor({1, 2, 3, 6});
  EXPECT_TRUE(MakeGradientProblem(right).ok());
  const auto field = [](const GradientSpec& spec) {
    return FieldOf(MakeGradientProblem(spec).status()).value_or("none");
  };
  GradientSpec spec = right;
  spec.d_output.shape[3] = 5;
  EXPECT_EQ(field(spec), "d_output.shape[3]");
  spec = right;
  spec.d_output.dtype = DType::kFloat64;
  EXPECT_EQ(field(spec), "d_output.dtype");
  spec = right;
  spec.d_output.shape.pop_back();
  EXPECT_EQ(field(spec), "d_output.shape");
  spec = right;
  spec.output = tensor({1, 2, 3, 6});
  EXPECT_EQ(field(spec), "logsumexp");
  spec.logsumexp = tensor({1, 2, 4});
  EXPECT_EQ(field(spec), "logsumexp.shape[2]");
  spec.logsumexp = TensorSpec{DType::kFloat64, {1, 2, 3}};
  EXPECT_EQ(field(spec), "logsumexp.dtype");
  spec.logsumexp = tensor({1, 2, 3});
  EXPECT_EQ(field(spec), "none");
  spec.output.reset();
  EXPECT_EQ(field(spec), "output");
  spec = right;
  spec.key.shape[3] = 3;
  EXPECT_EQ(field(spec), "key.shape[3]");
}

}  // namespace
}  // namespace attendant::core
