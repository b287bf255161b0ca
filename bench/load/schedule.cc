#include "bench/load/schedule.h"

#include <random>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace attendant::load {
namespace {

// More would only be memory.
constexpr double kMostCalls = 1e7;
// Elements of one tensor: 4 GiB of float32.
constexpr double kMostElements = 1 << 30;

}  // namespace

std::string Size::name() const { return absl::StrJoin(shape, "x"); }

absl::StatusOr<std::vector<Size>> ParseSizes(absl::string_view text) {
  std::vector<Size> sizes;
  for (const absl::string_view part : absl::StrSplit(text, ',')) {
    const std::vector<absl::string_view> halves = absl::StrSplit(part, ':');
    Size size;
    double elements = 1;
    bool ok = halves.size() <= 2;
    for (const absl::string_view number : absl::StrSplit(halves[0], 'x')) {
      int64_t axis = 0;
      ok = ok && absl::SimpleAtoi(number, &axis) && axis > 0;
      elements *= static_cast<double>(axis);
      size.shape.push_back(axis);
    }
    ok = ok && size.shape.size() == 4 && elements <= kMostElements;
    if (halves.size() == 2) ok = ok && absl::SimpleAtod(halves[1], &size.weight) && size.weight > 0;
    if (!ok) {
      return absl::InvalidArgumentError(absl::StrCat(
          "'", part, "' is no BATCHxHEADSxTOKENSxWIDTH of at most 2^30 elements, nor that with ",
          ":WEIGHT"));
    }
    sizes.push_back(std::move(size));
  }
  return sizes;
}

absl::StatusOr<std::vector<Phase>> ParsePhases(absl::string_view text) {
  std::vector<Phase> phases;
  for (const absl::string_view part : absl::StrSplit(text, ',')) {
    const std::pair<absl::string_view, absl::string_view> halves =
        absl::StrSplit(part, absl::MaxSplits(':', 1));
    Phase phase;
    if (!absl::SimpleAtod(halves.first, &phase.rate) || !(phase.rate > 0) ||
        !absl::ParseDuration(halves.second, &phase.duration) ||
        phase.duration <= absl::ZeroDuration() || phase.duration == absl::InfiniteDuration()) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", part, "' is no RATE:DURATION, such as 50:10s"));
    }
    phases.push_back(phase);
  }
  return phases;
}

absl::StatusOr<std::vector<Arrival>> MakeSchedule(const std::vector<Phase>& phases,
                                                  const std::vector<Size>& sizes, Arrivals arrivals,
                                                  uint32_t seed) {
  double calls = 0;
  for (const Phase& phase : phases) calls += phase.rate * absl::ToDoubleSeconds(phase.duration);
  if (!(calls <= kMostCalls)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the phases have ", calls, " calls, at most ", kMostCalls, " are made"));
  }
  std::vector<double> weights;
  weights.reserve(sizes.size());
  for (const Size& size : sizes) weights.push_back(size.weight);
  std::mt19937 generator(seed);
  std::discrete_distribution<size_t> size(weights.begin(), weights.end());
  std::exponential_distribution<double> gap(1);
  std::vector<Arrival> schedule;
  double begin = 0;
  for (size_t i = 0; i < phases.size(); ++i) {
    const double end = begin + absl::ToDoubleSeconds(phases[i].duration);
    if (arrivals == Arrivals::kConstant) {
      // The first comes at once.
      const auto at = [&](int64_t call) {
        return begin + static_cast<double>(call) / phases[i].rate;
      };
      for (int64_t call = 0; at(call) < end; ++call) {
        schedule.push_back({absl::Seconds(at(call)), size(generator), i});
      }
    } else {
      for (double at = begin + gap(generator) / phases[i].rate; at < end;
           at += gap(generator) / phases[i].rate) {
        schedule.push_back({absl::Seconds(at), size(generator), i});
      }
    }
    begin = end;
  }
  return schedule;
}

}  // namespace attendant::load
