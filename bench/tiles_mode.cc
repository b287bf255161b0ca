// --mode=tiles: the fused kernel's pieces by themselves, on data in L1 and L2: what is lost inside
// them cannot be won back around them. On one thread, whatever --threads says.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/cases.h"
#include "bench/measure.h"
#include "bench/modes.h"
#include "bench/report.h"
#include "bench/tiles.h"
#include "core/fused_kernel.h"
#include "core/machine.h"
#include "core/scheduler.h"
#include "core/workspace.h"

namespace attendant::bench {
namespace {

struct TileCase {
  const char* name;
  Tile tile;
  core::DType dtype;
  int64_t width;
};

constexpr TileCase kTileCases[] = {
    {"score_d64", Tile::kScore, core::DType::kFloat32, 64},
    {"score_d128", Tile::kScore, core::DType::kFloat32, 128},
    {"value_d64", Tile::kValue, core::DType::kFloat32, 64},
    {"value_d128", Tile::kValue, core::DType::kFloat32, 128},
    {"exp2", Tile::kWeight, core::DType::kFloat32, 64},
    {"f64_score_d64", Tile::kScore, core::DType::kFloat64, 64},
    {"f64_value_d64", Tile::kValue, core::DType::kFloat64, 64},
    {"f64_exp2", Tile::kWeight, core::DType::kFloat64, 64},
};

// One panel and block of keys, as a case for the report.
template <typename T>
Case CaseOf(const TileCase& c) {
  Case whole;
  whole.name = c.name;
  whole.dtype = c.dtype;
  whole.heads = whole.kv_heads = 1;
  whole.queries = PanelLanes<T>();
  whole.keys = core::kFusedBlock;
  whole.width = c.width;
  return whole;
}

template <typename T>
absl::StatusOr<CaseResult> Measure(const TileCase& c, Settings settings) {
  settings.threads = 1;
  CaseResult result = ResultFor(kTilesMode.name, CaseOf<T>(c), settings);
  core::Scheduler scheduler(1);
  const int64_t panel = core::kFusedBlock * PanelLanes<T>();
  const int64_t rows = core::kFusedBlock * c.width;
  auto memory = core::Workspace::Process().Allocate<T>(rows + 2 * panel);
  if (!memory.ok()) return memory.status();
  // Small numbers: sums of them stay in range however often they are taken.
  for (int64_t i = 0; i < memory->size(); ++i) {
    memory->data()[i] = static_cast<T>(i % 64) / 64 - T{0.5};
  }
  TileData<T> data;
  data.rows = {memory->data(), core::kFusedBlock, c.width, c.width};
  data.panel = memory->data() + rows;
  data.out = memory->data() + rows + panel;
  double flops = 0;
  int blocks = 1;
  const auto run = [&] {
    return scheduler.Run({{"tiles", 1, [&](const core::TileContext&) {
                             flops = 0;
                             for (int i = 0; i < blocks; ++i) flops += RunTiles(c.tile, data);
                             return absl::OkStatus();
                           }}});
  };
  const absl::StatusOr<int> calls = CallsAPiece(run);
  if (!calls.ok()) return calls.status();
  // A piece is one call of so many blocks: waking the thread is not what is measured.
  blocks = *calls;
  std::vector<double> gflops;
  std::vector<double> peak;
  for (Repetitions repetitions(settings.seconds); repetitions.Next();) {
    const absl::StatusOr<double> seconds = SecondsOf(1, run);
    if (!seconds.ok()) return seconds.status();
    gflops.push_back(flops / *seconds / 1e9);
    peak.push_back(core::MeasurePeakFlops(scheduler, c.dtype, *seconds) / 1e9);
  }
  result.set_flops(flops / blocks);
  *result.mutable_gflops() = FigureOfRates(gflops);
  *result.mutable_peak_gflops() = FigureOfRates(peak);
  *result.mutable_share() = RatioOf(result.gflops(), result.peak_gflops());
  return result;
}

absl::Status Run(const Settings& settings, const std::vector<std::string>& names,
                 std::vector<CaseResult>& results) {
  PrintMachine(settings);
  std::printf("\n%-16s %9s %8s %8s %6s %6s\n", "tile", "GFLOP/s", "median", "peak", "share",
              "median");
  for (const TileCase& c : kTileCases) {
    if (std::find(names.begin(), names.end(), c.name) == names.end()) continue;
    auto result = c.dtype == core::DType::kFloat64 ? Measure<double>(c, settings)
                                                   : Measure<float>(c, settings);
    if (!result.ok()) return result.status();
    std::printf("%-16s %9.1f %8.1f %8.1f %6.3f %6.3f\n", c.name, result->gflops().best(),
                result->gflops().median(), result->peak_gflops().best(), result->share().best(),
                result->share().median());
    std::fflush(stdout);
    results.push_back(*std::move(result));
  }
  return absl::OkStatus();
}

}  // namespace

const Mode kTilesMode = {
    "tiles",
    "the fused kernel's score tile, value tile and exp2 alone, as a share of one thread's "
    "multiply-adds",
    [] {
      std::vector<std::string> names;
      for (const TileCase& c : kTileCases) names.emplace_back(c.name);
      return names;
    },
    Run,
};

}  // namespace attendant::bench
