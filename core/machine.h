// What this machine is: its processor, the instruction set our SIMD code uses, and how fast it can
// multiply and add at the very best.
#ifndef ATTENDANT_CORE_MACHINE_H_
#define ATTENDANT_CORE_MACHINE_H_

#include <cstdint>
#include <string>

#include "core/scheduler.h"

namespace attendant::core {

// The processor's name from /proc/cpuinfo, "unknown" where there is none.
std::string CpuName();

// The instruction set that the SIMD code uses on this CPU: "AVX3" (AVX-512), "AVX2" or the
// baseline.
std::string SimdTarget();

// CPUs that this process may run on (its affinity mask); at least 1.
int AvailableCpus();

// Bytes of memory this machine has.
int64_t PhysicalMemoryBytes();

// FLOP/s of fused multiply-adds on registers alone, on all the scheduler's threads at once, best of
// `repetitions` of about a millisecond each: the roof that every kernel is measured against.
// Not to be called on a compute thread.
struct PeakFlops {
  double float32 = 0;
  double float64 = 0;
};
PeakFlops MeasurePeakFlops(Scheduler& scheduler, int repetitions);

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_MACHINE_H_
