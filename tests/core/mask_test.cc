#include "core/mask.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "tests/core/testing.h"

namespace attendant::core {
namespace {

using ::testing::ElementsAre;

constexpr double kHidden = -std::numeric_limits<double>::infinity();

Problem ProblemWith(const TensorSpec& mask, std::vector<double> sinks = {}) {
  AttendOptions options;
  options.mask = mask;
  options.sinks = std::move(sinks);
  return ProblemOf<double>({.batch = 2, .heads = 2, .kv_heads = 2, .queries = 2, .keys = 3},
                           options);
}

std::vector<double> Read(const HeadMask<double>& mask, int64_t query, KeyRange keys) {
  std::vector<double> bias(static_cast<size_t>(keys.size()));
  mask.Read(query, keys, bias.data());
  return bias;
}

TEST(HeadMaskTest, ReadsItsBatchHeadAndQuery) {
  const Problem problem = ProblemWith({DType::kFloat64, {2, 2, 2, 3}});
  std::vector<double> numbers(24);
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<double>(i);
  const HeadMask<double> mask(problem, numbers.data(), 1, 0);
  EXPECT_TRUE(mask.present() && mask.added());
  EXPECT_THAT(Read(mask, 1, {0, 3}), ElementsAre(15, 16, 17));
  EXPECT_THAT(Read(mask, 0, {1, 3}), ElementsAre(13, 14));
  EXPECT_EQ(mask.Numbers(0, 1), numbers.data() + 13);
  EXPECT_EQ(mask.Flags(0, 1), nullptr);
}

TEST(HeadMaskTest, BroadcastsWhatItHasNot) {
  const Problem of_query = ProblemWith({DType::kFloat64, {2, 1}});
  const std::vector<double> numbers = {5, kHidden};
  const HeadMask<double> mask(of_query, numbers.data(), 1, 1);
  EXPECT_THAT(Read(mask, 0, {0, 3}), ElementsAre(5, 5, 5));
  EXPECT_EQ(mask.Numbers(0, 0), nullptr);
  EXPECT_FALSE(mask.Hides(0, 2));
  EXPECT_TRUE(mask.Hides(1, 2));
}

TEST(HeadMaskTest, AnyByteButZeroIsTrue) {
  const Problem problem = ProblemWith({DType::kBool, {3}});
  const std::vector<uint8_t> flags = {1, 0, 255};
  const HeadMask<double> mask(problem, flags.data(), 0, 0);
  EXPECT_FALSE(mask.added());
  EXPECT_THAT(Read(mask, 1, {0, 3}), ElementsAre(0, kHidden, 0));
  EXPECT_EQ(mask.Flags(1, 2), flags.data() + 2);
}

TEST(HeadMaskTest, WithoutAMaskNothingIsHidden) {
  const HeadMask<double> none(ProblemOf<double>({}, {}), nullptr, 0, 0);
  EXPECT_FALSE(none.present());
  EXPECT_FALSE(none.Hides(0, 0));
  EXPECT_EQ(none.Shift(0, {0, 1}), 0);
}

TEST(HeadMaskTest, AMaskWithoutElementsIsAMask) {
  AttendOptions options;
  options.mask = TensorSpec{DType::kFloat64, {2, 0}};
  const HeadMask<double> mask(ProblemOf<double>({.queries = 2, .keys = 0}, options), nullptr, 0, 0);
  EXPECT_TRUE(mask.present() && mask.added());
  EXPECT_EQ(mask.Shift(1, {0, 0}), 0);
}

TEST(HeadMaskTest, ShiftsByTheLargestNumberARowSeesWhereThatIsFar) {
  const double far = kFar<double>;
  struct Case {
    std::vector<double> row;
    KeyRange keys;
    double shift;
  };
  const Case cases[] = {
      {{-far, -2 * far, kHidden}, {0, 3}, -far},
      {{-far, -2 * far, kHidden}, {1, 3}, -2 * far},
      {{-far, -2 * far, 0}, {0, 3}, 0},
      {{-far / 2, -far, -far}, {0, 3}, 0},
      {{3 * far, -far, 0}, {0, 3}, 3 * far},
      {{kHidden, kHidden, kHidden}, {0, 3}, 0},
      {{-kHidden, 0, 0}, {0, 3}, 0},
      {{-far, -far, -far}, {1, 1}, 0},
  };
  for (const Case& c : cases) {
    const Problem problem = ProblemWith({DType::kFloat64, {3}});
    EXPECT_EQ(HeadMask<double>(problem, c.row.data(), 0, 0).Shift(0, c.keys), c.shift);
  }
  // A sink that outweighs the keys leaves nothing to decide between them.
  const std::vector<double> row(3, -far);
  const auto shift = [&](double sink) {
    return HeadMask<double>(ProblemWith({DType::kFloat64, {3}}, {sink, 0}), row.data(), 0, 0)
        .Shift(0, {0, 3});
  };
  EXPECT_EQ(shift(1), 0);
  EXPECT_EQ(shift(-far), -far);
}

}  // namespace
}  // namespace attendant::core
