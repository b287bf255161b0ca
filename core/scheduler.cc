#include "core/scheduler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/errors.h"
#include "core/faults.h"
#include "core/gemm.h"

namespace attendant::core {

namespace {

using Clock = Scheduler::Clock;

constexpr char kShuttingDown[] = "the compute threads are shutting down";
constexpr int64_t kNoTile = -1;

// A thread without work looks for more for so long before it sleeps: to wake one takes about as
// long, and a stage or a short call often follows within it.
constexpr auto kLinger = std::chrono::microseconds(50);
// Whoever waits for a short job stays runnable for so long: a thread that sleeps hears of the end
// some ten microseconds later.
constexpr auto kAwait = std::chrono::microseconds(200);

// Jobs are even that have had the same milliseconds of threads: what is less is a matter of tiles,
// which are not cut to measure.
constexpr double kEvenSeconds = 1e-3;
// A tile keeps its thread for so long before shorter jobs may have it. It is what a call of a few
// tens of microseconds waits at most, and what a change of job costs (a cold L1 and L2, some 10 us)
// is a small part of.
constexpr auto kSlice = std::chrono::microseconds(200);

// Who would wait in vain hears of it at once: from this part of max_queue_wait on. How long a place
// takes varies by a tenth or two from one eight to the next, and an accepted job is to be computed.
constexpr double kInTime = 0.8;

constexpr double kLeastRetrySeconds = 0.01;
constexpr double kMostRetrySeconds = 30;
// Places whose time is averaged: jobs that started together end together, so that a few times
// max_running of them tell how quickly the queue moves, and fewer do not.
constexpr int64_t kAveraged = 64;

double Seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

// Whole ones, rounded up.
int64_t Milliseconds(Clock::duration duration) {
  return std::chrono::ceil<std::chrono::milliseconds>(duration).count();
}

// Gives way to other threads until ready() or the time has passed.
template <typename Ready>
void YieldUntil(const Ready& ready, Clock::duration limit) {
  if (ready()) return;
  const auto end = Clock::now() + limit;
  while (!ready() && Clock::now() < end) std::this_thread::yield();
}

SchedulerOptions Unbounded(int threads) {
  return {threads, std::numeric_limits<int>::max(), std::numeric_limits<int>::max(),
          Clock::duration::max()};
}

}  // namespace

// A tile that runs on a worker.
class Scheduler::Turn final : public Checkpoint::Host {
 public:
  Turn(Scheduler& scheduler, Job& job, int worker)
      : scheduler_(scheduler), job_(job), worker_(worker), since_(Clock::now()) {}

  void GiveWay() override {
    if (Clock::now() - since_ < kSlice) return;
    while (true) {
      const Taken taken = scheduler_.TakeInstead(*this);
      if (taken.job == nullptr) return;
      scheduler_.RunTaken(taken, worker_);
      since_ = Clock::now();
    }
  }

  Job& job() const { return job_; }
  // Seconds since this was last asked, or the tile went on.
  double TakeSeconds() {
    const Clock::time_point before = std::exchange(since_, Clock::now());
    return Seconds(since_ - before);
  }

