#include "server/admission.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "core/checked_math.h"
#include "core/errors.h"
#include "core/scheduler.h"
#include "server/status.h"

namespace attendant::server {
namespace {

constexpr char kMemoryBudget[] = "memory_budget";
constexpr char kMachineMemory[] = "machine_memory";

std::string Sum(const Need& need) {
  return absl::StrCat("the call needs ", need.total_bytes(), " bytes (request ", need.request_bytes,
                      ", workspace ", need.workspace_bytes, ", response ", need.response_bytes,
                      ")");
}

absl::Status NeverFits(const Need& need, int64_t budget) {
  Need chunked = need;
  chunked.workspace_bytes = need.chunked_workspace_bytes.value_or(need.workspace_bytes);
  const std::string advice =
      chunked.total_bytes() <= budget
          ? absl::StrCat("PATH_CHUNKED needs ", chunked.total_bytes(), " bytes, which fit")
          : "no path fits; ask for fewer batches, heads, tokens or returns at once";
  return core::OverLimit(kMemoryBudget,
                         absl::StrCat(Sum(need), ", ", budget, " are allowed; ", advice));
}

}  // namespace

int64_t Need::total_bytes() const {
  return core::SaturatingSum({request_bytes, workspace_bytes, response_bytes});
}

Reservation::~Reservation() {
  if (admission_ != nullptr) admission_->GiveBack(bytes_);
}

void Reservation::Keep(int64_t bytes) {
  if (admission_ == nullptr || bytes >= bytes_) return;
  admission_->GiveBack(bytes_ - bytes);
  bytes_ = bytes;
}

Admission::Admission(int64_t budget_bytes, std::function<absl::Duration()> retry_delay,
                     Metrics& metrics)
    : budget_bytes_(budget_bytes), retry_delay_(std::move(retry_delay)), metrics_(metrics) {
  metrics_.SetMemoryBudget(budget_bytes);
  metrics_.SetMemoryReservedSource([this] { return reserved_.load(std::memory_order_relaxed); });
}

Admission::~Admission() { metrics_.SetMemoryReservedSource(nullptr); }

absl::StatusOr<Reservation> Admission::Reserve(const Need& need) {
  const int64_t bytes = need.total_bytes();
  if (bytes > budget_bytes_) return NeverFits(need, budget_bytes_);
  int64_t held = reserved_.load(std::memory_order_relaxed);
  do {
    const int64_t available = budget_bytes_ - held;
    if (bytes > available) {
      return WithRetryDelay(
          core::OverLimit(kMemoryBudget, absl::StrCat(Sum(need), ", ", available, " of ",
                                                      budget_bytes_, " are free at the moment")),
          retry_delay_());
    }
  } while (!reserved_.compare_exchange_weak(held, held + bytes, std::memory_order_relaxed));
  return Reservation(this, bytes);
}

absl::Status Admission::Explain(absl::Status status) const {
  if (!absl::IsResourceExhausted(status) || RetryDelayOf(status).has_value()) return status;
  const auto limit = core::LimitOf(status);
  if (!limit.has_value()) {
    // Neither a limit of ours nor the caller's doing: the machine had no more for the moment.
    return WithRetryDelay(core::OverLimit(kMachineMemory, status.message()), retry_delay_());
  }
  if (*limit != core::Scheduler::kMaxQueue && *limit != core::Scheduler::kMaxQueueWait) {
    return status;
  }
  return WithRetryDelay(std::move(status), retry_delay_());
}

std::optional<ShedReason> ShedReasonOf(const absl::Status& status) {
  if (!absl::IsResourceExhausted(status)) return std::nullopt;
  const auto limit = core::LimitOf(status);
  if (limit == core::Scheduler::kMaxQueue) return ShedReason::kQueueFull;
  if (limit == core::Scheduler::kMaxQueueWait) return ShedReason::kQueueWait;
  return RetryDelayOf(status).has_value() ? ShedReason::kMemory : ShedReason::kNeverFits;
}

}  // namespace attendant::server
