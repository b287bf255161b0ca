// Work that may take long, and matrix products above all, in parts of about a millisecond at most.
#ifndef ATTENDANT_CORE_LONG_PRODUCT_H_
#define ATTENDANT_CORE_LONG_PRODUCT_H_

#include <algorithm>
#include <cstdint>

#include "absl/status/status.h"
#include "core/checkpoint.h"
#include "core/gemm.h"
#include "core/half.h"
#include "core/tensor_view.h"

namespace attendant::core {

// Multiply-adds of a part: 64 rows, 2048 columns and a depth of 64 take 0.4 ms on the slowest CPU
// known, in double twice that.
inline constexpr int64_t kPartOfProduct = int64_t{1} << 23;

// Rows of a second factor, of so many columns, that at most 64 rows of the first are multiplied
// with in one part.
constexpr int64_t RowsOfPart(int64_t columns) {
  return std::max<int64_t>(kPartOfProduct / 64 / std::max<int64_t>(columns, 1), 64);
}

// What a tile returns that was told to stop.
inline absl::Status StoppedError() { return absl::CancelledError("the job is to stop"); }

// Whether a tile that goes over rows asks its checkpoint before this one: to ask takes as long as
// some hundred elements.
constexpr bool IsDue(int64_t row, int64_t elements_of_row) {
  constexpr int64_t kElements = int64_t{1} << 14;
  return row % std::max<int64_t>(kElements / std::max<int64_t>(elements_of_row, 1), 1) == 0;
}

// Where a part of some rows is widened.
template <typename T>
struct WidePart {
  T* to = nullptr;
  int64_t rows = 0;  // that there is room for
};

// Calls take(rows, their range) for the rows `range` of `all`, as numbers to compute with, part by
// part: as many as a product with 64 rows takes about a millisecond for. Half precision is widened
// into `wide`. At least once. Returns the first error, and CANCELLED once the checkpoint says so.
template <typename S, typename Take>
absl::Status ForWideRows(const MatrixView<const S>& all, KeyRange range,
                         const WidePart<Wide<S>>& wide, const Checkpoint& checkpoint,
                         const Take& take) {
  int64_t most = RowsOfPart(all.columns);
  if constexpr (kIsHalf<S>) most = std::min(most, wide.rows);
  int64_t first = range.begin;
  do {
    if (checkpoint.ToStop()) return StoppedError();
    const KeyRange part{first, std::min(first + most, range.end)};
    absl::Status status = take(WidenRows(all.Rows(part.begin, part.size()), wide.to), part);
    if (!status.ok()) return status;
    first = part.end;
  } while (first < range.end);
  return absl::OkStatus();
}

// As Gemm, in parts of c's columns and, where that does not suffice, of the depth; how many depends
// on the sizes alone. Returns CANCELLED, with c not complete, once the checkpoint says so.
template <typename T>
absl::Status LongGemm(const MatrixView<const T>& a, const MatrixView<const T>& b,
                      Transpose transpose_b, const MatrixView<T>& c, bool accumulate,
                      const Checkpoint& checkpoint) {
  // Below so many a library's product is far from its peak.
  constexpr int64_t kLeastColumns = 64;
  constexpr int64_t kLeastDepth = 256;
  const auto part = [](int64_t others, int64_t least) {
    return std::max(kPartOfProduct / std::max<int64_t>(others, 1) / least * least, least);
  };
  const auto columns_of = [](const MatrixView<const T>& matrix, int64_t first, int64_t count) {
    return MatrixView<const T>{matrix.data + first, matrix.rows, count, matrix.stride};
  };
  const int64_t rows = std::max<int64_t>(c.rows, 1);
  const int64_t depth = a.columns;
  const int64_t columns_of_part = part(rows * depth, kLeastColumns);
  const int64_t depth_of_part = part(rows * std::min(columns_of_part, c.columns), kLeastDepth);
  for (int64_t column = 0; column < c.columns; column += columns_of_part) {
    const int64_t columns = std::min(columns_of_part, c.columns - column);
    const MatrixView<T> to{c.data + column, c.rows, columns, c.stride};
    int64_t done = 0;
    do {
      if (checkpoint.ToStop()) return StoppedError();
      const int64_t now = std::min(depth_of_part, depth - done);
      const MatrixView<const T> b_part = transpose_b == Transpose::kYes
                                             ? columns_of(b.Rows(column, columns), done, now)
                                             : columns_of(b.Rows(done, now), column, columns);
      absl::Status status =
          Gemm(columns_of(a, done, now), b_part, transpose_b, to, accumulate || done > 0);
      if (!status.ok()) return status;
      done += now;
    } while (done < depth);
  }
  return absl::OkStatus();
}

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_LONG_PRODUCT_H_
