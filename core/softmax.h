// Row kernels of the softmax and of the products beside it. SIMD, chosen for the CPU at run time.
//
// A row is n contiguous elements, n >= 0, at any alignment. All functions are thread-safe, and are
// defined for float and double.
#ifndef ATTENDANT_CORE_SOFTMAX_H_
#define ATTENDANT_CORE_SOFTMAX_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/tensor_view.h"

namespace attendant::core {

// The score before which all others of a row are weighed: the element whose product with the scale
// is the largest; that is the largest element, or the smallest where the scale is negative. NaN
// elements are passed over. Where nothing is left, NoScore(scale).
template <typename T>
T DominantScore(const T* row, int64_t n, T scale);

// Weaker than every score: -infinity, or +infinity where the scale is negative.
template <typename T>
T NoScore(T scale) {
  return std::copysign(std::numeric_limits<T>::infinity(), scale < 0 ? T{1} : T{-1});
}

// The one of two scores whose product with the scale is larger.
template <typename T>
T StrongerScore(T a, T b, T scale) {
  return scale < 0 ? std::min(a, b) : std::max(a, b);
}

// row[i] = 2^(scale * (row[i] - reference)), and returns their sum. A NaN stays NaN and makes the
// sum NaN. reference: the row's dominant score, or one that is stronger; NoScore counts as 0. With
// log2(e) in the scale this is the softmax's exponential. Every term is at most 1: without the
// reference exp overflows float beyond 88. The difference is taken before the product, where near
// the maximum it is exact, so that the largest term is 1 however large the scores are.
template <typename T>
T Exp2OfDifference(T* row, int64_t n, T scale, T reference);

// What a sink adds to the sum: 2^(sink - reference), 0 for a sink of -infinity. reference: not
// below the sink.
template <typename T>
T Exp2OfSink(T sink, T reference) {
  return sink == -std::numeric_limits<T>::infinity() ? T{0} : std::exp2(sink - reference);
}

// ln(sum of e^x), given the reference, the scale with log2(e) in it, and the sum that
// Exp2OfDifference returned. shift: what was subtracted from each score, in base e.
template <typename T>
T NaturalLogSumExp(T reference, T scale, T sum, T shift = 0);

// row[i] *= factor.
template <typename T>
void ScaleRow(T* row, int64_t n, T factor);

// sum[i] += row[i].
template <typename T>
void AddRow(T* sum, const T* row, int64_t n);

// True where no element is NaN or infinite. Of half precision as well.
template <typename S>
bool AllFinite(const S* row, int64_t n);
template <typename S>
bool AllRowsFinite(const MatrixView<const S>& rows) {
  for (int64_t row = 0; row < rows.rows; ++row) {
    if (!AllFinite(rows.Row(row), rows.columns)) return false;
  }
  return true;
}

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_SOFTMAX_H_
