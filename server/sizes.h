// How the memory that this process may use is shared out.
#ifndef ATTENDANT_SERVER_SIZES_H_
#define ATTENDANT_SERVER_SIZES_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "server/config.h"

namespace attendant::server {

struct Sizes {
  int64_t memory_budget = 0;  // bytes of all calls together: requests, workspace, responses
  int64_t receive_quota = 0;  // bytes that gRPC holds of what it received
  int64_t max_message_bytes = 0;
};

// What the configuration asks for, and for what it leaves open: a half of the allowed bytes is the
// budget, a quarter gRPC's receive quota, and the last quarter is left to the process itself; a
// message is half of the quota or the budget, 256 MiB at most. Returns INVALID_ARGUMENT with the
// arithmetic where the sizes cannot hold together. REQUIRES: allowed_bytes > 0.
absl::StatusOr<Sizes> ShareMemory(const Config& config, int64_t allowed_bytes);

}  // namespace attendant::server

#endif  // ATTENDANT_SERVER_SIZES_H_
