#include "core/head.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "core/cost.h"
#include "core/errors.h"
#include "core/scheduler.h"
#include "core/workspace.h"
#include "tests/core/oracle.h"
#include "tests/core/testing.h"

namespace attendant::core {
namespace {

using ::testing::Each;
using ::testing::Optional;

struct HeadSizes {
  int64_t batch = 1;
  int64_t tokens = 1;
  int64_t d_model = 1;
  int64_t heads = 1;
  int64_t d_k = 1;
  int64_t d_v = 1;
  bool x_has_batch = true;  // else batch is 1
};

HeadSpec SpecOf(const HeadSizes& s, DType dtype = DType::kFloat64) {
  HeadSpec spec;
  spec.x = {dtype, {s.batch, s.tokens, s.d_model}};
  if (!s.x_has_batch) spec.x.shape.erase(spec.x.shape.begin());
  spec.w_q = {dtype, {s.d_model, s.heads * s.d_k}};
  spec.w_k = spec.w_q;
  spec.w_v = {dtype, {s.d_model, s.heads * s.d_v}};
  spec.w_o = {dtype, {s.heads * s.d_v, s.d_model}};
  spec.heads = s.heads;
  spec.return_intermediates = true;
  return spec;
}

template <typename T>
struct HeadInputs {
  std::vector<T> x, w_q, w_k, w_v, w_o;
  std::vector<unsigned char> mask = {};
};

template <typename T>
HeadInputs<T> RandomHeadInputs(const HeadProblem& problem, uint32_t seed) {
  const Problem& p = problem.attend;
  std::mt19937 rng(seed);
  const auto weight = [&](int64_t width) {
    return RandomVector<T>(problem.d_model * p.heads * width, rng, 0.5);
  };
  HeadInputs<T> inputs;
  inputs.x = RandomVector<T>(p.batch * p.queries * problem.d_model, rng);
  inputs.w_q = weight(p.width);
  inputs.w_k = weight(p.width);
  inputs.w_v = weight(p.value_width);
  inputs.w_o = weight(p.value_width);
  return inputs;
}

// Intermediates are empty where they are not returned.
template <typename T>
struct HeadResults {
  std::vector<T> output, query, key, value, logits, weights, context;
};

template <typename T>
HeadResults<T> ComputeHead(const HeadProblem& problem, const HeadInputs<T>& in) {
  const Problem& p = problem.attend;
  HeadResults<T> results;
  results.output = Unwritten<T>(p.batch * p.queries * problem.d_model);
  HeadTensors<T> tensors{.x = in.x.data(),
                         .w_q = in.w_q.data(),
                         .w_k = in.w_k.data(),
                         .w_v = in.w_v.data(),
                         .w_o = in.w_o.data(),
                         .mask = in.mask.data(),
                         .output = results.output.data()};
  if (problem.return_intermediates) {
    const auto make = [&](std::vector<T>& tensor, int64_t width) {
      tensor = Unwritten<T>(p.batch * p.heads * p.queries * width);
      return tensor.data();
    };
    tensors.query = make(results.query, p.width);
    tensors.key = make(results.key, p.width);
    tensors.value = make(results.value, p.value_width);
    tensors.logits = make(results.logits, p.keys);
    tensors.weights = make(results.weights, p.keys);
    tensors.context = make(results.context, p.value_width);
  }
  Workspace workspace;
  Scheduler scheduler(2);
  auto stages = HeadStages<T>(problem, tensors, {&workspace, scheduler.threads()});
  EXPECT_EQ(stages.ok() ? scheduler.Run(*std::move(stages)) : stages.status(), absl::OkStatus());
  EXPECT_EQ(workspace.peak_bytes(), CostOf(problem, scheduler.threads()).workspace_bytes);
  return results;
}

// A naive product and the bound of its error: the longest row of one side, the longest column of
// the other, and SumError.
struct Product {
  std::vector<double> numbers;
  double tolerance = 0;
};

// a (rows, n), b (n, columns), row-major.
template <typename T>
Product Multiply(const std::vector<T>& a, const std::vector<T>& b, int64_t rows, int64_t n,
                 int64_t columns) {
  Product product;
  product.numbers.assign(rows * columns, 0);
  std::vector<T> transposed;
  for (int64_t column = 0; column < columns; ++column) {
    for (int64_t k = 0; k < n; ++k) transposed.push_back(b[k * columns + column]);
    for (int64_t row = 0; row < rows; ++row) {
      double& sum = product.numbers[row * columns + column];
      for (int64_t k = 0; k < n; ++k) {
        sum += static_cast<double>(a[row * n + k]) * static_cast<double>(b[k * columns + column]);
      }
    }
  }
  product.tolerance =
      SumError(n, UnitRoundoff<T>()) * LargestNorm(a, n) * LargestNorm(transposed, n);
  return product;
}

// Between (B, T, H, width), as a product with all heads' columns stands, and (B, H, T, width).
template <typename T>
std::vector<T> SwapMiddleAxes(const std::vector<T>& from, int64_t batch, int64_t first,
                              int64_t second, int64_t width) {
  std::vector<T> to;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t j = 0; j < second; ++j) {
      for (int64_t i = 0; i < first; ++i) {
        const auto row = from.begin() + ((b * first + i) * second + j) * width;
        to.insert(to.end(), row, row + width);
      }
    }
  }
  return to;
}

