// A job is a list of stages; a stage is a number of independent tiles.
#ifndef ATTENDANT_CORE_JOB_H_
#define ATTENDANT_CORE_JOB_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "core/mutex.h"

namespace attendant::core {

// Where a tile runs.
struct TileContext {
  int64_t tile = 0;  // 0 .. tiles - 1
  int worker = 0;    // 0 .. threads - 1; no two tiles run on one worker at a time
  // True once the job is to stop: a tile that takes long returns early, with any status.
  const std::atomic<bool>* stop = nullptr;
  bool stopped() const { return stop->load(std::memory_order_relaxed); }
};

// Tiles of one stage run in any order, at the same time; a stage starts when the one before it is
// complete.
struct Stage {
  std::string name;
  int64_t tiles = 0;
  // Called once for each tile. An error stops the job with that error.
  std::function<absl::Status(const TileContext&)> run;
};

// When things happened. first_tile and end are the epoch where no tile ran.
struct JobTimes {
  std::chrono::steady_clock::time_point submitted;
  std::chrono::steady_clock::time_point first_tile;
  std::chrono::steady_clock::time_point end;
};

// Thread-safe.
class Job {
 public:
  // done: called exactly once for a submitted job, on a compute thread, with no lock held, when no
  // tile is running any more; OK, or the first error or reason to stop. It must not wait for
  // anything: it occupies the thread.
  using Done = std::function<void(const absl::Status&, const JobTimes&)>;
  Job(std::vector<Stage> stages, Done done) : stages_(std::move(stages)), done_(std::move(done)) {}
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  // From then on no tile is started: the job ends with DEADLINE_EXCEEDED. REQUIRES: not submitted
  // yet.
  void set_deadline(std::chrono::system_clock::time_point deadline) { deadline_ = deadline; }

  // No further tile is started. REQUIRES: !why.ok(). The first reason wins; after
  // `done` it has no effect.
  void Stop(absl::Status why) {
    MutexLock lock(mutex_);
    if (why_.ok()) why_ = std::move(why);
    stopped_.store(true, std::memory_order_release);
  }

 private:
  friend class Scheduler;

  void StopIfLate() {
    if (deadline_ != kNoDeadline && std::chrono::system_clock::now() >= deadline_) {
      Stop(absl::DeadlineExceededError("the deadline passed before the job was complete"));
    }
  }
  bool stopped() const { return stopped_.load(std::memory_order_acquire); }
  absl::Status why() {
    MutexLock lock(mutex_);
    return why_;
  }

  static constexpr auto kNoDeadline = std::chrono::system_clock::time_point::max();

  std::chrono::system_clock::time_point deadline_ = kNoDeadline;
  std::atomic<bool> stopped_ = false;
  Mutex mutex_;
  absl::Status why_ ABSL_GUARDED_BY(mutex_);

  int64_t TilesLeft() const {
    return stage_ < stages_.size() ? stages_[stage_].tiles - next_tile_ : 0;
  }

  // The rest belongs to the scheduler and is guarded by its mutex once the job is submitted.
  std::vector<Stage> stages_;
  Done done_;
  size_t stage_ = 0;
  int64_t next_tile_ = 0;
  int64_t holders_ = 0;  // workers between taking from the queue and settling
  bool queued_ = false;
  JobTimes times_;
};

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_JOB_H_
