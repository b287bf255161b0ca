#include "core/machine.h"

#include <malloc.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <numeric>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "core/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/machine.cc"
#include <hwy/foreach_target.h>  // compiles the rest of this file once a target
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace attendant::core::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Twelve independent chains: a fused multiply-add has a latency of 4 or 5 cycles and 2 can start in
// each, so 10 keep the units busy; more would not fit the 16 registers of AVX2.
// Returns the floating-point operations it did; `sink` keeps the compiler from leaving them out.
template <typename T>
int64_t FmaChains(int64_t rounds, T* sink) {
  const hn::ScalableTag<T> d;
  const auto a = hn::Set(d, static_cast<T>(0.999999));
  const auto b = hn::Set(d, static_cast<T>(1e-6));
  // Each chain starts elsewhere: of equal ones the compiler would keep one.
  const auto start = [d](int chain) { return hn::Set(d, static_cast<T>(1 + chain)); };
  auto c0 = start(0), c1 = start(1), c2 = start(2), c3 = start(3), c4 = start(4), c5 = start(5);
  auto c6 = start(6), c7 = start(7), c8 = start(8), c9 = start(9), c10 = start(10), c11 = start(11);
  for (int64_t i = 0; i < rounds; ++i) {
    c0 = hn::MulAdd(c0, a, b);
    c1 = hn::MulAdd(c1, a, b);
    c2 = hn::MulAdd(c2, a, b);
    c3 = hn::MulAdd(c3, a, b);
    c4 = hn::MulAdd(c4, a, b);
    c5 = hn::MulAdd(c5, a, b);
    c6 = hn::MulAdd(c6, a, b);
    c7 = hn::MulAdd(c7, a, b);
    c8 = hn::MulAdd(c8, a, b);
    c9 = hn::MulAdd(c9, a, b);
    c10 = hn::MulAdd(c10, a, b);
    c11 = hn::MulAdd(c11, a, b);
  }
  const auto sum = hn::Add(hn::Add(hn::Add(c0, c1), hn::Add(c2, c3)),
                           hn::Add(hn::Add(hn::Add(c4, c5), hn::Add(c6, c7)),
                                   hn::Add(hn::Add(c8, c9), hn::Add(c10, c11))));
  *sink = hn::GetLane(hn::SumOfLanes(d, sum));
  return rounds * 12 * 2 * static_cast<int64_t>(hn::Lanes(d));
}

int64_t FmaChainsF(int64_t rounds, float* sink) { return FmaChains(rounds, sink); }
int64_t FmaChainsD(int64_t rounds, double* sink) { return FmaChains(rounds, sink); }
const char* TargetName() { return hwy::TargetName(HWY_TARGET); }

}  // namespace attendant::core::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attendant::core {

HWY_EXPORT(FmaChainsF);
HWY_EXPORT(FmaChainsD);
HWY_EXPORT(TargetName);

namespace {

using Clock = std::chrono::steady_clock;

// About a tenth of a millisecond at 4 GHz: 12 multiply-adds take 6 cycles.
constexpr int64_t kRounds = 60'000;

// Highway's bits of what is compiled in and runs on this CPU, best first; without the baseline,
// which needs no name.
std::vector<int64_t> Targets() {
  std::vector<int64_t> targets;
  const int64_t usable = hwy::SupportedTargets() & HWY_TARGETS & ~HWY_BASELINE_TARGETS;
  for (int bit = 0; bit < 62; ++bit) {
    if ((usable >> bit & 1) != 0) targets.push_back(int64_t{1} << bit);
  }
  return targets;
}

template <typename T, typename Chains>
double FlopsOf(Scheduler& scheduler, double seconds, const Chains& chains) {
  std::atomic<int> arrived = 0;
  std::vector<double> rates(scheduler.threads());
  const auto tile = [&](const TileContext& context) {
    // Tiles wait for each other, so that each is on a thread of its own and all run at once.
    ++arrived;
    while (arrived < scheduler.threads()) std::this_thread::yield();
    const auto begin = Clock::now();
    std::chrono::duration<double> elapsed{};
    double flops = 0;
    do {
      T sink = 0;
      const int64_t done = chains(kRounds, &sink);
      // The sink is finite by construction; the comparison makes it count.
      flops += sink == sink ? static_cast<double>(done) : 0;
      elapsed = Clock::now() - begin;
    } while (elapsed.count() < seconds);
    rates[context.worker] = flops / elapsed.count();
    return absl::OkStatus();
  };
  if (!scheduler.Run({{"peak", scheduler.threads(), tile}}).ok()) return 0;
  return std::accumulate(rates.begin(), rates.end(), 0.0);
}

}  // namespace

std::string CpuName() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  std::string line;
  while (std::getline(cpuinfo, line)) {
    absl::string_view rest = line;
    if (!absl::ConsumePrefix(&rest, "model name")) continue;
    const size_t value = rest.find_first_not_of(" \t:");
    if (value != absl::string_view::npos) return std::string(rest.substr(value));
  }
  return "unknown";
}

std::string SimdTarget() { return HWY_DYNAMIC_DISPATCH(TargetName)(); }

std::vector<std::string> SimdTargets() {
  std::vector<std::string> names;
  for (const int64_t target : Targets()) names.emplace_back(hwy::TargetName(target));
  if (names.empty()) names.push_back(SimdTarget());
  return names;
}

absl::Status ForceSimdTarget(absl::string_view name) {
  for (const int64_t target : Targets()) {
    if (name != hwy::TargetName(target)) continue;
    hwy::DisableTargets(~target);
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "is '", name, "', must be one of this CPU's: ", absl::StrJoin(SimdTargets(), ", ")));
}

int AvailableCpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) {
    return std::max(1, static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)));
  }
  return std::max(1, CPU_COUNT(&set));
}

int64_t PhysicalMemoryBytes() {
  return static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE);
}

double MeasurePeakFlops(Scheduler& scheduler, DType dtype, double seconds) {
  if (dtype == DType::kFloat64) {
    return FlopsOf<double>(scheduler, seconds, [](int64_t n, double* sink) {
      return HWY_DYNAMIC_DISPATCH(FmaChainsD)(n, sink);
    });
  }
  return FlopsOf<float>(scheduler, seconds, [](int64_t n, float* sink) {
    return HWY_DYNAMIC_DISPATCH(FmaChainsF)(n, sink);
  });
}

void KeepFreedMemory() {
  mallopt(M_MMAP_THRESHOLD, static_cast<int>(kLargestKeptBytes));
  mallopt(M_TRIM_THRESHOLD, 64 << 20);
  mallopt(M_TOP_PAD, 1 << 20);
  // One arena: of any other malloc_trim leaves the last free block, up to the trim threshold, and
  // each thread would have its own. A call allocates little beside its tensors; of four callers
  // at T2048 and of eight at T128 none was slower, and the peak was a quarter lower.
  mallopt(M_ARENA_MAX, 1);
}

}  // namespace attendant::core
#endif  // HWY_ONCE
