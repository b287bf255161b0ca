// The byte budget: what calls may hold at one time, request, workspace and response together.
//
// A call reserves its bytes by arithmetic, once its problem is known and before any of them is
// allocated, and holds them until it is answered. The messages as gRPC receives them are not
// counted here: gRPC's own quota bounds those.
#ifndef ATTENDANT_SERVER_ADMISSION_H_
#define ATTENDANT_SERVER_ADMISSION_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/metrics.h"

namespace attendant::server {

// Bytes of one call, by cost.
struct Need {
  int64_t request_bytes = 0;  // of the tensors that it holds
  int64_t workspace_bytes = 0;
  int64_t response_bytes = 0;
  // Of a call on another path: the workspace that the chunked one would need.
  std::optional<int64_t> chunked_workspace_bytes = std::nullopt;

  // Saturates at 2^63 - 1.
  int64_t total_bytes() const;
};

class Admission;

// Bytes that are taken from the budget until destruction. Thread-compatible; the Admission must
// outlive it.
class Reservation {
 public:
  Reservation() = default;
  Reservation(Reservation&& other) noexcept { *this = std::move(other); }
  Reservation& operator=(Reservation&& other) noexcept {
    std::swap(admission_, other.admission_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Reservation();

  // Gives back what is more than `bytes`.
  void Keep(int64_t bytes);

 private:
  friend class Admission;
  Reservation(Admission* admission, int64_t bytes) : admission_(admission), bytes_(bytes) {}

  Admission* admission_ = nullptr;
  int64_t bytes_ = 0;
};

// Thread-safe.
class Admission {
 public:
  // retry_delay: when who was refused may come again; called on any thread. metrics: shows the
  // budget and what is reserved of it, and must outlive the budget.
  Admission(int64_t budget_bytes, std::function<absl::Duration()> retry_delay, Metrics& metrics);
  ~Admission();
  Admission(const Admission&) = delete;
  Admission& operator=(const Admission&) = delete;

  // Returns RESOURCE_EXHAUSTED naming memory_budget, with all of its numbers: with a retry delay
  // where the call would fit an idle server, without one and naming the path that would fit where
  // it never can.
  absl::StatusOr<Reservation> Reserve(const Need& need);

  // What a caller is told of a status. Where a queue or the machine's memory was full, the limit's
  // name and a retry delay come with it; others stay.
  absl::Status Explain(absl::Status status) const;

 private:
  friend class Reservation;
  void GiveBack(int64_t bytes) { reserved_.fetch_sub(bytes, std::memory_order_relaxed); }

  const int64_t budget_bytes_;
  const std::function<absl::Duration()> retry_delay_;
  Metrics& metrics_;
  std::atomic<int64_t> reserved_ = 0;
};

// Why a call that ended so was turned away; none where it was not because of load.
std::optional<ShedReason> ShedReasonOf(const absl::Status& status);

}  // namespace attendant::server

#endif  // ATTENDANT_SERVER_ADMISSION_H_
