// Sets a matrix to 0.
#ifndef ATTENDANT_CORE_CLEAR_ROWS_H_
#define ATTENDANT_CORE_CLEAR_ROWS_H_

#include <algorithm>
#include <cstdint>

#include "core/tensor_view.h"

namespace attendant::core {

template <typename T>
void ClearRows(const MatrixView<T>& matrix) {
  for (int64_t row = 0; row < matrix.rows; ++row) {
    std::fill_n(matrix.Row(row), matrix.columns, T{});
  }
}

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_CLEAR_ROWS_H_
