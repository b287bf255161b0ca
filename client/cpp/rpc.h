// One attempt of a call on one connection: what unary calls and streams have in common.
#ifndef ATTENDANT_CLIENT_CPP_RPC_H_
#define ATTENDANT_CLIENT_CPP_RPC_H_

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/status.h>

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/types/span.h"
#include "client/cpp/call_group.h"
#include "client/cpp/calls.h"
#include "client/cpp/retry.h"
#include "client/cpp/wire.h"
#include "core/mutex.h"

namespace attendant {

// The caller's memory, as long as gRPC refers to it. A call may end while its last bytes still wait
// in the transport: the end of a loan waits until they are let go. Thread-safe.
class Loan {
 public:
  Loan() = default;
  ~Loan();
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;

  grpc::ByteBuffer Lend(absl::Span<const Segment> segments);

 private:
  static void Release(void* loan);

  core::Mutex mutex_;
  core::CondVar all_back_;
  int64_t lent_ ABSL_GUARDED_BY(mutex_) = 0;
};

// What a finished call came to, its details as payloads.
Outcome OutcomeOf(const grpc::Status& status, const grpc::ClientContext& context);

// Reads a message that was received.
absl::Status ReadBuffer(grpc::ByteBuffer& buffer, const Calls::Reader& read);

// One attempt of AttendStream.
Outcome AttemptStream(grpc::Channel& channel, const StreamCall& call, CallGroup& group);

}  // namespace attendant

#endif  // ATTENDANT_CLIENT_CPP_RPC_H_
