#include "client/cli/arrays.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/npy.h"
#include "core/half.h"

namespace attendant::cli {

core::DType DTypeOf(v1::DataType dtype) {
  switch (dtype) {
    case v1::DATA_TYPE_FLOAT64:
      return core::DType::kFloat64;
    case v1::DATA_TYPE_FLOAT16:
      return core::DType::kFloat16;
    case v1::DATA_TYPE_BFLOAT16:
      return core::DType::kBFloat16;
    default:
      return core::DType::kFloat32;
  }
}

std::vector<double> Numbers(const Tensor& tensor, int64_t first, int64_t count) {
  return core::WithStored(DTypeOf(tensor.dtype), [&]<typename S>() {
    const auto* const stored = reinterpret_cast<const S*>(tensor.bytes.data()) + first;
    std::vector<core::Wide<S>> wide(static_cast<size_t>(count));
    const auto row =
        core::WidenRows(core::MatrixView<const S>{stored, 1, count, count}, wide.data());
    return std::vector<double>(row.data, row.data + count);
  });
}

absl::Status MakeRank4(const std::string& name, v1::Layout layout, Tensor& tensor) {
  std::vector<int64_t>& shape = tensor.shape;
  if (shape.size() < 2 || shape.size() > 4) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": its shape (", absl::StrJoin(shape, ", "), ") has ", shape.size(),
                     shape.size() == 1 ? " dimension" : " dimensions", ", must have 2 to 4"));
  }
  if (shape.size() == 2) shape.insert(shape.begin() + (layout == v1::LAYOUT_BTHD ? 1 : 0), 1);
  if (shape.size() == 3) shape.insert(shape.begin(), 1);
  return absl::OkStatus();
}

absl::Status ReadMask(const std::string& path, v1::AttendOptions& options) {
  if (path.empty()) return absl::OkStatus();
  auto mask = ReadNpy(path);
  if (!mask.ok()) return mask.status();
  options.mutable_mask()->set_dtype(mask->dtype);
  options.mutable_mask()->mutable_shape()->Assign(mask->shape.begin(), mask->shape.end());
  options.mutable_mask()->set_data(std::move(mask->bytes));
  return absl::OkStatus();
}

}  // namespace attendant::cli
