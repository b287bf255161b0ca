#include "server/sizes.h"

#include <algorithm>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace attendant::server {
namespace {

constexpr int64_t kLargestAutoMessage = int64_t{256} << 20;
constexpr int64_t kSmallestMessage = int64_t{64} << 10;
// gRPC keeps message sizes in 32 bits.
constexpr int64_t kLargestMessage = std::numeric_limits<int32_t>::max();

absl::Status CheckMessage(const Sizes& sizes, int64_t allowed) {
  const int64_t message = sizes.max_message_bytes;
  if (message < kSmallestMessage || message > kLargestMessage) {
    return absl::InvalidArgumentError(
        absl::StrCat("--max_message_bytes=", message, ": must be from ", kSmallestMessage,
                     " (64KiB) to ", kLargestMessage, " (2GiB less a byte)"));
  }
  // Two, as a message that comes in beside one of the same size would otherwise end them both.
  if (message > sizes.receive_quota / 2) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--max_message_bytes=", message, ": 2 x ", message, " = ", 2 * message,
        " bytes are more than gRPC may hold of what it receives, ", sizes.receive_quota,
        " (a quarter of the ", allowed, " bytes of memory that are ours); at most ",
        sizes.receive_quota / 2, " would do"));
  }
  return absl::OkStatus();
}

absl::Status CheckBudget(const Sizes& sizes, int64_t allowed) {
  const int64_t budget = sizes.memory_budget;
  const int64_t message = sizes.max_message_bytes;
  if (budget < 2 * message) {
    const int64_t fits = budget / 2;
    return absl::InvalidArgumentError(
        absl::StrCat("--memory_budget=", budget, ": a largest request and a largest response, 2 x ",
                     message, " = ", 2 * message, " bytes, do not fit; raise it to at least that",
                     fits < kSmallestMessage
                         ? ""
                         : absl::StrCat(", or lower --max_message_bytes to at most ", fits)));
  }
  const int64_t left = allowed - sizes.receive_quota;
  if (budget > left) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--memory_budget=", budget, ": with the ", sizes.receive_quota,
        " bytes that gRPC may hold of what it receives (a quarter) that is more than the ", allowed,
        " bytes of memory that are ours; at most ", left, " would do"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Sizes> ShareMemory(const Config& config, int64_t allowed_bytes) {
  Sizes sizes;
  sizes.receive_quota = allowed_bytes / 4;
  sizes.memory_budget = config.memory_budget > 0 ? config.memory_budget : allowed_bytes / 2;
  sizes.max_message_bytes = config.max_message_bytes;
  if (sizes.max_message_bytes == 0) {
    const int64_t largest = std::min(sizes.receive_quota / 2, sizes.memory_budget / 2);
    sizes.max_message_bytes = std::clamp(largest, kSmallestMessage, kLargestAutoMessage);
  }
  if (absl::Status status = CheckMessage(sizes, allowed_bytes); !status.ok()) return status;
  if (absl::Status status = CheckBudget(sizes, allowed_bytes); !status.ok()) return status;
  return sizes;
}

}  // namespace attendant::server
