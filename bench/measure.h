// Repetitions and what is made of them.
//
// Clocks and neighbours change from one second to the next, so things to be compared are measured
// in turn, in short pieces, and the best of each is held against the best of the other.
#ifndef ATTENDANT_BENCH_MEASURE_H_
#define ATTENDANT_BENCH_MEASURE_H_

#include <chrono>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/report.pb.h"

namespace attendant::bench {

using Clock = std::chrono::steady_clock;

// Seconds a call of `run`, () -> absl::Status, takes on average over `calls` of them; the first
// error ends them.
template <typename Run>
absl::StatusOr<double> SecondsOf(int calls, const Run& run) {
  const auto begin = Clock::now();
  for (int i = 0; i < calls; ++i) {
    if (absl::Status status = run(); !status.ok()) return status;
  }
  return std::chrono::duration<double>(Clock::now() - begin).count() / calls;
}

// The length of a piece: long enough for the clock, short enough that the machine is the same at
// its end.
inline constexpr double kPieceSeconds = 3e-3;

// How many calls make a piece. Warms up first.
template <typename Run>
absl::StatusOr<int> CallsAPiece(const Run& run) {
  absl::StatusOr<double> seconds = SecondsOf(1, run);
  // A first call that takes longer than a piece says enough, and may take very long.
  if (seconds.ok() && *seconds < 10 * kPieceSeconds) seconds = SecondsOf(1, run);
  if (!seconds.ok()) return seconds.status();
  return static_cast<int>(kPieceSeconds / *seconds) + 1;
}

// Of rates, where more is better, and of times. REQUIRES: there is at least one.
Figure FigureOfRates(const std::vector<double>& rates);
Figure FigureOfTimes(const std::vector<double>& times);

// Best over best and median over median.
Figure RatioOf(const Figure& part, const Figure& whole);

// The loop of a case: true until the time is over and there are enough repetitions for a median.
class Repetitions {
 public:
  explicit Repetitions(double seconds)
      : end_(Clock::now() + std::chrono::duration<double>(seconds)) {}
  bool Next() { return ++count_ <= kLeast || Clock::now() < end_; }

 private:
  static constexpr int kLeast = 3;

  std::chrono::time_point<Clock, std::chrono::duration<double>> end_;
  int count_ = 0;
};

}  // namespace attendant::bench

#endif  // ATTENDANT_BENCH_MEASURE_H_
