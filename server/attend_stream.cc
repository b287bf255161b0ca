#include "server/attend_stream.h"

#include <grpcpp/server_context.h>

#include <algorithm>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/errors.h"
#include "core/mutex.h"
#include "server/byte_ranges.h"
#include "server/tensor_data.h"
#include "server/wire.h"

namespace attendant::server {
namespace {

// Of a message that is a piece, and what is around it.
constexpr int64_t kLongestMessage = kLongestPiece + (int64_t{64} << 10);

// A tensor of the request that comes in pieces.
struct Upload {
  v1::PieceTensor tensor;
  const char* name;
  unsigned char* to;
  int64_t bytes;
  ByteRanges here;
};

std::string BytesText(ByteRange range) {
  return absl::StrCat("bytes ", range.begin, " to ", range.end - 1);
}

// Where a piece's bytes go. Returns INVALID_ARGUMENT where that is no place for them.
absl::Status Place(const v1::Piece& piece, int64_t bytes, Upload& upload) {
  if (piece.offset() < 0 || piece.offset() > upload.bytes ||
      bytes > upload.bytes - piece.offset()) {
    return core::InvalidField("piece.offset",
                              absl::StrCat("is ", piece.offset(), ": ", upload.name, " has ",
                                           upload.bytes, " bytes, and the piece ", bytes));
  }
  if (const auto twice = upload.here.Add({piece.offset(), piece.offset() + bytes})) {
    return core::InvalidField("piece.offset",
                              absl::StrCat("is ", piece.offset(), ": ", BytesText(*twice), " of ",
                                           upload.name, " were sent before"));
  }
  if (upload.here.count() > kMostRanges) {
    return core::InvalidField(
        "piece.offset", absl::StrCat("leaves more than ", kMostRanges, " gaps in ", upload.name,
                                     "; send larger pieces, or in order"));
  }
  return absl::OkStatus();
}

v1::PieceTensor PieceTensorOf(int response_field) {
  switch (response_field) {
    case v1::AttendResponse::kOutputFieldNumber:
      return v1::PIECE_TENSOR_OUTPUT;
    case v1::AttendResponse::kWeightsFieldNumber:
      return v1::PIECE_TENSOR_WEIGHTS;
    case v1::AttendResponse::kLogsumexpFieldNumber:
      return v1::PIECE_TENSOR_LOGSUMEXP;
    default:
      return v1::PIECE_TENSOR_KEY_SUMS;
  }
}

// The answer's header: the response, its tensors without data.
grpc::ByteBuffer HeaderMessage(const google::protobuf::Message& rest,
                               const std::vector<ResponseData::Part>& parts) {
  std::string header;
  for (const ResponseData::Part& part : parts) {
    const std::string head = part.head.SerializeAsString();
    AppendLengthPrefix(part.number, static_cast<int64_t>(head.size()), header);
    header += head;
  }
  header += rest.SerializeAsString();
  std::string prefix;
  AppendLengthPrefix(v1::AttendStreamResponse::kHeaderFieldNumber,
                     static_cast<int64_t>(header.size()), prefix);
  const grpc::Slice slice(prefix + header);
  return grpc::ByteBuffer(&slice, 1);
}

// Bytes of a tensor from `offset` on, as many as a piece has.
grpc::ByteBuffer PieceMessage(const ResponseData::Part& part, int64_t offset, int64_t bytes) {
  v1::Piece piece;
  piece.set_tensor(PieceTensorOf(part.number));
  piece.set_offset(offset);
  std::string head = piece.SerializeAsString();
  AppendLengthPrefix(v1::Piece::kDataFieldNumber, bytes, head);
  std::string prefix;
  AppendLengthPrefix(v1::AttendStreamResponse::kPieceFieldNumber,
                     static_cast<int64_t>(head.size()) + bytes, prefix);
  const grpc::Slice slices[] = {
      grpc::Slice(prefix + head),
      part.bytes.sub(static_cast<size_t>(offset), static_cast<size_t>(offset + bytes))};
  return grpc::ByteBuffer(slices, 2);
}

// Thread-safe. gRPC calls back on any of its threads, one read or write after the other; beside
// them come the job's end, cancellations and whoever finds the peer too slow.
class AttendStreamCall final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                               public Call {
 public:
  AttendStreamCall(Calls& calls, grpc::CallbackServerContext* context, PlanHeader plan,
                   int64_t piece_bytes)
      : Call(calls, context, Method::kAttendStream),
        plan_(std::move(plan)),
        piece_bytes_(piece_bytes) {}

  // Called once, before gRPC knows of this call.
  void Start() {
    {
      // Also a HandOver, by this lock: reads are told of on any thread.
      core::MutexLock lock(mutex_);
      AwaitPeer(kLongestHead, PeerWait::Steps::kSeen);
    }
    StartRead(&incoming_);
    if (!calls().accepting()) Refuse();
  }

  void Stop(const absl::Status& why) override { EndEarly(why); }

  void Refuse() override {
    {
      core::MutexLock lock(mutex_);
      if (phase_ != Phase::kReading || work_.has_value()) return;
      phase_ = Phase::kEnded;
    }
    Answer(Refusal());
  }

