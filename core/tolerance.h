// How far a result may be from the true one by rounding alone. docs/exactness.md has the table.
#ifndef ATTENDANT_CORE_TOLERANCE_H_
#define ATTENDANT_CORE_TOLERANCE_H_

#include <cmath>
#include <cstdint>

#include "core/problem.h"
#include "core/tensor_view.h"

namespace attendant::core {

// How far a result of arithmetic in some type may be from one from the definition in double.
struct Tolerance {
  double weight = 0;     // relative
  double key_sum = 0;    // relative
  double output = 0;     // absolute
  double logsumexp = 0;  // absolute
  double tiny = 0;       // absolute, beside the relative ones: what is flushed to 0
};

// max|score| and max|V|: bounds on |scale| * sum |q_d k_d|, with what a mask adds, what ALiBi takes
// off and a sink, and on a value. Elements that are not finite are left out, as the rows that see
// them are NaN and not compared by size.
struct Magnitudes {
  double score = 0;
  double value = 0;
  // What queries and keys that were computed themselves bring into a score, and into a value.
  double score_error = 0;
  double value_error = 0;
};

// The error of a sum of n products, beside the sum of their absolute values. The roundings, each at
// most u, behave as independent ones with mean 0: 4 sqrt(n) u in place of the worst case's n u
// (Higham and Mary 2019, theorem 2.4, lambda = 4).
inline double SumError(int64_t n, double u) { return 4 * std::sqrt(static_cast<double>(n)) * u; }

// The rounding u of what computes for numbers of `dtype`: half its epsilon. Twice that for FLOAT64,
// where the roundings of what judges are as large as those of what is judged.
constexpr double UnitRoundoff(DType dtype) { return dtype == DType::kFloat64 ? 0x1p-52 : 0x1p-24; }

// What storing a number in half precision adds, relative to it, and half the least number beside 0;
// 0 for other types.
constexpr double StoringError(DType dtype) {
  return dtype == DType::kBFloat16 ? 0x1p-8 : dtype == DType::kFloat16 ? 0x1p-11 : 0;
}
constexpr double HalfLeastNumber(DType dtype) {
  return dtype == DType::kBFloat16 ? 0x1p-134 : dtype == DType::kFloat16 ? 0x1p-25 : 0;
}

// Derivation. Let S = max|score| as above, u the rounding of what computes.
//   score      a dot product of D terms is off by SumError(D) S. The rounded scale, its product
//              with the score, and the difference from the maximum (at most 2 S) add up to 4 u S.
//              A softcap adds 8 u of it, for a tangent that is off by 6 u of itself. Together: e.
//   weight     exp(s_j) / sum exp(s_k): e enters numerator and denominator, a factor e^(2 e). Then
//              relative: the sum of Tk terms, SumError(Tk); the exponential's polynomial, 3 u above
//              and below; the rescaling whenever a block of 256 keys raises the maximum, 3 u each;
//              a division and a product. 16 u cover all that does not grow.
//   output     weights that sum to 1, times values up to max|V|, in a sum of Tk terms.
//   key_sum    a sum of Tq weights, all of one sign.
//   logsumexp  absolute: e, the relative error of the sum, and one rounding of a result that is at
//              most S + ln Tk, in base 2 and again in base e.
//   tiny       the fused kernel's reference is up to 33 above the maximum in base 2: weights below
//              2^-92 (float), 2^-988 (double) of the largest may be 0.
//   rounding   half precision: the output and the weights are rounded once more, by half a unit of
//              their last place, or half the smallest subnormal number.
// dtype: of the numbers that are judged.
Tolerance ToleranceOf(DType dtype, const Problem& problem, const Magnitudes& magnitudes);

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_TOLERANCE_H_
