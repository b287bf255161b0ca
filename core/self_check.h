// Whether this process still computes what is right.
#ifndef ATTENDANT_CORE_SELF_CHECK_H_
#define ATTENDANT_CORE_SELF_CHECK_H_

#include "absl/status/status.h"
#include "core/kernel.h"
#include "core/scheduler.h"

namespace attendant::core {

// Computes a small problem on the scheduler, on both paths in float and in double, and compares it
// with the answer that is stored here. A short job each: it does not wait for one of the
// scheduler's places, and takes microseconds. kernel: of the chunked path. Returns INTERNAL where a
// tile failed or a number is wrong, and says which; RESOURCE_EXHAUSTED where there is no room to
// find out. Thread-safe. Not to be called on a compute thread.
absl::Status SelfCheck(Scheduler& scheduler, Kernel kernel);

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_SELF_CHECK_H_
