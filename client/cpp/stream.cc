// AttendStream from the caller's memory, and to it.
//
// All of the request is sent before the answer is read: no row of it is known before the last key.
#include <grpcpp/support/sync_stream.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/rpc.h"
#include "client/cpp/tensor_slice.h"

namespace attendant {
namespace {

using google::protobuf::io::CodedInputStream;
using Rpc = grpc::ClientReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>;

// The most that the contract allows in a piece.
constexpr int64_t kLargestPiece = int64_t{1} << 20;
// Tags, lengths and numbers around a piece's bytes, at most.
constexpr int64_t kAroundPiece = 64;

// Fields of AttendStreamRequest and AttendStreamResponse, and of Piece; with their tags where they
// are read.
constexpr int kHeader = 1;
constexpr int kPiece = 2;
constexpr int kTensor = 1;
constexpr int kOffset = 2;
constexpr int kData = 3;
constexpr uint32_t kHeaderTag = kHeader << 3 | 2;
constexpr uint32_t kPieceTag = kPiece << 3 | 2;
constexpr uint32_t kTensorTag = kTensor << 3;
constexpr uint32_t kOffsetTag = kOffset << 3;
constexpr uint32_t kDataTag = kData << 3 | 2;

absl::Status Malformed(absl::string_view what) {
  return absl::InternalError(absl::StrCat("the answer's stream ", what));
}

// A tensor that is coming in.
struct Incoming {
  const PieceSink* piece = nullptr;
  size_t bytes = 0;
  std::vector<std::pair<size_t, size_t>> ranges;  // begin, end
};

// Reads an answer. Thread-compatible.
class Answer {
 public:
  explicit Answer(const StreamCall& call) : call_(call) {
    for (const PieceSink& piece : call.received) *piece.sink->tensor = Tensor();
    for (const PieceSink& piece : call.received) piece.sink->present = false;
  }

  absl::Status ReadMessage(CodedInputStream& input);
  // INTERNAL where bytes are missing, or came twice.
  absl::Status CheckComplete();

 private:
  absl::Status ReadHeader(CodedInputStream& input);
  absl::Status ReadPiece(CodedInputStream& input);
  absl::Status ReadBytes(CodedInputStream& input, Incoming& tensor, size_t offset, size_t size);

