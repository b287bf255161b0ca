// What was measured, as JSON, and what every mode's table opens with.
#ifndef ATTENDANT_BENCH_REPORT_H_
#define ATTENDANT_BENCH_REPORT_H_

#include <string>
#include <vector>

#include "bench/cases.h"
#include "bench/modes.h"
#include "bench/report.pb.h"

namespace attendant::bench {

// A result with the case and the machine filled in, the figures still to come.
CaseResult ResultFor(const char* mode, const Case& c, const Settings& settings);

// One line: version, CPU, instruction set, kernels, threads.
void PrintMachine(const Settings& settings);

std::string ToJson(const std::vector<CaseResult>& results);

}  // namespace attendant::bench

#endif  // ATTENDANT_BENCH_REPORT_H_