// Each step against a naive one on what the step before it returned, from x to the output: each has
// its own bound, and a wrong step does not hide behind those after it.
template <typename T>
void ExpectNaiveHead(const HeadProblem& head, const HeadInputs<T>& in, const HeadResults<T>& out) {
  const Problem& p = head.attend;
  const int64_t rows = p.batch * p.queries;
  const auto expect_projection = [&](const std::vector<T>& weight, int64_t width,
                                     const std::vector<T>& actual) {
    const Product product = Multiply(in.x, weight, rows, head.d_model, p.heads * width);
    EXPECT_TRUE(Near(actual, SwapMiddleAxes(product.numbers, p.batch, p.queries, p.heads, width),
                     product.tolerance));
  };
  {
    SCOPED_TRACE("projections");
    expect_projection(in.w_q, p.width, out.query);
    expect_projection(in.w_k, p.width, out.key);
    expect_projection(in.w_v, p.value_width, out.value);
  }
  const Inputs<T> inner{out.query, out.key, out.value, in.mask};
  const Magnitudes magnitudes = MagnitudesOf(p, inner);
  const Tolerance tolerance = ToleranceOf<T>(p, magnitudes);
  // The logits are the scores of a problem that hides nothing: s = logsumexp + ln weight.
  Problem unmasked = p;
  unmasked.causal = Causal::kNone;
  unmasked.mask.reset();
  const OracleResult all = OracleOf(unmasked, inner);
  std::vector<double> logits;
  for (size_t i = 0; i < all.weights.size(); ++i) {
    logits.push_back(std::log(all.weights[i]) + all.logsumexp[i / static_cast<size_t>(p.keys)]);
  }
  EXPECT_TRUE(Near(out.logits, logits, tolerance.logsumexp)) << "logits";
  const OracleResult oracle = OracleOf(p, inner);
  EXPECT_TRUE(Near(out.weights, oracle.weights, tolerance.tiny, tolerance.weight)) << "weights";
  EXPECT_TRUE(HiddenWeightsAreZero(p, out.weights, in.mask));
  EXPECT_TRUE(Near(out.context, oracle.output, tolerance.output)) << "context";
  const Product output =
      Multiply(SwapMiddleAxes(out.context, p.batch, p.heads, p.queries, p.value_width), in.w_o,
               rows, p.heads * p.value_width, head.d_model);
  EXPECT_TRUE(Near(out.output, output.numbers, output.tolerance)) << "output";
}

