// Calls that nobody waits for, each on a thread of its own while it runs.
//
// A waiting thread costs little more than its stack's pages, and the blocking call under it is
// faster than gRPC's callbacks (docs/wire.md); retries and streams are the same as of other calls.
#ifndef ATTENDANT_CLIENT_CPP_ASYNC_H_
#define ATTENDANT_CLIENT_CPP_ASYNC_H_

#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/cpp/call_group.h"
#include "core/mutex.h"

namespace attendant {

// Thread-safe.
class AsyncCalls {
 public:
  // most: how many run at one time; the others wait in order.
  explicit AsyncCalls(int most) : most_(static_cast<size_t>(most)) {}
  ~AsyncCalls();
  AsyncCalls(const AsyncCalls&) = delete;
  AsyncCalls& operator=(const AsyncCalls&) = delete;

  // Runs call(group) on another thread. The timeout counts from now. After the end it runs on this
  // one, and its group is cancelled. Returns RESOURCE_EXHAUSTED where the system has no thread to
  // give: it does not run then.
  using Call = std::function<void(CallGroup&)>;
  absl::Status Start(absl::Duration timeout, Call call);

  // Cancels the calls that are not done, and waits for them. Not to be called from a call.
  void End();

 private:
  struct Task {
    std::shared_ptr<CallGroup> group;
    Call call;
  };

  // Runs tasks until the end.
  void Work();
  // True where a thread is there, or will be, to take what was added.
  bool HasThread() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const size_t most_;
  core::Mutex mutex_;
  core::CondVar added_;
  std::deque<Task> waiting_ ABSL_GUARDED_BY(mutex_);
  std::set<std::shared_ptr<CallGroup>> running_ ABSL_GUARDED_BY(mutex_);
  size_t idle_ ABSL_GUARDED_BY(mutex_) = 0;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attendant

#endif  // ATTENDANT_CLIENT_CPP_ASYNC_H_
