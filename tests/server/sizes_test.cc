#include "server/sizes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace attendant::server {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kGiB = int64_t{1} << 30;

Config ConfigOf(int64_t memory_budget, int64_t max_message_bytes) {
  Config config;
  config.memory_budget = memory_budget;
  config.max_message_bytes = max_message_bytes;
  return config;
}

TEST(SizesTest, WhatIsLeftOpenFollowsTheMemory) {
  const auto large = ShareMemory(Config(), 16 * kGiB);
  ASSERT_TRUE(large.ok()) << large.status();
  EXPECT_EQ(large->memory_budget, 8 * kGiB);
  EXPECT_EQ(large->receive_quota, 4 * kGiB);
  EXPECT_EQ(large->max_message_bytes, 256 * kMiB);
  const auto small = ShareMemory(Config(), 512 * kMiB);
  ASSERT_TRUE(small.ok()) << small.status();
  EXPECT_EQ(small->memory_budget, 256 * kMiB);
  EXPECT_EQ(small->receive_quota, 128 * kMiB);
  EXPECT_EQ(small->max_message_bytes, 64 * kMiB);
}

TEST(SizesTest, WhatIsAskedForIsTakenToTheLastByteThatFits) {
  const auto most = ShareMemory(ConfigOf(768 * kMiB, 128 * kMiB), kGiB);
  ASSERT_TRUE(most.ok()) << most.status();
  EXPECT_EQ(most->memory_budget, 768 * kMiB);
  EXPECT_EQ(most->max_message_bytes, 128 * kMiB);
  EXPECT_TRUE(ShareMemory(ConfigOf(256 * kMiB, 128 * kMiB), kGiB).ok());
}

TEST(SizesTest, AMessageLeftOpenFitsASmallBudget) {
  const auto sizes = ShareMemory(ConfigOf(10 * kMiB, 0), 16 * kGiB);
  ASSERT_TRUE(sizes.ok()) << sizes.status();
  EXPECT_EQ(sizes->max_message_bytes, 5 * kMiB);
}

struct BadSizes {
  int64_t memory_budget;
  int64_t max_message_bytes;
  int64_t allowed;
  const char* flag;
  const char* arithmetic;
};

class BadSizesTest : public testing::TestWithParam<BadSizes> {};

TEST_P(BadSizesTest, AreRefusedWithTheArithmetic) {
  const auto sizes = ShareMemory(ConfigOf(GetParam().memory_budget, GetParam().max_message_bytes),
                                 GetParam().allowed);
  EXPECT_EQ(sizes.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(sizes.status().message()), testing::StartsWith(GetParam().flag));
  EXPECT_THAT(std::string(sizes.status().message()), HasSubstr(GetParam().arithmetic));
}

TEST(SizesTest, NoLimitOfMessagesIsAdvisedThatWouldBeRefused) {
  for (const int64_t budget : {int64_t{1}, int64_t{100000}, int64_t{131071}}) {
    const auto sizes = ShareMemory(ConfigOf(budget, 0), kGiB);
    EXPECT_THAT(std::string(sizes.status().message()), testing::EndsWith("to at least that"));
  }
  EXPECT_TRUE(ShareMemory(ConfigOf(131072, 0), kGiB).ok());
}

INSTANTIATE_TEST_SUITE_P(
    All, BadSizesTest,
    testing::Values(
        BadSizes{0, 65535, kGiB, "--max_message_bytes=65535", "from 65536 (64KiB)"},
        BadSizes{0, 2 * kGiB, 64 * kGiB, "--max_message_bytes=2147483648", "to 2147483647"},
        BadSizes{0, 128 * kMiB + 1, kGiB, "--max_message_bytes=134217729",
                 "2 x 134217729 = 268435458 bytes are more than gRPC may hold of what it receives, "
                 "268435456"},
        BadSizes{256 * kMiB - 1, 128 * kMiB, kGiB, "--memory_budget=268435455",
                 "2 x 134217728 = 268435456 bytes, do not fit"},
        BadSizes{768 * kMiB + 1, 0, kGiB, "--memory_budget=805306369", "at most 805306368"},
        BadSizes{256 * kMiB - 1, 128 * kMiB, kGiB, "--memory_budget=268435455",
                 "raise it to at least that, or lower --max_message_bytes to at most 134217727"},
        BadSizes{1, 0, kGiB, "--memory_budget=1:",
                 "2 x 65536 = 131072 bytes, do not fit; raise it to at least that"},
        BadSizes{0, 0, 100, "--max_message_bytes=65536", "2 x 65536"}));

}  // namespace
}  // namespace attendant::server