 private:
  Scheduler& scheduler_;
  Job& job_;
  const int worker_;
  Clock::time_point since_;
};

Scheduler::Scheduler(const SchedulerOptions& options) : options_(options) {
  threads_.reserve(options_.threads);
  for (int worker = 0; worker < options_.threads; ++worker) {
    threads_.emplace_back([this, worker] { Work(worker); });
  }
}

Scheduler::Scheduler(int threads) : Scheduler(Unbounded(threads)) {}

Scheduler::~Scheduler() {
  {
    MutexLock lock(mutex_);
    shutdown_ = true;
    for (const JobList* jobs : {&waiting_, &waiting_short_, &started_}) {
      for (const auto& job : *jobs) job->Stop(absl::CancelledError(kShuttingDown));
    }
  }
  work_.NotifyAll();
  for (std::thread& thread : threads_) thread.join();
}

absl::Status Scheduler::Submit(std::shared_ptr<Job> job) {
  try {
    if constexpr (faults::kCompiledIn) {
      if (faults::Fires(faults::Point::kAllocation)) throw std::bad_alloc();
    }
    JobList node;
    node.push_back(std::move(job));
    Job& submitted = *node.front();
    submitted.times_.submitted = Clock::now();
    submitted.TellStops(any_stopped_);
    MutexLock lock(mutex_);
    // Room for all jobs now: a compute thread that makes one ready needs no memory.
    const size_t jobs = waiting_.size() + waiting_short_.size() + started_.size() + 1;
    if (ready_.capacity() < jobs) ready_.reserve(2 * jobs);
    if (shutdown_) submitted.Stop(absl::CancelledError(kShuttingDown));
    return Add(node);
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("out of memory");
  }
}

absl::Status Scheduler::Run(std::vector<Stage> stages, JobTimes* times, double expected_seconds) {
  Mutex mutex;
  CondVar complete;
  std::atomic<bool> done = false;
  absl::Status result;
  const auto on_done = [&](const absl::Status& status, const JobTimes& job_times) {
    MutexLock lock(mutex);
    result = status;
    if (times != nullptr) *times = job_times;
    done = true;
    complete.NotifyOne();
  };
  auto job = std::make_shared<Job>(std::move(stages), on_done);
  job->set_expected_seconds(expected_seconds);
  absl::Status submitted = Submit(std::move(job));
  if (!submitted.ok()) return submitted;
  YieldUntil([&] { return done.load(std::memory_order_relaxed); }, kAwait);
  MutexLock lock(mutex);
  while (!done) complete.Wait(mutex);
  return result;
}

int Scheduler::queued() const {
  MutexLock lock(mutex_);
  return static_cast<int>(waiting_.size() + waiting_short_.size());
}

int Scheduler::running() const {
  MutexLock lock(mutex_);
  return long_places_ + short_places_;
}

Clock::duration Scheduler::RetryDelay() const {
  MutexLock lock(mutex_);
  double seconds = static_cast<double>(waiting_short_.size()) * kShortSeconds + SecondsToTurn();
  if (seconds_a_place_ == 0) {
    for (const auto& job : started_) seconds += job->expected_seconds_;
  }
  return std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(std::clamp(seconds, kLeastRetrySeconds, kMostRetrySeconds)));
}

double Scheduler::SecondsToFreePlace() const {
  if (long_places_ < options_.max_running) return 0;
  const Clock::time_point now = Clock::now();
  double first = std::numeric_limits<double>::infinity();
  for (const auto& job : started_) {
    if (job->place_ != Job::Place::kLong) continue;
    const bool runs = job->times_.first_tile != Clock::time_point();
    const double since = runs ? Seconds(now - job->times_.first_tile) : 0;
    // All that run share the threads.
    first = std::min(first, long_places_ * SecondsOfTurn(*job) - since);
  }
  return std::isfinite(first) ? std::max(first, 0.0) : 0;
}

double Scheduler::SecondsOfTurn(const Job& job) const {
  if (job.expected_seconds_ <= 0) return seconds_a_place_;
  const double pace = expected_a_place_ > 0 ? seconds_a_place_ / expected_a_place_ : 1;
  return job.expected_seconds_ * pace;
}

double Scheduler::SecondsToTurn() const {
  double seconds = std::max(SecondsToFreePlace(), seconds_a_place_);
  for (const auto& job : waiting_) seconds += SecondsOfTurn(*job);
  return seconds;
}

void Scheduler::Work(int worker) {
  PrepareThreadForGemm();
  while (true) {
    Linger();
    const Taken taken = TakeNext();
    if (taken.job == nullptr) return;
    RunTaken(taken, worker);
  }
}

void Scheduler::Linger() const {
  YieldUntil([&] { return any_ready_.load(std::memory_order_relaxed); }, kLinger);
}

Scheduler::Taken Scheduler::TakeNext() {
  MutexLock lock(mutex_);
  while (true) {
    if (AnyExpired()) EndExpired();
    if (Job* const job = Next(nullptr); job != nullptr) return Take(job);
    // Where jobs wait, others have started.
    if (shutdown_ && started_.empty()) return {};
    const Clock::time_point expiry = next_expiry_;
    if (expiry == Clock::time_point::max()) {
      work_.Wait(mutex_);
    } else {
      work_.WaitUntil(mutex_, expiry);
    }
  }
}

Scheduler::Taken Scheduler::TakeInstead(Turn& turn) {
  MutexLock lock(mutex_);
  turn.job().used_seconds_ += turn.TakeSeconds();
  turn.job().StopIfLate();
  if (turn.job().stopped()) return {};
  if (AnyExpired()) EndExpired();
  Job* const job = Next(&turn);
  return job == nullptr ? Taken() : Take(job);
}

