// When calls are made, and of which size: decided before the first, whatever the server does.
#ifndef ATTENDANT_BENCH_LOAD_SCHEDULE_H_
#define ATTENDANT_BENCH_LOAD_SCHEDULE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace attendant::load {

// (batch, heads, tokens, width) of query, key and value, and how often it comes among the others.
struct Size {
  std::vector<int64_t> shape;
  double weight = 1;
  std::string name() const;
};

// A time in which calls come at one rate.
struct Phase {
  double rate = 0;  // calls a second
  absl::Duration duration;
};

enum class Arrivals { kPoisson, kConstant };

// A call to be made: at `at` from the start, of size sizes[size], in phase phases[phase].
struct Arrival {
  absl::Duration at;
  size_t size = 0;
  size_t phase = 0;
};

// "1x8x128x64", "1x8x128x64:3,1x8x2048x64:1" (weights). Returns INVALID_ARGUMENT with what is
// wrong.
absl::StatusOr<std::vector<Size>> ParseSizes(absl::string_view text);

// "50:10s", "50:10s,500:30s,50:15s". Returns INVALID_ARGUMENT with what is wrong.
absl::StatusOr<std::vector<Phase>> ParsePhases(absl::string_view text);

// Every call of the phases, one after the other, in order of time. The same for the same seed.
// Poisson: the times between calls are exponential, as of many callers who do not know each other.
// Returns INVALID_ARGUMENT where there would be more than 10 million.
absl::StatusOr<std::vector<Arrival>> MakeSchedule(const std::vector<Phase>& phases,
                                                  const std::vector<Size>& sizes, Arrivals arrivals,
                                                  uint32_t seed);

}  // namespace attendant::load

#endif  // ATTENDANT_BENCH_LOAD_SCHEDULE_H_
