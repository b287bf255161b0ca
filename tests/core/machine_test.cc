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
    for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
      EXPECT_GT(MeasurePeakFlops(scheduler, dtype, 1e-3), 0) << threads << NameOf(dtype);
    }
  }
}

TEST(MachineTest, TheTargetInUseIsTheBestOfThisCpu) {
  ASSERT_THAT(SimdTargets(), testing::Not(testing::IsEmpty()));
  EXPECT_EQ(SimdTargets().front(), SimdTarget());
}

TEST(MachineTest, AnUnknownTargetIsRefusedByNameWithWhatThereIs) {
  const absl::Status status = ForceSimdTarget("AVX9");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              testing::AllOf(testing::HasSubstr("'AVX9'"), testing::HasSubstr(SimdTarget())));
  EXPECT_EQ(SimdTargets().front(), SimdTarget());
}

// In a process of its own, since it is for good.
TEST(MachineDeathTest, AForcedTargetIsUsed) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const std::string last = SimdTargets().back();
  EXPECT_EXIT(
      {
        const bool forced = ForceSimdTarget(last).ok() && SimdTarget() == last;
        std::exit(forced ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace attendant::core
