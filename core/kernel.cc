#include "core/kernel.h"

#include "absl/strings/str_cat.h"
#include "core/gemm.h"
#include "core/machine.h"

namespace attendant::core {

std::string NameOf(Kernel kernel, DType dtype) {
  if (kernel == Kernel::kOneDnn) return GemmKernelName(dtype);
  return absl::StrCat("fused/", SimdTarget());
}

}  // namespace attendant::core
