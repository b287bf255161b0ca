// Nothing here sleeps: threads are held still by latches, and a test that could wait for something
// that a broken scheduler never does has a deadline.
#include "core/scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <latch>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/errors.h"

namespace attendant::core {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

constexpr int64_t kEndless = int64_t{1} << 60;  // tiles that only a stop ends

absl::Status NoWork(const TileContext&) { return absl::OkStatus(); }

// What a job's `done` was told.
class Completion {
 public:
  Job::Done Callback() {
    return [this](const absl::Status& status, const JobTimes& times) {
      if (calls_++ > 0) return;
      status_ = status;
      times_ = times;
      done_.count_down();
    };
  }
  absl::Status Wait() {
    done_.wait();
    return status_;
  }
  // REQUIRES: Wait has returned.
  JobTimes times() const { return times_; }
  int calls() const { return calls_; }

 private:
  std::latch done_{1};
  std::atomic<int> calls_ = 0;
  absl::Status status_;
  JobTimes times_;
};

std::shared_ptr<Job> JobOf(std::vector<Stage> stages, Completion& completion) {
  return std::make_shared<Job>(std::move(stages), completion.Callback());
}

// Where nothing is refused.
void Submit(Scheduler& scheduler, std::shared_ptr<Job> job) {
  EXPECT_EQ(scheduler.Submit(std::move(job)), absl::OkStatus());
}

// Keeps each thread of a scheduler inside a tile until it is released.
class Hold {
 public:
  explicit Hold(Scheduler& scheduler) {
    auto entered = std::make_shared<std::latch>(scheduler.threads());
    Submit(scheduler, std::make_shared<Job>(
                          std::vector<Stage>{{"hold", scheduler.threads(),
                                              [entered, release = release_](const TileContext&) {
                                                entered->count_down();
                                                release->wait();
                                                return absl::OkStatus();
                                              }}},
                          [](const absl::Status&, const JobTimes&) {}));
    entered->wait();
  }
  ~Hold() { Release(); }

  void Release() {
    if (!std::exchange(released_, true)) release_->count_down();
  }

 private:
  std::shared_ptr<std::latch> release_ = std::make_shared<std::latch>(1);
  bool released_ = false;
};

// Words in the order they were said.
class Log {
 public:
  void Say(std::string word) {
    MutexLock lock(mutex_);
    words_.push_back(std::move(word));
  }
  std::vector<std::string> words() {
    MutexLock lock(mutex_);
    return words_;
  }

