// What came of the calls, in numbers.
#ifndef ATTENDANT_BENCH_LOAD_SUMMARY_H_
#define ATTENDANT_BENCH_LOAD_SUMMARY_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "bench/load/schedule.h"

namespace attendant::load {

// A call that was made.
struct Record {
  Arrival arrival;
  // From when it was to start, not from when it did: a call that waits behind others in the client
  // has waited all the same.
  absl::Duration latency;
  absl::StatusCode code = absl::StatusCode::kOk;
};

// Exact: by sorting all of them. Seconds; 0 of none.
struct Latencies {
  int64_t count = 0;
  double p50 = 0;
  double p90 = 0;
  double p99 = 0;
  double p999 = 0;
  double max = 0;
};
Latencies LatenciesOf(std::vector<double> seconds);

// The least value that at least the fraction q of all does not exceed. REQUIRES: sorted, not empty.
double Percentile(const std::vector<double>& sorted, double q);

// Some of the calls.
struct Group {
  std::string name;
  double seconds = 0;  // in which they were to start
  int64_t calls = 0;
  double goodput = 0;                       // answered calls a second
  Latencies answered;                       // OK
  Latencies refused;                        // any other status
  std::map<std::string, int64_t> statuses;  // by name
};

// What began in a second of the run.
struct Second {
  int64_t calls = 0;
  int64_t answered = 0;
  double p50 = 0;  // of those answered
};

struct Summary {
  Group all;
  std::vector<Group> phases;
  std::vector<Group> sizes;
  std::vector<Second> timeline;
};

// Calls that were to start before `warmup` are in the timeline alone. ran: how long calls were
// started, the whole schedule or less.
Summary Summarize(const std::vector<Record>& records, const std::vector<Phase>& phases,
                  const std::vector<Size>& sizes, absl::Duration warmup, absl::Duration ran);

// "OK", "RESOURCE_EXHAUSTED", ...
std::string NameOf(absl::StatusCode code);

// The health checks beside the calls.
struct Health {
  Latencies latencies;
  int64_t failed = 0;
};

std::string ToText(const Summary& summary, const Health* health);
std::string ToJson(const Summary& summary, const Health* health);

}  // namespace attendant::load

#endif  // ATTENDANT_BENCH_LOAD_SUMMARY_H_