Job* Scheduler::Next(const Turn* below) {
  const auto may_interrupt = [&](const Job& job) {
    // The shorter of two jobs interrupts the other's tiles, never the other way round: so what is
    // interrupted goes on soon. How long an unknown job takes is not known to be little.
    const double expected = below->job().expected_seconds_;
    return job.expected_seconds_ > 0 && (expected <= 0 || job.expected_seconds_ <= expected / 2) &&
           job.used_seconds_ < below->job().used_seconds_;
  };
  const auto before = [](const Job& a, const Job& b) {
    const double a_had = std::floor(a.used_seconds_ / kEvenSeconds);
    const double b_had = std::floor(b.used_seconds_ / kEvenSeconds);
    return a_had < b_had || (a_had == b_had && a.turn_ < b.turn_);
  };
  Job* next = nullptr;
  for (Job* const job : ready_) {
    if (job->stopped() || job->TilesLeft() == 0) return job;
    if (below != nullptr && !may_interrupt(*job)) continue;
    if (next == nullptr || before(*job, *next)) next = job;
  }
  return next;
}

Scheduler::Taken Scheduler::Take(Job* job) {
  *std::find(ready_.begin(), ready_.end(), job) = ready_.back();
  ready_.pop_back();
  any_ready_ = !ready_.empty();
  job->ready_ = false;
  ++job->holders_;
  Taken taken{*job->position_, kNoTile};
  job->StopIfLate();
  if (job->stopped() || job->TilesLeft() == 0) return taken;
  if (job->times_.first_tile == Clock::time_point()) job->times_.first_tile = Clock::now();
  taken.tile = job->next_tile_++;
  if (job->TilesLeft() > 0) MakeReady(job);
  return taken;
}

void Scheduler::RunTaken(const Taken& taken, int worker) {
  Turn turn(*this, *taken.job, worker);
  if (taken.tile != kNoTile) {
    absl::Status status = RunTile(taken, {taken.tile, worker, &taken.job->stopped_, &turn});
    if (!status.ok()) taken.job->Stop(std::move(status));
  }
  Settle(taken.job, turn.TakeSeconds());
}

absl::Status Scheduler::RunTile(const Taken& taken, const TileContext& context) {
  if constexpr (faults::kCompiledIn) {
    constexpr auto kLate = std::chrono::milliseconds(3);
    if (faults::Fires(faults::Point::kEngineError)) {
      return absl::InternalError("a fault was asked for");
    }
    if (faults::Fires(faults::Point::kSlowTile)) std::this_thread::sleep_for(kLate);
  }
  try {
    return taken.job->stages_[taken.job->stage_].run(context);
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("out of memory");
  }
}

void Scheduler::MakeReady(Job* job) {
  job->ready_ = true;
  job->turn_ = ++turns_;
  ready_.push_back(job);
  any_ready_ = true;
  work_.NotifyOne();
}

void Scheduler::Settle(const std::shared_ptr<Job>& job, double used_seconds) {
  {
    MutexLock lock(mutex_);
    job->used_seconds_ += used_seconds;
    --job->holders_;
    if (job->holders_ > 0 || job->ready_) return;
    if (!job->stopped() && ++job->stage_ < job->stages_.size()) {
      job->next_tile_ = 0;
      MakeReady(job.get());
      return;
    }
    if (job->times_.first_tile != Clock::time_point()) job->times_.end = Clock::now();
    LeavePlace(*job);
  }
  // The stages hold the job's scratch: it is given back before anybody hears of the end.
  job->stages_.clear();
  const Job::Done done = std::move(job->done_);
  done(job->why(), job->times_);
  MutexLock lock(mutex_);
  started_.erase(job->position_);
  if (shutdown_ && started_.empty()) work_.NotifyAll();
}

bool Scheduler::IsShort(const Job& job) {
  if (job.expected_seconds_ > 0) return job.expected_seconds_ < kShortSeconds;
  return std::all_of(job.stages_.begin(), job.stages_.end(),
                     [](const Stage& stage) { return stage.tiles == 0; });
}

absl::Status Scheduler::CheckQueue(bool is_short) const {
  const auto queue = static_cast<int>(waiting_.size() + waiting_short_.size());
  if (queue >= options_.max_queue) {
    return OverLimit(kMaxQueue,
                     absl::StrCat(long_places_ + short_places_, " calls run and ", queue,
                                  " wait already, at most ", options_.max_queue, " may wait"));
  }
  // Short jobs are through before their wait is of any length.
  if (is_short || waiting_.empty()) return absl::OkStatus();
  const double expected = SecondsToTurn();
  if (expected < kInTime * Seconds(options_.max_queue_wait)) return absl::OkStatus();
  return OverLimit(kMaxQueueWait,
                   absl::StrCat("the call would wait about ", std::llround(expected * 1000),
                                " ms for its turn behind the ", queue, " that wait; at most ",
                                Milliseconds(options_.max_queue_wait), " ms are allowed"));
}

