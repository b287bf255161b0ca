#include "core/value_product.h"

#include <algorithm>
#include <cmath>

#include "core/gemm.h"
#include "core/softmax.h"

namespace attendant::core {
namespace {

// The value with 0 in place of what is not finite.
template <typename T>
absl::StatusOr<Buffer<T>> FinitePart(const MatrixView<const T>& value, Workspace& workspace) {
  auto copy = workspace.Allocate<T>(value.rows * value.columns);
  if (!copy.ok()) return copy;
  for (int64_t row = 0; row < value.rows; ++row) {
    std::transform(value.Row(row), value.Row(row) + value.columns,
                   copy->data() + row * value.columns,
                   [](T element) { return std::isfinite(element) ? element : T{0}; });
  }
  return copy;
}

// Adds what FinitePart left out of the queries to the keys that they see.
template <typename T>
void AddQueries(MatrixView<const T> weights, MatrixView<const T> query, MatrixView<T> output) {
  for (int64_t row = 0; row < query.rows; ++row) {
    const T* const from = query.Row(row);
    if (AllFinite(from, query.columns)) continue;
    for (int64_t key = 0; key < weights.columns; ++key) {
      const T weight = weights.Row(row)[key];
      for (int64_t column = 0; weight != 0 && column < query.columns; ++column) {
        if (!std::isfinite(from[column])) output.Row(key)[column] += weight * from[column];
      }
    }
  }
}

template <typename T>
bool AllSeen(const Problem& problem, const WeightsPart<T>& part, int64_t queries) {
  return !part.mask.present() &&
         problem.Ask(part.batch, part.first_query, queries, part.keys) == Visibility::kAll;
}

// Adds what FinitePart left out to the rows that see it.
template <typename T>
void AddRest(const Problem& problem, const WeightsPart<T>& part, MatrixView<const T> weights,
             MatrixView<const T> value, MatrixView<T> output) {
  for (int64_t key = 0; key < value.rows; ++key) {
    const T* const from = value.Row(key);
    if (AllFinite(from, value.columns)) continue;
    for (int64_t row = 0; row < weights.rows; ++row) {
      const int64_t query = part.first_query + row;
      const KeyRange seen = problem.VisibleKeys(part.batch, query);
      const int64_t position = part.keys.begin + key;
      if (position < seen.begin || position >= seen.end) continue;
      if (part.mask.Hides(query, position)) continue;
      for (int64_t column = 0; column < value.columns; ++column) {
        if (!std::isfinite(from[column])) {
          output.Row(row)[column] += weights.Row(row)[key] * from[column];
        }
      }
    }
  }
}

}  // namespace

template <typename T>
absl::Status ValueProduct(const Problem& problem, const WeightsPart<T>& part,
                          MatrixView<const T> weights, MatrixView<const T> value,
                          MatrixView<T> output, bool accumulate, Workspace& workspace) {
  if (weights.rows == 0) return absl::OkStatus();
  if (AllSeen(problem, part, weights.rows) || AllRowsFinite(value)) {
    return Gemm(weights, value, Transpose::kNo, output, accumulate);
  }
  const auto finite = FinitePart(value, workspace);
  if (!finite.ok()) return finite.status();
  const MatrixView<const T> finite_view{finite->data(), value.rows, value.columns, value.columns};
  absl::Status status = Gemm(weights, finite_view, Transpose::kNo, output, accumulate);
  if (status.ok()) AddRest(problem, part, weights, value, output);
  return status;
}

template <typename T>
absl::Status QueryProduct(const Problem& problem, const WeightsPart<T>& part,
                          MatrixView<const T> weights, MatrixView<const T> query,
                          MatrixView<T> output, bool accumulate, Workspace& workspace) {
  if (weights.rows == 0 || AllSeen(problem, part, weights.rows) || AllRowsFinite(query)) {
    return TransposedGemm(weights, query, output, accumulate);
  }
  const auto finite = FinitePart(query, workspace);
  if (!finite.ok()) return finite.status();
  const MatrixView<const T> finite_view{finite->data(), query.rows, query.columns, query.columns};
  absl::Status status = TransposedGemm(weights, finite_view, output, accumulate);
  if (status.ok()) AddQueries(weights, query, output);
  return status;
}

template absl::Status QueryProduct(const Problem&, const WeightsPart<float>&,
                                   MatrixView<const float>, MatrixView<const float>,
                                   MatrixView<float>, bool, Workspace&);
template absl::Status QueryProduct(const Problem&, const WeightsPart<double>&,
                                   MatrixView<const double>, MatrixView<const double>,
                                   MatrixView<double>, bool, Workspace&);
template absl::Status ValueProduct(const Problem&, const WeightsPart<float>&,
                                   MatrixView<const float>, MatrixView<const float>,
                                   MatrixView<float>, bool, Workspace&);
template absl::Status ValueProduct(const Problem&, const WeightsPart<double>&,
                                   MatrixView<const double>, MatrixView<const double>,
                                   MatrixView<double>, bool, Workspace&);

}  // namespace attendant::core
