// The one place where an absl::Status becomes what gRPC sends.
#ifndef ATTENDANT_SERVER_STATUS_H_
#define ATTENDANT_SERVER_STATUS_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/status.h>

#include <optional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace attendant::server {

// The same status, telling the caller when to try again. Whole milliseconds, rounded up, one at
// least: what RetryInfo and the pushback trailer say is the same.
absl::Status WithRetryDelay(absl::Status status, absl::Duration delay);
// What WithRetryDelay gave it.
std::optional<absl::Duration> RetryDelayOf(const absl::Status& status);

// UNAVAILABLE with a retry delay.
absl::Status UnavailableFor(absl::string_view why, absl::Duration retry_delay);

// The same code and message, with google.rpc details in the trailer grpc-status-details-bin:
// BadRequest for an error that names a field, QuotaFailure for a limit that was met, RetryInfo
// where the status carries a delay. Long messages are cut: trailers over 8 KiB do not arrive.
grpc::Status ToGrpcStatus(const absl::Status& status);

// What a call is to be finished with: ToGrpcStatus, and for RESOURCE_EXHAUSTED the trailer
// grpc-retry-pushback-ms, by which gRPC's clients retry: the delay, or -1 where waiting cannot
// help. UNAVAILABLE has none, as another server may answer at once. REQUIRES: the call is not
// finished.
grpc::Status AnswerOf(const absl::Status& status, grpc::ServerContextBase& context);

}  // namespace attendant::server

#endif  // ATTENDANT_SERVER_STATUS_H_
