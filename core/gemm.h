// Matrix products by libraries: oneDNN for float, OpenBLAS for double.
// All calls to either stand in gemm.cc.
#ifndef ATTENDANT_CORE_GEMM_H_
#define ATTENDANT_CORE_GEMM_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "core/tensor_view.h"

namespace attendant::core {

enum class Transpose { kNo, kYes };

// c = a * op(b), or c += a * op(b), on the calling thread. a: (M, K); op(b): (K, N); c: (M, N).
// K = 0 makes the product 0. Returns INTERNAL where the library refuses.
// REQUIRES: the sizes agree and none exceeds 2^31 - 1; PrepareThreadForGemm on this thread.
absl::Status Gemm(MatrixView<const float> a, MatrixView<const float> b, Transpose transpose_b,
                  MatrixView<float> c, bool accumulate);
absl::Status Gemm(MatrixView<const double> a, MatrixView<const double> b, Transpose transpose_b,
                  MatrixView<double> c, bool accumulate);

// c = a^T * b, or c += a^T * b: a: (K, M); b: (K, N). Otherwise as Gemm.
absl::Status TransposedGemm(MatrixView<const float> a, MatrixView<const float> b,
                            MatrixView<float> c, bool accumulate);
absl::Status TransposedGemm(MatrixView<const double> a, MatrixView<const double> b,
                            MatrixView<double> c, bool accumulate);

// Keeps the libraries from starting threads of their own on behalf of the calling one.
void PrepareThreadForGemm();

// Which library multiplies matrices of this type, and the instruction set it chose: "onednn/AVX2",
// "openblas/Zen".
std::string GemmKernelName(DType dtype);

// Such as "oneDNN 2.6.3".
std::string GemmLibraryVersion();

// INTERNAL where the OpenBLAS that was loaded is not the OpenMP build, the one that several threads
// may call at once and that starts none of its own.
absl::Status CheckBlas();

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_GEMM_H_
