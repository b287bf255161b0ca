// Scratch for the tiles of a job.
#ifndef ATTENDANT_CORE_SCRATCH_POOL_H_
#define ATTENDANT_CORE_SCRATCH_POOL_H_

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/mutex.h"

namespace attendant::core {

// How many tiles run at a time in a job of so many threads, whose largest stage has so many tiles.
inline int64_t ScratchCount(int threads, int64_t tiles) {
  return std::min<int64_t>(threads, tiles);
}

// One object for each tile that can run at a time, all of them made by the first tile that asks:
// what a job holds depends neither on which thread takes which tile nor on how many come in time,
// and a job that waits for its turn holds none. Thread-safe.
template <typename Scratch>
class ScratchPool {
 private:
  // A cache line of its own, since neighbours belong to other threads.
  struct alignas(64) Slot {
    Scratch scratch;
    bool taken = false;
  };

 public:
  // Of ScratchCount objects.
  ScratchPool(int threads, int64_t tiles)
      : slots_(static_cast<size_t>(ScratchCount(threads, tiles))) {}

  // Holds an object until its end. The pool must outlive it.
  class Lease {
   public:
    Lease(Lease&& other) noexcept
        : pool_(std::exchange(other.pool_, nullptr)), slot_(other.slot_) {}
    Lease& operator=(Lease&& other) = delete;
    ~Lease() {
      if (pool_ != nullptr) pool_->GiveBack(*slot_);
    }
    Scratch& operator*() const { return slot_->scratch; }
    Scratch* operator->() const { return &slot_->scratch; }

   private:
    friend class ScratchPool;
    Lease(ScratchPool* pool, Slot* slot) : pool_(pool), slot_(slot) {}
    ScratchPool* pool_;
    Slot* slot_;
  };

  // make: () -> absl::StatusOr<Scratch>; its error is returned, and the next to ask tries again.
  // A thread gets the object it had before where that is free: it may be in its cache.
  // REQUIRES: no more than ScratchCount leases at a time.
  template <typename Make>
  absl::StatusOr<Lease> Take(int worker, const Make& make) {
    MutexLock lock(mutex_);
    while (made_ < slots_.size()) {
      absl::StatusOr<Scratch> scratch = make();
      if (!scratch.ok()) return scratch.status();
      slots_[made_++].scratch = *std::move(scratch);
    }
    for (size_t i = 0; i < slots_.size(); ++i) {
      Slot& slot = slots_[(static_cast<size_t>(worker) + i) % slots_.size()];
      if (!std::exchange(slot.taken, true)) return Lease(this, &slot);
    }
    return absl::InternalError("more tiles run at a time than there is scratch for");
  }

 private:
  void GiveBack(Slot& slot) {
    MutexLock lock(mutex_);
    slot.taken = false;
  }

  Mutex mutex_;
  std::vector<Slot> slots_;
  size_t made_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_SCRATCH_POOL_H_
