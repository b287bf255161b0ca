// The memory of a call's tensors, and the one copy of a request's.
//
// A request's bytes arrive in slices of gRPC's, anywhere in memory. Each tensor is copied from
// there once, to a 64-byte boundary; then the slices are freed. A response's tensors are computed
// where they are sent from: gRPC's slices own that memory, and give it back when it was sent.
#ifndef ATTENDANT_SERVER_TENSOR_DATA_H_
#define ATTENDANT_SERVER_TENSOR_DATA_H_

#include <google/protobuf/message.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "attendant/v1/attention.pb.h"
#include "core/job.h"
#include "core/workspace.h"
#include "server/admission.h"
#include "server/wire.h"

namespace attendant::server {

// Requests up to this are copied at once, on gRPC's thread: it takes less than the hand-over to a
// compute thread. Larger ones are copied by the job's first stage.
inline constexpr int64_t kCopiedAtOnce = int64_t{256} << 10;
// Of that stage: about 0.1 ms, so that a small call beside it does not wait long.
inline constexpr int64_t kCopyTile = int64_t{1} << 20;

// The accounts of one call. What was taken from them may outlive the call: gRPC frees a response's
// slices on its own threads.
struct CallMemory {
  core::Workspace scratch;  // what Stats calls peak_workspace_bytes
  core::Workspace tensors;  // the request's and the response's
};

using TensorBuffer = core::Buffer<unsigned char>;

// Tensor bytes of requests that this process has copied since its start.
int64_t CopiedTensorBytes();

// A message's bytes in gRPC's slices. Thread-compatible.
class MessageBytes {
 public:
  MessageBytes() = default;
  explicit MessageBytes(const grpc::ByteBuffer& bytes);

  // Copies the data, or the part of it that the place is changed to; counted.
  void Copy(const DataPlace& place, unsigned char* to) const;

 private:
  std::vector<grpc::Slice> slices_;
  std::vector<int64_t> begins_;  // of each slice in the message
};

// A request's tensors. Thread-compatible; what Copy returns runs on many threads.
class RequestData {
 public:
  // account must outlive it.
  explicit RequestData(core::Workspace& account) : account_(account) {}
  RequestData(const RequestData&) = delete;
  RequestData& operator=(const RequestData&) = delete;

  // The message that ReadHead has read; `bytes` is left empty.
  void SetMessage(grpc::ByteBuffer& bytes);

  // Makes room for a tensor and returns where it is, on a 64-byte boundary; never null. Its bytes
  // are there once Copy's stage is complete, or the caller writes them. Where there is no room,
  // status() says so, and nothing may be written.
  unsigned char* Add(const v1::Tensor& tensor);
  const absl::Status& status() const { return status_; }

  // Copies at once where that is little, else returns the stage that does; this must outlive it.
  // The message's slices are freed as soon as all is copied. Called once, after the last Add.
  std::optional<core::Stage> Copy();
  // When that stage was complete; the epoch where there was none.
  std::chrono::steady_clock::time_point copied_at() const { return copied_at_; }

  // The tensors' memory, in the order of Add.
  const std::vector<TensorBuffer>& buffers() const { return buffers_; }
  // Gives it back.
  void Free();

 private:
  struct Range {
    DataPlace from;
    unsigned char* to;
  };

  core::Workspace& account_;
  absl::Status status_;
  std::vector<TensorBuffer> buffers_;
  MessageBytes message_;
  std::vector<Range> ranges_;
  std::atomic<int64_t> ranges_left_ = 0;
  std::chrono::steady_clock::time_point copied_at_;
};

// A response's tensors. Thread-compatible.
class ResponseData {
 public:
  // A tensor of the response without its data, and the bytes of that, which own themselves.
  struct Part {
    int number;  // of the response's field
    v1::Tensor head;
    grpc::Slice bytes;
  };

  explicit ResponseData(std::shared_ptr<CallMemory> memory) : memory_(std::move(memory)) {}

  // Makes room for the tensor that `head` describes, in the response's field `number`, and returns
  // where it is, as of RequestData::Add. REQUIRES: numbers only grow.
  unsigned char* Add(int number, const v1::Tensor& head);
  const absl::Status& status() const { return status_; }

  // The tensors, which are complete: from now on theirs.
  std::vector<Part> TakeParts();
  // As one message: the tensors, and `rest`, whose fields come after theirs.
  grpc::ByteBuffer TakeMessage(const google::protobuf::Message& rest);

 private:
  struct Tensor {
    int number;
    v1::Tensor head;
    TensorBuffer buffer;
  };

  const std::shared_ptr<CallMemory> memory_;
  absl::Status status_;
  std::vector<Tensor> tensors_;
};

// Both of one call, and what they are taken from.
struct CallData {
  const std::shared_ptr<CallMemory> memory = std::make_shared<CallMemory>();
  Reservation reservation;  // of the budget, before anything of it is allocated
  RequestData in{memory->tensors};
  ResponseData out{memory};

  const absl::Status& status() const { return in.status().ok() ? out.status() : in.status(); }
};

}  // namespace attendant::server

#endif  // ATTENDANT_SERVER_TENSOR_DATA_H_
