// What must hold between a problem's answer and that of a changed problem, on both paths and in
// every type.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <random>
#include <type_traits>
#include <vector>

#include "core/attend.h"
#include "core/problem.h"
#include "tests/core/attend_testing.h"
#include "tests/core/testing.h"

namespace attendant::core {
namespace {

template <typename Param>
class AttendMetamorphicTest : public AttendTest<Param> {
 protected:
  using S = typename Param::Type;

  // One head of 5 or 70 queries and 400 keys; scores with a softcap and a mask.
  struct Case {
    Problem problem;
    Inputs<S> inputs;
    std::vector<double> mask;
    Tolerance tolerance;
  };
  static constexpr int64_t kKeys = 400;
  static constexpr int64_t kWidth = 6;
  static AttendOptions OptionsOf(int64_t queries, int64_t keys) {
    AttendOptions options = ReturningAll();
    options.softcap = 4;
    options.mask = TensorSpec{WideOf(DTypeOf<S>()), {queries, keys}};
    return options;
  }
  static Sizes SizesOf(int64_t queries, int64_t keys) {
    return {.queries = queries, .keys = keys, .width = kWidth, .value_width = kWidth};
  }
  static Case CaseOf(int64_t queries, Path path) {
    Case c;
    const AttendOptions options = OptionsOf(queries, kKeys);
    c.problem = On(path, ProblemOf<S>(SizesOf(queries, kKeys), options));
    c.inputs = RandomInputs<S>(c.problem, 21);
    c.inputs.mask = RandomMask(*options.mask, 22);
    c.mask = MaskNumbers(c.problem, c.inputs.mask);
    c.tolerance = ToleranceOf<S>(c.problem, MagnitudesOf(c.problem, c.inputs));
    return c;
  }
  void ForEachCase(const std::function<void(const Case&)>& check) {
    for (const int64_t queries : {5, 70}) {
      for (const Path path : kBothPaths) {
        const Case c = CaseOf(queries, path);
        SCOPED_TRACE(testing::Message() << NameOf(path) << " " << Describe(c.problem));
        check(c);
      }
    }
  }
  Results<S> Compute(const Problem& problem, const Inputs<S>& inputs) {
    return core::Compute(problem, inputs, this->scheduler_);
  }
};
using AllRuns = testing::Types<Run<float, Kernel::kFused>, Run<double, Kernel::kFused>,
                               Run<Float16, Kernel::kFused>, Run<BFloat16, Kernel::kFused>,
                               Run<float, Kernel::kOneDnn>, Run<double, Kernel::kOneDnn>,
                               Run<Float16, Kernel::kOneDnn>, Run<BFloat16, Kernel::kOneDnn>>;
TYPED_TEST_SUITE(AttendMetamorphicTest, AllRuns);

// Row `i` of the result is row order[i] of `from`.
template <typename T>
std::vector<T> Permuted(const std::vector<T>& from, int64_t width,
                        const std::vector<int64_t>& order) {
  std::vector<T> to;
  for (const int64_t row : order) {
    to.insert(to.end(), from.begin() + row * width, from.begin() + (row + 1) * width);
  }
  return to;
}

TYPED_TEST(AttendMetamorphicTest, PermutingTheKeysPermutesTheWeights) {
  using Fixture = AttendMetamorphicTest<TypeParam>;
  std::vector<int64_t> order(Fixture::kKeys);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(1));
  this->ForEachCase([&](const auto& c) {
    // Columns of a row-major (queries, keys) array.
    const auto columns = [&](const std::vector<double>& from) {
      std::vector<double> to;
      for (int64_t i = 0; i < c.problem.queries; ++i) {
        for (const int64_t j : order) to.push_back(from[i * Fixture::kKeys + j]);
      }
      return to;
    };
    auto inputs = c.inputs;
    inputs.key = Permuted(c.inputs.key, Fixture::kWidth, order);
    inputs.value = Permuted(c.inputs.value, Fixture::kWidth, order);
    inputs.mask = MaskOf(c.problem.mask->dtype, columns(c.mask));
    const auto plain = this->Compute(c.problem, c.inputs);
    const auto permuted = this->Compute(c.problem, inputs);
    const Tolerance& t = c.tolerance;
    EXPECT_TRUE(Near(permuted.output, ToDouble(plain.output), 2 * t.output));
    EXPECT_TRUE(Near(permuted.weights, columns(ToDouble(plain.weights)), 2 * t.tiny, 2 * t.weight));
    EXPECT_TRUE(Near(permuted.logsumexp, ToDouble(plain.logsumexp), 2 * t.logsumexp));
    EXPECT_TRUE(Near(permuted.key_sums, Permuted(ToDouble(plain.key_sums), 1, order), 2 * t.tiny,
                     2 * t.key_sum));
  });
}

TYPED_TEST(AttendMetamorphicTest, DoublingTheValuesDoublesTheOutputToTheBit) {
  using Number = typename TestFixture::Real;
  this->ForEachCase([&](const auto& c) {
    const auto doubled = [](const std::vector<Number>& stored) {
      std::vector<Wide<Number>> numbers = Widened(stored);
      for (Wide<Number>& number : numbers) number *= 2;
      return Stored<Number>(numbers);
    };
    auto inputs = c.inputs;
    inputs.value = doubled(c.inputs.value);
    const auto plain = this->Compute(c.problem, c.inputs);
    const auto larger = this->Compute(c.problem, inputs);
    // Numbers of float16 below its least normal one are rounded to multiples of 2^-24.
    const double subnormal = std::is_same_v<Number, Float16> ? 0x1p-23 : 0;
    EXPECT_TRUE(Near(larger.output, ToDouble(doubled(plain.output)), subnormal));
    EXPECT_TRUE(SameBits(larger.weights, plain.weights));
    EXPECT_TRUE(SameBits(larger.logsumexp, plain.logsumexp));
  });
}

TYPED_TEST(AttendMetamorphicTest, PartsOfTheKeysMergeByTheirLogSumExpIntoTheWhole) {
  using Fixture = AttendMetamorphicTest<TypeParam>;
  using Number = typename TestFixture::Real;
  constexpr int64_t kSplit = 150;
  this->ForEachCase([&](const auto& c) {
    const int64_t queries = c.problem.queries;
    const auto part = [&](int64_t first, int64_t end) {
      std::vector<double> mask;
      for (int64_t i = 0; i < queries; ++i) {
        const auto row = c.mask.begin() + i * Fixture::kKeys;
        mask.insert(mask.end(), row + first, row + end);
      }
      const auto rows = [&](const std::vector<Number>& tensor) {
        return std::vector<Number>(tensor.begin() + first * Fixture::kWidth,
                                   tensor.begin() + end * Fixture::kWidth);
      };
      const Problem problem = ProblemOf<Number>(Fixture::SizesOf(queries, end - first),
                                                Fixture::OptionsOf(queries, end - first));
      return this->Compute(On(c.problem.path, problem),
                           {c.inputs.query, rows(c.inputs.key), rows(c.inputs.value),
                            MaskOf(c.problem.mask->dtype, mask)});
    };
    const auto whole = this->Compute(c.problem, c.inputs);
    const auto low = part(0, kSplit);
    const auto high = part(kSplit, Fixture::kKeys);
    const std::vector<double> low_output = ToDouble(low.output);
    const std::vector<double> high_output = ToDouble(high.output);
    std::vector<double> output;
    std::vector<double> logsumexp;
    for (int64_t i = 0; i < queries; ++i) {
      const double a = static_cast<double>(low.logsumexp[i]);
      const double b = static_cast<double>(high.logsumexp[i]);
      const double largest = std::max(a, b);
      logsumexp.push_back(std::isinf(largest)
                              ? largest
                              : largest + std::log(std::exp(a - largest) + std::exp(b - largest)));
      for (int64_t x = 0; x < Fixture::kWidth; ++x) {
        const auto at = static_cast<size_t>(i * Fixture::kWidth + x);
        output.push_back(std::isinf(largest)
                             ? 0
                             : low_output[at] * std::exp(a - logsumexp.back()) +
                                   high_output[at] * std::exp(b - logsumexp.back()));
      }
    }
    EXPECT_TRUE(Near(whole.output, output, 4 * c.tolerance.output));
    EXPECT_TRUE(Near(whole.logsumexp, logsumexp, 4 * c.tolerance.logsumexp));
  });
}

}  // namespace
}  // namespace attendant::core