template <typename T>
class HeadTest : public ::testing::Test {
 protected:
  // On both paths, causal, with a mask, and neither; the output is the same without intermediates.
  void ExpectNaive(const HeadSizes& sizes) {
    const TensorSpec mask{DTypeOf<T>(), {sizes.tokens, sizes.tokens}};
    for (const Path path : kBothPaths) {
      for (int kind = 0; kind < 3; ++kind) {
        HeadSpec spec = SpecOf(sizes, DTypeOf<T>());
        spec.options.path = path;
        if (kind == 1) spec.options.causal = Causal::kTopLeft;
        if (kind == 2) spec.options.mask = mask;
        HeadProblem problem = MakeHeadProblem(spec).value();
        SCOPED_TRACE(absl::StrCat(NameOf(path), " ", Describe(problem.attend),
                                  " d_model=", problem.d_model));
        HeadInputs<T> inputs = RandomHeadInputs<T>(problem, 1);
        if (kind == 2) inputs.mask = RandomMask(mask, 2);
        const HeadResults<T> results = ComputeHead(problem, inputs);
        ExpectNaiveHead(problem, inputs, results);
        spec.return_intermediates = false;
        const HeadResults<T> output_alone = ComputeHead(MakeHeadProblem(spec).value(), inputs);
        EXPECT_TRUE(SameBits(output_alone.output, results.output)) << "without intermediates";
      }
    }
  }
};

using FloatingTypes = ::testing::Types<float, double>;
TYPED_TEST_SUITE(HeadTest, FloatingTypes);

TYPED_TEST(HeadTest, MatchesANaiveComputationForOneHead) {
  this->ExpectNaive({.tokens = 5, .d_model = 8, .d_k = 3, .d_v = 4});
  this->ExpectNaive({.tokens = 5, .d_model = 8, .d_k = 3, .d_v = 4, .x_has_batch = false});
  this->ExpectNaive({.tokens = 1});
}

TYPED_TEST(HeadTest, MatchesANaiveComputationForSeveralHeads) {
  this->ExpectNaive({.batch = 2, .tokens = 7, .d_model = 6, .heads = 3, .d_k = 2, .d_v = 5});
  this->ExpectNaive(
      {.tokens = 9, .d_model = 8, .heads = 2, .d_k = 4, .d_v = 4, .x_has_batch = false});
}

TYPED_TEST(HeadTest, MatchesANaiveComputationAcrossBlocks) {
  this->ExpectNaive({.batch = 2, .tokens = 129, .d_model = 16, .heads = 2, .d_k = 8, .d_v = 6});
  this->ExpectNaive({.tokens = 257, .d_model = 5, .d_k = 4, .d_v = 3});
}

TYPED_TEST(HeadTest, AnySizeMayBeZero) {
  const HeadSizes usual{.batch = 2, .tokens = 3, .d_model = 4, .heads = 2, .d_k = 3, .d_v = 2};
  for (int64_t HeadSizes::*size : {&HeadSizes::batch, &HeadSizes::tokens, &HeadSizes::d_model,
                                   &HeadSizes::d_k, &HeadSizes::d_v}) {
    HeadSizes sizes = usual;
    sizes.*size = 0;
    this->ExpectNaive(sizes);
  }
}

TYPED_TEST(HeadTest, OutputWithoutValueColumnsIsZero) {
  const auto problem =
      MakeHeadProblem(SpecOf({.tokens = 3, .d_model = 4, .d_k = 2, .d_v = 0}, DTypeOf<TypeParam>()))
          .value();
  const auto results = ComputeHead(problem, RandomHeadInputs<TypeParam>(problem, 2));
  EXPECT_THAT(results.output, Each(TypeParam{0}));
}

