#include "core/faults.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "core/scheduler.h"
#include "core/self_check.h"
#include "core/workspace.h"

namespace attendant::core {
namespace {

using faults::Arm;
using faults::Fired;
using faults::Point;

class FaultsTest : public testing::Test {
 protected:
  ~FaultsTest() override { faults::DisarmAll(); }
};

absl::Status NoWork(const TileContext&) { return absl::OkStatus(); }

TEST_F(FaultsTest, EveryNthAllocationIsRefused) {
  Workspace workspace;
  Arm(Point::kAllocation, 3);
  for (int i = 1; i <= 6; ++i) {
    EXPECT_EQ(absl::IsResourceExhausted(workspace.Allocate<float>(10).status()), i % 3 == 0) << i;
  }
  EXPECT_EQ(Fired(Point::kAllocation), 2);
  EXPECT_EQ(workspace.current_bytes(), 0);
  faults::DisarmAll();
  EXPECT_TRUE(workspace.Allocate<float>(10).ok());
}

TEST_F(FaultsTest, WithoutMemoryForAJobSubmitRefusesIt) {
  Scheduler scheduler(1);
  std::atomic<int> done = 0;
  const auto job = std::make_shared<Job>(std::vector<Stage>{{"one", 1, NoWork}},
                                         [&](const absl::Status&, const JobTimes&) { ++done; });
  Arm(Point::kAllocation, 1);
  EXPECT_TRUE(absl::IsResourceExhausted(scheduler.Submit(job)));
  faults::DisarmAll();
  EXPECT_EQ(scheduler.Run({{"one", 1, NoWork}}), absl::OkStatus());
  EXPECT_EQ(done, 0);
}

TEST_F(FaultsTest, AnEngineErrorEndsItsJobAndFailsTheSelfCheck) {
  Scheduler scheduler(2);
  EXPECT_EQ(SelfCheck(scheduler, Kernel::kFused), absl::OkStatus());
  Arm(Point::kEngineError, 1);
  EXPECT_TRUE(absl::IsInternal(scheduler.Run({{"one", 1, NoWork}})));
  EXPECT_TRUE(absl::IsInternal(SelfCheck(scheduler, Kernel::kFused)));
  faults::DisarmAll();
  EXPECT_EQ(SelfCheck(scheduler, Kernel::kFused), absl::OkStatus());
}

TEST_F(FaultsTest, NoMemoryIsNoEngineError) {
  Scheduler scheduler(2);
  Arm(Point::kAllocation, 1);
  EXPECT_TRUE(absl::IsResourceExhausted(SelfCheck(scheduler, Kernel::kFused)));
}

TEST_F(FaultsTest, ASlowTileIsRunAllTheSame) {
  Scheduler scheduler(2);
  std::atomic<int> tiles = 0;
  Arm(Point::kSlowTile, 2);
  EXPECT_EQ(scheduler.Run({{"six", 6,
                            [&](const TileContext&) {
                              ++tiles;
                              return absl::OkStatus();
                            }}}),
            absl::OkStatus());
  EXPECT_EQ(tiles, 6);
  EXPECT_EQ(Fired(Point::kSlowTile), 3);
}

}  // namespace
}  // namespace attendant::core
