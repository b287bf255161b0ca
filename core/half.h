// Half precision to and from float. SIMD, chosen for the CPU at run time.
#ifndef ATTENDANT_CORE_HALF_H_
#define ATTENDANT_CORE_HALF_H_

#include <cstdint>

#include "core/tensor_view.h"

namespace attendant::core {

// to[i] = from[i], exactly; a NaN stays one. Thread-safe.
void Widen(const Float16* from, int64_t n, float* to);
void Widen(const BFloat16* from, int64_t n, float* to);

// to[i] = from[i], rounded to nearest, ties to even; beyond the largest number infinity; numbers
// below the least normal one as subnormals; NaN as a quiet one. Thread-safe.
void Narrow(const float* from, int64_t n, Float16* to);
void Narrow(const float* from, int64_t n, BFloat16* to);

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_HALF_H_
