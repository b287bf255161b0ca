// Calls that end together: by one deadline, or when one of them has failed.
#ifndef ATTENDANT_CLIENT_CPP_CALL_GROUP_H_
#define ATTENDANT_CLIENT_CPP_CALL_GROUP_H_

#include <functional>
#include <map>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/mutex.h"

namespace attendant {

// Thread-safe.
class CallGroup {
 public:
  explicit CallGroup(absl::Duration timeout) : deadline_(absl::Now() + timeout) {}

  absl::Time deadline() const { return deadline_; }

  // Stops the calls that run, and those that join later.
  void Cancel() {
    core::MutexLock lock(mutex_);
    cancelled_ = true;
    for (const auto& [member, stop] : members_) stop();
  }

  bool cancelled() {
    core::MutexLock lock(mutex_);
    return cancelled_;
  }

  // A call, while it lives.
  class Member {
   public:
    // stop: called by Cancel, from any thread; at once where that was called before.
    Member(CallGroup& group, std::function<void()> stop) : group_(group) {
      core::MutexLock lock(group_.mutex_);
      if (group_.cancelled_) stop();
      group_.members_.emplace(this, std::move(stop));
    }
    ~Member() {
      core::MutexLock lock(group_.mutex_);
      group_.members_.erase(this);
    }
    Member(const Member&) = delete;
    Member& operator=(const Member&) = delete;

   private:
    CallGroup& group_;
  };

 private:
  const absl::Time deadline_;
  core::Mutex mutex_;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<const Member*, std::function<void()>> members_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attendant

#endif  // ATTENDANT_CLIENT_CPP_CALL_GROUP_H_