  const StreamCall& call_;
  std::vector<Incoming> tensors_;
  bool header_ = false;
};

absl::Status Answer::ReadMessage(CodedInputStream& input) {
  const uint32_t tag = input.ReadTag();
  int size = 0;
  if ((tag != kHeaderTag && tag != kPieceTag) || !input.ReadVarintSizeAsInt(&size) ||
      size != input.BytesUntilLimit()) {
    return Malformed("has a message that is neither a header nor a piece");
  }
  return tag == kHeaderTag ? ReadHeader(input) : ReadPiece(input);
}

absl::Status Answer::ReadHeader(CodedInputStream& input) {
  if (std::exchange(header_, true)) return Malformed("has two headers");
  if (absl::Status status = attendant::ReadMessage(input, call_.answer); !status.ok()) {
    return status;
  }
  for (const PieceSink& piece : call_.received) {
    if (!piece.sink->present) continue;
    Tensor& tensor = *piece.sink->tensor;
    const int64_t bytes = BytesOf(tensor.shape, tensor.dtype);
    if (bytes != piece.bytes) {
      return Malformed(absl::StrCat("has a tensor of ", bytes, " bytes, must have ", piece.bytes));
    }
    const auto length = static_cast<size_t>(bytes);
    if (!piece.sink->into.has_value()) tensor.bytes.reserve(length);
    tensors_.push_back({&piece, length, {}});
  }
  return absl::OkStatus();
}

absl::Status Answer::ReadPiece(CodedInputStream& input) {
  uint64_t name = 0;
  uint64_t offset = 0;
  int size = 0;
  uint32_t tag = input.ReadTag();
  if (tag != kTensorTag || !input.ReadVarint64(&name)) return Malformed("has a nameless piece");
  tag = input.ReadTag();
  if (tag == kOffsetTag) {
    if (!input.ReadVarint64(&offset)) return Malformed("ends within a piece");
    tag = input.ReadTag();
  }
  if (tag == 0) return absl::OkStatus();  // of no bytes
  if (tag != kDataTag || !input.ReadVarintSizeAsInt(&size) || size != input.BytesUntilLimit()) {
    return Malformed("has a piece without data");
  }
  for (Incoming& tensor : tensors_) {
    if (static_cast<uint64_t>(tensor.piece->tensor) != name) continue;
    const auto length = static_cast<size_t>(size);
    if (offset > tensor.bytes || length > tensor.bytes - offset) {
      return Malformed(absl::StrCat("has bytes ", offset, " to ", offset + length,
                                    " of a tensor of ", tensor.bytes));
    }
    return ReadBytes(input, tensor, static_cast<size_t>(offset), length);
  }
  return Malformed(absl::StrCat("has a piece of tensor ", name, ", which its header has not"));
}

absl::Status Answer::ReadBytes(CodedInputStream& input, Incoming& tensor, size_t offset,
                               size_t size) {
  tensor.ranges.emplace_back(offset, offset + size);
  const TensorSink& sink = *tensor.piece->sink;
  char* to = nullptr;
  if (sink.into.has_value()) {
    to = sink.into->data() + offset;
  } else if (std::string& bytes = sink.tensor->bytes; bytes.size() == offset) {
    // In order, as our server sends them: without filling with zeros first.
    for (size_t left = size; left > 0;) {
      const void* data = nullptr;
      int there = 0;
      if (!input.GetDirectBufferPointer(&data, &there)) return Malformed("ends within a piece");
      const size_t taken = std::min(left, static_cast<size_t>(there));
      bytes.append(static_cast<const char*>(data), taken);
      input.Skip(static_cast<int>(taken));
      left -= taken;
    }
    return absl::OkStatus();
  } else {
    if (bytes.size() < tensor.bytes) bytes.resize(tensor.bytes);
    to = bytes.data() + offset;
  }
  return input.ReadRaw(to, static_cast<int>(size)) ? absl::OkStatus()
                                                   : Malformed("ends within a piece");
}

absl::Status Answer::CheckComplete() {
  if (!header_) return Malformed("has no header");
  for (Incoming& tensor : tensors_) {
    tensor.piece->sink->read = tensor.bytes;
    std::sort(tensor.ranges.begin(), tensor.ranges.end());
    size_t end = 0;
    for (const auto& [begin, next] : tensor.ranges) {
      if (begin != end) break;
      end = next;
    }
    if (end != tensor.bytes) {
      return Malformed(
          absl::StrCat("has not each byte of a tensor once: up to ", end, " of ", tensor.bytes));
    }
  }
  return absl::OkStatus();
}

bool Send(Rpc& rpc, const OutMessage& message, Loan& loan) {
  return rpc.Write(loan.Lend(message.segments()));
}

// False where the server takes no more.
bool SendAll(Rpc& rpc, const StreamCall& call, Loan& loan) {
  OutMessage header;
  header.AddMessage(kHeader, call.header);
  if (!Send(rpc, header, loan)) return false;
  const auto longest = static_cast<size_t>(std::min(kLargestPiece, call.limit - kAroundPiece));
  for (const PieceSource& source : call.sent) {
    for (size_t offset = 0; offset < source.bytes.size(); offset += longest) {
      OutMessage piece;
      piece.AddNumber(kTensor, static_cast<uint64_t>(source.tensor));
      if (offset > 0) piece.AddNumber(kOffset, offset);
      piece.AddBytes(kData, source.bytes.substr(offset, longest));
      OutMessage message;
      message.AddMessage(kPiece, piece);
      if (!Send(rpc, message, loan)) return false;
    }
  }
  return rpc.WritesDone();
}

}  // namespace

Outcome AttemptStream(grpc::Channel& channel, const StreamCall& call, CallGroup& group) {
  Loan loan;
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(group.deadline()));
  const CallGroup::Member member(group, [&context] { context.TryCancel(); });
  const grpc::internal::RpcMethod method(kAttendStream, grpc::internal::RpcMethod::BIDI_STREAMING);
  const std::unique_ptr<Rpc> rpc(
      grpc::internal::ClientReaderWriterFactory<grpc::ByteBuffer, grpc::ByteBuffer>::Create(
          &channel, method, &context));
  Answer answer(call);
  absl::Status read;
  if (SendAll(*rpc, call, loan)) {
    grpc::ByteBuffer message;
    while (read.ok() && rpc->Read(&message)) {
      read =
          ReadBuffer(message, [&](CodedInputStream& input) { return answer.ReadMessage(input); });
    }
  }
  if (!read.ok()) context.TryCancel();
  Outcome outcome = OutcomeOf(rpc->Finish(), context);
  if (!read.ok()) outcome = {read, std::nullopt, /*never=*/true};
  if (outcome.status.ok()) outcome.status = answer.CheckComplete();
  return outcome;
}

}  // namespace attendant
