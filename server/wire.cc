#include "server/wire.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <cstring>
#include <limits>
#include <map>
#include <memory>

#include "absl/strings/str_cat.h"
#include "attendant/v1/attention.pb.h"
#include "core/errors.h"

namespace attendant::server {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

// What stands for data in the short form. Shorter data stays as it is, so that a length of these
// bytes says which of the two it is, and the short form is never longer than the message.
struct Mark {
  int64_t offset;
  int64_t bytes;
};
constexpr size_t kMarkBytes = sizeof(Mark);

// protobuf reads no longer tags and lengths.
constexpr int kLongestVarint32 = 5;

// The way to a field, from the message's root.
struct Place {
  const Place* parent = nullptr;
  const FieldDescriptor* field = nullptr;
  int index = 0;  // where it is repeated
};

std::string NameOf(const Place& place) {
  if (place.field == nullptr) return "";
  std::string name = NameOf(*place.parent);
  absl::StrAppend(&name, name.empty() ? "" : ".", place.field->name());
  if (place.field->is_repeated()) absl::StrAppend(&name, "[", place.index, "]");
  return name;
}

absl::Status Malformed(const Place& place, absl::string_view what) {
  const std::string name = NameOf(place);
  return core::InvalidField(name.empty() ? "request" : name,
                            absl::StrCat("is not as protobuf writes it: ", what));
}

bool HoldsData(const FieldDescriptor& field) {
  return (field.containing_type() == v1::Tensor::descriptor() &&
          field.number() == v1::Tensor::kDataFieldNumber) ||
         (field.containing_type() == v1::Piece::descriptor() &&
          field.number() == v1::Piece::kDataFieldNumber);
}

// Writes the short form of one message. Thread-compatible.
class HeadReader {
 public:
  // verify: whether each number and string is parsed at once, to say which of them is malformed.
  HeadReader(CodedInputStream& in, bool verify) : in_(in), verify_(verify) {}

  // Reads to the stream's limit.
  absl::Status Read(const Descriptor& type, const Place& place, std::string& out) {
    std::map<int, int> seen;  // of repeated messages
    while (true) {
      const int before = in_.CurrentPosition();
      const uint32_t tag = in_.ReadTag();
      if (tag == 0) break;
      if (in_.CurrentPosition() - before > kLongestVarint32) return Malformed(place, "a long tag");
      const FieldDescriptor* const field =
          type.FindFieldByNumber(WireFormatLite::GetTagFieldNumber(tag));
      Place inner{&place, field};
      if (field != nullptr && field->is_repeated() && field->message_type() != nullptr) {
        inner.index = seen[field->number()]++;
        if (++repeated_ > kMostRepeated) return TooMany(inner);
      }
      absl::Status status =
          field == nullptr ? Skip(tag, place) : ReadField(tag, *field, inner, out);
      if (!status.ok()) return status;
      if (static_cast<int64_t>(out.size()) > kLongestHead) return TooLong(inner);
    }
    if (!in_.ConsumedEntireMessage()) return Malformed(place, "it is cut off, or a tag is 0");
    return absl::OkStatus();
  }

 private:
  static absl::Status TooMany(const Place& place) {
    return core::InvalidField(NameOf(place), absl::StrCat("is one too many: a request may have ",
                                                          kMostRepeated, " repeated messages"));
  }

  static absl::Status TooLong(const Place& place) {
    return core::OverLimit("max_head_bytes",
                           absl::StrCat(NameOf(place), ": the message has more than ", kLongestHead,
                                        " bytes beside its tensors' data"));
  }

  absl::Status Skip(uint32_t tag, const Place& place) {
    if (WireFormatLite::SkipField(&in_, tag)) return absl::OkStatus();
    return Malformed(place, absl::StrCat("field ", WireFormatLite::GetTagFieldNumber(tag),
                                         ", which is unknown, does not end"));
  }

  // Of a field that the contract knows by its number.
  absl::Status ReadField(uint32_t tag, const FieldDescriptor& field, const Place& place,
                         std::string& out) {
    switch (WireFormatLite::GetTagWireType(tag)) {
      case WireFormatLite::WIRETYPE_LENGTH_DELIMITED:
        if (field.message_type() != nullptr) return ReadMessage(tag, field, place, out);
        if (HoldsData(field)) return MarkData(tag, place, out);
        break;
      case WireFormatLite::WIRETYPE_START_GROUP:
      case WireFormatLite::WIRETYPE_END_GROUP:
        return Skip(tag, *place.parent);
      default:
        break;
    }
    const size_t before = out.size();
    if (absl::Status status = CopyValue(tag, place, out); !status.ok()) return status;
    if (verify_ && !Parses(*field.containing_type(), out.substr(before))) {
      return Malformed(place, "its numbers or its text");
    }
    return absl::OkStatus();
  }

  static bool Parses(const Descriptor& type, const std::string& bytes) {
    const std::unique_ptr<google::protobuf::Message> probe(
        google::protobuf::MessageFactory::generated_factory()->GetPrototype(&type)->New());
    return probe->ParseFromString(bytes);
  }

  absl::Status ReadMessage(uint32_t tag, const FieldDescriptor& field, const Place& place,
                           std::string& out) {
    int length = 0;
    if (absl::Status status = ReadLength(place, length); !status.ok()) return status;
    const CodedInputStream::Limit limit = in_.PushLimit(length);
    if (!in_.IncrementRecursionDepth()) return Malformed(place, "it is nested too deeply");
    std::string inner;
    if (absl::Status status = Read(*field.message_type(), place, inner); !status.ok()) {
      return status;
    }
    in_.DecrementRecursionDepth();
    in_.PopLimit(limit);
    AppendVarint(tag, out);
    AppendVarint(inner.size(), out);
    out += inner;
    return absl::OkStatus();
  }

