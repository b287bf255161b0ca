// How much of the machine is really ours: CPUs by affinity and cgroup quota, memory by cgroup
// limit, threads by trial.
//
// Both versions of cgroups are read, also at once: every group from our own up to the mount counts,
// since each limits those below it.
#ifndef ATTENDANT_SERVER_CPU_H_
#define ATTENDANT_SERVER_CPU_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"

namespace attendant::server {

// The smallest limits of the cgroups that this process is in, without a value where there is none.
struct CgroupLimits {
  std::optional<double> cpus;  // CPU time a second, as a number of CPUs
  std::optional<int64_t> memory_bytes;
};

// root: where to find /proc/self/cgroup, /proc/self/mountinfo and what they name; "" is this
// machine. What cannot be read limits nothing.
CgroupLimits ReadCgroupLimits(const std::string& root = "");

// Compute threads for so many CPUs of the affinity mask: no more than whole CPUs of the quota, one
// at least. Rounded down, as automaxprocs and Rust's standard library do: compute threads never
// rest, so that one more would spend the quota before its period ends, and then gRPC's threads stop
// too. What is left over serves those.
int UsableCpus(int affinity_cpus, const CgroupLimits& limits);

// The bytes of memory that are ours on a machine of so many.
int64_t UsableMemoryBytes(int64_t machine_bytes, const CgroupLimits& limits);

// Makes as many threads as a server has that starts, to see whether it can: gRPC would abort, or
// never start. Returns RESOURCE_EXHAUSTED with the numbers and what to change.
absl::Status CheckThreads(int compute_threads);

}  // namespace attendant::server

#endif  // ATTENDANT_SERVER_CPU_H_
