// NumPy's .npy files: float32, float64, float16 and bool arrays, little-endian, C order. The format
// is that of numpy.lib.format, versions 1 to 3.
#ifndef ATTENDANT_CLIENT_CLI_NPY_H_
#define ATTENDANT_CLIENT_CLI_NPY_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/client.h"

namespace attendant::cli {

// Returns NOT_FOUND where the file cannot be opened, INVALID_ARGUMENT saying what is wrong with it,
// each naming the file.
absl::StatusOr<Tensor> ReadNpy(const std::string& path);

// Returns PERMISSION_DENIED naming the file where it cannot be written.
// REQUIRES: the tensor is FLOAT32, FLOAT64, FLOAT16 or BOOL.
absl::Status WriteNpy(const std::string& path, const Tensor& tensor);

}  // namespace attendant::cli

#endif  // ATTENDANT_CLIENT_CLI_NPY_H_
