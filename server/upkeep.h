// What a server does beside its calls, on a thread of its own: after an engine fault it checks
// itself, it tends the calls, and when none comes it gives freed memory back to the kernel.
#ifndef ATTENDANT_SERVER_UPKEEP_H_
#define ATTENDANT_SERVER_UPKEEP_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>

#include "absl/status/status.h"
#include "core/mutex.h"
#include "server/health.h"
#include "server/metrics.h"

namespace attendant::server {

// Tells when to give memory back: no call runs or has come since the look before, and more is
// resident than what was left the last time. Thread-compatible.
class IdleMemory {
 public:
  bool IsWorthTrimming(const Activity& activity, int64_t resident_bytes);
  // After it was given back.
  void Trimmed(int64_t resident_bytes) { floor_bytes_ = resident_bytes; }

 private:
  int64_t started_ = -1;
  int64_t floor_bytes_ = 0;
};

// Thread-safe.
class Upkeep {
 public:
  using Clock = std::chrono::steady_clock;

  struct Duties {
    std::function<Activity()> activity;
    // OK: what is computed is right. RESOURCE_EXHAUSTED: there was no room to find out.
    std::function<absl::Status()> self_check;
    // Told of each change, with a lock held: it must neither wait nor call back.
    std::function<void(Engine)> report;
    // Ends what waits for too long.
    std::function<void()> tend_calls;
    Clock::duration tend_every = std::chrono::seconds(1);
    // Between looks at the activity. Long enough that a light load never counts as idle: what comes
    // after a trim pays for its memory's pages once more.
    Clock::duration look_every = std::chrono::seconds(5);
    // Twice that passes before the second self-check, and twice as long before each further one.
    Clock::duration retry_after = std::chrono::milliseconds(250);
  };

  // Self-checks that fail one after the other before the engine counts as broken: some 15 s with
  // their pauses. Those that find no memory do not count.
  static constexpr int kMostFailures = 6;

  explicit Upkeep(Duties duties);
  // Waits for a self-check that runs.
  ~Upkeep();
  Upkeep(const Upkeep&) = delete;
  Upkeep& operator=(const Upkeep&) = delete;

  // A call failed for a reason of ours: the engine is faulty until a self-check passes. Does not
  // wait.
  void EngineFault();

 private:
  enum class Wake { kStop, kFault, kTime };

  void Run();
  // Until one of these; no fault: it does not count.
  Wake Await(Clock::duration time, bool fault_counts) ABSL_LOCKS_EXCLUDED(mutex_);
  void CheckEngine() ABSL_LOCKS_EXCLUDED(mutex_);
  // After a self-check; false where a fault came while it ran.
  bool EngineIsSound() ABSL_LOCKS_EXCLUDED(mutex_);
  void GiveMemoryBack();

  const Duties duties_;
  IdleMemory idle_;
  core::Mutex mutex_;
  core::CondVar wake_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  bool fault_ ABSL_GUARDED_BY(mutex_) = false;  // not looked into yet
  Engine engine_ ABSL_GUARDED_BY(mutex_) = Engine::kSound;
  std::thread thread_;
};

}  // namespace attendant::server

#endif  // ATTENDANT_SERVER_UPKEEP_H_
