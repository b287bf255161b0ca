// Arrays on their way from files to messages.
#ifndef ATTENDANT_CLIENT_CLI_ARRAYS_H_
#define ATTENDANT_CLIENT_CLI_ARRAYS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/cpp/client.h"
#include "core/tensor_view.h"

namespace attendant::cli {

// FLOAT32 where the contract's type is none of a number.
core::DType DTypeOf(v1::DataType dtype);

// `count` elements from `first` on. REQUIRES: a floating type.
std::vector<double> Numbers(const Tensor& tensor, int64_t first, int64_t count);

// Gives a tensor of rank 2 or 3 the axes it lacks: one batch, one head. Returns INVALID_ARGUMENT
// naming `name`, where it comes from, where it has another rank.
absl::Status MakeRank4(const std::string& name, v1::Layout layout, Tensor& tensor);

// Puts the mask of a .npy file into the options; "" is none. Returns ReadNpy's errors.
absl::Status ReadMask(const std::string& path, v1::AttendOptions& options);

}  // namespace attendant::cli

#endif  // ATTENDANT_CLIENT_CLI_ARRAYS_H_