// Half precision: what float computes of the same numbers, rounded where it is returned and nowhere
// between.
template <typename S>
void ExpectFloatRounded(const HeadSizes& sizes, bool masked) {
  HeadSpec spec = SpecOf(sizes, DType::kFloat32);
  if (masked) spec.options.mask = TensorSpec{DType::kBool, {sizes.tokens, sizes.tokens}};
  const HeadProblem problem = MakeHeadProblem(spec).value();
  HeadInputs<float> wide = RandomHeadInputs<float>(problem, 4);
  HeadInputs<S> inputs;
  const auto round = [](std::vector<float>& numbers) {
    const std::vector<S> stored = Stored<S>(numbers);
    numbers = Widened(stored);
    return stored;
  };
  inputs.x = round(wide.x);
  inputs.w_q = round(wide.w_q);
  inputs.w_k = round(wide.w_k);
  inputs.w_v = round(wide.w_v);
  inputs.w_o = round(wide.w_o);
  if (masked) inputs.mask = wide.mask = RandomMask(*spec.options.mask, 5);
  const HeadResults<float> expected = ComputeHead(problem, wide);
  HeadProblem half = problem;
  half.attend.dtype = DTypeOf<S>();
  SCOPED_TRACE(Describe(half.attend));
  const HeadResults<S> results = ComputeHead(half, inputs);
  const double rounding = std::is_same_v<S, BFloat16> ? 0x1p-8 : 0x1p-11;
  const auto near = [&](const std::vector<S>& actual, const std::vector<float>& numbers) {
    return Near(actual, ToDouble(numbers), 1e-5, 1.01 * rounding);
  };
  EXPECT_TRUE(near(results.query, expected.query));
  EXPECT_TRUE(near(results.key, expected.key));
  EXPECT_TRUE(near(results.value, expected.value));
  EXPECT_TRUE(near(results.logits, expected.logits));
  EXPECT_TRUE(near(results.weights, expected.weights));
  EXPECT_TRUE(near(results.context, expected.context));
  EXPECT_TRUE(near(results.output, expected.output));
  half.return_intermediates = half.attend.return_weights = false;
  EXPECT_TRUE(SameBits(ComputeHead(half, inputs).output, results.output));
}

TEST(HeadHalfTest, HalvesAreComputedAsFloatsAndRoundedOnce) {
  const HeadSizes all[] = {
      {.tokens = 5, .d_model = 8, .d_k = 3, .d_v = 4, .x_has_batch = false},
      {.batch = 2, .tokens = 150, .d_model = 12, .heads = 3, .d_k = 4, .d_v = 5},
      {.tokens = 3, .d_model = 4, .d_k = 0, .d_v = 2},
      {.tokens = 3, .d_model = 4, .d_k = 2, .d_v = 0},
  };
  for (const HeadSizes& sizes : all) {
    for (const bool masked : {false, true}) {
      ExpectFloatRounded<Float16>(sizes, masked);
      ExpectFloatRounded<BFloat16>(sizes, masked);
    }
  }
}

// With identities for x and all weights, query, key and value are the identity, the logits
// I / sqrt(2), and each row's weights e^(1/sqrt 2) : 1.
TYPED_TEST(HeadTest, IdentitiesGiveTheSoftmaxOfTheIdentity) {
  const auto problem =
      MakeHeadProblem(SpecOf({.tokens = 2, .d_model = 2, .d_k = 2, .d_v = 2}, DTypeOf<TypeParam>()))
          .value();
  const std::vector<TypeParam> identity{1, 0, 0, 1};
  const auto results =
      ComputeHead<TypeParam>(problem, {identity, identity, identity, identity, identity});
  EXPECT_EQ(results.query, identity);
  EXPECT_EQ(results.key, identity);
  EXPECT_EQ(results.value, identity);
  const double same = 1 / (1 + std::exp(-1 / std::sqrt(2.0)));
  const std::vector<double> weights{same, 1 - same, 1 - same, same};
  const double tolerance = 8 * UnitRoundoff<TypeParam>();
  EXPECT_TRUE(Near(results.logits, {1 / std::sqrt(2.0), 0, 0, 1 / std::sqrt(2.0)}, tolerance));
  EXPECT_TRUE(Near(results.weights, weights, tolerance));
  EXPECT_TRUE(Near(results.context, weights, tolerance));
  EXPECT_TRUE(Near(results.output, weights, tolerance));
}

