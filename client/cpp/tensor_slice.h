// Parts of tensors: a range of an axis taken out of one, and put into one.
#ifndef ATTENDANT_CLIENT_CPP_TENSOR_SLICE_H_
#define ATTENDANT_CLIENT_CPP_TENSOR_SLICE_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "client/cpp/client.h"
#include "core/checked_math.h"

namespace attendant {

// begin <= x < end.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

// Bytes of one element; 0 where the type is none of the contract's.
inline int64_t ElementBytes(v1::DataType dtype) {
  switch (dtype) {
    case v1::DATA_TYPE_FLOAT64:
      return 8;
    case v1::DATA_TYPE_FLOAT32:
      return 4;
    case v1::DATA_TYPE_FLOAT16:
    case v1::DATA_TYPE_BFLOAT16:
      return 2;
    case v1::DATA_TYPE_BOOL:
      return 1;
    default:
      return 0;
  }
}

// What sums over a row are held in.
inline v1::DataType WideOf(v1::DataType dtype) {
  return dtype == v1::DATA_TYPE_FLOAT64 ? v1::DATA_TYPE_FLOAT64 : v1::DATA_TYPE_FLOAT32;
}

// Of any sizes, also of ones that no tensor has: the largest number where it is too large, and 0
// where one is negative.
inline int64_t BytesOf(absl::Span<const int64_t> sizes, v1::DataType dtype) {
  int64_t bytes = ElementBytes(dtype);
  for (const int64_t size : sizes) {
    bytes = core::SaturatingProduct({bytes, std::max<int64_t>(size, 0)});
  }
  return bytes;
}

// The axes [first, last) as one: their product.
inline int64_t ProductOf(const std::vector<int64_t>& shape, size_t first, size_t last) {
  int64_t product = 1;
  for (size_t axis = first; axis < last; ++axis) product *= shape[axis];
  return product;
}

// Bytes from one index of the axis to the next.
inline int64_t StrideOf(v1::DataType dtype, const std::vector<int64_t>& shape, size_t axis) {
  return ProductOf(shape, axis + 1, shape.size()) * ElementBytes(dtype);
}

// A part of a tensor: where it lies if that is in one piece, else a copy of its own.
struct TensorSlice {
  TensorRef ref;
  std::shared_ptr<const std::string> copy;  // null: ref's bytes are the tensor's
};

// REQUIRES: the tensor's bytes are those of its shape, and the range is within its axis.
inline TensorSlice SliceOf(const TensorSlice& from, size_t axis, Range range) {
  const TensorRef& tensor = from.ref;
  if (range == Range{0, tensor.shape()[axis]}) return from;
  std::vector<int64_t> shape = tensor.shape();
  const auto stride = static_cast<size_t>(StrideOf(tensor.dtype(), shape, axis));
  const size_t step = stride * static_cast<size_t>(shape[axis]);
  const int64_t outer = ProductOf(shape, 0, axis);
  const size_t skipped = stride * static_cast<size_t>(range.begin);
  const size_t taken = stride * static_cast<size_t>(range.size());
  shape[axis] = range.size();
  if (outer == 1) {
    return {{tensor.dtype(), std::move(shape), tensor.bytes().substr(skipped, taken)}, from.copy};
  }
  auto copy = std::make_shared<std::string>();
  copy->reserve(taken * static_cast<size_t>(outer));
  for (int64_t i = 0; i < outer; ++i) {
    copy->append(tensor.bytes().data() + static_cast<size_t>(i) * step + skipped, taken);
  }
  return {{tensor.dtype(), std::move(shape), *copy}, copy};
}

// Copies a part to where it belongs: its first axis starts at `outer_begin` of the whole's, its
// axis `axis` at `begin`; the others are as long as the whole's.
// REQUIRES: both tensors' bytes are those of their shapes, and of one type; axis > 0.
inline void Place(const Tensor& part, int64_t outer_begin, size_t axis, int64_t begin,
                  Tensor* whole) {
  const auto stride = static_cast<size_t>(StrideOf(whole->dtype, whole->shape, axis));
  const size_t step = stride * static_cast<size_t>(whole->shape[axis]);
  const size_t bytes = stride * static_cast<size_t>(part.shape[axis]);
  if (bytes == 0) return;
  const int64_t outer = ProductOf(part.shape, 0, axis);
  const int64_t first = outer_begin * ProductOf(part.shape, 1, axis);
  for (int64_t i = 0; i < outer; ++i) {
    std::memcpy(whole->bytes.data() + static_cast<size_t>(first + i) * step +
                    stride * static_cast<size_t>(begin),
                part.bytes.data() + static_cast<size_t>(i) * bytes, bytes);
  }
}

// A tensor of zeros.
inline Tensor ZerosOf(v1::DataType dtype, std::vector<int64_t> shape) {
  const int64_t bytes = ProductOf(shape, 0, shape.size()) * ElementBytes(dtype);
  return {dtype, std::move(shape), std::string(static_cast<size_t>(bytes), '\0')};
}

}  // namespace attendant

#endif  // ATTENDANT_CLIENT_CPP_TENSOR_SLICE_H_
