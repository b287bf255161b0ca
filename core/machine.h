// What this machine is: its processor, the instruction set our SIMD code uses, and how fast it can
// multiply and add at the very best.
#ifndef ATTENDANT_CORE_MACHINE_H_
#define ATTENDANT_CORE_MACHINE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "core/scheduler.h"
#include "core/tensor_view.h"

namespace attendant::core {

// The processor's name from /proc/cpuinfo, "unknown" where there is none.
std::string CpuName();

// The instruction set that the SIMD code uses on this CPU: "AVX3" (AVX-512), "AVX2" or the
// baseline.
std::string SimdTarget();

// The instruction sets that SimdTarget can be on this CPU, best first.
std::vector<std::string> SimdTargets();

// Uses none but `name` from now on. Returns INVALID_ARGUMENT where it is not one of SimdTargets().
// Not thread-safe: call it before there are threads.
absl::Status ForceSimdTarget(absl::string_view name);

// CPUs that this process may run on (its affinity mask); at least 1.
int AvailableCpus();

// Bytes of memory this machine has.
int64_t PhysicalMemoryBytes();

// FLOP/s of fused multiply-adds on registers alone, of FLOAT32 or FLOAT64, on all the scheduler's
// threads at once, on average over `seconds`: the roof that every kernel is measured against.
// Not to be called on a compute thread.
double MeasurePeakFlops(Scheduler& scheduler, DType dtype, double seconds);

// The same for both types; 0 where it was not measured.
struct PeakFlops {
  double float32 = 0;
  double float64 = 0;
};

// Blocks of memory that are smaller stay in the process when they are freed, after KeepFreedMemory.
inline constexpr int64_t kLargestKeptBytes = int64_t{32} << 20;

// Keeps freed memory in the process for the next call: by default glibc returns what is larger than
// a few pages to the kernel, and every call pays for page faults. Call it before any thread starts.
void KeepFreedMemory();

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_MACHINE_H_
