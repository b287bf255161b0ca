// What computes the tiles of the chunked path.
#ifndef ATTENDANT_CORE_KERNEL_H_
#define ATTENDANT_CORE_KERNEL_H_

#include <string>

#include "core/tensor_view.h"

namespace attendant::core {

enum class Kernel {
  kFused,   // our own, fused_kernel.h
  kOneDnn,  // matrix products by oneDNN and OpenBLAS: the trusted alternative
};

// The kernel and the instruction set it uses on this CPU: "fused/AVX2", "onednn/AVX2",
// "openblas/Zen".
std::string NameOf(Kernel kernel, DType dtype);

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_KERNEL_H_
