#include "core/tiling.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace attendant::core {
namespace {

Problem ProblemOf(int64_t batch, int64_t heads) {
  Problem problem;
  problem.batch = batch;
  problem.heads = problem.kv_heads = heads;
  return problem;
}

void ExpectCoversEachElementOnce(int64_t batch, int64_t heads, int64_t length, int64_t block) {
  const Tiling tiling(ProblemOf(batch, heads), length, block);
  std::vector<int> covered(batch * heads * length, 0);
  for (int64_t tile = 0; tile < tiling.tiles(); ++tile) {
    const Tiling::Block part = tiling[tile];
    ASSERT_GE(part.count, 1);
    ASSERT_LE(part.count, block);
    ASSERT_LT(part.batch, batch);
    ASSERT_LT(part.head, heads);
    ASSERT_LE(part.first + part.count, length);
    EXPECT_EQ(part.flat_head, part.batch * heads + part.head);
    for (int64_t i = part.first; i < part.first + part.count; ++i) {
      ++covered[part.flat_head * length + i];
    }
  }
  EXPECT_EQ(covered, std::vector<int>(covered.size(), 1));
}

TEST(TilingTest, CoversEachElementOnce) {
  for (int64_t batch = 0; batch <= 3; ++batch) {
    for (int64_t heads = 0; heads <= 3; ++heads) {
      for (int64_t length = 0; length <= 9; ++length) {
        for (int64_t block = 1; block <= 10; ++block) {
          SCOPED_TRACE(testing::Message()
                       << batch << " x " << heads << " x " << length << " in blocks of " << block);
          ExpectCoversEachElementOnce(batch, heads, length, block);
        }
      }
    }
  }
}

TEST(TilingTest, NumbersBatchByBatchHeadByHeadBlockByBlock) {
  const Tiling tiling(ProblemOf(2, 3), /*length=*/5, /*block=*/2);
  ASSERT_EQ(tiling.tiles(), 2 * 3 * 3);
  int64_t tile = 0;
  for (int64_t batch = 0; batch < 2; ++batch) {
    for (int64_t head = 0; head < 3; ++head) {
      for (int64_t first = 0; first < 5; first += 2) {
        const Tiling::Block block = tiling[tile++];
        EXPECT_EQ(block.batch, batch);
        EXPECT_EQ(block.head, head);
        EXPECT_EQ(block.first, first);
        EXPECT_EQ(block.count, first == 4 ? 1 : 2);
      }
    }
  }
}

TEST(TilingTest, TheNumberOfTilesSaturates) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(Tiling(ProblemOf(kMax, kMax), kMax, 1).tiles(), kMax);
  EXPECT_EQ(Tiling(ProblemOf(kMax, kMax), 0, 1).tiles(), 0);
  EXPECT_EQ(Tiling(ProblemOf(0, kMax), kMax, 1).tiles(), 0);
}

}  // namespace
}  // namespace attendant::core
