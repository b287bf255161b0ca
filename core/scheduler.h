// The compute threads, and the queue in front of them.
//
// At most max_running jobs share the threads, and a few short ones beside them; the others wait in
// order. Threads are shared by time: the next tile is one of the job that has had least of them
// since it came, to a millisecond; jobs that are even take tiles in turn. A tile that takes long
// lets shorter jobs have its thread between two of its blocks: a short job beside a long one waits
// for blocks, not for the job. Within a job tiles are started in order.
//
// Nothing of this changes a result.
#ifndef ATTENDANT_CORE_SCHEDULER_H_
#define ATTENDANT_CORE_SCHEDULER_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <list>
#include <memory>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "core/job.h"
#include "core/mutex.h"

namespace attendant::core {

struct SchedulerOptions {
  int threads = 1;  // > 0
  // Jobs that share the threads, beside the short ones. > 0
  int max_running = 8;
  // Jobs that wait for their turn. >= 0
  int max_queue = 256;
  // How long one waits at most.
  std::chrono::steady_clock::duration max_queue_wait = std::chrono::seconds(10);
};

// Thread-safe.
class Scheduler {
 public:
  using Clock = std::chrono::steady_clock;

  // A job of less expected compute is short.
  static constexpr double kShortSeconds = 1e-3;
  // Short jobs that run at a time. Together they take what a few tiles of a long one do.
  static constexpr int kMostShort = 16;
  // What its limits are called where one is over.
  static constexpr char kMaxQueue[] = "max_queue";
  static constexpr char kMaxQueueWait[] = "max_queue_wait";

  explicit Scheduler(const SchedulerOptions& options);
  // Without bounds: every job runs at once. REQUIRES: threads > 0.
  explicit Scheduler(int threads);
  // Stops every job that is not complete with CANCELLED and waits for its `done`.
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // Returns OverLimit "max_queue" where too many jobs wait, OverLimit "max_queue_wait" where so
  // much waits that this one's turn would come too late, and RESOURCE_EXHAUSTED where the
  // machine has no memory for one more: then `done` is not called. A job that has waited longer
  // than max_queue_wait ends with OverLimit "max_queue_wait", one whose deadline passes with
  // DEADLINE_EXCEEDED, one that is stopped with that; no tile of it was started.
  // REQUIRES: the job was not submitted before.
  absl::Status Submit(std::shared_ptr<Job> job);

  // Runs the stages and returns when they are complete: OK, the first tile's error, or what Submit
  // says. times: where to write when things happened, or null. expected_seconds: as of a job. Not
  // to be called on a compute thread.
  absl::Status Run(std::vector<Stage> stages, JobTimes* times = nullptr,
                   double expected_seconds = 0);

  int threads() const { return static_cast<int>(threads_.size()); }
  int queued() const ABSL_LOCKS_EXCLUDED(mutex_);   // jobs that wait for their turn
  int running() const ABSL_LOCKS_EXCLUDED(mutex_);  // jobs that have it, and are not complete

  // When a caller that was refused may come again: what waits now has its turn by then, by how
  // quickly jobs went of late, and by what is expected of those that run. 10 ms to 30 s.
  Clock::duration RetryDelay() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  using JobList = std::list<std::shared_ptr<Job>>;
  class Turn;

  void Work(int worker);
  // Returns once there may be something to take, or none came for a while.
  void Linger() const;
  // A job's next tile, or a job that has none left to start (tile -1).
  struct Taken {
    std::shared_ptr<Job> job;
    int64_t tile = 0;
  };
  // Waits where there is nothing to take. The job is null when the scheduler shuts down and every
  // job is complete.
  Taken TakeNext() ABSL_LOCKS_EXCLUDED(mutex_);
  // What may have the thread before the turn's tile goes on; the job is null where nothing may.
  Taken TakeInstead(Turn& turn) ABSL_LOCKS_EXCLUDED(mutex_);
  Taken Take(Job* job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RunTaken(const Taken& taken, int worker) ABSL_LOCKS_EXCLUDED(mutex_);
  static absl::Status RunTile(const Taken& taken, const TileContext& context);
  // Puts back what was taken and used a thread for so long. The last to do so starts the next stage
  // or completes the job.
  void Settle(const std::shared_ptr<Job>& job, double used_seconds) ABSL_LOCKS_EXCLUDED(mutex_);

  // The job that is next; null where none is ready. below: the tile that it would interrupt, or
  // null.
  Job* Next(const Turn* below) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void MakeReady(Job* job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // The queue.
  static bool IsShort(const Job& job);
  // By what is expected of the jobs that run, and how that turned out of late; 0 where a place is
  // free.
  double SecondsToFreePlace() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // How much later the next place is left because of a job that waits before.
  double SecondsOfTurn(const Job& job) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Until a job that comes now has its turn, by how quickly jobs went of late, and by what is
  // expected of those that are here.
  double SecondsToTurn() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether one more job may wait.
  absl::Status CheckQueue(bool is_short) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // node: a list of the job alone, which goes to where it belongs.
  absl::Status Add(JobList& node) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Start(JobList& from, Job& job, Job::Place place) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StartWaiting() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LeavePlace(Job& job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends the jobs that need not wait any longer.
  void EndExpired() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndExpired(JobList& waiting) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether EndExpired would find any.
  bool AnyExpired() const;
  void NoteExpiry(const Job& job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const SchedulerOptions options_;
  mutable Mutex mutex_;
  CondVar work_;
  JobList waiting_ ABSL_GUARDED_BY(mutex_);          // in the order they came
  JobList waiting_short_ ABSL_GUARDED_BY(mutex_);    // of them the short ones
  JobList started_ ABSL_GUARDED_BY(mutex_);          // until `done` has returned
  std::vector<Job*> ready_ ABSL_GUARDED_BY(mutex_);  // of those, with something to take
  std::atomic<bool> any_ready_ = false;              // whether ready_ has any
  int64_t turns_ ABSL_GUARDED_BY(mutex_) = 0;
  int long_places_ ABSL_GUARDED_BY(mutex_) = 0;  // that are occupied
  int short_places_ ABSL_GUARDED_BY(mutex_) = 0;
  // No job that waits has to end before, unless it was stopped.
  std::atomic<Clock::time_point> next_expiry_ = Clock::time_point::max();
  // Whether a job was stopped that may wait. Jobs outlive the scheduler.
  const std::shared_ptr<std::atomic<bool>> any_stopped_ = std::make_shared<std::atomic<bool>>();
  // When a place was last left, or the first one taken; and how long it takes until one is left, by
  // the last ones.
  Clock::time_point place_left_ ABSL_GUARDED_BY(mutex_);
  int64_t places_left_ ABSL_GUARDED_BY(mutex_) = 0;
  double seconds_a_place_ ABSL_GUARDED_BY(mutex_) = 0;   // 0: not known yet
  double expected_a_place_ ABSL_GUARDED_BY(mutex_) = 0;  // of the same jobs; 0: of none
  bool shutdown_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_SCHEDULER_H_
