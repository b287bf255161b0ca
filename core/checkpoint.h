// Where a tile stands between two blocks of its work: it may be told to stop, and others may have
// the thread for a moment.
#ifndef ATTENDANT_CORE_CHECKPOINT_H_
#define ATTENDANT_CORE_CHECKPOINT_H_

#include <atomic>

namespace attendant::core {

// Refers to what its tile was started with. Belongs to the thread that runs the tile.
class Checkpoint {
 public:
  class Host {
   public:
    // Runs tiles of shorter jobs where some have waited long enough. What the tile keeps, it keeps
    // on the stack and in scratch of its own.
    virtual void GiveWay() = 0;

   protected:
    ~Host() = default;
  };

  // host: null where there are no other jobs.
  Checkpoint(const std::atomic<bool>& stop, Host* host) : stop_(&stop), host_(host) {}

  // Called at least once in every millisecond or so of work. True once the job is to stop: the tile
  // then returns early.
  bool ToStop() const {
    if (host_ != nullptr) host_->GiveWay();
    return stop_->load(std::memory_order_relaxed);
  }

 private:
  const std::atomic<bool>* stop_;
  Host* host_;
};

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_CHECKPOINT_H_
