#include "server/upkeep.h"

#include <malloc.h>
#include <spdlog/spdlog.h>

#include <string>
#include <utility>

#include "server/process_metrics.h"

namespace attendant::server {
namespace {

// Less is not worth the pages that the next call has to fault in.
constexpr int64_t kWorthTrimming = int64_t{8} << 20;

}  // namespace

bool IdleMemory::IsWorthTrimming(const Activity& activity, int64_t resident_bytes) {
  const bool idle = activity.running == 0 && activity.started == started_;
  started_ = activity.started;
  return idle && resident_bytes > floor_bytes_ + kWorthTrimming;
}

Upkeep::Upkeep(Duties duties) : duties_(std::move(duties)), thread_([this] { Run(); }) {}

Upkeep::~Upkeep() {
  {
    core::MutexLock lock(mutex_);
    stop_ = true;
  }
  wake_.NotifyAll();
  thread_.join();
}

void Upkeep::EngineFault() {
  core::MutexLock lock(mutex_);
  if (engine_ == Engine::kBroken) return;
  fault_ = true;
  if (engine_ == Engine::kSound) {
    engine_ = Engine::kFaulty;
    duties_.report(engine_);
  }
  wake_.NotifyAll();
}

void Upkeep::Run() {
  Clock::time_point next_look = Clock::now() + duties_.look_every;
  while (true) {
    switch (Await(duties_.tend_every, /*fault_counts=*/true)) {
      case Wake::kStop:
        return;
      case Wake::kFault:
        CheckEngine();
        break;
      case Wake::kTime:
        duties_.tend_calls();
        if (Clock::now() < next_look) break;
        next_look = Clock::now() + duties_.look_every;
        GiveMemoryBack();
        break;
    }
  }
}

Upkeep::Wake Upkeep::Await(Clock::duration time, bool fault_counts) {
  const auto end = Clock::now() + time;
  core::MutexLock lock(mutex_);
  while (true) {
    if (stop_) return Wake::kStop;
    if (fault_ && fault_counts) return Wake::kFault;
    if (Clock::now() >= end) return Wake::kTime;
    wake_.WaitUntil(mutex_, end);
  }
}

void Upkeep::CheckEngine() {
  spdlog::error("an engine fault: not ready until a self-check passes");
  Clock::duration pause = duties_.retry_after;
  for (int failures = 0; failures < kMostFailures;) {
    {
      core::MutexLock lock(mutex_);
      fault_ = false;
    }
    const absl::Status status = duties_.self_check();
    if (status.ok()) {
      // Another fault meanwhile is looked into by the next round of Run.
      if (EngineIsSound()) spdlog::info("the self-check passed: ready");
      return;
    }
    spdlog::error("the self-check failed: {}", status.ToString());
    // Where there was no room to find out nothing is known: that says nothing against the engine.
    if (!absl::IsResourceExhausted(status)) {
      ++failures;
      pause *= 2;
    }
    if (failures < kMostFailures && Await(pause, /*fault_counts=*/false) == Wake::kStop) return;
  }
  core::MutexLock lock(mutex_);
  fault_ = false;
  engine_ = Engine::kBroken;
  duties_.report(engine_);
  spdlog::critical("no self-check passed: not live any more, to be restarted");
}

bool Upkeep::EngineIsSound() {
  core::MutexLock lock(mutex_);
  if (fault_) return false;
  engine_ = Engine::kSound;
  duties_.report(engine_);
  return true;
}

void Upkeep::GiveMemoryBack() {
  if (!idle_.IsWorthTrimming(duties_.activity(), ResidentBytes())) return;
  malloc_trim(0);
  idle_.Trimmed(ResidentBytes());
}

}  // namespace attendant::server
