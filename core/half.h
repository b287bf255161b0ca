// Half precision to and from float. SIMD, chosen for the CPU at run time.
#ifndef ATTENDANT_CORE_HALF_H_
#define ATTENDANT_CORE_HALF_H_

#include <algorithm>
#include <cstdint>

#include "absl/status/status.h"
#include "core/problem.h"
#include "core/tensor_view.h"

namespace attendant::core {

// to[i] = from[i], exactly; a NaN stays one. Thread-safe.
void Widen(const Float16* from, int64_t n, float* to);
void Widen(const BFloat16* from, int64_t n, float* to);

// to[i] = from[i], rounded to nearest, ties to even; beyond the largest number infinity; numbers
// below the least normal one as subnormals; NaN as a quiet one. Thread-safe.
void Narrow(const float* from, int64_t n, Float16* to);
void Narrow(const float* from, int64_t n, BFloat16* to);

// Numbers as they are stored: rounded, or copied.
template <typename S>
void Store(const Wide<S>* from, int64_t n, S* to) {
  if constexpr (kIsHalf<S>) {
    Narrow(from, n, to);
  } else {
    std::copy_n(from, n, to);
  }
}

// Rows as numbers to compute with: half precision widened into `to`, row after row; other rows
// where they lie.
template <typename S>
MatrixView<const Wide<S>> WidenRows(const MatrixView<const S>& rows, Wide<S>* to) {
  if constexpr (kIsHalf<S>) {
    for (int64_t row = 0; row < rows.rows; ++row) {
      Widen(rows.Row(row), rows.columns, to + row * rows.columns);
    }
    return {to, rows.rows, rows.columns, rows.columns};
  } else {
    return rows;
  }
}

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_HALF_H_