 private:
  Mutex mutex_;
  std::vector<std::string> words_ ABSL_GUARDED_BY(mutex_);
};

Stage Saying(Log& log, const std::string& name, int64_t tiles) {
  return {name, tiles, [&log, name](const TileContext& context) {
            log.Say(name + std::to_string(context.tile));
            return absl::OkStatus();
          }};
}

// True once the tile is told to stop; false where it is not within half a minute.
bool IsToldToStop(const TileContext& context) {
  const auto deadline = Clock::now() + std::chrono::seconds(30);
  while (!context.stopped()) {
    if (Clock::now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

TEST(SchedulerTest, HasTheThreadsItWasAskedFor) {
  for (const int threads : {1, 2, 8}) EXPECT_EQ(Scheduler(threads).threads(), threads);
}

TEST(SchedulerTest, TilesOfOneJobStartInOrder) {
  Log log;
  Scheduler scheduler(1);
  EXPECT_EQ(scheduler.Run({Saying(log, "a", 3), Saying(log, "b", 2)}), absl::OkStatus());
  EXPECT_THAT(log.words(), ElementsAre("a0", "a1", "a2", "b0", "b1"));
}

// Threads are shared by time, to a millisecond. Runs a trial, which returns how long its tiles took
// and what is wrong with it, until none of them can have been taken for longer than it was, because
// something else had its CPU.
void ExpectUndisturbed(
    const std::function<std::pair<Clock::duration, testing::AssertionResult>()>& trial) {
  constexpr int kTrials = 200;
  for (int i = 0; i < kTrials; ++i) {
    const auto [time, result] = trial();
    if (time >= std::chrono::milliseconds(1)) continue;
    EXPECT_TRUE(result);
    return;
  }
  FAIL() << "every trial was disturbed";
}

TEST(SchedulerTest, TilesOfTwoJobsAlternate) {
  ExpectUndisturbed([] {
    Log log;
    Completion a, b;
    Scheduler scheduler(1);
    Hold hold(scheduler);
    Submit(scheduler, JobOf({Saying(log, "a", 3)}, a));
    Submit(scheduler, JobOf({Saying(log, "b", 3)}, b));
    hold.Release();
    EXPECT_EQ(a.Wait(), absl::OkStatus());
    EXPECT_EQ(b.Wait(), absl::OkStatus());
    const std::vector<std::string> in_turn = {"a0", "b0", "a1", "b1", "a2", "b2"};
    return std::pair(b.times().end - a.times().first_tile,
                     log.words() == in_turn
                         ? testing::AssertionSuccess()
                         : testing::AssertionFailure() << testing::PrintToString(log.words()));
  });
}

TEST(SchedulerTest, AShortJobCompletesWhileALongOneHasTiles) {
  ExpectUndisturbed([] {
    std::atomic<int> long_tiles = 0;
    int long_tiles_at_end_of_short = -1;
    Completion long_completion;
    Clock::duration time = {};
    std::latch short_done(1);
    Scheduler scheduler(1);
    Hold hold(scheduler);
    Submit(scheduler, JobOf({{"long", 1000,
                              [&](const TileContext&) {
                                ++long_tiles;
                                return absl::OkStatus();
                              }}},
                            long_completion));
    Submit(scheduler,
           std::make_shared<Job>(std::vector<Stage>{{"first", 1, NoWork}, {"second", 1, NoWork}},
                                 [&](const absl::Status&, const JobTimes& times) {
                                   long_tiles_at_end_of_short = long_tiles;
                                   time = times.end - times.first_tile;
                                   short_done.count_down();
                                 }));
    hold.Release();
    short_done.wait();
    EXPECT_EQ(long_completion.Wait(), absl::OkStatus());
    EXPECT_EQ(long_tiles, 1000);
    const bool beside = long_tiles_at_end_of_short >= 1 && long_tiles_at_end_of_short <= 10;
    return std::pair(time, beside ? testing::AssertionSuccess()
                                  : testing::AssertionFailure() << long_tiles_at_end_of_short);
  });
}

TEST(SchedulerTest, AfterStopNoFurtherTileStarts) {
  for (const int threads : {1, 2, 8}) {
    std::atomic<int> started = 0;
    std::latch entered(threads);
    std::latch release(1);
    Completion completion;
    {
      Scheduler scheduler(threads);
      const auto job = JobOf({{"held", kEndless,
                               [&](const TileContext&) {
                                 ++started;
                                 entered.count_down();
                                 release.wait();
                                 return absl::OkStatus();
                               }},
                              {"next", 1,
                               [&](const TileContext&) {
                                 ++started;
                                 return absl::OkStatus();
                               }}},
                             completion);
      Submit(scheduler, job);
      entered.wait();
      job->Stop(absl::CancelledError("first"));
      job->Stop(absl::DeadlineExceededError("second"));
      release.count_down();
      EXPECT_EQ(completion.Wait(), absl::CancelledError("first"));
    }
    EXPECT_EQ(started, threads);
    EXPECT_EQ(completion.calls(), 1);
  }
}

TEST(SchedulerTest, ARunningTileIsToldToStop) {
  std::latch entered(1);
  bool told_early = true;
  bool told = false;
  Completion completion;
  Scheduler scheduler(1);
  const auto job = JobOf({{"long", 1,
                           [&](const TileContext& context) {
                             told_early = context.stopped();
                             entered.count_down();
                             told = IsToldToStop(context);
                             return absl::OkStatus();
                           }}},
                         completion);
  Submit(scheduler, job);
  entered.wait();
  job->Stop(absl::CancelledError("enough"));
  EXPECT_EQ(completion.Wait(), absl::CancelledError("enough"));
  EXPECT_FALSE(told_early);
  EXPECT_TRUE(told);
}

TEST(SchedulerTest, StoppingOneJobLeavesTheOthersAlone) {
  Log log;
  Completion stopped, other;
  Scheduler scheduler(1);
  Hold hold(scheduler);
  const auto job = JobOf({Saying(log, "a", 3)}, stopped);
  Submit(scheduler, job);
  Submit(scheduler, JobOf({Saying(log, "b", 3)}, other));
  job->Stop(absl::CancelledError("enough"));
  hold.Release();
  EXPECT_EQ(stopped.Wait(), absl::CancelledError("enough"));
  EXPECT_EQ(other.Wait(), absl::OkStatus());
  EXPECT_THAT(log.words(), ElementsAre("b0", "b1", "b2"));
}

TEST(SchedulerTest, AJobMayBeStoppedBeforeItIsSubmitted) {
  std::atomic<int> started = 0;
  Completion completion;
  {
    Scheduler scheduler(2);
    const auto job = JobOf({{"never", 5,
                             [&](const TileContext&) {
                               ++started;
                               return absl::OkStatus();
                             }}},
                           completion);
    job->Stop(absl::CancelledError("early"));
    Submit(scheduler, job);
    EXPECT_EQ(completion.Wait(), absl::CancelledError("early"));
  }
  EXPECT_EQ(started, 0);
  EXPECT_EQ(completion.calls(), 1);
  EXPECT_EQ(completion.times().first_tile, Clock::time_point());
  EXPECT_EQ(completion.times().end, Clock::time_point());
}

TEST(SchedulerTest, StopAfterDoneHasNoEffect) {
  Completion completion;
  {
    Scheduler scheduler(1);
    const auto job = JobOf({{"one", 1, NoWork}}, completion);
    Submit(scheduler, job);
    EXPECT_EQ(completion.Wait(), absl::OkStatus());
    job->Stop(absl::CancelledError("late"));
  }
  EXPECT_EQ(completion.Wait(), absl::OkStatus());
  EXPECT_EQ(completion.calls(), 1);
}

TEST(SchedulerTest, ATilesErrorStopsTheJobWithThatError) {
  Log log;
  Completion completion;
  {
    Scheduler scheduler(1);
    Submit(scheduler, JobOf({{"failing", 10,
                              [&](const TileContext& context) {
                                log.Say(std::to_string(context.tile));
                                return context.tile == 2 ? absl::InternalError("tile 2 failed")
                                                         : absl::OkStatus();
                              }},
                             Saying(log, "next", 1)},
                            completion));
    EXPECT_EQ(completion.Wait(), absl::InternalError("tile 2 failed"));
  }
  EXPECT_THAT(log.words(), ElementsAre("0", "1", "2"));
  EXPECT_EQ(completion.calls(), 1);
}

TEST(SchedulerTest, TheFirstOfTwoErrorsWins) {
  std::latch both_running(2);
  Scheduler scheduler(2);
  const absl::Status status = scheduler.Run({{"failing", 2, [&](const TileContext& context) {
                                                both_running.arrive_and_wait();
                                                if (context.tile == 0)
                                                  return absl::InternalError("first");
                                                EXPECT_TRUE(IsToldToStop(context));
                                                return absl::DataLossError("second");
                                              }}});
  EXPECT_EQ(status, absl::InternalError("first"));
}

// Checks, of a job of several stages, that each tile runs once, that a stage begins when the one
// before it is complete, and that a worker runs one tile at a time.
class TileCounters {
 public:
  TileCounters(std::vector<int64_t> tiles, std::vector<std::atomic<int>>& worker_tiles)
      : tiles_(std::move(tiles)), worker_tiles_(worker_tiles), ended_(tiles_.size()) {
    for (const int64_t count : tiles_) runs_.emplace_back(count);
  }

  std::vector<Stage> Stages() {
    std::vector<Stage> stages;
    for (size_t stage = 0; stage < tiles_.size(); ++stage) {
      stages.push_back({"counted", tiles_[stage], [this, stage](const TileContext& context) {
                          Run(stage, context);
                          return absl::OkStatus();
                        }});
    }
    return stages;
  }

  void ExpectEachTileRanOnce() const {
    for (const auto& stage : runs_) {
      for (const auto& runs : stage) EXPECT_EQ(runs, 1);
    }
    EXPECT_EQ(early_, 0);
    EXPECT_EQ(shared_workers_, 0);
  }

 private:
  void Run(size_t stage, const TileContext& context) {
    ASSERT_GE(context.worker, 0);
    ASSERT_LT(context.worker, static_cast<int>(worker_tiles_.size()));
    if (worker_tiles_[context.worker]++ > 0) ++shared_workers_;
    if (stage > 0 && ended_[stage - 1] != tiles_[stage - 1]) ++early_;
    ASSERT_LT(context.tile, tiles_[stage]);
    ++runs_[stage][context.tile];
    ++ended_[stage];
    --worker_tiles_[context.worker];
  }

  const std::vector<int64_t> tiles_;
  std::vector<std::atomic<int>>& worker_tiles_;  // running now, of all jobs
  std::vector<std::vector<std::atomic<int>>> runs_;
  std::vector<std::atomic<int64_t>> ended_;
  std::atomic<int> early_ = 0;
  std::atomic<int> shared_workers_ = 0;
};

class SchedulerThreadsTest : public testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Threads, SchedulerThreadsTest, testing::Values(1, 2, 8));

TEST_P(SchedulerThreadsTest, NoTileIsLostOrDoubled) {
  constexpr int kSubmitters = 4;
  constexpr int kJobsEach = 50;
  std::vector<std::atomic<int>> worker_tiles(GetParam());
  std::vector<std::unique_ptr<TileCounters>> counters;
  std::vector<Completion> completions(kSubmitters * kJobsEach);
  for (int64_t job = 0; job < kSubmitters * kJobsEach; ++job) {
    counters.push_back(std::make_unique<TileCounters>(
        std::vector<int64_t>{job % 17, (job * 7) % 5, 1 + job % 3, 0}, worker_tiles));
  }
  {
    Scheduler scheduler(GetParam());
    std::vector<std::thread> submitters;
    for (int submitter = 0; submitter < kSubmitters; ++submitter) {
      submitters.emplace_back([&, submitter] {
        for (int i = submitter * kJobsEach; i < (submitter + 1) * kJobsEach; ++i) {
          Submit(scheduler, JobOf(counters[i]->Stages(), completions[i]));
        }
      });
    }
    for (std::thread& submitter : submitters) submitter.join();
    for (Completion& completion : completions) EXPECT_EQ(completion.Wait(), absl::OkStatus());
  }
  for (const auto& counter : counters) counter->ExpectEachTileRanOnce();
  for (const Completion& completion : completions) EXPECT_EQ(completion.calls(), 1);
}

TEST_P(SchedulerThreadsTest, AStoppedJobIsDoneWhenNoTileOfItRuns) {
  constexpr int kJobs = 100;
  std::vector<std::atomic<int>> running(kJobs);
  std::vector<std::atomic<bool>> done(kJobs);
  std::atomic<int> running_at_done = 0;
  std::atomic<int> after_done = 0;
  std::latch all_done(kJobs);
  Scheduler scheduler(GetParam());
  for (int i = 0; i < kJobs; ++i) {
    Submit(scheduler,
           std::make_shared<Job>(std::vector<Stage>{{"failing", 40,
                                                     [&, i](const TileContext& context) {
                                                       ++running[i];
                                                       if (done[i]) ++after_done;
                                                       --running[i];
                                                       return context.tile == i % 40
                                                                  ? absl::InternalError("stop")
                                                                  : absl::OkStatus();
                                                     }}},
                                 [&, i](const absl::Status& status, const JobTimes&) {
                                   EXPECT_EQ(status, absl::InternalError("stop"));
                                   if (running[i] > 0) ++running_at_done;
                                   done[i] = true;
                                   all_done.count_down();
                                 }));
  }
  all_done.wait();
  EXPECT_EQ(running_at_done, 0);
  EXPECT_EQ(after_done, 0);
}

TEST_P(SchedulerThreadsTest, DestructionStopsWhatIsPending) {
  constexpr int kJobs = 20;
  std::vector<Completion> completions(kJobs);
  {
    Scheduler scheduler(GetParam());
    for (Completion& completion : completions) {
      Submit(scheduler, JobOf({{"endless", kEndless, NoWork}}, completion));
    }
  }
  for (Completion& completion : completions) {
    ASSERT_EQ(completion.calls(), 1);
    EXPECT_EQ(completion.Wait().code(), absl::StatusCode::kCancelled);
  }
}

TEST_P(SchedulerThreadsTest, DestructionTellsRunningTilesToStop) {
  std::latch entered(GetParam());
  std::atomic<int> told = 0;
  Completion completion;
  {
    Scheduler scheduler(GetParam());
    Submit(scheduler, JobOf({{"long", GetParam(),
                              [&](const TileContext& context) {
                                entered.count_down();
                                if (IsToldToStop(context)) ++told;
                                return absl::OkStatus();
                              }}},
                            completion));
    entered.wait();
  }
  ASSERT_EQ(completion.calls(), 1);
  EXPECT_EQ(completion.Wait().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(told, GetParam());
}

TEST_P(SchedulerThreadsTest, StagesAndJobsWithoutTilesComplete) {
  Log log;
  std::atomic<int> ran = 0;
  const auto count = [&](const TileContext&) {
    ++ran;
    return absl::OkStatus();
  };
  Scheduler scheduler(GetParam());
  EXPECT_EQ(scheduler.Run({}), absl::OkStatus());
  EXPECT_EQ(scheduler.Run({{"empty", 0, count}}), absl::OkStatus());
  EXPECT_EQ(scheduler.Run({{"empty", 0, count}, {"empty", 0, count}}), absl::OkStatus());
  EXPECT_EQ(ran, 0);
  EXPECT_EQ(scheduler.Run({{"empty", 0, count}, {"one", 1, count}, {"empty", 0, count}}),
            absl::OkStatus());
  EXPECT_EQ(ran, 1);
}

TEST(SchedulerTest, AJobWithoutTilesHasNoTimesOfThem) {
  Completion completion;
  Scheduler scheduler(1);
  Submit(scheduler, JobOf({{"empty", 0, NoWork}}, completion));
  EXPECT_EQ(completion.Wait(), absl::OkStatus());
  EXPECT_NE(completion.times().submitted, Clock::time_point());
  EXPECT_EQ(completion.times().first_tile, Clock::time_point());
  EXPECT_EQ(completion.times().end, Clock::time_point());
}

TEST(SchedulerTest, AStageWaitsForTheLastTileOfTheOneBefore) {
  std::latch held(1);
  std::latch other_ended(1);
  std::latch release(1);
  std::atomic<bool> second_started = false;
  Completion completion;
  Scheduler scheduler(2);
  Submit(scheduler, JobOf({{"first", 2,
                            [&](const TileContext& context) {
                              if (context.tile == 0) {
                                held.count_down();
                                release.wait();
                              } else {
                                other_ended.count_down();
                              }
                              return absl::OkStatus();
                            }},
                           {"second", 1,
                            [&](const TileContext&) {
                              second_started = true;
                              return absl::OkStatus();
                            }}},
                          completion));
  held.wait();
  other_ended.wait();
  // The thread that is free has left the job alone: it takes others.
  EXPECT_EQ(scheduler.Run({{"other", 3, NoWork}}), absl::OkStatus());
  EXPECT_FALSE(second_started);
  release.count_down();
  EXPECT_EQ(completion.Wait(), absl::OkStatus());
  EXPECT_TRUE(second_started);
}

TEST(SchedulerTest, TilesOfOneStageRunAtTheSameTime) {
  constexpr int kThreads = 4;
  std::latch all_running(kThreads);
  std::vector<std::atomic<int>> tiles_of_worker(kThreads);
  Scheduler scheduler(kThreads);
  EXPECT_EQ(scheduler.Run({{"meet", kThreads,
                            [&](const TileContext& context) {
                              ++tiles_of_worker[context.worker];
                              all_running.arrive_and_wait();
                              return absl::OkStatus();
                            }}}),
            absl::OkStatus());
  for (const auto& tiles : tiles_of_worker) EXPECT_EQ(tiles, 1);
}

TEST(SchedulerTest, WhatAStageCapturesIsReleasedBeforeDone) {
  const std::pair<const char*, absl::Status> ends[] = {{"complete", absl::OkStatus()},
                                                       {"failed", absl::InternalError("failed")}};
  for (const auto& [name, end] : ends) {
    SCOPED_TRACE(name);
    auto token = std::make_shared<int>(0);
    const std::weak_ptr<int> watched = token;
    bool released = false;
    std::latch done(1);
    Scheduler scheduler(2);
    // Not from an initializer list, whose copy would live until Submit returns.
    std::vector<Stage> stages(1);
    stages[0] = {"holding", 3,
                 [token = std::move(token), result = end](const TileContext&) { return result; }};
    Submit(scheduler,
           std::make_shared<Job>(std::move(stages),
                                 [&, expected = end](const absl::Status& status, const JobTimes&) {
                                   EXPECT_EQ(status, expected);
                                   released = watched.expired();
                                   done.count_down();
                                 }));
    done.wait();
    EXPECT_TRUE(released);
  }
}

TEST(SchedulerTest, WhatAStageCapturesIsReleasedThoughNoTileRan) {
  auto token = std::make_shared<int>(0);
  const std::weak_ptr<int> watched = token;
  bool released = false;
  std::latch done(1);
  Scheduler scheduler(1);
  const auto job = std::make_shared<Job>(
      std::vector<Stage>{
          {"never", 3,
           [token = std::move(token)](const TileContext&) { return absl::OkStatus(); }}},
      [&](const absl::Status&, const JobTimes&) {
        released = watched.expired();
        done.count_down();
      });
  job->Stop(absl::CancelledError("early"));
  Submit(scheduler, job);
  done.wait();
  EXPECT_TRUE(released);
}

TEST(SchedulerTest, DoneMaySubmitAnotherJob) {
  Completion second;
  Scheduler scheduler(1);
  Submit(scheduler,
         std::make_shared<Job>(std::vector<Stage>{{"first", 1, NoWork}},
                               [&](const absl::Status&, const JobTimes&) {
                                 Submit(scheduler, JobOf({{"second", 1, NoWork}}, second));
                               }));
  EXPECT_EQ(second.Wait(), absl::OkStatus());
}

TEST(SchedulerTest, DestructionWaitsForAJobThatDoneSubmits) {
  Completion second;
  {
    Scheduler scheduler(1);
    Submit(scheduler,
           std::make_shared<Job>(std::vector<Stage>{{"endless", kEndless, NoWork}},
                                 [&](const absl::Status&, const JobTimes&) {
                                   Submit(scheduler, JobOf({{"second", 1, NoWork}}, second));
                                 }));
  }
  ASSERT_EQ(second.calls(), 1);
  EXPECT_EQ(second.Wait().code(), absl::StatusCode::kCancelled);
}

TEST(SchedulerTest, AJobWhoseDeadlineHasPassedStartsNoTile) {
  Completion completion;
  std::atomic<int> tiles = 0;
  Scheduler scheduler(1);
  auto job = JobOf({{"late", 3,
                     [&](const TileContext&) {
                       ++tiles;
                       return absl::OkStatus();
                     }}},
                   completion);
  job->set_deadline(std::chrono::system_clock::now());
  Submit(scheduler, std::move(job));
  EXPECT_EQ(completion.Wait().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(tiles, 0);
}

TEST(SchedulerTest, TimesAreInOrder) {
  Clock::time_point in_tile;
  Completion completion;
  Scheduler scheduler(1);
  const Clock::time_point before = Clock::now();
  Submit(scheduler, JobOf({{"one", 1,
                            [&](const TileContext&) {
                              in_tile = Clock::now();
                              return absl::OkStatus();
                            }}},
                          completion));
  EXPECT_EQ(completion.Wait(), absl::OkStatus());
  const Clock::time_point after = Clock::now();
  const JobTimes times = completion.times();
  EXPECT_LE(before, times.submitted);
  EXPECT_LE(times.submitted, times.first_tile);
  EXPECT_LE(times.first_tile, in_tile);
  EXPECT_LE(in_tile, times.end);
  EXPECT_LE(times.end, after);
}

TEST(SchedulerTest, TimeInTheQueueEndsWithTheFirstTile) {
  Completion completion;
  Scheduler scheduler(1);
  Hold hold(scheduler);
  Submit(scheduler, JobOf({{"one", 1, NoWork}}, completion));
  const Clock::time_point waiting = Clock::now();
  hold.Release();
  EXPECT_EQ(completion.Wait(), absl::OkStatus());
  EXPECT_LE(completion.times().submitted, waiting);
  EXPECT_GE(completion.times().first_tile, waiting);
}

TEST(SchedulerTest, RunReturnsWhenEveryTileHasRun) {
  std::atomic<int> ran = 0;
  const auto count = [&](const TileContext&) {
    ++ran;
    return absl::OkStatus();
  };
  Scheduler scheduler(3);
  EXPECT_EQ(scheduler.Run({{"a", 10, count}, {"b", 7, count}}), absl::OkStatus());
  EXPECT_EQ(ran, 17);
}

TEST(SchedulerTest, RunReturnsTheFirstError) {
  Scheduler scheduler(1);
  EXPECT_EQ(scheduler.Run({{"failing", 5,
                            [](const TileContext& context) -> absl::Status {
                              if (context.tile < 2) return absl::OkStatus();
                              return absl::InternalError(std::to_string(context.tile));
                            }}}),
            absl::InternalError("2"));
  EXPECT_EQ(scheduler.Run({{"fine", 1, NoWork}}), absl::OkStatus());
}

TEST(SchedulerTest, ManyThreadsMayRunAtOnce) {
  constexpr int kCallers = 4;
  Scheduler scheduler(2);
  std::vector<std::atomic<int>> ran(kCallers);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller) {
    callers.emplace_back([&, caller] {
      for (int i = 0; i < 50; ++i) {
        EXPECT_EQ(scheduler.Run({{"count", 3,
                                  [&](const TileContext&) {
                                    ++ran[caller];
                                    return absl::OkStatus();
                                  }}}),
                  absl::OkStatus());
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_THAT(ran,
              Each(testing::Truly([](const std::atomic<int>& count) { return count == 150; })));
}

// A scheduler of one thread whose queue is in question.
SchedulerOptions Narrow(int max_running, int max_queue) {
  SchedulerOptions options;
  options.max_running = max_running;
  options.max_queue = max_queue;
  options.max_queue_wait = std::chrono::hours(1);
  return options;
}

std::shared_ptr<Job> ShortJobOf(std::vector<Stage> stages, Completion& completion) {
  auto job = JobOf(std::move(stages), completion);
  job->set_expected_seconds(1e-4);
  return job;
}

TEST(SchedulerQueueTest, JobsWaitInTheOrderTheyCame) {
  Log log;
  std::vector<Completion> completions(3);
  Scheduler scheduler(Narrow(1, 8));
  Hold hold(scheduler);
  for (int i = 0; i < 3; ++i) {
    Submit(scheduler, JobOf({Saying(log, std::string(1, static_cast<char>('a' + i)), 2)},
                            completions[static_cast<size_t>(i)]));
  }
  EXPECT_EQ(scheduler.running(), 1);
  EXPECT_EQ(scheduler.queued(), 3);
  hold.Release();
  for (Completion& completion : completions) EXPECT_EQ(completion.Wait(), absl::OkStatus());
  EXPECT_THAT(log.words(), ElementsAre("a0", "a1", "b0", "b1", "c0", "c1"));
  EXPECT_EQ(scheduler.queued(), 0);
}

TEST(SchedulerQueueTest, AsManyRunAsMay) {
  Log log;
  Completion a, b, c;
  Scheduler scheduler(Narrow(3, 8));
  Hold hold(scheduler);
  Submit(scheduler, JobOf({Saying(log, "a", 2)}, a));
  Submit(scheduler, JobOf({Saying(log, "b", 2)}, b));
  Submit(scheduler, JobOf({Saying(log, "c", 2)}, c));
  EXPECT_EQ(scheduler.running(), 3);
  EXPECT_EQ(scheduler.queued(), 1);
  hold.Release();
  for (Completion* completion : {&a, &b, &c}) EXPECT_EQ(completion->Wait(), absl::OkStatus());
  EXPECT_EQ(scheduler.running(), 0);
}

TEST(SchedulerQueueTest, AFullQueueRefusesAndDoneIsNotCalled) {
  Completion first, second, refused, next;
  Scheduler scheduler(Narrow(1, 1));
  Hold hold(scheduler);
  Submit(scheduler, JobOf({{"one", 1, NoWork}}, first));
  const absl::Status status = scheduler.Submit(JobOf({{"one", 1, NoWork}}, refused));
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(LimitOf(status), "max_queue");
  EXPECT_EQ(scheduler.queued(), 1);
  EXPECT_EQ(LimitOf(scheduler.Run({{"one", 1, NoWork}})), "max_queue");
  hold.Release();
  EXPECT_EQ(first.Wait(), absl::OkStatus());
  EXPECT_EQ(refused.calls(), 0);
  // There is room again.
  Submit(scheduler, JobOf({{"one", 1, NoWork}}, next));
  EXPECT_EQ(next.Wait(), absl::OkStatus());
}

TEST(SchedulerQueueTest, WithoutAQueueWhatCannotRunIsRefused) {
  Completion completion;
  Scheduler scheduler(Narrow(1, 0));
  EXPECT_EQ(scheduler.Run({{"one", 1, NoWork}}), absl::OkStatus());
  Hold hold(scheduler);
  const absl::Status refused = scheduler.Submit(JobOf({{"one", 1, NoWork}}, completion));
  EXPECT_EQ(LimitOf(refused), "max_queue");
  EXPECT_THAT(std::string(refused.message()),
              testing::HasSubstr("1 calls run and 0 wait already, at most 0 may wait"));
  EXPECT_EQ(completion.calls(), 0);
}

TEST(SchedulerQueueTest, ShortJobsAndJobsWithoutTilesRunBesideTheOthers) {
  Log log;
  Completion long_running, waiting, little, empty;
  Scheduler scheduler(Narrow(2, 8));
  Hold hold(scheduler);
  Submit(scheduler, JobOf({{"long", kEndless, NoWork}}, long_running));
  Submit(scheduler, JobOf({Saying(log, "waiting", 1)}, waiting));
  Submit(scheduler, ShortJobOf({Saying(log, "short", 1)}, little));
  Submit(scheduler, JobOf({{"empty", 0, NoWork}}, empty));
  EXPECT_EQ(scheduler.queued(), 1);
  EXPECT_EQ(scheduler.running(), 4);
  hold.Release();
  EXPECT_EQ(little.Wait(), absl::OkStatus());
  EXPECT_EQ(empty.Wait(), absl::OkStatus());
  EXPECT_EQ(waiting.Wait(), absl::OkStatus());
  EXPECT_THAT(log.words(), testing::UnorderedElementsAre("short0", "waiting0"));
}

TEST(SchedulerQueueTest, ShortJobsWaitForEachOtherInOrder) {
  constexpr int kMore = 3;
  Log log;
  std::vector<Completion> completions(Scheduler::kMostShort + kMore);
  Scheduler scheduler(Narrow(1, kMore));
  Hold hold(scheduler);
  for (size_t i = 0; i < completions.size(); ++i) {
    const bool waits = i >= Scheduler::kMostShort;
    Submit(scheduler, ShortJobOf({Saying(log, waits ? "later" + std::to_string(i) : "first", 1)},
                                 completions[i]));
  }
  EXPECT_EQ(scheduler.queued(), kMore);
  Completion refused;
  EXPECT_EQ(LimitOf(scheduler.Submit(ShortJobOf({{"one", 1, NoWork}}, refused))), "max_queue");
  hold.Release();
  for (Completion& completion : completions) EXPECT_EQ(completion.Wait(), absl::OkStatus());
  std::vector<std::string> words = log.words();
  words.erase(std::remove(words.begin(), words.end(), "first0"), words.end());
  EXPECT_THAT(words, ElementsAre("later160", "later170", "later180"));
}

TEST(SchedulerQueueTest, AJobThatWaitsTooLongEndsWithoutATile) {
  std::atomic<int> tiles = 0;
  Completion endless, waiting;
  SchedulerOptions options = Narrow(1, 8);
  options.max_queue_wait = std::chrono::milliseconds(5);
  Scheduler scheduler(options);
  const auto running = JobOf({{"endless", kEndless, NoWork}}, endless);
  Submit(scheduler, running);
  Submit(scheduler, JobOf({{"one", 1,
                            [&](const TileContext&) {
                              ++tiles;
                              return absl::OkStatus();
                            }}},
                          waiting));
  // While the other job runs.
  const absl::Status expired = waiting.Wait();
  EXPECT_EQ(LimitOf(expired), "max_queue_wait");
  EXPECT_THAT(std::string(expired.message()),
              testing::ContainsRegex("has waited [0-9]+ ms for its turn, at most 5 ms"));
  EXPECT_EQ(endless.calls(), 0);
  EXPECT_EQ(tiles, 0);
  EXPECT_EQ(waiting.times().first_tile, Clock::time_point());
  EXPECT_EQ(scheduler.queued(), 0);
  running->Stop(absl::CancelledError("enough"));
  EXPECT_EQ(endless.Wait(), absl::CancelledError("enough"));
}

TEST(SchedulerQueueTest, AThreadThatSleepsEndsWhatHasWaitedTooLong) {
  std::latch entered(1);
  std::latch release(1);
  Completion held, waiting;
  SchedulerOptions options = Narrow(1, 8);
  options.threads = 2;
  options.max_queue_wait = std::chrono::milliseconds(5);
  Scheduler scheduler(options);
  Submit(scheduler, JobOf({{"held", 1,
                            [&](const TileContext&) {
                              entered.count_down();
                              release.wait();
                              return absl::OkStatus();
                            }}},
                          held));
  entered.wait();
  Submit(scheduler, JobOf({{"one", 1, NoWork}}, waiting));
  EXPECT_EQ(LimitOf(waiting.Wait()), "max_queue_wait");
  EXPECT_EQ(held.calls(), 0);
  release.count_down();
  EXPECT_EQ(held.Wait(), absl::OkStatus());
}

TEST(SchedulerQueueTest, WhoWouldWaitInVainHearsOfItAtOnce) {
  // Half of it passes.
  constexpr auto kWait = std::chrono::seconds(6);
  std::latch first_release(1), second_entered(1), second_release(1);
  Completion first, second, third, refused, small;
  SchedulerOptions options = Narrow(1, 8);
  options.max_queue_wait = kWait;
  Scheduler scheduler(options);
  const auto held = [](std::latch* entered, std::latch& release) {
    return Stage{"held", 1, [entered, &release](const TileContext&) {
                   if (entered != nullptr) entered->count_down();
                   release.wait();
                   return absl::OkStatus();
                 }};
  };
  Submit(scheduler, JobOf({held(nullptr, first_release)}, first));
  Submit(scheduler, JobOf({held(&second_entered, second_release)}, second));
  Submit(scheduler, JobOf({{"one", 1, NoWork}}, third));
  // Nothing is known of how long a place takes: both may wait. Then it is half of what may be
  // waited.
  std::this_thread::sleep_until(Clock::now() + kWait / 2);
  first_release.count_down();
  EXPECT_EQ(first.Wait(), absl::OkStatus());
  second_entered.wait();
  const absl::Status status = scheduler.Submit(JobOf({{"one", 1, NoWork}}, refused));
  EXPECT_EQ(LimitOf(status), "max_queue_wait");
  EXPECT_THAT(std::string(status.message()),
              testing::ContainsRegex("would wait about [0-9]+ ms for its turn behind the 1 "
                                     "that wait; at most 6000 ms are allowed"));
  Submit(scheduler, ShortJobOf({{"one", 1, NoWork}}, small));
  second_release.count_down();
  EXPECT_EQ(third.Wait(), absl::OkStatus());
  EXPECT_EQ(small.Wait(), absl::OkStatus());
  EXPECT_EQ(refused.calls(), 0);
}

TEST(SchedulerQueueTest, AJobWhoseDeadlinePassesInTheQueueIsNeverComputed) {
  std::atomic<int> tiles = 0;
  Completion endless, late, in_time;
  Scheduler scheduler(Narrow(1, 8));
  const auto running = JobOf({{"endless", kEndless, NoWork}}, endless);
  Submit(scheduler, running);
  const auto count = [&](const TileContext&) {
    ++tiles;
    return absl::OkStatus();
  };
  const auto patient = JobOf({{"one", 1, count}}, in_time);
  patient->set_deadline(std::chrono::system_clock::now() + std::chrono::hours(1));
  Submit(scheduler, patient);
  const auto job = JobOf({{"one", 1, count}}, late);
  job->set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(5));
  Submit(scheduler, job);
  EXPECT_EQ(late.Wait().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(tiles, 0);
  EXPECT_EQ(endless.calls(), 0);
  EXPECT_EQ(scheduler.queued(), 1);
  running->Stop(absl::CancelledError("enough"));
  EXPECT_EQ(in_time.Wait(), absl::OkStatus());
  EXPECT_EQ(tiles, 1);
}

TEST(SchedulerQueueTest, AJobThatIsStoppedInTheQueueEndsThere) {
  std::atomic<int> tiles = 0;
  Completion endless, stopped;
  Scheduler scheduler(Narrow(1, 8));
  const auto running = JobOf({{"endless", kEndless, NoWork}}, endless);
  Submit(scheduler, running);
  const auto job = JobOf({{"one", 1,
                           [&](const TileContext&) {
                             ++tiles;
                             return absl::OkStatus();
                           }}},
                         stopped);
  Submit(scheduler, job);
  EXPECT_EQ(scheduler.queued(), 1);
  job->Stop(absl::CancelledError("gone"));
  EXPECT_EQ(stopped.Wait(), absl::CancelledError("gone"));
  EXPECT_EQ(endless.calls(), 0);
  EXPECT_EQ(tiles, 0);
  running->Stop(absl::CancelledError("enough"));
  EXPECT_EQ(endless.Wait(), absl::CancelledError("enough"));
  // Jobs may be told to stop when the scheduler has forgotten them.
  job->Stop(absl::CancelledError("again"));
}

TEST(SchedulerQueueTest, DestructionEndsWhatWaits) {
  std::vector<Completion> completions(5);
  {
    Scheduler scheduler(Narrow(1, 8));
    for (Completion& completion : completions) {
      Submit(scheduler, JobOf({{"endless", kEndless, NoWork}}, completion));
    }
  }
  for (Completion& completion : completions) {
    ASSERT_EQ(completion.calls(), 1);
    EXPECT_EQ(completion.Wait().code(), absl::StatusCode::kCancelled);
  }
}

TEST(SchedulerQueueTest, DoneMaySubmitWhereTheQueueWasFull) {
  Completion second;
  Scheduler scheduler(Narrow(1, 0));
  Submit(scheduler,
         std::make_shared<Job>(std::vector<Stage>{{"first", 1, NoWork}},
                               [&](const absl::Status&, const JobTimes&) {
                                 Submit(scheduler, JobOf({{"second", 1, NoWork}}, second));
                               }));
  EXPECT_EQ(second.Wait(), absl::OkStatus());
}

TEST(SchedulerQueueTest, TheRetryDelayFollowsWhatWaits) {
  using std::chrono::milliseconds;
  Completion first, more[8];
  Scheduler scheduler(Narrow(1, 8));
  // Nothing is known, nothing waits.
  EXPECT_EQ(scheduler.RetryDelay(), milliseconds(10));
  Hold hold(scheduler);
  const auto expected = JobOf({{"one", 1, NoWork}}, first);
  expected->set_expected_seconds(2);
  Submit(scheduler, expected);
  // Nothing was measured: what is expected of the job that waits.
  EXPECT_EQ(scheduler.RetryDelay(), milliseconds(2000));
  const auto held = Clock::now();
  while (Clock::now() - held < milliseconds(20)) std::this_thread::yield();
  hold.Release();
  EXPECT_EQ(first.Wait(), absl::OkStatus());
  // A place took 20 ms, once. Now that many jobs wait for one each, it takes longer.
  const auto before = scheduler.RetryDelay();
  EXPECT_GE(before, milliseconds(10));
  Hold again(scheduler);
  for (Completion& completion : more) {
    Submit(scheduler, JobOf({{"one", 1, NoWork}}, completion));
  }
  EXPECT_GT(scheduler.RetryDelay(), 2 * before);
  EXPECT_LE(scheduler.RetryDelay(), std::chrono::seconds(30));
  again.Release();
  for (Completion& completion : more) EXPECT_EQ(completion.Wait(), absl::OkStatus());
}

TEST(SchedulerQueueTest, TheRetryDelayKnowsHowLongTheJobsThatRunWillTake) {
  Completion quick, slow;
  std::latch started(1);
  std::latch release(1);
  Scheduler scheduler(Narrow(1, 0));
  // What the past says: milliseconds.
  Submit(scheduler, JobOf({{"one", 1, NoWork}}, quick));
  EXPECT_EQ(quick.Wait(), absl::OkStatus());
  const auto running = JobOf({{"one", 1,
                               [&](const TileContext&) {
                                 started.count_down();
                                 release.wait();
                                 return absl::OkStatus();
                               }}},
                             slow);
  running->set_expected_seconds(25);
  Submit(scheduler, running);
  started.wait();
  EXPECT_GT(scheduler.RetryDelay(), std::chrono::seconds(5));
  EXPECT_LE(scheduler.RetryDelay(), std::chrono::seconds(25));
  release.count_down();
  EXPECT_EQ(slow.Wait(), absl::OkStatus());
}

// Uses a thread for so long, as a tile does that cannot give way.
void Use(Clock::duration time) {
  const auto end = Clock::now() + time;
  while (Clock::now() < end) {
  }
}

TEST(SchedulerShareTest, ThreadsAreSharedByTimeNotByTiles) {
  constexpr int kLittleTiles = 40;
  std::atomic<int> large_tiles = 0;
  int large_tiles_at_end = -1;
  Completion large;
  std::latch little_done(1);
  Scheduler scheduler(1);
  Hold hold(scheduler);
  const auto endless = JobOf({{"large", kEndless,
                               [&](const TileContext&) {
                                 ++large_tiles;
                                 Use(std::chrono::milliseconds(10));
                                 return absl::OkStatus();
                               }}},
                             large);
  Submit(scheduler, endless);
  // In turn there would be a large tile for each of these.
  Submit(scheduler, std::make_shared<Job>(std::vector<Stage>{{"little", kLittleTiles,
                                                              [](const TileContext&) {
                                                                Use(std::chrono::microseconds(50));
                                                                return absl::OkStatus();
                                                              }}},
                                          [&](const absl::Status&, const JobTimes&) {
                                            large_tiles_at_end = large_tiles;
                                            little_done.count_down();
                                          }));
  hold.Release();
  little_done.wait();
  EXPECT_LE(large_tiles_at_end, kLittleTiles / 4);
  endless->Stop(absl::CancelledError("enough"));
  EXPECT_EQ(large.Wait(), absl::CancelledError("enough"));
}

TEST(SchedulerShareTest, ATileGivesWayToShorterJobs) {
  std::latch entered(1);
  std::atomic<bool> short_is_done = false;
  bool went_on_after = false;
  int worker_of_long = -1;
  std::atomic<int> worker_of_short = -1;
  Completion long_completion;
  Scheduler scheduler(1);
  const auto job = JobOf({{"long", 1,
                           [&](const TileContext& context) {
                             worker_of_long = context.worker;
                             entered.count_down();
                             const auto deadline = Clock::now() + std::chrono::seconds(60);
                             while (!short_is_done && Clock::now() < deadline) {
                               if (context.checkpoint().ToStop()) return absl::OkStatus();
                             }
                             went_on_after = short_is_done;
                             return absl::OkStatus();
                           }}},
                         long_completion);
  job->set_expected_seconds(10);
  Submit(scheduler, job);
  entered.wait();
  // Two stages of it run while the only thread is inside the other's tile.
  const auto little = std::make_shared<Job>(std::vector<Stage>{{"first", 3, NoWork},
                                                               {"second", 1,
                                                                [&](const TileContext& context) {
                                                                  worker_of_short = context.worker;
                                                                  return absl::OkStatus();
                                                                }}},
                                            [&](const absl::Status& status, const JobTimes&) {
                                              EXPECT_EQ(status, absl::OkStatus());
                                              short_is_done = true;
                                            });
  little->set_expected_seconds(1e-4);
  Submit(scheduler, little);
  EXPECT_EQ(long_completion.Wait(), absl::OkStatus());
  EXPECT_TRUE(went_on_after);
  EXPECT_EQ(worker_of_long, 0);
  EXPECT_EQ(worker_of_short, 0);
}

TEST(SchedulerShareTest, ATileDoesNotGiveWayToLongerJobs) {
  std::latch entered(1);
  std::atomic<bool> submitted = false;
  std::atomic<bool> long_started = false;
  bool started_inside = false;
  Completion first, second;
  Scheduler scheduler(1);
  const auto job = JobOf({{"short", 1,
                           [&](const TileContext& context) {
                             entered.count_down();
                             while (!submitted) std::this_thread::yield();
                             const auto end = Clock::now() + std::chrono::milliseconds(5);
                             while (Clock::now() < end) context.checkpoint().ToStop();
                             started_inside = long_started;
                             return absl::OkStatus();
                           }}},
                         first);
  job->set_expected_seconds(0.1);
  Submit(scheduler, job);
  entered.wait();
  for (const double seconds : {0.0, 0.1, 1.0}) {
    const auto other = std::make_shared<Job>(std::vector<Stage>{{"long", 1,
                                                                 [&](const TileContext&) {
                                                                   long_started = true;
                                                                   return absl::OkStatus();
                                                                 }}},
                                             [](const absl::Status&, const JobTimes&) {});
    other->set_expected_seconds(seconds);
    Submit(scheduler, other);
  }
  submitted = true;
  EXPECT_EQ(first.Wait(), absl::OkStatus());
  EXPECT_FALSE(started_inside);
  EXPECT_EQ(scheduler.Run({{"last", 1, NoWork}}), absl::OkStatus());
  EXPECT_TRUE(long_started);
}

TEST(SchedulerShareTest, ATileLearnsOfItsDeadlineAndEndsWhatWaits) {
  Completion running, waiting;
  SchedulerOptions options = Narrow(1, 8);
  options.max_queue_wait = std::chrono::milliseconds(5);
  Scheduler scheduler(options);
  std::latch entered(1);
  const auto job = JobOf({{"long", 1,
                           [&](const TileContext& context) {
                             entered.count_down();
                             while (!context.checkpoint().ToStop()) {
                             }
                             return absl::OkStatus();
                           }}},
                         running);
  job->set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(200));
  Submit(scheduler, job);
  entered.wait();
  Submit(scheduler, JobOf({{"one", 1, NoWork}}, waiting));
  EXPECT_EQ(LimitOf(waiting.Wait()), "max_queue_wait");
  EXPECT_EQ(running.Wait().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST(SchedulerTest, AJobThatComputesForTooLongEndsInsideOfATileOrBetweenTwo) {
  Scheduler scheduler(1);
  const Stage one = {"one", 1, [](const TileContext& context) {
                       while (!context.checkpoint().ToStop()) {
                       }
                       return absl::OkStatus();
                     }};
  for (const Stage& stage : {one, Stage{"endless", kEndless, NoWork}}) {
    Completion completion;
    const auto job = JobOf({stage}, completion);
    job->set_max_compute_time(std::chrono::milliseconds(1));
    Submit(scheduler, job);
    const absl::Status status = completion.Wait();
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    EXPECT_EQ(LimitOf(status), "max_compute_time");
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("has computed for 0."), HasSubstr("at most 0.001 s")));
  }
}

TEST(SchedulerTest, TimeInTheQueueIsNoTimeOfComputing) {
  Completion completion;
  Scheduler scheduler(1);
  Hold hold(scheduler);
  const auto job = JobOf({{"one", 1, NoWork}}, completion);
  job->set_max_compute_time(std::chrono::microseconds(1));
  Submit(scheduler, job);
  const auto waited = Clock::now() + std::chrono::microseconds(2);
  while (Clock::now() < waited) std::this_thread::yield();
  hold.Release();
  EXPECT_EQ(completion.Wait(), absl::OkStatus());
}

TEST(SchedulerTest, ATileWithoutMemoryEndsItsJob) {
  Scheduler scheduler(2);
  EXPECT_EQ(scheduler
                .Run({{"throwing", 4,
                       [](const TileContext&) -> absl::Status { throw std::bad_alloc(); }}})
                .code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(scheduler.Run({{"fine", 1, NoWork}}), absl::OkStatus());
}

TEST(SchedulerQueueTest, ManyThreadsSubmitAndEachJobEndsOnce) {
  constexpr int kSubmitters = 64;
  constexpr int kJobsEach = 20;
  std::atomic<int> refused = 0;
  std::atomic<int> ended = 0;
  std::atomic<int> tiles = 0;
  std::atomic<int> complete = 0;
  {
    SchedulerOptions options = Narrow(2, 8);
    options.threads = 2;
    Scheduler scheduler(options);
    std::vector<std::thread> submitters;
    submitters.reserve(kSubmitters);
    for (int submitter = 0; submitter < kSubmitters; ++submitter) {
      submitters.emplace_back([&, submitter] {
        for (int i = 0; i < kJobsEach; ++i) {
          const auto job = std::make_shared<Job>(std::vector<Stage>{{"tiles", 3,
                                                                     [&](const TileContext&) {
                                                                       ++tiles;
                                                                       return absl::OkStatus();
                                                                     }}},
                                                 [&](const absl::Status& status, const JobTimes&) {
                                                   if (status.ok()) ++complete;
                                                   ++ended;
                                                 });
          if (i % 3 == 0) job->set_expected_seconds(1e-5);
          const absl::Status status = scheduler.Submit(job);
          if (!status.ok()) {
            EXPECT_EQ(LimitOf(status), "max_queue");
            ++refused;
          }
          if ((i + submitter) % 5 == 0) job->Stop(absl::CancelledError("gone"));
        }
      });
    }
    for (std::thread& submitter : submitters) submitter.join();
  }
  EXPECT_EQ(refused + ended, kSubmitters * kJobsEach);
  EXPECT_GE(tiles, 3 * complete);
}

}  // namespace
}  // namespace attendant::core
