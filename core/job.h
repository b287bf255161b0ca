// A job is a list of stages; a stage is a number of independent tiles.
#ifndef ATTENDANT_CORE_JOB_H_
#define ATTENDANT_CORE_JOB_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "core/checkpoint.h"
#include "core/mutex.h"

namespace attendant::core {

// Where a tile runs.
struct TileContext {
  int64_t tile = 0;  // 0 .. tiles - 1
  // 0 .. threads - 1; no two tiles of a job run on one worker at a time.
  int worker = 0;
  // True once the job is to stop: a tile that takes long returns early, with any status.
  const std::atomic<bool>* stop = nullptr;
  Checkpoint::Host* host = nullptr;

  bool stopped() const { return stop->load(std::memory_order_relaxed); }
  // What a tile of more than a millisecond asks between its blocks.
  Checkpoint checkpoint() const { return {*stop, host}; }
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
  using Clock = std::chrono::steady_clock;

  // The limit that a job meets which computes for too long, as OverLimit names it.
  static constexpr char kMaxComputeTime[] = "max_compute_time";

  // done: called exactly once for a job that Submit took, on a compute thread, with no lock held,
  // when no tile is running any more; OK, or the first error or reason to stop. It must not wait
  // for anything: it occupies the thread.
  using Done = std::function<void(const absl::Status&, const JobTimes&)>;
  Job(std::vector<Stage> stages, Done done) : stages_(std::move(stages)), done_(std::move(done)) {}
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  // From then on no tile is started: the job ends with DEADLINE_EXCEEDED. REQUIRES: not submitted
  // yet.
  void set_deadline(std::chrono::system_clock::time_point deadline) { deadline_ = deadline; }

  // So long after its first tile the job ends with OverLimit kMaxComputeTime, whoever it shared the
  // threads with. REQUIRES: not submitted yet.
  void set_max_compute_time(Clock::duration most) { max_compute_time_ = most; }

  // Compute that the job will take when it has all threads; 0, as at first, where nobody knows.
  // REQUIRES: not submitted yet.
  void set_expected_seconds(double seconds) { expected_seconds_ = seconds; }

  // No further tile is started. REQUIRES: !why.ok(). The first reason wins; after
  // `done` it has no effect.
  void Stop(absl::Status why) {
    MutexLock lock(mutex_);
    if (why_.ok()) why_ = std::move(why);
    stopped_.store(true, std::memory_order_release);
    if (any_stopped_ != nullptr) any_stopped_->store(true, std::memory_order_release);
  }

 private:
  friend class Scheduler;

  // Which of the scheduler's places the job occupies.
  enum class Place : uint8_t { kNone, kLong, kShort };

  // Where the deadline has passed, or it has computed for too long.
  void StopIfLate();
  bool stopped() const { return stopped_.load(std::memory_order_acquire); }
  absl::Status why() {
    MutexLock lock(mutex_);
    return why_;
  }
  // From now on *any_stopped says that some job was stopped.
  void TellStops(std::shared_ptr<std::atomic<bool>> any_stopped) {
    MutexLock lock(mutex_);
    any_stopped_ = std::move(any_stopped);
  }

  static constexpr auto kNoDeadline = std::chrono::system_clock::time_point::max();

  std::chrono::system_clock::time_point deadline_ = kNoDeadline;
  Clock::duration max_compute_time_ = Clock::duration::max();
  double expected_seconds_ = 0;
  std::atomic<bool> stopped_ = false;
  Mutex mutex_;
  absl::Status why_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<std::atomic<bool>> any_stopped_ ABSL_GUARDED_BY(mutex_);

  int64_t TilesLeft() const {
    return stage_ < stages_.size() ? stages_[stage_].tiles - next_tile_ : 0;
  }

  // The rest belongs to the scheduler and is guarded by its mutex once the job is submitted.
  std::vector<Stage> stages_;
  Done done_;
  size_t stage_ = 0;
  int64_t next_tile_ = 0;
  int64_t holders_ = 0;  // workers between taking the job and settling
  bool ready_ = false;
  int64_t turn_ = 0;         // when it became ready, by count
  double used_seconds_ = 0;  // of threads: what it has had of its share
  Place place_ = Place::kNone;
  std::list<std::shared_ptr<Job>>::iterator position_;  // in the scheduler's lists
  JobTimes times_;
};

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_JOB_H_