  absl::Status MarkData(uint32_t tag, const Place& place, std::string& out) {
    int length = 0;
    if (absl::Status status = ReadLength(place, length); !status.ok()) return status;
    AppendVarint(tag, out);
    if (static_cast<size_t>(length) < kMarkBytes) {
      AppendVarint(static_cast<uint64_t>(length), out);
      return CopyBytes(length, place, out);
    }
    const Mark mark{in_.CurrentPosition(), length};
    AppendVarint(kMarkBytes, out);
    out.append(reinterpret_cast<const char*>(&mark), kMarkBytes);
    return in_.Skip(length) ? absl::OkStatus() : Malformed(place, "it is cut off");
  }

  absl::Status CopyValue(uint32_t tag, const Place& place, std::string& out) {
    AppendVarint(tag, out);
    uint64_t value = 0;
    int length = 0;
    switch (WireFormatLite::GetTagWireType(tag)) {
      case WireFormatLite::WIRETYPE_VARINT:
        if (!in_.ReadVarint64(&value)) return Malformed(place, "its number does not end");
        AppendVarint(value, out);
        return absl::OkStatus();
      case WireFormatLite::WIRETYPE_FIXED64:
        return CopyBytes(8, place, out);
      case WireFormatLite::WIRETYPE_FIXED32:
        return CopyBytes(4, place, out);
      case WireFormatLite::WIRETYPE_LENGTH_DELIMITED:
        if (absl::Status status = ReadLength(place, length); !status.ok()) return status;
        if (length > kLongestHead) return TooLong(place);
        AppendVarint(static_cast<uint64_t>(length), out);
        return CopyBytes(length, place, out);
      default:
        return Malformed(place, "it has an unknown wire type");
    }
  }

  // A length that the bytes left can have: nothing is allocated before this is known.
  absl::Status ReadLength(const Place& place, int& length) {
    const int before = in_.CurrentPosition();
    if (!in_.ReadVarintSizeAsInt(&length) || in_.CurrentPosition() - before > kLongestVarint32) {
      return Malformed(place, "its length does not end, or is more than 2^31 - 1");
    }
    if (length > in_.BytesUntilLimit()) {
      return Malformed(place, absl::StrCat("its length is ", length, ", and ",
                                           in_.BytesUntilLimit(), " bytes are left"));
    }
    return absl::OkStatus();
  }

  absl::Status CopyBytes(int count, const Place& place, std::string& out) {
    if (count > in_.BytesUntilLimit()) return Malformed(place, "it is cut off");
    const size_t before = out.size();
    out.resize(before + static_cast<size_t>(count));
    if (!in_.ReadRaw(out.data() + before, count)) return Malformed(place, "it is cut off");
    return absl::OkStatus();
  }

  CodedInputStream& in_;
  const bool verify_;
  int repeated_ = 0;  // messages so far
};

absl::Status ShortForm(google::protobuf::io::ZeroCopyInputStream& bytes, int length, bool verify,
                       const Descriptor& type, std::string& out) {
  CodedInputStream in(&bytes);
  in.PushLimit(length);
  return HeadReader(in, verify).Read(type, Place(), out);
}

// Which field it is that protobuf refuses in a short form whose grammar is right.
absl::Status WhatIsRefused(const std::string& head, const Descriptor& type) {
  const int length = static_cast<int>(head.size());
  google::protobuf::io::ArrayInputStream bytes(head.data(), length);
  std::string unused;
  absl::Status status = ShortForm(bytes, length, /*verify=*/true, type, unused);
  return status.ok() ? Malformed(Place(), "protobuf refuses it") : status;
}

}  // namespace

absl::Status ReadHead(grpc::ByteBuffer& bytes, google::protobuf::Message& message) {
  const size_t length = bytes.Length();
  if (length > static_cast<size_t>(std::numeric_limits<int>::max())) {
    return core::InvalidField("request", absl::StrCat("has ", length, " bytes, at most 2^31 - 1"));
  }
  grpc::ProtoBufferReader reader(&bytes);
  if (!reader.status().ok()) return absl::InternalError(reader.status().error_message());
  const Descriptor& type = *message.GetDescriptor();
  std::string head;
  absl::Status status = ShortForm(reader, static_cast<int>(length), /*verify=*/false, type, head);
  if (!status.ok()) return status;
  return message.ParseFromString(head) ? absl::OkStatus() : WhatIsRefused(head, type);
}

DataPlace PlaceOf(const std::string& data) {
  if (data.size() != kMarkBytes) return {static_cast<int64_t>(data.size()), 0, data};
  Mark mark;
  std::memcpy(&mark, data.data(), kMarkBytes);
  return {mark.bytes, mark.offset, {}};
}

void AppendVarint(uint64_t value, std::string& out) {
  uint8_t bytes[10];
  const uint8_t* const end =
      google::protobuf::io::CodedOutputStream::WriteVarint64ToArray(value, bytes);
  out.append(reinterpret_cast<const char*>(bytes), static_cast<size_t>(end - bytes));
}

void AppendLengthPrefix(int number, int64_t bytes, std::string& out) {
  AppendVarint(WireFormatLite::MakeTag(number, WireFormatLite::WIRETYPE_LENGTH_DELIMITED), out);
  AppendVarint(static_cast<uint64_t>(bytes), out);
}

}  // namespace attendant::server
