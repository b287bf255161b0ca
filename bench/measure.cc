#include "bench/measure.h"

#include <algorithm>

namespace attendant::bench {
namespace {

Figure FigureOf(std::vector<double> samples, double best) {
  const auto middle = samples.begin() + static_cast<std::ptrdiff_t>(samples.size() / 2);
  std::nth_element(samples.begin(), middle, samples.end());
  Figure figure;
  figure.set_best(best);
  figure.set_median(*middle);
  return figure;
}

}  // namespace

Figure FigureOfRates(const std::vector<double>& rates) {
  return FigureOf(rates, *std::max_element(rates.begin(), rates.end()));
}

Figure FigureOfTimes(const std::vector<double>& times) {
  return FigureOf(times, *std::min_element(times.begin(), times.end()));
}

Figure RatioOf(const Figure& part, const Figure& whole) {
  Figure ratio;
  ratio.set_best(part.best() / whole.best());
  ratio.set_median(part.median() / whole.median());
  return ratio;
}

}  // namespace attendant::bench