absl::Status Scheduler::Add(JobList& node) {
  Job& job = *node.front();
  job.position_ = node.begin();
  const bool is_short = IsShort(job);
  JobList& waiting = is_short ? waiting_short_ : waiting_;
  const bool free = is_short ? short_places_ < kMostShort : long_places_ < options_.max_running;
  if (job.stopped()) {
    Start(node, job, Job::Place::kNone);
  } else if (free && waiting.empty()) {
    Start(node, job, is_short ? Job::Place::kShort : Job::Place::kLong);
  } else {
    if (absl::Status status = CheckQueue(is_short); !status.ok()) return status;
    waiting.splice(waiting.end(), node);
    NoteExpiry(job);
    // A thread that sleeps does not know yet how long it may.
    work_.NotifyOne();
  }
  return absl::OkStatus();
}

void Scheduler::Start(JobList& from, Job& job, Job::Place place) {
  // A newcomer has had as much as the one that has had least: the past is nobody's share.
  double least = std::numeric_limits<double>::infinity();
  for (const auto& other : started_) {
    if (other->place_ != Job::Place::kNone) least = std::min(least, other->used_seconds_);
  }
  job.used_seconds_ = std::isfinite(least) ? least : 0;
  job.place_ = place;
  if (place == Job::Place::kShort) ++short_places_;
  if (place == Job::Place::kLong && long_places_++ == 0) place_left_ = Clock::now();
  started_.splice(started_.end(), from, job.position_);
  MakeReady(&job);
}

void Scheduler::LeavePlace(Job& job) {
  const Job::Place place = std::exchange(job.place_, Job::Place::kNone);
  if (place == Job::Place::kShort) --short_places_;
  if (place == Job::Place::kLong) {
    --long_places_;
    const Clock::time_point now = Clock::now();
    const double seconds = std::max(Seconds(now - place_left_), 1e-9);
    place_left_ = now;
    const double weight = 1.0 / static_cast<double>(std::min(++places_left_, kAveraged));
    seconds_a_place_ += (seconds - seconds_a_place_) * weight;
    expected_a_place_ += (job.expected_seconds_ - expected_a_place_) * weight;
  }
  StartWaiting();
}

void Scheduler::StartWaiting() {
  if (waiting_.empty() && waiting_short_.empty()) return;
  if (AnyExpired()) EndExpired();
  while (long_places_ < options_.max_running && !waiting_.empty()) {
    Start(waiting_, *waiting_.front(), Job::Place::kLong);
  }
  while (short_places_ < kMostShort && !waiting_short_.empty()) {
    Start(waiting_short_, *waiting_short_.front(), Job::Place::kShort);
  }
}

bool Scheduler::AnyExpired() const {
  if (any_stopped_->load(std::memory_order_relaxed)) return true;
  const Clock::time_point expiry = next_expiry_.load(std::memory_order_relaxed);
  return expiry != Clock::time_point::max() && Clock::now() >= expiry;
}

void Scheduler::EndExpired() {
  // Read as well as written: a stop that this takes back is seen below, a later one stays.
  any_stopped_->exchange(false, std::memory_order_acq_rel);
  next_expiry_ = Clock::time_point::max();
  EndExpired(waiting_);
  EndExpired(waiting_short_);
}

void Scheduler::EndExpired(JobList& waiting) {
  const Clock::time_point now = Clock::now();
  for (auto at = waiting.begin(); at != waiting.end();) {
    Job& job = **at++;
    job.StopIfLate();
    if (!job.stopped() && now - job.times_.submitted >= options_.max_queue_wait) {
      job.Stop(
          OverLimit(kMaxQueueWait,
                    absl::StrCat("the call has waited ", Milliseconds(now - job.times_.submitted),
                                 " ms for its turn, at most ",
                                 Milliseconds(options_.max_queue_wait), " ms are allowed")));
    }
    if (job.stopped()) {
      Start(waiting, job, Job::Place::kNone);
    } else {
      NoteExpiry(job);
    }
  }
}

void Scheduler::NoteExpiry(const Job& job) {
  // Later than anybody waits.
  constexpr auto kNever = std::chrono::hours(24 * 365);
  Clock::time_point expiry = Clock::time_point::max();
  if (options_.max_queue_wait < kNever) expiry = job.times_.submitted + options_.max_queue_wait;
  const auto now = std::chrono::system_clock::now();
  if (job.deadline_ < now + kNever) {
    expiry = std::min(expiry, Clock::now() + (std::max(job.deadline_, now) - now));
  }
  next_expiry_ = std::min(next_expiry_.load(), expiry);
}

}  // namespace attendant::core
