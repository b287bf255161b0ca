// How close the attention paths come to the machine's fused-multiply-add peak.
//
// Peak and kernel are measured in turn in one process, since clocks and neighbours change from one
// second to the next; a figure is the best of its repetitions over the best of the peak's, with the
// medians beside. FLOPs are those of the matrix products, as the field counts.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "core/attend.h"
#include "core/cost.h"
#include "core/gemm.h"
#include "core/kernel.h"
#include "core/machine.h"
#include "core/scheduler.h"
#include "core/version.h"

namespace attendant::core {
namespace {

using Clock = std::chrono::steady_clock;

struct Case {
  Path path;
  int64_t batch;
  int64_t heads;
  int64_t tokens;
  int64_t width;
  Causal causal;
};

constexpr Case kCases[] = {
    {Path::kChunked, 1, 8, 128, 64, Causal::kNone},
    {Path::kChunked, 1, 8, 512, 64, Causal::kNone},
    {Path::kChunked, 1, 8, 2048, 64, Causal::kNone},
    {Path::kChunked, 1, 8, 2048, 64, Causal::kTopLeft},
    {Path::kChunked, 1, 8, 2048, 128, Causal::kNone},
    {Path::kChunked, 1, 8, 8192, 64, Causal::kNone},
    {Path::kExplicit, 1, 8, 1024, 64, Causal::kNone},
    {Path::kExplicit, 1, 8, 2048, 64, Causal::kNone},
};

template <typename T>
std::vector<T> Normal(int64_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<T> normal;
  std::vector<T> values(count);
  for (T& value : values) value = normal(generator);
  return values;
}

struct Rates {
  std::vector<double> flops;  // a second, one a repetition
  std::vector<double> peak;
  int64_t workspace_bytes = 0;
};

double Best(const std::vector<double>& rates) {
  return *std::max_element(rates.begin(), rates.end());
}

double Median(std::vector<double> rates) {
  std::nth_element(rates.begin(), rates.begin() + rates.size() / 2, rates.end());
  return rates[rates.size() / 2];
}

Problem ProblemOf(const Case& c, DType dtype) {
  const TensorSpec spec{dtype, {c.batch, c.heads, c.tokens, c.width}};
  AttendOptions options;
  options.path = c.path;
  options.causal = c.causal;
  return *MakeProblem(spec, spec, spec, options);
}

template <typename T>
Rates Measure(const Case& c, Scheduler& scheduler, Kernel kernel, double seconds) {
  const Problem problem = ProblemOf(c, DTypeOf<T>());
  const int64_t elements = c.batch * c.heads * c.tokens * c.width;
  const std::vector<T> query = Normal<T>(elements, 1);
  const std::vector<T> key = Normal<T>(elements, 2);
  const std::vector<T> value = Normal<T>(elements, 3);
  std::vector<T> output(elements);
  const auto view = [&](auto* data) {
    return TensorView(data, problem.layout, c.heads, c.tokens, c.width);
  };
  const AttendTensors<T> tensors{view(query.data()), view(key.data()), view(value.data()),
                                 view(output.data())};
  Rates rates;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  do {
    const PeakFlops peak = MeasurePeakFlops(scheduler, 1);
    rates.peak.push_back(sizeof(T) == sizeof(float) ? peak.float32 : peak.float64);
    Workspace workspace;
    const auto begin = Clock::now();
    auto stages = AttendStages<T>(problem, tensors, {&workspace, scheduler.threads(), kernel});
    const absl::Status status = stages.ok() ? scheduler.Run(*std::move(stages)) : stages.status();
    const std::chrono::duration<double> elapsed = Clock::now() - begin;
    if (!status.ok()) {
      std::fprintf(stderr, "attend_bench: %s\n", status.ToString().c_str());
      std::exit(1);
    }
    rates.flops.push_back(static_cast<double>(ProductFlops(problem)) / elapsed.count());
    rates.workspace_bytes = std::max(rates.workspace_bytes, workspace.peak_bytes());
  } while (Clock::now() < end || rates.flops.size() < 5);
  return rates;
}

template <typename T>
void Report(const Case& c, Scheduler& scheduler, Kernel kernel, double seconds) {
  const Rates rates = Measure<T>(c, scheduler, kernel, seconds);
  std::printf("%-8s %-8s %2lld %3lld %6lld %4lld %-8s %9.1f %9.1f %9.1f %6.2f %6.2f %12lld\n",
              std::string(NameOf(DTypeOf<T>())).c_str(), std::string(NameOf(c.path)).c_str(),
              static_cast<long long>(c.batch), static_cast<long long>(c.heads),
              static_cast<long long>(c.tokens), static_cast<long long>(c.width),
              c.causal == Causal::kNone ? "no" : "top-left", Best(rates.flops) / 1e9,
              Median(rates.flops) / 1e9, Best(rates.peak) / 1e9,
              Best(rates.flops) / Best(rates.peak), Median(rates.flops) / Median(rates.peak),
              static_cast<long long>(rates.workspace_bytes));
  std::fflush(stdout);
}

int Main(int argc, char** argv) {
  int threads = AvailableCpus();
  double seconds = 3;
  Kernel kernel = Kernel::kFused;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.rfind("--threads=", 0) == 0) {
      threads = std::atoi(argument.c_str() + 10);
    } else if (argument.rfind("--seconds=", 0) == 0) {
      seconds = std::atof(argument.c_str() + 10);
    } else if (argument == "--kernel=fused" || argument == "--kernel=onednn") {
      kernel = argument == "--kernel=fused" ? Kernel::kFused : Kernel::kOneDnn;
    } else {
      std::fprintf(
          stderr,
          "usage: attend_bench [--threads=N] [--seconds=S a case] [--kernel=fused|onednn]\n");
      return argument == "--help" ? 0 : 2;
    }
  }
  if (threads < 1 || threads > 1024 || !(seconds > 0)) {
    std::fprintf(stderr, "attend_bench: --threads is 1 to 1024, --seconds more than 0\n");
    return 2;
  }
  Scheduler scheduler(threads);
  std::printf(
      "attend_bench %s, %s, softmax on %s, float32 by %s (%s), float64 by %s, %d threads\n\n",
      Version(), CpuName().c_str(), SimdTarget().c_str(), NameOf(kernel, DType::kFloat32).c_str(),
      GemmLibraryVersion().c_str(), NameOf(kernel, DType::kFloat64).c_str(), threads);
  std::printf("%-8s %-8s %2s %3s %6s %4s %-8s %9s %9s %9s %6s %6s %12s\n", "dtype", "path", "B",
              "H", "T", "D", "causal", "GFLOP/s", "median", "peak", "share", "median",
              "workspace B");
  for (const Case& c : kCases) Report<float>(c, scheduler, kernel, seconds);
  Report<double>({Path::kChunked, 1, 8, 2048, 64, Causal::kNone}, scheduler, kernel, seconds);
  return 0;
}

}  // namespace
}  // namespace attendant::core

int main(int argc, char** argv) { return attendant::core::Main(argc, argv); }
