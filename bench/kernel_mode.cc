// --mode=kernel: each case against the roof that bounds it.
//
// Self-attention is held against the CPU's fused multiply-adds, decoding against the bandwidth of
// reading its keys and values from memory. FLOPs are those of the matrix products, bytes those of K
// and V read once, as the field counts.
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "bench/cases.h"
#include "bench/measure.h"
#include "bench/memory.h"
#include "bench/modes.h"
#include "bench/report.h"
#include "bench/workload.h"
#include "core/machine.h"
#include "core/scheduler.h"

namespace attendant::bench {
namespace {

// Keys that one task of the read roof reads, and then as many values: about what a task of the
// kernel reads.
constexpr int64_t kReadKeys = 4096;

// The memory a decode case reads, as tasks.
template <typename S>
std::vector<Stretch> StretchesOf(const core::Problem& p, const typename Workload<S>::KeyValue& kv) {
  std::vector<Stretch> stretches;
  const int64_t rows = p.batch * p.kv_heads * p.keys;
  for (int64_t row = 0; row < rows; row += kReadKeys) {
    const int64_t bytes =
        std::min(kReadKeys, rows - row) * p.width * static_cast<int64_t>(sizeof(S));
    stretches.push_back({kv.key.data() + row * p.width, bytes});
    stretches.push_back({kv.value.data() + row * p.width, bytes});
  }
  return stretches;
}

// A turn of the peak lasts as long as the piece beside it, so that both meet the same disturbances:
// of a clock that drifts, a short turn would see the best moments alone.
constexpr double kLongestPeak = 0.1;

// Repetitions of one case, each a rate.
struct Rates {
  std::vector<double> gflops;
  std::vector<double> peak;
  std::vector<double> gigabytes;
  std::vector<double> read;
};

template <typename S>
absl::StatusOr<CaseResult> Measure(const Case& c, const Settings& settings,
                                   core::Scheduler& scheduler) {
  CaseResult result = ResultFor(kKernelMode.name, c, settings);
  const int64_t copies = CopiesOf(c);
  result.set_key_value_copies(static_cast<int32_t>(copies));
  auto workload = Workload<S>::Make(c, copies);
  if (!workload.ok()) return workload.status();
  const auto run = [&] { return workload->Run(scheduler, settings.kernel); };
  const auto read = [&] {
    return Read(scheduler, StretchesOf<S>(workload->problem(), workload->Next()));
  };
  const absl::StatusOr<int> calls = CallsAPiece(run);
  if (!calls.ok()) return calls.status();
  Rates rates;
  for (Repetitions repetitions(settings.seconds); repetitions.Next();) {
    const absl::StatusOr<double> seconds = SecondsOf(*calls, run);
    if (!seconds.ok()) return seconds.status();
    rates.gflops.push_back(result.flops() / *seconds / 1e9);
    rates.gigabytes.push_back(result.key_value_bytes() / *seconds / 1e9);
    const double turn = std::min(*calls * *seconds, kLongestPeak);
    rates.peak.push_back(core::MeasurePeakFlops(scheduler, c.dtype, turn) / 1e9);
    if (!c.decode) continue;
    const absl::StatusOr<double> read_seconds = SecondsOf(*calls, read);
    if (!read_seconds.ok()) return read_seconds.status();
    rates.read.push_back(result.key_value_bytes() / *read_seconds / 1e9);
  }
  *result.mutable_gflops() = FigureOfRates(rates.gflops);
  *result.mutable_peak_gflops() = FigureOfRates(rates.peak);
  *result.mutable_share() = RatioOf(result.gflops(), result.peak_gflops());
  if (c.decode) {
    *result.mutable_gigabytes_per_second() = FigureOfRates(rates.gigabytes);
    *result.mutable_read_bandwidth() = FigureOfRates(rates.read);
    *result.mutable_share() = RatioOf(result.gigabytes_per_second(), result.read_bandwidth());
  }
  result.set_workspace_bytes(static_cast<int32_t>(workload->workspace_bytes()));
  return result;
}

void PrintHeader() {
  const int64_t cache = LastLevelCacheBytes();
  std::printf("last-level cache %lld MiB: decode cases rotate over %lld MiB or more of K and V\n\n",
              static_cast<long long>(cache >> 20), static_cast<long long>(4 * cache >> 20));
  std::printf("%-28s %9s %8s %8s %6s %6s %8s %8s %6s %6s %12s\n", "", "GFLOP/s", "", "peak",
              "share", "", "GB/s", "read", "share", "", "workspace");
  std::printf("%-28s %9s %8s %8s %6s %6s %8s %8s %6s %6s %12s\n", "case", "best", "median", "best",
              "best", "median", "best", "best", "best", "median", "bytes");
}

void Print(const CaseResult& r) {
  const Figure of_peak = RatioOf(r.gflops(), r.peak_gflops());
  std::printf("%-28s %9.1f %8.1f %8.1f %6.3f %6.3f", r.name().c_str(), r.gflops().best(),
              r.gflops().median(), r.peak_gflops().best(), of_peak.best(), of_peak.median());
  if (r.has_read_bandwidth()) {
    std::printf(" %8.1f %8.1f %6.3f %6.3f", r.gigabytes_per_second().best(),
                r.read_bandwidth().best(), r.share().best(), r.share().median());
  } else {
    std::printf(" %8s %8s %6s %6s", "", "", "", "");
  }
  std::printf(" %12d\n", r.workspace_bytes());
  std::fflush(stdout);
}

absl::Status Run(const Settings& settings, const std::vector<std::string>& names,
                 std::vector<CaseResult>& results) {
  core::Scheduler scheduler(settings.threads);
  PrintMachine(settings);
  PrintHeader();
  for (const std::string& name : names) {
    const Case& c = CaseNamed(KernelCases(), name);
    auto result =
        core::WithStored(c.dtype, [&]<typename S>() { return Measure<S>(c, settings, scheduler); });
    if (!result.ok()) return result.status();
    Print(*result);
    results.push_back(*std::move(result));
  }
  return absl::OkStatus();
}

}  // namespace

const Mode kKernelMode = {
    "kernel",
    "attention, as a share of the CPU's multiply-adds, or of the memory's bandwidth to decode",
    [] { return NamesOf(KernelCases()); },
    Run,
};

}  // namespace attendant::bench