// What the algebra of a head says of any head: random ones, several sizes and heads.
constexpr HeadSizes kAnyHeads[] = {
    {.tokens = 5, .d_model = 8, .d_k = 4, .d_v = 4, .x_has_batch = false},
    {.batch = 2, .tokens = 33, .d_model = 12, .heads = 3, .d_k = 5, .d_v = 7},
    {.batch = 1, .tokens = 150, .d_model = 24, .heads = 2, .d_k = 16, .d_v = 8}};

// Each head's own invertible M (width, width), as a product of shears I + factor e_from e_to^T:
// the inverse of one is I - factor e_from e_to^T, so that nothing has to be inverted.
struct Shear {
  int64_t from;
  int64_t to;
  double factor;
};

std::vector<Shear> RandomShears(int64_t width, std::mt19937& rng) {
  std::vector<Shear> shears;
  for (int64_t n = 0; n < 2 * width; ++n) {
    const auto from = static_cast<int64_t>(rng() % static_cast<uint32_t>(width));
    const auto other = static_cast<int64_t>(rng() % static_cast<uint32_t>(width - 1));
    shears.push_back({from, (from + 1 + other) % width, rng() % 2 == 0 ? 0.5 : -0.25});
  }
  return shears;
}

// W M of the columns of one head. w: (rows, columns).
void TimesShears(const std::vector<Shear>& shears, int64_t first, int64_t columns,
                 std::vector<double>& w) {
  for (const Shear& shear : shears) {
    for (size_t row = 0; row < w.size(); row += static_cast<size_t>(columns)) {
      double* const of_head = w.data() + row + first;
      of_head[shear.to] += shear.factor * of_head[shear.from];
    }
  }
}

// W M^-T of the same: a shear's inverse, transposed.
void TimesInverseTransposes(const std::vector<Shear>& shears, int64_t first, int64_t columns,
                            std::vector<double>& w) {
  for (const Shear& shear : shears) {
    for (size_t row = 0; row < w.size(); row += static_cast<size_t>(columns)) {
      double* const of_head = w.data() + row + first;
      of_head[shear.from] -= shear.factor * of_head[shear.to];
    }
  }
}

// M^-1 W of the rows of one head.
void InversesTimes(const std::vector<Shear>& shears, int64_t first, int64_t columns,
                   std::vector<double>& w) {
  for (const Shear& shear : shears) {
    double* const from = w.data() + (first + shear.from) * columns;
    const double* const to = w.data() + (first + shear.to) * columns;
    for (int64_t column = 0; column < columns; ++column) from[column] -= shear.factor * to[column];
  }
}

// Calls expect(problem, inputs, results) for random heads on both paths.
template <typename Expect>
void ForAnyHeads(const Expect& expect) {
  for (const HeadSizes& sizes : kAnyHeads) {
    for (const Path path : kBothPaths) {
      for (const uint32_t seed : {11u, 12u, 13u}) {
        HeadSpec spec = SpecOf(sizes);
        spec.options.path = path;
        const HeadProblem problem = MakeHeadProblem(spec).value();
        SCOPED_TRACE(absl::StrCat("seed ", seed, " ", NameOf(path), " ", Describe(problem.attend)));
        expect(problem, RandomHeadInputs<double>(problem, seed), std::mt19937(seed));
      }
    }
  }
}

// By the roundings of the products with M, whose entries stay small.
constexpr double kReparameterised = 1e-11;

TEST(HeadAlgebraTest, OneMatrixForQueriesAndKeysMakesLogitsSymmetric) {
  ForAnyHeads([](const HeadProblem& problem, HeadInputs<double> inputs, const std::mt19937&) {
    const int64_t tokens = problem.attend.queries;
    const auto asymmetry = [&] {
      const std::vector<double> logits = ComputeHead(problem, inputs).logits;
      double most = 0;
      for (size_t at = 0; at < logits.size(); ++at) {
        const auto t = static_cast<size_t>(tokens);
        const size_t row = at / t % t;
        const size_t column = at % t;
        most =
            std::max(most, std::abs(logits[at] - logits[at - row * t - column + column * t + row]));
      }
      return most;
    };
    EXPECT_GT(asymmetry(), 0.1) << "with a matrix each";
    inputs.w_k = inputs.w_q;
    EXPECT_LT(asymmetry(), 1e-13);
  });
}

