#include "client/cpp/rpc.h"

#include <grpcpp/support/proto_buffer_reader.h>
#include <grpcpp/support/slice.h>

#include <exception>
#include <string>
#include <vector>

#include "absl/strings/cord.h"
#include "google/rpc/status.pb.h"

namespace attendant {
namespace {

absl::Status ToStatus(const grpc::Status& status) {
  absl::Status result(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  google::rpc::Status details;
  if (status.error_details().empty() || !details.ParseFromString(status.error_details())) {
    return result;
  }
  for (const auto& detail : details.details()) {
    result.SetPayload(detail.type_url(), absl::Cord(detail.value()));
  }
  return result;
}

}  // namespace

Loan::~Loan() {
  core::MutexLock lock(mutex_);
  while (lent_ > 0) all_back_.Wait(mutex_);
}

void Loan::Release(void* loan) {
  auto* const self = static_cast<Loan*>(loan);
  core::MutexLock lock(self->mutex_);
  // Under the lock: the loan ends as soon as it is let go.
  if (--self->lent_ == 0) self->all_back_.NotifyAll();
}

grpc::ByteBuffer Loan::Lend(absl::Span<const Segment> segments) {
  std::vector<grpc::Slice> slices;
  slices.reserve(2 * segments.size());
  for (const Segment& segment : segments) {
    if (!segment.own.empty()) slices.emplace_back(segment.own);
    if (segment.borrowed.empty()) continue;
    {
      core::MutexLock lock(mutex_);
      ++lent_;
    }
    // gRPC's slices are of what may be written, and it writes to none that it sends.
    slices.emplace_back(const_cast<char*>(segment.borrowed.data()), segment.borrowed.size(),
                        &Loan::Release, this);
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

Outcome OutcomeOf(const grpc::Status& status, const grpc::ClientContext& context) {
  Outcome outcome;
  if (status.ok()) return outcome;
  outcome.status = ToStatus(status);
  const auto& trailers = context.GetServerTrailingMetadata();
  const auto pushback = trailers.find("grpc-retry-pushback-ms");
  if (pushback != trailers.end()) {
    ReadPushback({pushback->second.data(), pushback->second.size()}, &outcome);
  }
  return outcome;
}

absl::Status ReadBuffer(grpc::ByteBuffer& buffer, const Calls::Reader& read) {
  grpc::ProtoBufferReader reader(&buffer);
  google::protobuf::io::CodedInputStream input(&reader);
  input.PushLimit(static_cast<int>(buffer.Length()));
  try {
    return read(input);
  } catch (const std::exception&) {
    // bad_alloc, or length_error where the request asks for more than any memory can have.
    return absl::ResourceExhaustedError("out of memory for the answer");
  }
}

}  // namespace attendant
