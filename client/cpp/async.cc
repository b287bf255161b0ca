#include "client/cpp/async.h"

#include <exception>
#include <utility>

namespace attendant {

AsyncCalls::~AsyncCalls() { End(); }

void AsyncCalls::End() {
  std::vector<std::thread> threads;
  {
    core::MutexLock lock(mutex_);
    ended_ = true;
    for (const Task& task : waiting_) task.group->Cancel();
    for (const auto& group : running_) group->Cancel();
    added_.NotifyAll();
    threads.swap(threads_);
  }
  for (std::thread& thread : threads) thread.join();
}

bool AsyncCalls::HasThread() {
  if (idle_ >= waiting_.size() || threads_.size() >= most_) return true;
  try {
    threads_.emplace_back([this] { Work(); });
  } catch (const std::exception&) {
    // The system has no more, or no memory for one.
    return !threads_.empty();
  }
  return true;
}

absl::Status AsyncCalls::Start(absl::Duration timeout, Call call) {
  Task task{std::make_shared<CallGroup>(timeout), std::move(call)};
  {
    core::MutexLock lock(mutex_);
    if (ended_) {
      // From a callback: no thread may start now, as nobody would wait for it.
      task.group->Cancel();
    } else {
      waiting_.push_back(std::move(task));
      if (HasThread()) {
        added_.NotifyOne();
        return absl::OkStatus();
      }
      waiting_.pop_back();
      return absl::ResourceExhaustedError("the system has no thread for the call");
    }
  }
  task.call(*task.group);
  return absl::OkStatus();
}

void AsyncCalls::Work() {
  core::MutexLock lock(mutex_);
  while (true) {
    while (waiting_.empty() && !ended_) {
      ++idle_;
      added_.Wait(mutex_);
      --idle_;
    }
    if (waiting_.empty()) return;
    Task task = std::move(waiting_.front());
    waiting_.pop_front();
    running_.insert(task.group);
    mutex_.Unlock();
    task.call(*task.group);
    task.call = nullptr;
    mutex_.Lock();
    running_.erase(task.group);
  }
}

}  // namespace attendant