// Elhage et al., A Mathematical Framework for Transformer Circuits (2021): W_q W_k^T is what
// counts.
TEST(HeadAlgebraTest, TheQkCircuitAloneDecidesTheWeights) {
  ForAnyHeads([](const HeadProblem& problem, HeadInputs<double> inputs, std::mt19937 rng) {
    const auto before = ComputeHead(problem, inputs);
    const int64_t width = problem.attend.width;
    const int64_t columns = problem.attend.heads * width;
    for (int64_t head = 0; head < problem.attend.heads; ++head) {
      const std::vector<Shear> shears = RandomShears(width, rng);
      TimesShears(shears, head * width, columns, inputs.w_q);
      TimesInverseTransposes(shears, head * width, columns, inputs.w_k);
    }
    const auto after = ComputeHead(problem, inputs);
    EXPECT_FALSE(Near(after.query, before.query, 0.1)) << "M is no identity";
    EXPECT_TRUE(Near(after.logits, before.logits, kReparameterised));
    EXPECT_TRUE(Near(after.weights, before.weights, kReparameterised));
    EXPECT_TRUE(Near(after.output, before.output, kReparameterised));
  });
}

// And W_v W_o.
TEST(HeadAlgebraTest, TheOvCircuitAloneDecidesTheOutput) {
  ForAnyHeads([](const HeadProblem& problem, HeadInputs<double> inputs, std::mt19937 rng) {
    const auto before = ComputeHead(problem, inputs);
    const int64_t width = problem.attend.value_width;
    for (int64_t head = 0; head < problem.attend.heads; ++head) {
      const std::vector<Shear> shears = RandomShears(width, rng);
      TimesShears(shears, head * width, problem.attend.heads * width, inputs.w_v);
      InversesTimes(shears, head * width, problem.d_model, inputs.w_o);
    }
    const auto after = ComputeHead(problem, inputs);
    EXPECT_FALSE(Near(after.context, before.context, 0.1)) << "M is no identity";
    EXPECT_TRUE(SameBits(after.weights, before.weights));
    EXPECT_TRUE(Near(after.output, before.output, kReparameterised));
  });
}

// In float32 e^89 is infinite: without the row's maximum subtracted these rows would be NaN. Scores
// of hundreds also decide: the largest takes what there is.
TEST(HeadAlgebraTest, LogitsAbove88StayFinite) {
  for (const HeadSizes& sizes : kAnyHeads) {
    for (const Path path : kBothPaths) {
      HeadSpec spec = SpecOf(sizes, DType::kFloat32);
      spec.options.path = path;
      spec.options.scale = 400;
      const HeadProblem problem = MakeHeadProblem(spec).value();
      SCOPED_TRACE(absl::StrCat(NameOf(path), " ", Describe(problem.attend)));
      const auto results = ComputeHead(problem, RandomHeadInputs<float>(problem, 14));
      EXPECT_GT(*std::max_element(results.logits.begin(), results.logits.end()), 200);
      const auto tokens = static_cast<size_t>(problem.attend.keys);
      for (size_t row = 0; row < results.weights.size(); row += tokens) {
        double sum = 0;
        for (size_t j = 0; j < tokens; ++j) sum += static_cast<double>(results.weights[row + j]);
        ASSERT_NEAR(sum, 1, 1e-6);
      }
      for (const float number : results.output) ASSERT_TRUE(std::isfinite(number));
    }
  }
}

const HeadSizes kTwoHeads{.batch = 2, .tokens = 3, .d_model = 4, .heads = 2, .d_k = 3, .d_v = 5};

