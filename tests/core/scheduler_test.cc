// Nothing here sleeps: threads are held still by latches, and a test that could wait for something
// that a broken scheduler never does has a deadline.
#include "core/scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace attendant::core {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
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

// Keeps each thread of a scheduler inside a tile until it is released.
class Hold {
 public:
  explicit Hold(Scheduler& scheduler) {
    auto entered = std::make_shared<std::latch>(scheduler.threads());
    scheduler.Submit(std::make_shared<Job>(
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

TEST(SchedulerTest, TilesOfTwoJobsAlternate) {
  Log log;
  Completion a, b;
  Scheduler scheduler(1);
  Hold hold(scheduler);
  scheduler.Submit(JobOf({Saying(log, "a", 3)}, a));
  scheduler.Submit(JobOf({Saying(log, "b", 3)}, b));
  hold.Release();
  EXPECT_EQ(a.Wait(), absl::OkStatus());
  EXPECT_EQ(b.Wait(), absl::OkStatus());
  EXPECT_THAT(log.words(), ElementsAre("a0", "b0", "a1", "b1", "a2", "b2"));
}

TEST(SchedulerTest, AShortJobCompletesWhileALongOneHasTiles) {
  std::atomic<int> long_tiles = 0;
  int long_tiles_at_end_of_short = -1;
  Completion long_completion;
  std::latch short_done(1);
  Scheduler scheduler(1);
  Hold hold(scheduler);
  scheduler.Submit(JobOf({{"long", 1000,
                           [&](const TileContext&) {
                             ++long_tiles;
                             return absl::OkStatus();
                           }}},
                         long_completion));
  scheduler.Submit(
      std::make_shared<Job>(std::vector<Stage>{{"first", 1, NoWork}, {"second", 1, NoWork}},
                            [&](const absl::Status&, const JobTimes&) {
                              long_tiles_at_end_of_short = long_tiles;
                              short_done.count_down();
                            }));
  hold.Release();
  short_done.wait();
  EXPECT_EQ(long_completion.Wait(), absl::OkStatus());
  EXPECT_EQ(long_tiles, 1000);
  EXPECT_GE(long_tiles_at_end_of_short, 1);
  EXPECT_LE(long_tiles_at_end_of_short, 10);
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
      scheduler.Submit(job);
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
  scheduler.Submit(job);
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
  scheduler.Submit(job);
  scheduler.Submit(JobOf({Saying(log, "b", 3)}, other));
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
    scheduler.Submit(job);
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
    scheduler.Submit(job);
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
    scheduler.Submit(JobOf({{"failing", 10,
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
          scheduler.Submit(JobOf(counters[i]->Stages(), completions[i]));
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
    scheduler.Submit(std::make_shared<Job>(
        std::vector<Stage>{{"failing", 40,
                            [&, i](const TileContext& context) {
                              ++running[i];
                              if (done[i]) ++after_done;
                              --running[i];
                              return context.tile == i % 40 ? absl::InternalError("stop")
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
      scheduler.Submit(JobOf({{"endless", kEndless, NoWork}}, completion));
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
    scheduler.Submit(JobOf({{"long", GetParam(),
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
  scheduler.Submit(JobOf({{"empty", 0, NoWork}}, completion));
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
  scheduler.Submit(JobOf({{"first", 2,
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
    scheduler.Submit(std::make_shared<Job>(
        std::move(stages), [&, expected = end](const absl::Status& status, const JobTimes&) {
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
  scheduler.Submit(job);
  done.wait();
  EXPECT_TRUE(released);
}

TEST(SchedulerTest, DoneMaySubmitAnotherJob) {
  Completion second;
  Scheduler scheduler(1);
  scheduler.Submit(std::make_shared<Job>(std::vector<Stage>{{"first", 1, NoWork}},
                                         [&](const absl::Status&, const JobTimes&) {
                                           scheduler.Submit(JobOf({{"second", 1, NoWork}}, second));
                                         }));
  EXPECT_EQ(second.Wait(), absl::OkStatus());
}

TEST(SchedulerTest, DestructionWaitsForAJobThatDoneSubmits) {
  Completion second;
  {
    Scheduler scheduler(1);
    scheduler.Submit(
        std::make_shared<Job>(std::vector<Stage>{{"endless", kEndless, NoWork}},
                              [&](const absl::Status&, const JobTimes&) {
                                scheduler.Submit(JobOf({{"second", 1, NoWork}}, second));
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
  scheduler.Submit(std::move(job));
  EXPECT_EQ(completion.Wait().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(tiles, 0);
}

TEST(SchedulerTest, TimesAreInOrder) {
  Clock::time_point in_tile;
  Completion completion;
  Scheduler scheduler(1);
  const Clock::time_point before = Clock::now();
  scheduler.Submit(JobOf({{"one", 1,
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
  scheduler.Submit(JobOf({{"one", 1, NoWork}}, completion));
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

}  // namespace
}  // namespace attendant::core
