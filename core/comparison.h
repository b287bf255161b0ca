// Two sets of numbers side by side: how far apart they are, in which units, and what arithmetic may
// have brought them there.
#ifndef ATTENDANT_CORE_COMPARISON_H_
#define ATTENDANT_CORE_COMPARISON_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <vector>

#include "core/tensor_view.h"

namespace attendant::core {

// Arithmetic that differences may come from, finest first. steps: not only the result is rounded,
// but what is between too.
struct Level {
  DType dtype;
  bool steps;
  const char* name;
  const char* code;
};
inline constexpr Level kLevels[] = {
    {DType::kFloat64, false, "float64", ""},
    {DType::kFloat32, false, "float32", "float32_arithmetic"},
    {DType::kFloat16, false, "float16", "float16_arithmetic"},
    {DType::kBFloat16, false, "bfloat16", "bfloat16_arithmetic"},
    {DType::kFloat16, true, "float16", "float16_arithmetic"},
    {DType::kBFloat16, true, "bfloat16", "bfloat16_arithmetic"},
};
inline constexpr size_t kLevelCount = std::size(kLevels);
// The first whose steps are rounded; the same types without stand as far before the end of those.
inline constexpr size_t kSteps = 4;

// The level of a type whose steps are not rounded. REQUIRES: it is a floating type.
size_t LevelOf(DType dtype);

// How far apart two numbers may be.
struct Allowed {
  double absolute = 0;
  double relative = 0;
  double Of(double ours) const {
    return absolute + (std::isfinite(ours) ? relative * std::abs(ours) : 0);
  }
};

// Bits of a type's significand, and how many of them a finite number needs.
int PrecisionOf(DType dtype);
int BitsOf(double x);

// |a - b|; 0 where both are NaN, or the same infinity, and infinite where one alone is either.
double Apart(double a, double b);

// How many numbers of `dtype` it is from one to the other, each rounded to it; 2^63 - 1 where that
// is more, or one alone is NaN.
int64_t UlpsApart(DType dtype, double candidate, double ours);

// to[i] = from[first + i], exactly.
void ToDouble(DType dtype, const void* from, int64_t first, int64_t count, double* to);

// The largest Euclidean norm of a column, or of a row; elements that are not finite are left out.
double NormOfColumns(const MatrixView<const double>& matrix);
double NormOfRows(const double* rows, int64_t count, int64_t width);

// The largest distance on one side of a comparison.
struct Worst {
  double apart = -1;  // nothing compared
  int64_t element = 0;
  double ours = 0;
  double mask_reach = 0;
};

// What comparing a claim with our own answer found.
struct Comparison {
  Worst worst;
  int64_t ulps = 0;
  bool within[kLevelCount] = {true, true, true, true, true, true};
  // Of numbers that each level's type holds though the claim's own is wider.
  bool held[kLevelCount] = {true, true, true, true, true, true};
  int64_t telling[kLevelCount] = {};
  bool any_finite = false;

  void Merge(const Comparison& other);
};

// How numbers that may come from some arithmetic are off, beside our own computation in it.
class Likeness {
 public:
  void Add(double theirs, double simulated, double ours);

  double residual() const { return residual_; }
  // As far away as the simulated numbers, and by all of them: rounding spares few.
  bool SameSize() const;
  // Off where the simulated numbers are, too, in the same direction.
  bool SameNumbers() const { return squares_of_residual_ <= squares_ / 4; }

 private:
  std::vector<double> theirs_;
  double theirs_most_ = 0;
  double simulated_most_ = 0;
  double residual_ = 0;
  double squares_ = 0;
  double squares_of_simulated_ = 0;
  double squares_of_residual_ = 0;
};

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_COMPARISON_H_
