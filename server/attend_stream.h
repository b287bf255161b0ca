// AttendStream: a header, then the request's bytes in pieces; a header, then the answer's.
//
//   client   header  piece*  half-close
//   server                              header  piece*  status
//
// The header is the request without data: from it alone the call is admitted or refused, and its
// memory is made, before a byte of a tensor is here. Pieces are copied to where they belong as they
// come, each byte once, in any order. The answer's pieces are sent from where they were computed.
// One read and one write are outstanding at a time, so that gRPC's flow control holds a sender to
// what is taken, and a slow reader holds its own call's memory and nothing else.
#ifndef ATTENDANT_SERVER_ATTEND_STREAM_H_
#define ATTENDANT_SERVER_ATTEND_STREAM_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <cstddef>
#include <cstdint>
#include <functional>

#include "absl/status/statusor.h"
#include "attendant/v1/attention.pb.h"
#include "server/call.h"

namespace attendant::server {

// Bytes of a piece at most, either way.
inline constexpr int64_t kLongestPiece = int64_t{1} << 20;
// Ranges of one tensor that wait for what is between them: some 64 bytes each are kept.
inline constexpr size_t kMostRanges = size_t{1} << 16;

// Admits the request that a header describes, and lays out its work in `data`.
using PlanHeader =
    std::function<absl::StatusOr<Work>(const v1::AttendRequest& header, CallData& data)>;

// Serves one call. The reactor is its own, and gRPC's. piece_bytes: of the answer's, at most.
grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ServeAttendStream(
    Calls& calls, grpc::CallbackServerContext* context, PlanHeader plan, int64_t piece_bytes);

}  // namespace attendant::server

#endif  // ATTENDANT_SERVER_ATTEND_STREAM_H_
