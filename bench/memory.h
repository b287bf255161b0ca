// The memory that decode cases read: how large the cache before it is, and how fast it can be read.
#ifndef ATTENDANT_BENCH_MEMORY_H_
#define ATTENDANT_BENCH_MEMORY_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "core/scheduler.h"

namespace attendant::bench {

// Of the first CPU; 32 MiB where the machine does not say.
int64_t LastLevelCacheBytes();

// A stretch of memory. data is aligned to 64 bytes, bytes a multiple of 64.
struct Stretch {
  const void* data = nullptr;
  int64_t bytes = 0;
};

// Reads every stretch once, one a task, with wide loads and nothing else.
absl::Status Read(core::Scheduler& scheduler, const std::vector<Stretch>& stretches);

}  // namespace attendant::bench

#endif  // ATTENDANT_BENCH_MEMORY_H_
