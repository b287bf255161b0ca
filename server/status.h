// The one place where an absl::Status becomes what gRPC sends.
#ifndef ATTENDANT_SERVER_STATUS_H_
#define ATTENDANT_SERVER_STATUS_H_

#include <grpcpp/support/status.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace attendant::server {

// UNAVAILABLE that tells the caller when to try again.
absl::Status UnavailableFor(absl::string_view why, absl::Duration retry_delay);

// The same code and message, with google.rpc details in the trailer grpc-status-details-bin:
// BadRequest for an error that names a field, QuotaFailure for a limit that was met, RetryInfo
// where the status carries a delay. Long messages are cut: trailers over 8 KiB do not arrive.
grpc::Status ToGrpcStatus(const absl::Status& status);

}  // namespace attendant::server

#endif  // ATTENDANT_SERVER_STATUS_H_
