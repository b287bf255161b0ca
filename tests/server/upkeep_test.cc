#include "server/upkeep.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <vector>

namespace attendant::server {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kMiB = int64_t{1} << 20;

TEST(IdleMemoryTest, IsWorthTrimmingOnceAfterTheLastCall) {
  IdleMemory idle;
  EXPECT_FALSE(idle.IsWorthTrimming({0, 0}, 100 * kMiB));  // nothing to compare with yet
  EXPECT_TRUE(idle.IsWorthTrimming({0, 0}, 100 * kMiB));
  idle.Trimmed(60 * kMiB);
  EXPECT_FALSE(idle.IsWorthTrimming({0, 0}, 60 * kMiB));
  EXPECT_FALSE(idle.IsWorthTrimming({5, 0}, 200 * kMiB)) << "calls came since the look before";
  EXPECT_TRUE(idle.IsWorthTrimming({5, 0}, 200 * kMiB));
  idle.Trimmed(61 * kMiB);
  EXPECT_FALSE(idle.IsWorthTrimming({5, 0}, 65 * kMiB)) << "too little";
}

TEST(IdleMemoryTest, NeverWhileACallRuns) {
  IdleMemory idle;
  EXPECT_FALSE(idle.IsWorthTrimming({1, 1}, 100 * kMiB));
  EXPECT_FALSE(idle.IsWorthTrimming({1, 1}, 100 * kMiB));
  EXPECT_TRUE(idle.IsWorthTrimming({1, 0}, 100 * kMiB));
}

// Self-checks of which the first few fail, and what was reported.
class UpkeepTest : public testing::Test {
 protected:
  Upkeep::Duties Duties(int failures) {
    Upkeep::Duties duties;
    duties.activity = [] { return Activity(); };
    duties.tend_calls = [this] { ++tended_; };
    duties.retry_after = std::chrono::milliseconds(1);
    duties.self_check = [this, failures] {
      return ++checks_ <= failures ? absl::InternalError("wrong") : absl::OkStatus();
    };
    duties.report = [this](Engine engine) {
      core::MutexLock lock(mutex_);
      reported_.push_back(engine);
      changed_.NotifyAll();
    };
    return duties;
  }

  std::vector<Engine> AwaitReports(size_t count) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    core::MutexLock lock(mutex_);
    while (reported_.size() < count && changed_.WaitUntil(mutex_, deadline)) {
    }
    return reported_;
  }

  std::atomic<int> checks_ = 0;
  std::atomic<int> tended_ = 0;
  core::Mutex mutex_;
  core::CondVar changed_;
  std::vector<Engine> reported_;
};

TEST_F(UpkeepTest, AfterAFaultTheFirstCheckThatPassesIsEnough) {
  Upkeep upkeep(Duties(2));
  upkeep.EngineFault();
  EXPECT_THAT(AwaitReports(2), ElementsAre(Engine::kFaulty, Engine::kSound));
  EXPECT_EQ(checks_, 3);
  upkeep.EngineFault();
  EXPECT_THAT(AwaitReports(4),
              ElementsAre(Engine::kFaulty, Engine::kSound, Engine::kFaulty, Engine::kSound));
}

TEST_F(UpkeepTest, AnEngineThatNeverPassesIsBrokenForGood) {
  Upkeep upkeep(Duties(1000));
  upkeep.EngineFault();
  EXPECT_THAT(AwaitReports(2), ElementsAre(Engine::kFaulty, Engine::kBroken));
  EXPECT_EQ(checks_, Upkeep::kMostFailures);
  upkeep.EngineFault();
  EXPECT_EQ(AwaitReports(2).size(), 2u);
  EXPECT_EQ(checks_, Upkeep::kMostFailures);
}

TEST_F(UpkeepTest, WithoutRoomForACheckNothingIsKnown) {
  Upkeep::Duties duties = Duties(0);
  duties.self_check = [this] {
    return ++checks_ <= 2 * Upkeep::kMostFailures ? absl::ResourceExhaustedError("full")
                                                  : absl::OkStatus();
  };
  Upkeep upkeep(duties);
  upkeep.EngineFault();
  EXPECT_THAT(AwaitReports(2), ElementsAre(Engine::kFaulty, Engine::kSound));
}

TEST_F(UpkeepTest, AFaultDuringACheckIsCheckedAgain) {
  Upkeep* upkeep = nullptr;
  Upkeep::Duties duties = Duties(0);
  duties.self_check = [this, &upkeep] {
    if (++checks_ == 1) upkeep->EngineFault();
    return absl::OkStatus();
  };
  Upkeep tested(duties);
  upkeep = &tested;
  tested.EngineFault();
  EXPECT_THAT(AwaitReports(2), ElementsAre(Engine::kFaulty, Engine::kSound));
  EXPECT_EQ(checks_, 2);
}

TEST_F(UpkeepTest, EndsWhileItWaitsForTheNextCheck) {
  Upkeep::Duties duties = Duties(1000);
  duties.retry_after = std::chrono::hours(1);
  Upkeep upkeep(duties);
  upkeep.EngineFault();
  EXPECT_THAT(AwaitReports(1), ElementsAre(Engine::kFaulty));
}

TEST_F(UpkeepTest, LooksAtTheActivity) {
  std::atomic<int> looks = 0;
  Upkeep::Duties duties = Duties(0);
  duties.tend_every = std::chrono::milliseconds(1);
  duties.look_every = std::chrono::milliseconds(1);
  duties.activity = [this, &looks] {
    if (++looks == 3) {
      core::MutexLock lock(mutex_);
      reported_.push_back(Engine::kSound);
      changed_.NotifyAll();
    }
    return Activity();
  };
  Upkeep upkeep(duties);
  EXPECT_EQ(AwaitReports(1).size(), 1u);
  EXPECT_GE(looks, 3);
  EXPECT_GE(tended_, 3);
}

}  // namespace
}  // namespace attendant::server
