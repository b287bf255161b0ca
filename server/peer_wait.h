// How long a call has waited for its peer.
#ifndef ATTENDANT_SERVER_PEER_WAIT_H_
#define ATTENDANT_SERVER_PEER_WAIT_H_

#include <chrono>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace attendant::server {

// What a call holds is needed by others, and its peer may be gone without a trace.
struct PeerLimits {
  // A peer that is seen to move nothing for so long has its call ended.
  std::chrono::seconds idle{60};
  // Bytes a second, on the average of all that it sends or takes; `idle` is allowed beside that.
  int64_t slowest = int64_t{256} << 10;
};

// Thread-compatible.
class PeerWait {
 public:
  using Clock = std::chrono::steady_clock;

  // Whether Moved is called for what is sent or taken, or nobody sees anything before the end.
  enum class Steps : uint8_t { kSeen, kUnseen };

  // From now on the peer is to send, or to take, so many bytes.
  void Begin(int64_t bytes, Steps steps, Clock::time_point now) {
    waits_ = true;
    steps_ = steps;
    bytes_ = bytes;
    begin_ = last_ = now;
  }
  // It has sent or taken some of them.
  void Moved(Clock::time_point now) { last_ = now; }
  void End() { waits_ = false; }

  // DEADLINE_EXCEEDED where it has kept the call waiting for too long.
  absl::Status Check(const PeerLimits& limits, Clock::time_point now) const {
    if (!waits_) return absl::OkStatus();
    if (steps_ == Steps::kSeen && now - last_ >= limits.idle) {
      return absl::DeadlineExceededError(absl::StrCat("nothing was sent or taken for ",
                                                      limits.idle.count(), " s: the call is idle"));
    }
    const auto allowed = limits.idle + std::chrono::seconds(bytes_ / limits.slowest);
    if (now - begin_ < allowed) return absl::OkStatus();
    return absl::DeadlineExceededError(absl::StrCat(bytes_, " bytes were not sent or taken within ",
                                                    allowed.count(), " s: at least ",
                                                    limits.slowest, " bytes a second must be"));
  }

 private:
  bool waits_ = false;
  Steps steps_ = Steps::kSeen;
  int64_t bytes_ = 0;
  Clock::time_point begin_;
  Clock::time_point last_;
};

}  // namespace attendant::server

#endif  // ATTENDANT_SERVER_PEER_WAIT_H_
