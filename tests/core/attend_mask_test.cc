// Masks, on both paths.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "core/attend.h"
#include "core/problem.h"
#include "tests/core/attend_testing.h"
#include "tests/core/testing.h"

namespace attendant::core {
namespace {

template <typename Param>
class AttendMaskTest : public AttendTest<Param> {};
TYPED_TEST_SUITE(AttendMaskTest, Runs);

constexpr double kHidden = -std::numeric_limits<double>::infinity();

template <typename T>
std::vector<TensorSpec> MaskSpecs(const Sizes& s) {
  std::vector<TensorSpec> specs;
  for (const DType dtype : {DType::kBool, DTypeOf<T>()}) {
    for (int broadcast = 0; broadcast < 16; ++broadcast) {
      std::vector<int64_t> shape = {s.batch, s.heads, s.queries, s.keys};
      for (size_t axis = 0; axis < 4; ++axis) {
        if ((broadcast >> axis & 1) != 0) shape[axis] = 1;
      }
      specs.push_back({dtype, shape});
    }
    specs.push_back({dtype, {}});
    specs.push_back({dtype, {s.keys}});
    specs.push_back({dtype, {s.queries, s.keys}});
    specs.push_back({dtype, {s.heads, s.queries, 1}});
  }
  return specs;
}

// Of few and many queries, with and without the other options.
TYPED_TEST(AttendMaskTest, MatchesTheOracleWithAMaskOfAnyShape) {
  using T = typename TestFixture::Real;
  const std::pair<int64_t, int64_t> all[] = {{1, 300}, {3, 70}, {40, 200}, {5, 0}};
  for (const auto& [queries, keys] : all) {
    const Sizes sizes{.batch = 3,
                      .heads = 2,
                      .kv_heads = 1,
                      .queries = queries,
                      .keys = keys,
                      .width = 3,
                      .value_width = 2};
    for (const TensorSpec& mask : MaskSpecs<T>(sizes)) {
      for (const bool more : {false, true}) {
        AttendOptions options = ReturningAll(more ? Causal::kBottomRight : Causal::kNone);
        options.mask = mask;
        if (more) {
          options.softcap = 3;
          options.alibi_slopes = {0.25, -0.01};
          options.sinks = {0.5, kHidden};
          options.key_lengths = {keys, keys / 2, keys};
        }
        const Problem problem = ProblemOf<T>(sizes, options);
        Inputs<T> inputs = RandomInputs<T>(problem, 1);
        inputs.mask = RandomMask(mask, 2);
        ExpectOracle(problem, inputs, this->scheduler_);
      }
    }
  }
}

// One query and one head, keys of one element: the output and what it should be.
template <typename T>
void ExpectMasked(AttendOptions options, DType dtype, const std::vector<double>& mask,
                  const Inputs<T>& inputs, double expected, Scheduler& scheduler) {
  const auto keys = static_cast<int64_t>(mask.size());
  options.mask = TensorSpec{dtype, {keys}};
  const Problem problem = ProblemOf<T>({.keys = keys}, options);
  Inputs<T> masked = inputs;
  masked.mask = MaskOf(dtype, mask);
  for (const Path path : kBothPaths) {
    const T output = Compute(On(path, problem), masked, scheduler).output[0];
    EXPECT_NEAR(static_cast<double>(output), expected, 1e-6 * std::abs(expected))
        << NameOf(path) << ", " << NameOf(dtype);
  }
}

TYPED_TEST(AttendMaskTest, AHiddenKeyCountsForNothing) {
  using T = typename TestFixture::Real;
  constexpr double kNone = 0;
  for (const DType dtype : {DType::kBool, DTypeOf<T>()}) {
    // False hides; it is not added as 0.
    ExpectMasked<T>({}, dtype, {kNone, kHidden}, {{0}, {1, 1}, {0, 10}}, 0, this->scheduler_);
    // The first block of keys hidden.
    std::vector<double> mask(600, kHidden);
    std::fill(mask.begin() + 512, mask.end(), kNone);
    const std::vector<T> ones(600, 1);
    ExpectMasked<T>({}, dtype, mask, {{1}, ones, ones}, 1, this->scheduler_);
    // A softcap stands before the mask.
    AttendOptions options;
    options.softcap = 1;
    ExpectMasked<T>(options, dtype, {kHidden, kNone}, {{0}, {1, 1}, {10, 0}}, 0, this->scheduler_);
    // However large the hidden key's score is beside the seen one's.
    options = {};
    options.scale = 1;
    ExpectMasked<T>(options, dtype, {kNone, kHidden}, {{100}, {-300, 400}, {1, 9}}, 1,
                    this->scheduler_);
  }
}

TYPED_TEST(AttendMaskTest, ARowHiddenByTheMaskIsZero) {
  using T = typename TestFixture::Real;
  for (const DType dtype : {DType::kBool, DTypeOf<T>()}) {
    for (const int64_t queries : {2, 70}) {
      AttendOptions options = ReturningAll();
      options.mask = TensorSpec{dtype, {queries, 300}};
      const Problem problem = ProblemOf<T>({.queries = queries, .keys = 300}, options);
      Inputs<T> inputs = RandomInputs<T>(problem, 1);
      std::vector<double> mask(static_cast<size_t>(queries * 300), 0);
      std::fill_n(mask.begin(), 300, kHidden);
      inputs.mask = MaskOf(dtype, mask);
      for (const Path path : kBothPaths) {
        const auto results = Compute(On(path, problem), inputs, this->scheduler_);
        EXPECT_EQ(results.output[0], 0) << NameOf(path);
        EXPECT_EQ(results.logsumexp[0], -std::numeric_limits<T>::infinity()) << NameOf(path);
        EXPECT_EQ(results.weights[7], 0) << NameOf(path);
        EXPECT_NE(results.output[1], 0) << NameOf(path);
      }
      ExpectOracle(problem, inputs, this->scheduler_);
    }
  }
}

// What a program writes for 'masked' where it does not write -infinity: an ordinary number.
template <typename T>
std::vector<T> Sentinels() {
  constexpr T kLowest = std::numeric_limits<T>::lowest();
  return {T{-1e4f},    T{-1e9f}, T{-1e30f},   T{-1.2e38f},
          T{-2.3e38f}, kLowest,  kLowest / 2, kLowest / 1024};
}

TYPED_TEST(AttendMaskTest, TheDifferenceOfSentinelsDecides) {
  using T = typename TestFixture::Real;
  for (const int64_t queries : {1, 40}) {
    for (const T sentinel : Sentinels<T>()) {
      AttendOptions options = ReturningAll();
      options.mask = TensorSpec{DTypeOf<T>(), {queries, 2}};
      const Problem problem = ProblemOf<T>({.queries = queries, .keys = 2}, options);
      Inputs<T> inputs = RandomInputs<T>(problem, 1);
      inputs.query.assign(inputs.query.size(), 0);
      inputs.value = {1, 3};
      // Of the first row alone: the others see ordinary numbers.
      std::vector<double> mask(static_cast<size_t>(queries * 2), 0);
      const auto output = [&](double first, double second, Path path) {
        mask[0] = first;
        mask[1] = second;
        inputs.mask = MaskOf(DTypeOf<T>(), mask);
        return Compute(On(path, problem), inputs, this->scheduler_);
      };
      for (const Path path : kBothPaths) {
        SCOPED_TRACE(::testing::Message() << NameOf(path) << ", " << sentinel);
        const double lowest = static_cast<double>(sentinel);
        const auto same = output(lowest, lowest, path);
        EXPECT_NEAR(static_cast<double>(same.weights[0]), 0.5, 1e-6);
        EXPECT_NEAR(static_cast<double>(same.logsumexp[0]) / lowest, 1, 1e-3);
        const auto expect = [&](double first, double second, double expected) {
          EXPECT_NEAR(static_cast<double>(output(first, second, path).output[0]), expected, 1e-5)
              << first << " and " << second;
        };
        expect(lowest, lowest, 2);
        expect(lowest, lowest / 2, 3);
        expect(lowest / 2, lowest, 1);
        expect(lowest, 0, 3);
        // As large above 0.
        expect(-lowest, -lowest, 2);
        expect(-lowest, -lowest / 2, 1);
        expect(0, -lowest, 3);
      }
    }
  }
}

// However far below the row's largest a finite number is, its key is seen: a NaN there reaches the
// row, whoever its neighbours are.
TYPED_TEST(AttendMaskTest, AKeyFarBelowTheOthersIsSeen) {
  using T = typename TestFixture::Real;
  const double lowest = static_cast<double>(std::numeric_limits<T>::lowest());
  for (const int64_t queries : {1, 3, 40}) {
    AttendOptions options;
    options.mask = TensorSpec{DTypeOf<T>(), {2}};
    const Problem problem = ProblemOf<T>({.queries = queries, .keys = 2}, options);
    Inputs<T> inputs{std::vector<T>(static_cast<size_t>(queries), 0), {1, 1}, {1, 1}};
    inputs.mask = MaskOf(DTypeOf<T>(), {-lowest, lowest});
    for (std::vector<T>* const poisoned : {&inputs.key, &inputs.value}) {
      poisoned->back() = NaNs<T>()[0];
      for (const Path path : kBothPaths) {
        for (const T output : Compute(On(path, problem), inputs, this->scheduler_).output) {
          EXPECT_TRUE(std::isnan(output)) << NameOf(path) << ", " << queries << " queries";
        }
      }
      poisoned->back() = 1;
    }
  }
}

// A sink of an ordinary size outweighs keys that are far below it, and nothing of it is left beside
// keys that are far above.
TYPED_TEST(AttendMaskTest, ASinkStandsBesideSentinels) {
  using T = typename TestFixture::Real;
  const double lowest = static_cast<double>(std::numeric_limits<T>::lowest());
  struct Case {
    double sink;
    double mask;
    double output;
    double logsumexp;
  };
  const Case cases[] = {{1, lowest, 0, 1},
                        {1, -lowest, 2, -lowest},
                        {lowest / 4, lowest, 0, lowest / 4},
                        {lowest / 2, lowest / 4, 2, lowest / 4},
                        {lowest / 2, 0, 2, std::log(2.0)},
                        {kHidden, lowest, 2, lowest}};
  for (const Case& c : cases) {
    for (const int64_t queries : {1, 40}) {
      AttendOptions options = ReturningAll();
      options.mask = TensorSpec{DTypeOf<T>(), {2}};
      options.sinks = {c.sink};
      const Problem problem = ProblemOf<T>({.queries = queries, .keys = 2}, options);
      Inputs<T> inputs = RandomInputs<T>(problem, 1);
      inputs.query.assign(inputs.query.size(), 0);
      inputs.value = {1, 3};
      inputs.mask = MaskOf(DTypeOf<T>(), {c.mask, c.mask});
      for (const Path path : kBothPaths) {
        const auto results = Compute(On(path, problem), inputs, this->scheduler_);
        SCOPED_TRACE(::testing::Message() << NameOf(path) << ", sink " << c.sink);
        EXPECT_NEAR(static_cast<double>(results.output[0]), c.output, 1e-5);
        EXPECT_NEAR(static_cast<double>(results.weights[0]), c.output / 4, 1e-6);
        EXPECT_NEAR(static_cast<double>(results.logsumexp[0]) / c.logsumexp, 1, 1e-6);
      }
    }
  }
}

TYPED_TEST(AttendMaskTest, AConstantInARowOfTheMaskShowsInItsLogSumExpAlone) {
  using T = typename TestFixture::Real;
  for (const int64_t queries : {2, 70}) {
    AttendOptions options = ReturningAll();
    options.mask = TensorSpec{DTypeOf<T>(), {queries, 1}};
    const Problem problem = ProblemOf<T>({.queries = queries, .keys = 300}, options);
    Inputs<T> inputs = RandomInputs<T>(problem, 1);
    const auto with = [&](double constant) {
      inputs.mask = MaskOf(DTypeOf<T>(), std::vector<double>(queries, constant));
      return inputs;
    };
    for (const Path path : kBothPaths) {
      const auto plain = Compute(On(path, problem), with(0), this->scheduler_);
      const auto moved = Compute(On(path, problem), with(-4), this->scheduler_);
      std::vector<double> logsumexp = ToDouble(plain.logsumexp);
      for (double& number : logsumexp) number -= 4;
      EXPECT_TRUE(Near(moved.output, ToDouble(plain.output), 1e-5)) << NameOf(path);
      EXPECT_TRUE(Near(moved.weights, ToDouble(plain.weights), 0, 1e-5)) << NameOf(path);
      EXPECT_TRUE(Near(moved.logsumexp, logsumexp, 1e-5)) << NameOf(path);
    }
  }
}

// NaN and infinities in what the mask hides; and a NaN in what it does not.
TYPED_TEST(AttendMaskTest, KeysThatTheMaskHidesNeverShow) {
  using T = typename TestFixture::Real;
  for (const int64_t queries : {2, 70}) {
    for (const DType dtype : {DType::kBool, DTypeOf<T>()}) {
      AttendOptions options = ReturningAll();
      options.mask = TensorSpec{dtype, {queries, 300}};
      const Problem problem =
          ProblemOf<T>({.queries = queries, .keys = 300, .width = 4, .value_width = 5}, options);
      Inputs<T> clean = RandomInputs<T>(problem, 11);
      // Keys 3, 200 and 299 are hidden from all but the second row.
      std::vector<double> mask(static_cast<size_t>(queries * 300), 0);
      for (int64_t i = 0; i < queries; ++i) {
        for (const int64_t j : {3, 200, 299}) mask[i * 300 + j] = i == 1 ? 0 : kHidden;
      }
      clean.mask = MaskOf(dtype, mask);
      for (const Path path : kBothPaths) {
        const auto expected = Compute(On(path, problem), clean, this->scheduler_);
        for (const T poison : Poisons<T>()) {
          for (const bool values : {false, true}) {
            SCOPED_TRACE(::testing::Message() << NameOf(path) << ", " << NameOf(dtype) << ", "
                                              << queries << " queries, " << poison);
            Inputs<T> poisoned = clean;
            for (const int64_t j : {3, 200, 299}) {
              if (values) {
                FillRow(poisoned.value, j, problem.value_width, poison);
              } else {
                FillRow(poisoned.key, j, problem.width, poison);
              }
            }
            const auto actual = Compute(On(path, problem), poisoned, this->scheduler_);
            for (int64_t i = 0; i < queries; ++i) {
              for (int64_t x = 0; x < problem.value_width; ++x) {
                const auto at = static_cast<size_t>(i * problem.value_width + x);
                if (i == 1) {
                  EXPECT_FALSE(std::isfinite(actual.output[at]) && values);
                } else {
                  EXPECT_EQ(actual.output[at], expected.output[at]) << "row " << i;
                }
              }
            }
            EXPECT_TRUE(HiddenWeightsAreZero(problem, actual.weights, clean.mask));
          }
        }
      }
    }
  }
}

TYPED_TEST(AttendMaskTest, NaNInTheMaskMakesItsRowNaNAndNoOther) {
  using T = typename TestFixture::Real;
  for (const int64_t queries : {2, 70}) {
    AttendOptions options = ReturningAll();
    options.mask = TensorSpec{DTypeOf<T>(), {queries, 300}};
    const Problem problem = ProblemOf<T>({.queries = queries, .keys = 300}, options);
    Inputs<T> inputs = RandomInputs<T>(problem, 13);
    inputs.mask = RandomMask(*options.mask, 3);
    for (const T nan : NaNs<T>()) {
      std::memcpy(inputs.mask.data() + 301 * sizeof(T), &nan, sizeof(T));
      ExpectOracle(problem, inputs, this->scheduler_);
      for (const Path path : kBothPaths) {
        const auto results = Compute(On(path, problem), inputs, this->scheduler_);
        EXPECT_TRUE(std::isnan(results.output[1])) << NameOf(path);
        EXPECT_FALSE(std::isnan(results.output[0])) << NameOf(path);
      }
    }
  }
}

}  // namespace
}  // namespace attendant::core
