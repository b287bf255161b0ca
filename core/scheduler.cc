#include "core/scheduler.h"

#include <chrono>
#include <utility>

#include "core/gemm.h"

namespace attendant::core {

namespace {

using Clock = std::chrono::steady_clock;

constexpr char kShuttingDown[] = "the compute threads are shutting down";
constexpr int64_t kNoTile = -1;

// A thread without work looks for more for so long before it sleeps: to wake one takes about as
// long, and a stage or a short call often follows within it.
constexpr auto kLinger = std::chrono::microseconds(50);
// Whoever waits for a short job stays runnable for so long: a thread that sleeps hears of the end
// some ten microseconds later.
constexpr auto kAwait = std::chrono::microseconds(200);

// Gives way to other threads until ready() or the time has passed.
template <typename Ready>
void YieldUntil(const Ready& ready, Clock::duration limit) {
  if (ready()) return;
  const auto end = Clock::now() + limit;
  while (!ready() && Clock::now() < end) std::this_thread::yield();
}

}  // namespace

Scheduler::Scheduler(int threads) {
  threads_.reserve(threads);
  for (int worker = 0; worker < threads; ++worker) {
    threads_.emplace_back([this, worker] { Work(worker); });
  }
}

Scheduler::~Scheduler() {
  {
    MutexLock lock(mutex_);
    shutdown_ = true;
    for (const auto& job : incomplete_) job->Stop(absl::CancelledError(kShuttingDown));
  }
  work_.NotifyAll();
  for (std::thread& thread : threads_) thread.join();
}

void Scheduler::Submit(std::shared_ptr<Job> job) {
  job->times_.submitted = Clock::now();
  {
    MutexLock lock(mutex_);
    incomplete_.insert(job);
    if (shutdown_) job->Stop(absl::CancelledError(kShuttingDown));
    Enqueue(std::move(job));
  }
}

absl::Status Scheduler::Run(std::vector<Stage> stages, JobTimes* times) {
  Mutex mutex;
  CondVar complete;
  std::atomic<bool> done = false;
  absl::Status result;
  Submit(std::make_shared<Job>(std::move(stages),
                               [&](const absl::Status& status, const JobTimes& job_times) {
                                 MutexLock lock(mutex);
                                 result = status;
                                 if (times != nullptr) *times = job_times;
                                 done = true;
                                 complete.NotifyOne();
                               }));
  YieldUntil([&] { return done.load(std::memory_order_relaxed); }, kAwait);
  MutexLock lock(mutex);
  while (!done) complete.Wait(mutex);
  return result;
}

void Scheduler::Work(int worker) {
  PrepareThreadForGemm();
  while (true) {
    Linger();
    int64_t tile = 0;
    std::shared_ptr<Job> job = TakeTile(tile);
    if (job == nullptr) return;
    if (tile != kNoTile) {
      const TileContext context{tile, worker, &job->stopped_};
      absl::Status status = job->stages_[job->stage_].run(context);
      if (!status.ok()) job->Stop(std::move(status));
    }
    Settle(std::move(job));
  }
}

void Scheduler::Linger() const {
  YieldUntil([&] { return any_ready_.load(std::memory_order_relaxed); }, kLinger);
}

std::shared_ptr<Job> Scheduler::TakeTile(int64_t& tile) {
  MutexLock lock(mutex_);
  while (ready_.empty()) {
    if (shutdown_ && incomplete_.empty()) return nullptr;
    work_.Wait(mutex_);
  }
  std::shared_ptr<Job> job = std::move(ready_.front());
  ready_.pop_front();
  any_ready_ = !ready_.empty();
  job->queued_ = false;
  ++job->holders_;
  tile = kNoTile;
  job->StopIfLate();
  if (job->stopped() || job->TilesLeft() == 0) return job;
  if (job->times_.first_tile == Clock::time_point()) job->times_.first_tile = Clock::now();
  tile = job->next_tile_++;
  if (job->TilesLeft() > 0) Enqueue(job);
  return job;
}

void Scheduler::Enqueue(std::shared_ptr<Job> job) {
  job->queued_ = true;
  ready_.push_back(std::move(job));
  any_ready_ = true;
  work_.NotifyOne();
}

void Scheduler::Settle(std::shared_ptr<Job> job) {
  {
    MutexLock lock(mutex_);
    --job->holders_;
    if (job->holders_ > 0 || job->queued_) return;
    if (!job->stopped() && job->stage_ < job->stages_.size()) {
      ++job->stage_;
      job->next_tile_ = 0;
      Enqueue(std::move(job));
      return;
    }
    if (job->times_.first_tile != Clock::time_point()) job->times_.end = Clock::now();
  }
  // The stages hold the job's scratch: it is given back before anybody hears of the end.
  job->stages_.clear();
  const Job::Done done = std::move(job->done_);
  done(job->why(), job->times_);
  MutexLock lock(mutex_);
  incomplete_.erase(job);
  if (shutdown_ && incomplete_.empty()) work_.NotifyAll();
}

}  // namespace attendant::core
