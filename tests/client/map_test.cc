#include "client/cli/map.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "absl/strings/str_split.h"

namespace attendant::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string> Lines(const std::string& map) { return absl::StrSplit(map, '\n'); }

TEST(MapTest, ShadesGoFromNothingToTheLargest) {
  const double kNaN = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(Lines(DrawMap({0.9, 0, 1e-9, 0.45, 0.89, kNaN}, 2, 3)),
              ElementsAre("2 queries by 3 keys, @ = 0.9", "@ .", "+@?", ""));
}

TEST(MapTest, AHiddenRowIsBlank) {
  EXPECT_THAT(Lines(DrawMap({0, 0}, 1, 2)), ElementsAre("1 queries by 2 keys, @ = 0", "  ", ""));
}

TEST(MapTest, WhatIsTooLargeIsDrawnByItsLargest) {
  std::vector<double> weights(64 * 144, 0.001);
  weights[144 + 1] = 1;  // query 1, key 1
  const auto lines = Lines(DrawMap(weights, 64, 144));
  ASSERT_EQ(lines.size(), 1 + 32 + 1);
  EXPECT_THAT(lines[0], HasSubstr("the largest of 2 by 2"));
  EXPECT_EQ(lines[1], "@" + std::string(71, '.'));
  EXPECT_EQ(lines[32], std::string(72, '.'));
}

TEST(MapTest, NothingIsNoPicture) {
  EXPECT_THAT(Lines(DrawMap({}, 0, 3)), ElementsAre("0 queries by 3 keys, @ = 0", ""));
}

}  // namespace
}  // namespace attendant::cli
