// weights * value over a range of keys, in which some positions may be hidden.
#ifndef ATTENDANT_CORE_VALUE_PRODUCT_H_
#define ATTENDANT_CORE_VALUE_PRODUCT_H_

#include <cstdint>

#include "absl/status/status.h"
#include "core/mask.h"
#include "core/problem.h"
#include "core/tensor_view.h"
#include "core/workspace.h"

namespace attendant::core {

// Which part of the scores some weights are: queries from `first_query` on, against `keys`.
template <typename T>
struct WeightsPart {
  int64_t batch = 0;
  int64_t first_query = 0;
  KeyRange keys;
  HeadMask<T> mask = {};
};

// output = weights * value, or += where accumulate.
//   weights  (rows, part.keys.size())
//   value    (part.keys.size(), Dv): the rows of one head's value that belong to part.keys
//   output   (rows, Dv)
// A hidden position does not take part at all: its weight is 0, but 0 times a NaN or an infinity in
// value would not be. A row that does not see such a value has the same bits as without it.
// workspace: used for a copy of value where some positions are hidden and a value is not finite.
// Returns INTERNAL where the matrix library refuses, RESOURCE_EXHAUSTED where the copy does not
// fit. REQUIRES: weights are 0 at hidden positions.
template <typename T>
absl::Status ValueProduct(const Problem& problem, const WeightsPart<T>& part,
                          MatrixView<const T> weights, MatrixView<const T> value,
                          MatrixView<T> output, bool accumulate, Workspace& workspace);

// output = weights^T * query, or += where accumulate: the same the other way round, for a gradient.
//   weights  (rows, part.keys.size()), 0 at hidden positions
//   query    (rows, D): what of each query is summed
//   output   (part.keys.size(), D)
// Where a weight is 0 the query's NaN or infinity does not show.
template <typename T>
absl::Status QueryProduct(const Problem& problem, const WeightsPart<T>& part,
                          MatrixView<const T> weights, MatrixView<const T> query,
                          MatrixView<T> output, bool accumulate, Workspace& workspace);

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_VALUE_PRODUCT_H_
