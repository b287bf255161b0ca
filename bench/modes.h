// The ways of measuring, each in a file of its own.
#ifndef ATTENDANT_BENCH_MODES_H_
#define ATTENDANT_BENCH_MODES_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "bench/report.pb.h"
#include "core/kernel.h"

namespace attendant::bench {

struct Settings {
  int threads = 1;
  double seconds = 3;  // a case
  core::Kernel kernel = core::Kernel::kFused;
};

struct Mode {
  const char* name;
  const char* help;
  // The names of its cases.
  std::vector<std::string> (*cases)();
  // Measures the named cases, prints a table as it goes, and appends what it found. Called once in
  // a process, before any other thread exists.
  absl::Status (*run)(const Settings& settings, const std::vector<std::string>& names,
                      std::vector<CaseResult>& results);
};

extern const Mode kKernelMode;
extern const Mode kTilesMode;
extern const Mode kRpcMode;
extern const Mode kWireMode;

}  // namespace attendant::bench

#endif  // ATTENDANT_BENCH_MODES_H_
