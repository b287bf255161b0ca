#include "core/machine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace attendant::core {
namespace {

TEST(MachineTest, HasNames) {
  EXPECT_THAT(CpuName(), testing::Not(testing::IsEmpty()));
  EXPECT_THAT(SimdTarget(), testing::Not(testing::IsEmpty()));
}

TEST(MachineTest, UsesATargetThatIsCompiledIn) {
  EXPECT_THAT(SimdTarget(), testing::AnyOf("AVX3", "AVX2", "SSE2"));
}

TEST(MachineTest, HasCpusAndMemory) {
  EXPECT_GE(AvailableCpus(), 1);
  EXPECT_GT(PhysicalMemoryBytes(), int64_t{1} << 20);
}

TEST(MachineTest, PeaksArePositiveOnAnyNumberOfThreads) {
  for (const int threads : {1, 3}) {
    Scheduler scheduler(threads);
    const PeakFlops peak = MeasurePeakFlops(scheduler, /*repetitions=*/2);
    EXPECT_GT(peak.float32, 0) << threads;
    EXPECT_GT(peak.float64, 0) << threads;
  }
}

TEST(MachineTest, NothingIsMeasuredInNoRepetitions) {
  Scheduler scheduler(1);
  const PeakFlops peak = MeasurePeakFlops(scheduler, /*repetitions=*/0);
  EXPECT_EQ(peak.float32, 0);
  EXPECT_EQ(peak.float64, 0);
}

}  // namespace
}  // namespace attendant::core