TEST(MakeHeadProblemTest, TakesTheSizesFromTheShapes) {
  const HeadProblem problem = MakeHeadProblem(SpecOf(kTwoHeads)).value();
  EXPECT_EQ(problem.d_model, 4);
  EXPECT_TRUE(problem.x_has_batch);
  EXPECT_TRUE(problem.return_intermediates);
  const Problem& p = problem.attend;
  EXPECT_EQ(p.dtype, DType::kFloat64);
  EXPECT_EQ(p.batch, 2);
  EXPECT_EQ(p.heads, 2);
  EXPECT_EQ(p.kv_heads, 2);
  EXPECT_EQ(p.queries, 3);
  EXPECT_EQ(p.keys, 3);
  EXPECT_EQ(p.width, 3);
  EXPECT_EQ(p.value_width, 5);
  EXPECT_DOUBLE_EQ(p.scale, 1 / std::sqrt(3.0));
}

TEST(MakeHeadProblemTest, XWithoutBatchIsABatchOfOne) {
  HeadSizes sizes = kTwoHeads;
  sizes.x_has_batch = false;
  const HeadProblem problem = MakeHeadProblem(SpecOf(sizes)).value();
  EXPECT_FALSE(problem.x_has_batch);
  EXPECT_EQ(problem.attend.batch, 1);
  EXPECT_EQ(problem.attend.queries, 3);
}

TEST(MakeHeadProblemTest, HeadsOfZeroMeanOne) {
  HeadSpec spec = SpecOf(kTwoHeads);
  spec.heads = 0;
  const HeadProblem problem = MakeHeadProblem(spec).value();
  EXPECT_EQ(problem.attend.heads, 1);
  EXPECT_EQ(problem.attend.width, 6);
  EXPECT_EQ(problem.attend.value_width, 10);
}

TEST(MakeHeadProblemTest, TakesPathCausalAndScaleFromTheOptions) {
  HeadSpec spec = SpecOf(kTwoHeads);
  spec.options.path = Path::kExplicit;
  spec.options.causal = Causal::kTopLeft;
  spec.options.scale = -2;
  const Problem p = MakeHeadProblem(spec).value().attend;
  EXPECT_EQ(p.path, Path::kExplicit);
  EXPECT_EQ(p.causal, Causal::kTopLeft);
  EXPECT_EQ(p.scale, -2);
}

TEST(MakeHeadProblemTest, IgnoresLayoutAndWhatElseTheOptionsReturn) {
  for (const bool intermediates : {false, true}) {
    HeadSpec spec = SpecOf(kTwoHeads);
    spec.return_intermediates = intermediates;
    spec.options.layout = Layout::kBthd;
    spec.options.return_weights = !intermediates;
    spec.options.return_logsumexp = true;
    spec.options.return_key_sums = true;
    const Problem p = MakeHeadProblem(spec).value().attend;
    EXPECT_EQ(p.layout, Layout::kBhtd);
    EXPECT_EQ(p.return_weights, intermediates);
    EXPECT_FALSE(p.return_logsumexp);
    EXPECT_FALSE(p.return_key_sums);
    EXPECT_EQ(p.queries, 3);
  }
}

struct BadSpec {
  const char* field;
  void (*spoil)(HeadSpec&);
};

