// Non-owning views of tensors in memory.
#ifndef ATTENDANT_CORE_TENSOR_VIEW_H_
#define ATTENDANT_CORE_TENSOR_VIEW_H_

#include <cstdint>
#include <type_traits>

#include "absl/strings/string_view.h"

namespace attendant::core {

enum class DType { kUnspecified, kFloat32, kFloat64, kFloat16, kBFloat16, kBool };

// Bytes of one element; 0 for kUnspecified.
constexpr int64_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 4;
    case DType::kFloat64:
      return 8;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kBool:
      return 1;
    case DType::kUnspecified:
      break;
  }
  return 0;
}

// The contract's name, such as "FLOAT32".
constexpr absl::string_view NameOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "FLOAT32";
    case DType::kFloat64:
      return "FLOAT64";
    case DType::kFloat16:
      return "FLOAT16";
    case DType::kBFloat16:
      return "BFLOAT16";
    case DType::kBool:
      return "BOOL";
    case DType::kUnspecified:
      break;
  }
  return "UNSPECIFIED";
}

// Half precision, as it is stored.
struct Float16 {
  uint16_t bits = 0;
};
struct BFloat16 {
  uint16_t bits = 0;
};

// What numbers stored as S are computed in.
template <typename S>
using Wide = std::conditional_t<std::is_same_v<S, double>, double, float>;
constexpr bool IsHalf(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBFloat16; }
constexpr DType WideOf(DType dtype) { return IsHalf(dtype) ? DType::kFloat32 : dtype; }
template <typename S>
inline constexpr bool kIsHalf = !std::is_same_v<S, Wide<S>>;

template <typename T>
constexpr DType DTypeOf();
template <>
constexpr DType DTypeOf<float>() {
  return DType::kFloat32;
}
template <>
constexpr DType DTypeOf<double>() {
  return DType::kFloat64;
}

template <>
constexpr DType DTypeOf<Float16>() {
  return DType::kFloat16;
}
template <>
constexpr DType DTypeOf<BFloat16>() {
  return DType::kBFloat16;
}

// Calls function.template operator()<S>() for the type that numbers of `dtype` are stored as.
// REQUIRES: it is a floating type.
template <typename Function>
auto WithStored(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::kFloat64:
      return function.template operator()<double>();
    case DType::kFloat16:
      return function.template operator()<Float16>();
    case DType::kBFloat16:
      return function.template operator()<BFloat16>();
    default:
      return function.template operator()<float>();
  }
}

// Order of the axes of a (batch, heads, tokens, width) tensor in memory.
enum class Layout { kBhtd, kBthd };

// A matrix whose rows are contiguous. Thread-compatible; does not own data.
template <typename T>
struct MatrixView {
  T* data = nullptr;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t stride = 0;  // elements from one row to the next

  T* Row(int64_t row) const { return data + row * stride; }
  // REQUIRES: 0 <= first, first + count <= rows.
  MatrixView Rows(int64_t first, int64_t count) const {
    return {Row(first), count, columns, stride};
  }
};

// A (batch, heads, tokens, width) tensor with any strides, in elements; 0 repeats what there is.
// Thread-compatible; does not own data.
template <typename T>
struct StridedView {
  T* data = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t token_stride = 0;
  int64_t width_stride = 0;

  T* Row(int64_t batch, int64_t head, int64_t token) const {
    return data + batch * batch_stride + head * head_stride + token * token_stride;
  }
};

// A (batch, heads, tokens, width) tensor in either layout: the tokens of one head are a matrix.
// Thread-compatible; does not own data.
template <typename T>
class TensorView {
 public:
  TensorView() = default;
  // REQUIRES: data holds heads * tokens * width elements for every batch that is asked for.
  TensorView(T* data, Layout layout, int64_t heads, int64_t tokens, int64_t width)
      : data_(data),
        tokens_(tokens),
        width_(width),
        batch_stride_(heads * tokens * width),
        head_stride_(layout == Layout::kBhtd ? tokens * width : width),
        token_stride_(layout == Layout::kBhtd ? width : heads * width) {}

  StridedView<T> Strided() const { return {data_, batch_stride_, head_stride_, token_stride_, 1}; }

  MatrixView<T> Head(int64_t batch, int64_t head) const {
    return {data_ + batch * batch_stride_ + head * head_stride_, tokens_, width_, token_stride_};
  }

 private:
  T* data_ = nullptr;
  int64_t tokens_ = 0;
  int64_t width_ = 0;
  int64_t batch_stride_ = 0;
  int64_t head_stride_ = 0;
  int64_t token_stride_ = 0;
};

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_TENSOR_VIEW_H_
