// The compute threads.
//
// Tiles of the submitted jobs are taken in turn, one tile a job: a short job beside a long one
// waits for tiles, not for the job. Within a job tiles are started in order.
#ifndef ATTENDANT_CORE_SCHEDULER_H_
#define ATTENDANT_CORE_SCHEDULER_H_

#include <atomic>
#include <deque>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "core/job.h"
#include "core/mutex.h"

namespace attendant::core {

// Thread-safe.
class Scheduler {
 public:
  // REQUIRES: threads > 0.
  explicit Scheduler(int threads);
  // Stops every job that is not complete with CANCELLED and waits for its `done`.
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // REQUIRES: the job was not submitted before.
  void Submit(std::shared_ptr<Job> job);

  // Runs the stages and returns when they are complete: OK or the first tile's error. times: where
  // to write when things happened, or null. Not to be called on a compute thread.
  absl::Status Run(std::vector<Stage> stages, JobTimes* times = nullptr);

  int threads() const { return static_cast<int>(threads_.size()); }

 private:
  void Work(int worker);
  // Returns once there may be something to take, or none came for a while.
  void Linger() const;
  // Takes the next tile, or a job that has none left to start (tile -1); waits where there is
  // neither. Returns null when the scheduler shuts down and every job is complete.
  std::shared_ptr<Job> TakeTile(int64_t& tile) ABSL_LOCKS_EXCLUDED(mutex_);
  // Puts back what TakeTile gave. The last to do so starts the next stage or completes the job.
  void Settle(std::shared_ptr<Job> job) ABSL_LOCKS_EXCLUDED(mutex_);
  void Enqueue(std::shared_ptr<Job> job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Mutex mutex_;
  CondVar work_;
  std::deque<std::shared_ptr<Job>> ready_ ABSL_GUARDED_BY(mutex_);  // jobs with something to take
  std::atomic<bool> any_ready_ = false;                             // whether ready_ has any
  std::set<std::shared_ptr<Job>> incomplete_ ABSL_GUARDED_BY(mutex_);
  bool shutdown_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_SCHEDULER_H_