TEST(MakeHeadProblemTest, NamesTheFieldThatIsWrong) {
  const BadSpec bad_specs[] = {
      {"heads", [](HeadSpec& s) { s.heads = -1; }},
      {"heads", [](HeadSpec& s) { s.heads = std::numeric_limits<int64_t>::min(); }},
      {"heads", [](HeadSpec& s) { s.heads = 5; }},  // divides w_v's 10 columns, not w_q's 6
      {"heads", [](HeadSpec& s) { s.heads = 3; }},  // divides w_q's 6 columns, not w_v's 10
      {"x.shape", [](HeadSpec& s) { s.x.shape = {}; }},
      {"x.shape", [](HeadSpec& s) { s.x.shape = {4}; }},
      {"x.shape",
       [](HeadSpec& s) {
         s.x.shape = {1, 2, 3, 4};
       }},
      {"x.shape",
       [](HeadSpec& s) {
         s.x.shape = {int64_t{1} << 40, int64_t{1} << 40, 4};
       }},
      {"x.shape[0]", [](HeadSpec& s) { s.x.shape[0] = -1; }},
      {"x.shape[1]", [](HeadSpec& s) { s.x.shape[1] = -1; }},
      {"x.shape[2]", [](HeadSpec& s) { s.x.shape[2] = -1; }},
      {"w_q.shape[0]", [](HeadSpec& s) { s.x.shape[2] = 3; }},
      {"x.dtype", [](HeadSpec& s) { s.x.dtype = DType::kUnspecified; }},
      {"x.dtype", [](HeadSpec& s) { s.x.dtype = DType::kBool; }},
      {"w_q.dtype", [](HeadSpec& s) { s.w_q.dtype = DType::kFloat32; }},
      {"w_k.dtype", [](HeadSpec& s) { s.w_k.dtype = DType::kFloat32; }},
      {"w_v.dtype", [](HeadSpec& s) { s.w_v.dtype = DType::kBool; }},
      {"w_o.dtype", [](HeadSpec& s) { s.w_o.dtype = DType::kUnspecified; }},
      {"w_q.shape",
       [](HeadSpec& s) {
         s.w_q.shape = {4, 2, 3};
       }},
      {"w_k.shape", [](HeadSpec& s) { s.w_k.shape = {24}; }},
      {"w_v.shape", [](HeadSpec& s) { s.w_v.shape = {}; }},
      {"w_o.shape",
       [](HeadSpec& s) {
         s.w_o.shape = {1, 10, 4};
       }},
      {"w_q.shape[0]", [](HeadSpec& s) { s.w_q.shape[0] = 5; }},
      {"w_k.shape[0]", [](HeadSpec& s) { s.w_k.shape[0] = 5; }},
      {"w_v.shape[0]", [](HeadSpec& s) { s.w_v.shape[0] = 5; }},
      {"w_q.shape[1]", [](HeadSpec& s) { s.w_q.shape[1] = -6; }},
      {"w_k.shape[1]", [](HeadSpec& s) { s.w_k.shape[1] = 8; }},
      {"w_o.shape[0]", [](HeadSpec& s) { s.w_o.shape[0] = 12; }},
      {"w_o.shape[1]", [](HeadSpec& s) { s.w_o.shape[1] = 5; }},
      {"options.scale",
       [](HeadSpec& s) { s.options.scale = std::numeric_limits<double>::quiet_NaN(); }},
  };
  for (const BadSpec& bad : bad_specs) {
    HeadSpec spec = SpecOf(kTwoHeads);
    bad.spoil(spec);
    const absl::Status status = MakeHeadProblem(spec).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad.field << ": " << status;
    EXPECT_THAT(FieldOf(status), Optional(std::string(bad.field))) << status;
  }
}

// Scores between empty tensors still have to be counted.
TEST(MakeHeadProblemTest, RefusesSizesWhoseProductsOverflow) {
  HeadSpec spec = SpecOf({.tokens = int64_t{1} << 40, .d_model = 0, .d_k = 0, .d_v = 0});
  const absl::Status status = MakeHeadProblem(spec).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_TRUE(FieldOf(status).has_value());
}

TEST(HeadStagesTest, WorkspaceThatDoesNotSufficeIsAnError) {
  HeadSpec spec = SpecOf(kTwoHeads);
  spec.return_intermediates = false;
  const HeadProblem problem = MakeHeadProblem(spec).value();
  const auto inputs = RandomHeadInputs<double>(problem, 3);
  std::vector<double> output(2 * 3 * 4);
  Workspace workspace;
  workspace.SetLimit(100);
  const HeadTensors<double> tensors{.x = inputs.x.data(),
                                    .w_q = inputs.w_q.data(),
                                    .w_k = inputs.w_k.data(),
                                    .w_v = inputs.w_v.data(),
                                    .w_o = inputs.w_o.data(),
                                    .output = output.data()};
  EXPECT_EQ(HeadStages(problem, tensors, {&workspace, 1}).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(workspace.current_bytes(), 0);
}

}  // namespace
}  // namespace attendant::core
