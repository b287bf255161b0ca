#include "server/cpu.h"

#include <grpc/support/cpu.h>

#include <algorithm>
#include <exception>
#include <fstream>
#include <functional>
#include <latch>
#include <thread>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace attendant::server {
namespace {

// Where a hierarchy of cgroups is mounted.
struct Mount {
  std::string top;    // the group that is seen at the mount point
  std::string point;  // where
};

// Where a process is in a hierarchy: as in /proc/self/cgroup.
struct Membership {
  std::string controllers;  // of version 1, separated by commas; empty: version 2
  std::string group;
};

// Threads of a server that starts, beside those that compute: one for upkeep, two for metrics, and
// gRPC's two for timers, two executors and two for reflection; its two pools follow the CPUs.
int OtherThreads() {
  constexpr int kFixed = 1 + 2 + 2 + 2 + 2;
  constexpr int kLeastOfPool = 2;
  constexpr int kMostOfPool = 16;
  const int cpus = static_cast<int>(gpr_cpu_num_cores());
  return kFixed + std::clamp(cpus, kLeastOfPool, kMostOfPool) +
         std::clamp(cpus / 2, kLeastOfPool, kMostOfPool);
}

// How many of so many threads there can be at one time.
int PossibleThreads(int wanted) {
  std::latch end(1);
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(wanted));
  try {
    for (int i = 0; i < wanted; ++i) threads.emplace_back([&end] { end.wait(); });
  } catch (const std::exception&) {
    // The system has no more, or no memory for one.
  }
  end.count_down();
  for (std::thread& thread : threads) thread.join();
  return static_cast<int>(threads.size());
}

std::vector<std::string> LinesOf(const std::string& path) {
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

bool HasWord(absl::string_view list, absl::string_view word) {
  return absl::c_linear_search(absl::StrSplit(list, ','), word);
}

// "4:memory:/a/b"
std::vector<Membership> MembershipsOf(const std::string& root) {
  std::vector<Membership> memberships;
  for (const std::string& line : LinesOf(absl::StrCat(root, "/proc/self/cgroup"))) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() == 3) memberships.push_back({parts[1], parts[2]});
  }
  return memberships;
}

// The mount of version 2, or of version 1 with this controller:
// "35 31 0:32 /a /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
std::optional<Mount> MountOf(const std::string& root, absl::string_view controller) {
  for (const std::string& line : LinesOf(absl::StrCat(root, "/proc/self/mountinfo"))) {
    const std::vector<std::string> halves = absl::StrSplit(line, absl::MaxSplits(" - ", 1));
    if (halves.size() != 2) continue;
    const std::vector<std::string> front = absl::StrSplit(halves[0], ' ');
    const std::vector<std::string> back = absl::StrSplit(halves[1], ' ');
    if (front.size() < 5 || back.size() < 3) continue;
    const bool matches = controller.empty() ? back[0] == "cgroup2"
                                            : back[0] == "cgroup" && HasWord(back[2], controller);
    if (matches) return Mount{front[3], front[4]};
  }
  return std::nullopt;
}

// The folders of our group and of those above it, up to the mount point.
std::vector<std::string> FoldersOf(const std::string& root, const Mount& mount,
                                   const std::string& group) {
  const std::string top = root + mount.point;
  // What the mount shows starts at its own top: of /docker/1 at the top /docker/1 it is nothing. A
  // group outside it is seen from another namespace, and the mount point is all there is.
  absl::string_view below = group;
  if (mount.top != "/" && !absl::ConsumePrefix(&below, mount.top)) below = "";
  if (!absl::StartsWith(below, "/") || absl::StartsWith(below, "/..")) below = "";
  std::vector<std::string> folders = {top};
  for (const absl::string_view part : absl::StrSplit(below, '/', absl::SkipEmpty())) {
    folders.push_back(absl::StrCat(folders.back(), "/", part));
  }
  return folders;
}