 private:
  // While it writes there is always a write outstanding, while it reads a read.
  enum class Phase : uint8_t { kReading, kComputing, kWriting, kEnded };

  void OnReadDone(bool ok) override {
    if (!ok) {
      OnUploaded();
      return;
    }
    absl::Status status;
    {
      core::MutexLock lock(mutex_);
      if (phase_ == Phase::kEnded) return;
      status = WithoutThrowing([&]() -> absl::Status {
        mutex_.AssertHeld();
        if (absl::Status fits = CheckMessage(); !fits.ok()) return fits;
        return work_.has_value() ? TakePiece() : TakeHeader();
      });
      incoming_.Clear();
    }
    if (!status.ok()) {
      End(status);
      return;
    }
    StartRead(&incoming_);
  }

  // Of a piece: one that is far too long need not be read to be refused. A header may have as much
  // as a request of one message beside its tensors' bytes.
  absl::Status CheckMessage() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto bytes = static_cast<int64_t>(incoming_.Length());
    if (!work_.has_value() || bytes <= kLongestMessage) return absl::OkStatus();
    return core::OverLimit("stream_message_bytes",
                           absl::StrCat("the message has ", bytes, " bytes, at most ",
                                        kLongestMessage, " are a piece"));
  }

  absl::Status TakeHeader() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    v1::AttendStreamRequest message;
    if (absl::Status status = ReadHead(incoming_, message); !status.ok()) return status;
    if (!message.has_header()) return core::InvalidField("header", "must be the first message");
    absl::StatusOr<Work> work =
        PrepareWork([&](CallData& data) { return plan_(message.header(), data); });
    if (!work.ok()) return work.status();
    constexpr std::pair<v1::PieceTensor, const char*> kTensors[] = {
        {v1::PIECE_TENSOR_QUERY, "query"},
        {v1::PIECE_TENSOR_KEY, "key"},
        {v1::PIECE_TENSOR_VALUE, "value"},
        {v1::PIECE_TENSOR_MASK, "options.mask"}};
    const std::vector<TensorBuffer>& room = data().in.buffers();
    uploads_.reserve(room.size());
    int64_t bytes = 0;
    for (size_t i = 0; i < room.size(); ++i) {
      bytes += room[i].size();
      uploads_.push_back(
          {kTensors[i].first, kTensors[i].second, room[i].data(), room[i].size(), {}});
    }
    work_ = *std::move(work);
    AwaitPeer(bytes, PeerWait::Steps::kSeen);
    return absl::OkStatus();
  }

