#include "core/merge.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/errors.h"
#include "tests/core/testing.h"

namespace attendant::core {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

constexpr double kEmpty = -std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

template <typename S>
class MergeTest : public ::testing::Test {
 protected:
  using T = Wide<S>;

  struct Part {
    std::vector<S> output;
    std::vector<T> logsumexp;
  };

  static MergeProblem ProblemOf(size_t parts, int64_t rows, int64_t width) {
    return {DTypeOf<S>(), static_cast<int64_t>(parts), 1, 1, rows, width};
  }

  static Part PartOf(const std::vector<double>& output, const std::vector<double>& logsumexp) {
    return {Stored<S>(std::vector<T>(output.begin(), output.end())),
            std::vector<T>(logsumexp.begin(), logsumexp.end())};
  }

  // Some rows of some parts are empty, their outputs NaN.
  static std::vector<Part> RandomParts(size_t count, int64_t rows, int64_t width) {
    std::mt19937 rng(3);
    std::normal_distribution<double> normal(0, 5);
    std::vector<Part> parts;
    for (size_t p = 0; p < count; ++p) {
      std::vector<double> output;
      std::vector<double> logsumexp;
      for (int64_t row = 0; row < rows; ++row) {
        const bool empty = rng() % 3 == 0;
        logsumexp.push_back(empty ? kEmpty : normal(rng));
        for (int64_t x = 0; x < width; ++x) output.push_back(empty ? kNaN : normal(rng));
      }
      parts.push_back(PartOf(output, logsumexp));
    }
    return parts;
  }

  static Part Merged(const std::vector<Part>& parts, int64_t rows, int64_t width, int threads = 2) {
    Part merged{std::vector<S>(static_cast<size_t>(rows * width)),
                std::vector<T>(static_cast<size_t>(rows))};
    MergeTensors<S> tensors;
    for (const Part& part : parts) {
      tensors.parts.push_back({part.output.data(), part.logsumexp.data()});
    }
    tensors.output = merged.output.data();
    tensors.logsumexp = merged.logsumexp.data();
    Scheduler scheduler{threads};
    EXPECT_EQ(scheduler.Run(MergeStages<S>(ProblemOf(parts.size(), rows, width), tensors)),
              absl::OkStatus());
    return merged;
  }

