#include "server/byte_ranges.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace attendant::server {
namespace {

TEST(ByteRangesTest, NothingIsMissingOfNothing) {
  ByteRanges ranges;
  EXPECT_EQ(ranges.FirstMissing(0), std::nullopt);
  EXPECT_EQ(ranges.FirstMissing(5), (ByteRange{0, 5}));
  EXPECT_EQ(ranges.Add({3, 3}), std::nullopt);
  EXPECT_EQ(ranges.FirstMissing(5), (ByteRange{0, 5}));
}

TEST(ByteRangesTest, RangesThatMeetAreOne) {
  ByteRanges ranges;
  ranges.Add({0, 2});
  ranges.Add({4, 6});
  EXPECT_EQ(ranges.count(), 2u);
  EXPECT_EQ(ranges.FirstMissing(6), (ByteRange{2, 4}));
  ranges.Add({2, 4});
  EXPECT_EQ(ranges.count(), 1u);
  EXPECT_EQ(ranges.FirstMissing(6), std::nullopt);
  EXPECT_EQ(ranges.FirstMissing(9), (ByteRange{6, 9}));
}

TEST(ByteRangesTest, WhatCameTwiceIsNamedAndNotAdded) {
  ByteRanges ranges;
  ranges.Add({10, 20});
  EXPECT_EQ(ranges.Add({15, 25}), (ByteRange{15, 20}));
  EXPECT_EQ(ranges.Add({5, 12}), (ByteRange{10, 12}));
  EXPECT_EQ(ranges.Add({0, 30}), (ByteRange{10, 20}));
  EXPECT_EQ(ranges.Add({12, 13}), (ByteRange{12, 13}));
  EXPECT_EQ(ranges.FirstMissing(20), (ByteRange{0, 10}));
  EXPECT_EQ(ranges.count(), 1u);
}

TEST(ByteRangesTest, IsAsAFlagForEachByte) {
  constexpr int64_t kSize = 60;
  for (uint32_t seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 rng(seed);
    ByteRanges ranges;
    std::vector<bool> here(kSize);
    for (int i = 0; i < 80; ++i) {
      const auto begin = static_cast<int64_t>(rng() % kSize);
      const int64_t end = begin + static_cast<int64_t>(rng() % 5) % (kSize - begin + 1);
      std::optional<ByteRange> twice;
      for (int64_t b = begin; b < end; ++b) {
        if (here[b] && !twice) twice = ByteRange{b, b};
        if (twice && twice->end == b && here[b]) twice->end = b + 1;
      }
      EXPECT_EQ(ranges.Add({begin, end}), twice);
      for (int64_t b = begin; b < end && !twice; ++b) here[b] = true;
      std::optional<ByteRange> missing;
      for (int64_t b = 0; b < kSize; ++b) {
        if (!here[b] && !missing) missing = ByteRange{b, b};
        if (missing && missing->end == b && !here[b]) missing->end = b + 1;
      }
      EXPECT_EQ(ranges.FirstMissing(kSize), missing);
    }
  }
}

}  // namespace
}  // namespace attendant::server
