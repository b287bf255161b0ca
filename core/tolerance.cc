#include "core/tolerance.h"

#include <algorithm>

namespace attendant::core {

Tolerance ToleranceOf(DType dtype, const Problem& p, const Magnitudes& magnitudes) {
  const double u = UnitRoundoff(dtype);
  const double score = (SumError(p.width, u) + (p.softcap == 0 ? 4 : 12) * u) * magnitudes.score +
                       magnitudes.score_error;
  const double sum =
      SumError(p.keys, u) + (16 + 3 * std::floor(static_cast<double>(p.keys) / 256)) * u;
  Tolerance tolerance;
  tolerance.weight = std::expm1(2 * score) + sum;
  tolerance.key_sum = tolerance.weight + SumError(p.queries, u);
  tolerance.output =
      (tolerance.weight + SumError(p.keys, u)) * magnitudes.value + magnitudes.value_error;
  tolerance.logsumexp =
      score + sum +
      2 * u * (magnitudes.score + std::log(static_cast<double>(std::max<int64_t>(p.keys, 1))));
  tolerance.tiny = 4 * (WideOf(dtype) == DType::kFloat32 ? 0x1p-92 : 0x1p-988) *
                   static_cast<double>(std::max<int64_t>(p.queries, 1));
  tolerance.weight += StoringError(dtype);
  tolerance.output += StoringError(dtype) * magnitudes.value + HalfLeastNumber(dtype);
  tolerance.tiny += HalfLeastNumber(dtype);
  return tolerance;
}

}  // namespace attendant::core
