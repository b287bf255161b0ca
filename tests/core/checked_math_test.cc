#include "core/checked_math.h"

#include <gtest/gtest.h>

#include <limits>

namespace attendant::core {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
constexpr int64_t kTwo32 = int64_t{1} << 32;

TEST(CheckedProductTest, MultipliesWhatFits) {
  EXPECT_EQ(CheckedProduct({}), 1);
  EXPECT_EQ(CheckedProduct({7}), 7);
  EXPECT_EQ(CheckedProduct({2, 3, 5}), 30);
  EXPECT_EQ(CheckedProduct({kMax, 1}), kMax);
  EXPECT_EQ(CheckedProduct({kTwo32, kTwo32 / 4}), int64_t{1} << 62);
}

TEST(CheckedProductTest, HasNothingWhereItOverflows) {
  EXPECT_EQ(CheckedProduct({kTwo32, kTwo32}), std::nullopt);
  EXPECT_EQ(CheckedProduct({kTwo32, kTwo32 / 2}), std::nullopt);
  EXPECT_EQ(CheckedProduct({kMax, 2}), std::nullopt);
  EXPECT_EQ(CheckedProduct({kMax, kMax, kMax}), std::nullopt);
}

TEST(CheckedProductTest, AFactorOfZeroMakesZeroWhereverItStands) {
  EXPECT_EQ(CheckedProduct({0, kMax, kMax}), 0);
  EXPECT_EQ(CheckedProduct({kMax, 0, kMax}), 0);
  EXPECT_EQ(CheckedProduct({kMax, kMax, 0}), 0);
}

TEST(SaturatingProductTest, StopsAtTheLargest) {
  EXPECT_EQ(SaturatingProduct({3, 4}), 12);
  EXPECT_EQ(SaturatingProduct({kTwo32, kTwo32}), kMax);
  EXPECT_EQ(SaturatingProduct({kMax, kMax, 0}), 0);
}

TEST(SaturatingSumTest, StopsAtTheLargest) {
  EXPECT_EQ(SaturatingSum({}), 0);
  EXPECT_EQ(SaturatingSum({3, 4, 5}), 12);
  EXPECT_EQ(SaturatingSum({kMax, 0}), kMax);
  EXPECT_EQ(SaturatingSum({kMax, 1}), kMax);
  EXPECT_EQ(SaturatingSum({1, kMax, kMax, kMax}), kMax);
  EXPECT_EQ(SaturatingSum({kMax - 1, 1}), kMax);
}

TEST(CeilDivTest, RoundsUp) {
  EXPECT_EQ(CeilDiv(0, 5), 0);
  EXPECT_EQ(CeilDiv(1, 5), 1);
  EXPECT_EQ(CeilDiv(5, 5), 1);
  EXPECT_EQ(CeilDiv(6, 5), 2);
}

TEST(CeilDivTest, DoesNotOverflow) {
  EXPECT_EQ(CeilDiv(kMax, 1), kMax);
  EXPECT_EQ(CeilDiv(kMax, 2), kMax / 2 + 1);
  EXPECT_EQ(CeilDiv(kMax - 1, kMax), 1);
}

}  // namespace
}  // namespace attendant::core
