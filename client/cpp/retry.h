// Whether and when a call that failed is made again. Pure: it looks at no clock and sends nothing.
//
// Every call of the service may be repeated, so what counts is whether that helps: it does where a
// server is gone or going (UNAVAILABLE), and where it is full and says when to come again
// (RESOURCE_EXHAUSTED with google.rpc.RetryInfo or the trailer grpc-retry-pushback-ms). It does not
// where a message can never fit, which is RESOURCE_EXHAUSTED without either, or with a pushback
// below 0.
#ifndef ATTENDANT_CLIENT_CPP_RETRY_H_
#define ATTENDANT_CLIENT_CPP_RETRY_H_

#include <optional>
#include <random>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"

namespace attendant {

// What one attempt came to.
struct Outcome {
  absl::Status status;
  // The server's grpc-retry-pushback-ms, as sent.
  std::optional<absl::Duration> pushback = std::nullopt;
  // It asked not to be called again: its pushback was below 0, or no number.
  bool never = false;
};

// Fills in what the trailer's text says.
void ReadPushback(absl::string_view text, Outcome* outcome);

// google.rpc.RetryInfo among a status's payloads.
std::optional<absl::Duration> RetryDelayOf(const absl::Status& status);

// The attempts of one call. Thread-compatible.
class Retry {
 public:
  Retry(const RetryOptions& options, absl::Time deadline, uint32_t seed)
      : options_(options), deadline_(deadline), generator_(seed) {}

  // After an attempt that failed: how long to wait before the next. Nothing: its status is the
  // call's. It is exponential backoff, or what the server asks for where that is longer. Both are
  // spread, so that callers refused together do not come again together.
  std::optional<absl::Duration> Next(const Outcome& outcome, absl::Time now);

  // Attempts that ended.
  int attempts() const { return attempts_; }

 private:
  const RetryOptions options_;
  const absl::Time deadline_;
  std::minstd_rand generator_;
  int attempts_ = 0;
};

}  // namespace attendant

#endif  // ATTENDANT_CLIENT_CPP_RETRY_H_
