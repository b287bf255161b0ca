#include "core/job.h"

#include "absl/strings/str_cat.h"
#include "core/errors.h"

namespace attendant::core {
namespace {

double Seconds(Job::Clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

}  // namespace

void Job::StopIfLate() {
  if (deadline_ != kNoDeadline && std::chrono::system_clock::now() >= deadline_) {
    Stop(absl::DeadlineExceededError("the deadline passed before the job was complete"));
  }
  const bool computes = times_.first_tile != Clock::time_point();
  if (!computes || max_compute_time_ == Clock::duration::max()) return;
  const Clock::duration computed = Clock::now() - times_.first_tile;
  if (computed >= max_compute_time_) {
    Stop(OverLimit(kMaxComputeTime,
                   absl::StrCat("the call has computed for ", Seconds(computed), " s, at most ",
                                Seconds(max_compute_time_), " s are allowed")));
  }
}

}  // namespace attendant::core
