#include "core/gemm.h"

#include <cblas.h>
#include <oneapi/dnnl/dnnl.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "core/clear_rows.h"

// The OpenMP API's own declaration; its header belongs to the compiler, and analysers bring none.
extern "C" void omp_set_num_threads(int threads);

namespace attendant::core {
namespace {

// What both libraries want of a matrix with one row or no column as well.
template <typename T>
int64_t LeadingDimension(const MatrixView<T>& matrix) {
  return std::max<int64_t>({matrix.stride, matrix.columns, 1});
}

// True where nothing is left for a library; c then holds the result. depth: K.
template <typename T>
bool DoneWithoutLibrary(int64_t depth, MatrixView<T> c, bool accumulate) {
  if (c.rows == 0 || c.columns == 0) return true;
  if (depth > 0) return false;
  if (!accumulate) ClearRows(c);
  return true;
}

// c = op(a) * op(b), or c += ...: the libraries themselves. depth: K, more than 0.
absl::Status Multiply(const MatrixView<const float>& a, Transpose transpose_a,
                      const MatrixView<const float>& b, Transpose transpose_b, int64_t depth,
                      const MatrixView<float>& c, bool accumulate) {
  const auto letter = [](Transpose transpose) { return transpose == Transpose::kYes ? 'T' : 'N'; };
  const dnnl_status_t status =
      dnnl_sgemm(letter(transpose_a), letter(transpose_b), c.rows, c.columns, depth, 1.0f, a.data,
                 LeadingDimension(a), b.data, LeadingDimension(b), accumulate ? 1.0f : 0.0f, c.data,
                 LeadingDimension(c));
  if (status == dnnl_success) return absl::OkStatus();
  // No fault of the engine: another try may find memory.
  if (status == dnnl_out_of_memory) return absl::ResourceExhaustedError("out of memory");
  return absl::InternalError(absl::StrCat("oneDNN sgemm failed with status ", status));
}
absl::Status Multiply(const MatrixView<const double>& a, Transpose transpose_a,
                      const MatrixView<const double>& b, Transpose transpose_b, int64_t depth,
                      const MatrixView<double>& c, bool accumulate) {
  const auto to_int = [](int64_t size) { return static_cast<blasint>(size); };
  const auto transpose = [](Transpose of) {
    return of == Transpose::kYes ? CblasTrans : CblasNoTrans;
  };
  cblas_dgemm(CblasRowMajor, transpose(transpose_a), transpose(transpose_b), to_int(c.rows),
              to_int(c.columns), to_int(depth), 1.0, a.data, to_int(LeadingDimension(a)), b.data,
              to_int(LeadingDimension(b)), accumulate ? 1.0 : 0.0, c.data,
              to_int(LeadingDimension(c)));
  return absl::OkStatus();
}

absl::string_view OneDnnInstructionSet() {
  // Each value has the bits of the instruction sets it contains.
  const int isa = dnnl_get_effective_cpu_isa();
  const auto contains = [isa](int other) { return (isa & other) == other; };
  if (contains(dnnl_cpu_isa_avx512_core)) return "AVX-512";
  if (contains(dnnl_cpu_isa_avx2)) return "AVX2";
  if (contains(dnnl_cpu_isa_avx)) return "AVX";
  return contains(dnnl_cpu_isa_sse41) ? "SSE4.1" : "x86-64";
}

}  // namespace

absl::Status Gemm(MatrixView<const float> a, MatrixView<const float> b, Transpose transpose_b,
                  MatrixView<float> c, bool accumulate) {
  if (DoneWithoutLibrary(a.columns, c, accumulate)) return absl::OkStatus();
  return Multiply(a, Transpose::kNo, b, transpose_b, a.columns, c, accumulate);
}
absl::Status Gemm(MatrixView<const double> a, MatrixView<const double> b, Transpose transpose_b,
                  MatrixView<double> c, bool accumulate) {
  if (DoneWithoutLibrary(a.columns, c, accumulate)) return absl::OkStatus();
  return Multiply(a, Transpose::kNo, b, transpose_b, a.columns, c, accumulate);
}

absl::Status TransposedGemm(MatrixView<const float> a, MatrixView<const float> b,
                            MatrixView<float> c, bool accumulate) {
  if (DoneWithoutLibrary(a.rows, c, accumulate)) return absl::OkStatus();
  return Multiply(a, Transpose::kYes, b, Transpose::kNo, a.rows, c, accumulate);
}
absl::Status TransposedGemm(MatrixView<const double> a, MatrixView<const double> b,
                            MatrixView<double> c, bool accumulate) {
  if (DoneWithoutLibrary(a.rows, c, accumulate)) return absl::OkStatus();
  return Multiply(a, Transpose::kYes, b, Transpose::kNo, a.rows, c, accumulate);
}

void PrepareThreadForGemm() { omp_set_num_threads(1); }

std::string GemmLibraryVersion() {
  const dnnl_version_t* version = dnnl_version();
  return absl::StrCat("oneDNN ", version->major, ".", version->minor, ".", version->patch);
}

std::string GemmKernelName(DType dtype) {
  if (dtype == DType::kFloat64) return absl::StrCat("openblas/", openblas_get_corename());
  return absl::StrCat("onednn/", OneDnnInstructionSet());
}

absl::Status CheckBlas() {
  if (openblas_get_parallel() == OPENBLAS_OPENMP) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("the loaded OpenBLAS is not its OpenMP build (",
                                          openblas_get_config(),
                                          "); Debian's libopenblas0-openmp is needed"));
}

}  // namespace attendant::core