  absl::Status TakePiece() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    v1::AttendStreamRequest message;
    if (absl::Status status = ReadHead(incoming_, message); !status.ok()) return status;
    if (!message.has_piece()) {
      return core::InvalidField("piece", "is unset, must be in every message after the header");
    }
    const v1::Piece& piece = message.piece();
    const auto upload = std::find_if(uploads_.begin(), uploads_.end(), [&](const Upload& one) {
      return one.tensor == piece.tensor();
    });
    if (upload == uploads_.end()) {
      return core::InvalidField("piece.tensor",
                                absl::StrCat("is ", static_cast<int>(piece.tensor()),
                                             ", which is no tensor of this request"));
    }
    const DataPlace data = PlaceOf(piece.data());
    if (data.bytes > kLongestPiece) {
      return core::InvalidField("piece.data", absl::StrCat("has ", data.bytes, " bytes, at most ",
                                                           kLongestPiece, " are a piece"));
    }
    if (absl::Status status = Place(piece, data.bytes, *upload); !status.ok()) return status;
    // A piece of nothing is none that keeps a stream from being idle.
    if (data.bytes == 0) return absl::OkStatus();
    MessageBytes(incoming_).Copy(data, upload->to + piece.offset());
    NotePeerMoved();
    return absl::OkStatus();
  }

  // There is nothing more to read: the client has sent all, or the call has ended.
  void OnUploaded() {
    if (context()->IsCancelled()) {
      EndEarly(WhyCancelled());
      return;
    }
    AwaitPeerNoMore();
    absl::Status complete;
    std::optional<Work> work;
    {
      core::MutexLock lock(mutex_);
      if (phase_ == Phase::kEnded) return;
      complete = WithoutThrowing([&] {
        mutex_.AssertHeld();
        return CheckComplete();
      });
      if (complete.ok()) phase_ = Phase::kComputing;
      work.swap(work_);
    }
    if (!complete.ok()) {
      End(complete);
      return;
    }
    NoteArrival();
    Submit(*std::move(work));
  }

  absl::Status CheckComplete() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!work_.has_value()) return core::InvalidField("header", "is unset: no message came");
    for (const Upload& upload : uploads_) {
      if (const auto missing = upload.here.FirstMissing(upload.bytes)) {
        return core::InvalidField(
            upload.name, absl::StrCat(BytesText(*missing), " of ", upload.bytes, " were not sent"));
      }
    }
    return absl::OkStatus();
  }

  void OnComputed(const absl::Status& status, const google::protobuf::Message& response) override {
    absl::Status made = status;
    {
      core::MutexLock lock(mutex_);
      if (made.ok()) made = WhyStopped();
      if (made.ok()) {
        made = WithoutThrowing([&] {
          mutex_.AssertHeld();
          parts_ = data().out.TakeParts();
          outgoing_ = HeaderMessage(response, parts_);
          size_t bytes = outgoing_.Length();
          for (const ResponseData::Part& part : parts_) bytes += part.bytes.size();
          AwaitPeer(static_cast<int64_t>(bytes), PeerWait::Steps::kSeen);
          return absl::OkStatus();
        });
      }
      phase_ = made.ok() ? Phase::kWriting : Phase::kEnded;
    }
    if (made.ok()) {
      StartWrite(&outgoing_);
    } else {
      Answer(made);
    }
  }

  void OnWriteDone(bool ok) override {
    bool more = false;
    absl::Status end = ok ? absl::OkStatus() : WhyCancelled();
    {
      core::MutexLock lock(mutex_);
      if (phase_ == Phase::kEnded) {
        end = why_ended_;
      } else if (ok) {
        end = WithoutThrowing([&] {
          mutex_.AssertHeld();
          return MakePiece(more);
        });
      }
      if (!more) phase_ = Phase::kEnded;
    }
    if (more) {
      NotePeerMoved();
      StartWrite(&outgoing_);
      return;
    }
    if (!end.ok()) calls().metrics().JobCancelled(CancelStage::kSend);
    Answer(end);
  }

  // Says whether there was one left; it is the next to be written then.
  absl::Status MakePiece(bool& more) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    while (part_ < parts_.size() &&
           sent_of_part_ == static_cast<int64_t>(parts_[part_].bytes.size())) {
      parts_[part_++].bytes = grpc::Slice();
      sent_of_part_ = 0;
    }
    more = part_ < parts_.size();
    if (!more) return absl::OkStatus();
    const ResponseData::Part& part = parts_[part_];
    const int64_t bytes =
        std::min(piece_bytes_, static_cast<int64_t>(part.bytes.size()) - sent_of_part_);
    outgoing_ = PieceMessage(part, sent_of_part_, bytes);
    sent_of_part_ += bytes;
    return absl::OkStatus();
  }

  // Ends a call whose bytes are not as they should be. REQUIRES: they are being read.
  void End(const absl::Status& why) {
    {
      core::MutexLock lock(mutex_);
      if (phase_ == Phase::kEnded) return;
      phase_ = Phase::kEnded;
    }
    Answer(why);
  }

  // Ends the call in any phase, as soon as gRPC and the compute threads let go of it.
  void EndEarly(const absl::Status& why) {
    Phase phase = Phase::kReading;
    {
      core::MutexLock lock(mutex_);
      phase = phase_;
      if (phase == Phase::kEnded) return;
      if (phase == Phase::kComputing) {
        Call::Stop(why);
        return;
      }
      phase_ = Phase::kEnded;
      why_ended_ = why;
    }
    if (phase == Phase::kReading) {
      calls().metrics().JobCancelled(CancelStage::kReceive);
      Answer(why);
    } else {
      // Whoever reads no more would hold the write for ever; OnWriteDone answers, perhaps before
      // this.
      Abort(why);
    }
  }

  // REQUIRES: nothing is being written, and no job runs.
  void Answer(const absl::Status& status) { Finish(RecordAnswer(status)); }

  // Ours neither wait nor compute, but for the copy of a piece.
  bool InternalInlineable() override { return true; }

  void OnCancel() override { EndEarly(WhyCancelled()); }

  void EndSlow(const absl::Status& why) override { EndEarly(why); }

  void OnDone() override {
    // A HandOver as in Start.
    { const core::MutexLock lock(mutex_); }
    Leave();
  }

  const PlanHeader plan_;
  const int64_t piece_bytes_;

  // gRPC's while a read or write is outstanding.
  grpc::ByteBuffer incoming_;
  grpc::ByteBuffer outgoing_;

  core::Mutex mutex_;
  Phase phase_ ABSL_GUARDED_BY(mutex_) = Phase::kReading;
  absl::Status why_ended_ ABSL_GUARDED_BY(mutex_);
  // Of the request.
  std::optional<Work> work_ ABSL_GUARDED_BY(mutex_);
  std::vector<Upload> uploads_ ABSL_GUARDED_BY(mutex_);
  // Of the answer: what is left of it.
  std::vector<ResponseData::Part> parts_ ABSL_GUARDED_BY(mutex_);
  size_t part_ ABSL_GUARDED_BY(mutex_) = 0;  // the one that is sent
  int64_t sent_of_part_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ServeAttendStream(
    Calls& calls, grpc::CallbackServerContext* context, PlanHeader plan, int64_t piece_bytes) {
  const auto call =
      std::make_shared<AttendStreamCall>(calls, context, std::move(plan), piece_bytes);
  calls.Add(call);
  call->Start();
  return call.get();
}

}  // namespace attendant::server
