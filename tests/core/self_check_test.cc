#include "core/self_check.h"

#include <gtest/gtest.h>

#include <latch>
#include <memory>
#include <utility>
#include <vector>

#include "core/scheduler.h"

namespace attendant::core {
namespace {

TEST(SelfCheckTest, PassesOnEveryKernelAndNumberOfThreads) {
  for (const int threads : {1, 2, 5}) {
    Scheduler scheduler(threads);
    for (const Kernel kernel : {Kernel::kFused, Kernel::kOneDnn}) {
      EXPECT_EQ(SelfCheck(scheduler, kernel), absl::OkStatus());
    }
  }
}

TEST(SelfCheckTest, NeedsNoneOfTheSchedulersPlaces) {
  SchedulerOptions options;
  options.max_running = 1;
  options.max_queue = 0;
  Scheduler scheduler(options);
  std::latch done(1);
  const auto job = std::make_shared<Job>(
      std::vector<Stage>{
          {"endless", int64_t{1} << 60, [](const TileContext&) { return absl::OkStatus(); }}},
      [&](const absl::Status&, const JobTimes&) { done.count_down(); });
  ASSERT_EQ(scheduler.Submit(job), absl::OkStatus());
  EXPECT_EQ(SelfCheck(scheduler, Kernel::kFused), absl::OkStatus());
  job->Stop(absl::CancelledError("enough"));
  done.wait();
}

}  // namespace
}  // namespace attendant::core