  // By the definition, in float64.
  static void ExpectMerged(const std::vector<Part>& parts, int64_t rows, int64_t width,
                           const Part& merged) {
    std::vector<double> output;
    std::vector<double> logsumexp;
    std::vector<std::vector<double>> outputs;
    for (const Part& part : parts) outputs.push_back(ToDouble(part.output));
    for (int64_t row = 0; row < rows; ++row) {
      double sum = 0;
      std::vector<double> sums(static_cast<size_t>(width), 0);
      for (size_t p = 0; p < parts.size(); ++p) {
        const double weight = std::exp(static_cast<double>(parts[p].logsumexp[row]));
        if (weight == 0) continue;
        sum += weight;
        for (int64_t x = 0; x < width; ++x) sums[x] += weight * outputs[p][row * width + x];
      }
      logsumexp.push_back(std::log(sum));
      for (const double x : sums) output.push_back(sum == 0 ? 0 : x / sum);
    }
    const double u = static_cast<double>(std::numeric_limits<T>::epsilon());
    const double stored = std::is_same_v<S, BFloat16>  ? 0x1p-8
                          : std::is_same_v<S, Float16> ? 0x1p-11
                                                       : 0;
    EXPECT_TRUE(Near(merged.output, output, 30 * 8 * u + 30 * stored));
    EXPECT_TRUE(Near(merged.logsumexp, logsumexp, 30 * u));
  }
};
using Types = ::testing::Types<float, double, Float16, BFloat16>;
TYPED_TEST_SUITE(MergeTest, Types);

TYPED_TEST(MergeTest, IsTheWeightedMeanOfItsPartsInAnyOrder) {
  for (const int64_t rows : {1, 7, 900}) {
    for (const int64_t width : {0, 1, 64, 600}) {
      if (rows * width > 100'000) continue;
      for (const size_t count : {1, 2, 5}) {
        SCOPED_TRACE(::testing::Message() << count << " parts, " << rows << " x " << width);
        auto parts = this->RandomParts(count, rows, width);
        this->ExpectMerged(parts, rows, width, this->Merged(parts, rows, width));
        std::reverse(parts.begin(), parts.end());
        this->ExpectMerged(parts, rows, width, this->Merged(parts, rows, width));
      }
    }
  }
}

TYPED_TEST(MergeTest, OnePartAndEmptyOnesAreThatPart) {
  const auto one = this->PartOf({1.5, -2, 0.25, 3}, {0.7, -300});
  const auto empty = this->PartOf({kNaN, kNaN, 5, 6}, {kEmpty, kEmpty});
  for (const auto& parts : {std::vector{one}, {empty, one}, {one, empty, empty}}) {
    const auto merged = this->Merged(parts, 2, 2);
    EXPECT_TRUE(SameBits(merged.output, one.output));
    EXPECT_TRUE(SameBits(merged.logsumexp, one.logsumexp));
  }
}

TYPED_TEST(MergeTest, NothingButEmptyPartsIsEmpty) {
  const auto empty = this->PartOf({kNaN, 7}, {kEmpty});
  const auto merged = this->Merged({empty, empty}, 1, 2);
  EXPECT_THAT(ToDouble(merged.output), Each(0));
  EXPECT_THAT(ToDouble(merged.logsumexp), Each(kEmpty));
}

TYPED_TEST(MergeTest, NaNStaysInItsRow) {
  const auto merged = this->Merged(
      {this->PartOf({1, 1, 1}, {0, kNaN, 0}), this->PartOf({3, 3, kNaN}, {0, 0, 0})}, 3, 1);
  EXPECT_TRUE(Near(merged.output, {2, kNaN, kNaN}, 0));
  EXPECT_EQ(std::isnan(merged.logsumexp[1]), true);
  EXPECT_NEAR(static_cast<double>(merged.logsumexp[2]), std::log(2.0), 1e-6);
}

TYPED_TEST(MergeTest, LargeLogSumExpsDecideByTheirDifference) {
  const double large = sizeof(typename TestFixture::T) == 4 ? 3e38 : 1e300;
  const auto merged = this->Merged({this->PartOf({1, 1, 1}, {large, -large, 1000}),
                                    this->PartOf({3, 3, 3}, {large, large, -1000})},
                                   3, 1);
  EXPECT_TRUE(Near(merged.output, {2, 3, 1}, 0));
}

TYPED_TEST(MergeTest, BitsDoNotDependOnTheThreads) {
  const auto parts = this->RandomParts(3, 5000, 40);
  const auto one = this->Merged(parts, 5000, 40, 1);
  for (const int threads : {2, 8}) {
    const auto more = this->Merged(parts, 5000, 40, threads);
    EXPECT_TRUE(SameBits(more.output, one.output));
    EXPECT_TRUE(SameBits(more.logsumexp, one.logsumexp));
  }
}

TEST(MakeMergeProblemTest, TakesPartsOfOneShape) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16}) {
    const MergePartSpec part{{dtype, {2, 3, 4, 5}}, {WideOf(dtype), {2, 3, 4}}};
    const auto problem = MakeMergeProblem({part, part});
    ASSERT_TRUE(problem.ok()) << problem.status();
    EXPECT_EQ(problem->parts, 2);
    EXPECT_EQ(problem->rows(), 24);
    EXPECT_EQ(problem->value_width, 5);
    EXPECT_EQ(MergeFlops(*problem), 2 * 2 * 24 * 5);
    EXPECT_EQ(ResponseBytes(*problem), 24 * (5 * SizeOf(dtype) + SizeOf(WideOf(dtype))));
    EXPECT_EQ(RequestBytes(*problem), 2 * ResponseBytes(*problem));
  }
}

TEST(MakeMergeProblemTest, NamesTheFieldThatIsWrong) {
  const MergePartSpec good{{DType::kFloat16, {1, 2, 3, 4}}, {DType::kFloat32, {1, 2, 3}}};
  const auto expect = [&](const MergePartSpec& second, const std::string& field,
                          const std::string& what) {
    const absl::Status status = MakeMergeProblem({good, second}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(FieldOf(status).value_or(""), field);
    EXPECT_THAT(std::string(status.message()), HasSubstr(what));
  };
  MergePartSpec bad = good;
  bad.output.shape[3] = 5;
  expect(bad, "parts[1].output.shape[3]", "is 5, must be 4 (as in parts[0].output)");
  bad = good;
  bad.output.dtype = DType::kFloat32;
  expect(bad, "parts[1].output.dtype", "must be FLOAT16");
  bad = good;
  bad.logsumexp.dtype = DType::kFloat16;
  expect(bad, "parts[1].logsumexp.dtype", "must be FLOAT32 (for outputs of FLOAT16)");
  bad = good;
  bad.logsumexp.shape[2] = 7;
  expect(bad, "parts[1].logsumexp.shape[2]", "is 7, must be 3");
  bad = good;
  bad.logsumexp.shape = {1, 2};
  expect(bad, "parts[1].logsumexp.shape", "must have 3");
  bad = good;
  bad.output.shape[0] = -1;
  expect(bad, "parts[1].output.shape[0]", "is -1, must be 0 or more");
  EXPECT_EQ(FieldOf(MakeMergeProblem({}).status()).value_or(""), "parts");
}

}  // namespace
}  // namespace attendant::core