std::optional<int64_t> NumberIn(absl::string_view text) {
  int64_t number = 0;
  if (!absl::SimpleAtoi(text, &number)) return std::nullopt;
  return number;
}

std::string FirstLineOf(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::optional<double> CpusOf(std::optional<int64_t> quota, std::optional<int64_t> period) {
  if (!quota.has_value() || !period.has_value() || *quota <= 0 || *period <= 0) return std::nullopt;
  return static_cast<double>(*quota) / static_cast<double>(*period);
}

// Version 2: "150000 100000", or "max 100000".
std::optional<double> CpuMax(const std::string& folder) {
  const std::vector<std::string> parts = absl::StrSplit(FirstLineOf(folder + "/cpu.max"), ' ');
  if (parts.size() != 2) return std::nullopt;
  return CpusOf(NumberIn(parts[0]), NumberIn(parts[1]));
}

// Version 1: -1 is no quota.
std::optional<double> CfsQuota(const std::string& folder) {
  return CpusOf(NumberIn(FirstLineOf(folder + "/cpu.cfs_quota_us")),
                NumberIn(FirstLineOf(folder + "/cpu.cfs_period_us")));
}

// A file of one number; "max" is none. Version 1 says a number near 2^63 instead.
std::function<std::optional<int64_t>(const std::string&)> NumberOf(const char* name) {
  return [name](const std::string& folder) {
    const std::optional<int64_t> number = NumberIn(FirstLineOf(absl::StrCat(folder, "/", name)));
    return number.has_value() && *number > 0 ? number : std::nullopt;
  };
}

template <typename T, typename Read>
void Lower(std::optional<T>& limit, const std::vector<std::string>& folders, const Read& read) {
  for (const std::string& folder : folders) {
    const std::optional<T> here = read(folder);
    if (here.has_value()) limit = std::min(limit.value_or(*here), *here);
  }
}

}  // namespace

CgroupLimits ReadCgroupLimits(const std::string& root) {
  CgroupLimits limits;
  for (const Membership& membership : MembershipsOf(root)) {
    const auto folders = [&](absl::string_view controller) {
      const std::optional<Mount> mount = MountOf(root, controller);
      return mount.has_value() ? FoldersOf(root, *mount, membership.group)
                               : std::vector<std::string>();
    };
    if (membership.controllers.empty()) {
      const std::vector<std::string> groups = folders("");
      Lower(limits.cpus, groups, CpuMax);
      Lower(limits.memory_bytes, groups, NumberOf("memory.max"));
      // Above this the kernel slows the process down: it is as good as a limit.
      Lower(limits.memory_bytes, groups, NumberOf("memory.high"));
    }
    if (HasWord(membership.controllers, "cpu")) Lower(limits.cpus, folders("cpu"), CfsQuota);
    if (HasWord(membership.controllers, "memory")) {
      Lower(limits.memory_bytes, folders("memory"), NumberOf("memory.limit_in_bytes"));
    }
  }
  return limits;
}

int UsableCpus(int affinity_cpus, const CgroupLimits& limits) {
  if (!limits.cpus.has_value() || *limits.cpus >= affinity_cpus) return std::max(1, affinity_cpus);
  return std::max(1, static_cast<int>(*limits.cpus));
}

int64_t UsableMemoryBytes(int64_t machine_bytes, const CgroupLimits& limits) {
  return std::min(machine_bytes, limits.memory_bytes.value_or(machine_bytes));
}

absl::Status CheckThreads(int compute_threads) {
  const int others = OtherThreads();
  const int possible = PossibleThreads(compute_threads + others);
  if (possible == compute_threads + others) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "--compute_threads=", compute_threads, " and ", others, " other threads are wanted, and the ",
      "system has ", possible, "; lower the one, or raise the limit that it sets to processes ",
      "(ulimit -u, or the pids limit of a container)"));
}

}  // namespace attendant::server
