#include "client/cpp/wire.h"

#include <google/protobuf/io/zero_copy_stream.h>

#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"

namespace attendant {
namespace {

using google::protobuf::MessageLite;
using google::protobuf::io::CodedInputStream;
using google::protobuf::io::CodedOutputStream;

// protobuf's encoding: https://protobuf.dev/programming-guides/encoding
enum WireType { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

// Shorter bytes cost less to copy than to refer to.
constexpr size_t kLeastBorrowed = 1024;

// Fields of Tensor.
constexpr int kDtype = 1;
constexpr int kShape = 2;
constexpr int kData = 3;

void AppendVarintTo(std::string& text, uint64_t value) {
  uint8_t bytes[10];
  const uint8_t* const end = CodedOutputStream::WriteVarint64ToArray(value, bytes);
  text.append(reinterpret_cast<const char*>(bytes), static_cast<size_t>(end - bytes));
}

absl::Status Malformed() { return absl::InternalError("the answer is no message of the contract"); }

// A field's length, as a limit of the input.
class Nested {
 public:
  explicit Nested(CodedInputStream& input) : input_(input) {
    ok_ = input.ReadVarintSizeAsInt(&size_) && size_ <= input.BytesUntilLimit();
    if (ok_) limit_ = input.PushLimit(size_);
  }
  ~Nested() {
    if (ok_) input_.PopLimit(limit_);
  }
  Nested(const Nested&) = delete;
  Nested& operator=(const Nested&) = delete;

  bool ok() const { return ok_; }
  int size() const { return size_; }
  bool AtEnd() const { return input_.BytesUntilLimit() == 0; }

 private:
  CodedInputStream& input_;
  CodedInputStream::Limit limit_ = 0;
  int size_ = 0;
  bool ok_ = false;
};

bool SkipField(CodedInputStream& input, uint32_t tag) {
  uint64_t number = 0;
  int size = 0;
  switch (tag & 7) {
    case kVarint:
      return input.ReadVarint64(&number);
    case kFixed64:
      return input.Skip(8);
    case kBytes:
      return input.ReadVarintSizeAsInt(&size) && input.Skip(size);
    case kFixed32:
      return input.Skip(4);
    default:
      return false;
  }
}

bool ReadShape(CodedInputStream& input, std::vector<int64_t>& shape) {
  const Nested nested(input);
  if (!nested.ok()) return false;
  while (!nested.AtEnd()) {
    uint64_t size = 0;
    if (!input.ReadVarint64(&size)) return false;
    shape.push_back(static_cast<int64_t>(size));
  }
  return true;
}

absl::Status ReadData(CodedInputStream& input, TensorSink& sink) {
  const Nested nested(input);
  if (!nested.ok()) return Malformed();
  if (!sink.into.has_value()) {
    return input.ReadString(&sink.tensor->bytes, nested.size()) ? absl::OkStatus() : Malformed();
  }
  if (sink.into->size() != static_cast<size_t>(nested.size())) {
    return absl::InternalError(absl::StrCat("the answer's tensor has ", nested.size(),
                                            " bytes, the memory for it ", sink.into->size()));
  }
  if (!input.ReadRaw(sink.into->data(), nested.size())) return Malformed();
  sink.read = sink.into->size();
  return absl::OkStatus();
}

absl::Status ReadTensor(CodedInputStream& input, TensorSink& sink) {
  const Nested nested(input);
  if (!nested.ok()) return Malformed();
  sink.present = true;
  while (!nested.AtEnd()) {
    const uint32_t tag = input.ReadTag();
    bool ok = true;
    uint64_t number = 0;
    if (tag == (kDtype << 3 | kVarint)) {
      ok = input.ReadVarint64(&number);
      sink.tensor->dtype = static_cast<v1::DataType>(number);
    } else if (tag == (kShape << 3 | kBytes)) {
      ok = ReadShape(input, sink.tensor->shape);
    } else if (tag == (kShape << 3 | kVarint)) {
      ok = input.ReadVarint64(&number);
      sink.tensor->shape.push_back(static_cast<int64_t>(number));
    } else if (tag == (kData << 3 | kBytes)) {
      if (absl::Status status = ReadData(input, sink); !status.ok()) return status;
    } else {
      ok = tag != 0 && SkipField(input, tag);
    }
    if (!ok) return Malformed();
  }
  return absl::OkStatus();
}

absl::Status Read(CodedInputStream& input, MessageLite& message) {
  const Nested nested(input);
  const bool ok = nested.ok() && message.MergeFromCodedStream(&input) && nested.AtEnd();
  return ok ? absl::OkStatus() : Malformed();
}

absl::Status Read(CodedInputStream& input, std::vector<double>& numbers) {
  const Nested nested(input);
  if (!nested.ok()) return Malformed();
  while (!nested.AtEnd()) {
    uint64_t bits = 0;
    if (!input.ReadLittleEndian64(&bits)) return Malformed();
    double number = 0;
    std::memcpy(&number, &bits, sizeof(number));
    numbers.push_back(number);
  }
  return absl::OkStatus();
}

absl::Status ReadField(CodedInputStream& input, const InField& field) {
  if (auto* const sink = std::get_if<TensorSink*>(&field.to)) return ReadTensor(input, **sink);
  if (auto* const message = std::get_if<MessageLite*>(&field.to)) return Read(input, **message);
  return Read(input, **std::get_if<std::vector<double>*>(&field.to));
}

}  // namespace

// What protobuf writes a message to. Bytes fields too long for a block are handed over as they lie.
class OutMessage::Stream final : public google::protobuf::io::ZeroCopyOutputStream {
 public:
  explicit Stream(OutMessage& message) : message_(message) {}

  bool Next(void** data, int* size) override {
    std::string& own = message_.own();
    own.resize(own.size() + kBlock);
    message_.size_ += kBlock;
    *data = own.data() + own.size() - kBlock;
    *size = kBlock;
    return true;
  }
  void BackUp(int count) override {
    std::string& own = message_.own();
    own.resize(own.size() - static_cast<size_t>(count));
    message_.size_ -= static_cast<size_t>(count);
  }
  int64_t ByteCount() const override { return static_cast<int64_t>(message_.size_ - before_); }
  bool AllowsAliasing() const override { return true; }
  bool WriteAliasedRaw(const void* data, int size) override {
    message_.AppendBytes({static_cast<const char*>(data), static_cast<size_t>(size)});
    return true;
  }

 private:
  static constexpr int kBlock = 256;

  OutMessage& message_;
  const size_t before_ = message_.size_;
};

// The text at the end, to append to.
std::string& OutMessage::own() {
  if (segments_.empty() || !segments_.back().borrowed.empty()) segments_.emplace_back();
  return segments_.back().own;
}

void OutMessage::AppendVarint(uint64_t value) {
  std::string& text = own();
  size_ -= text.size();
  AppendVarintTo(text, value);
  size_ += text.size();
}

void OutMessage::AppendTag(int field, int wire_type) {
  AppendVarint(static_cast<uint64_t>(field) << 3 | static_cast<uint64_t>(wire_type));
}

void OutMessage::AppendBytes(absl::string_view bytes) {
  std::string& text = own();
  if (bytes.size() < kLeastBorrowed) {
    text.append(bytes.data(), bytes.size());
  } else {
    segments_.back().borrowed = bytes;
  }
  size_ += bytes.size();
}

void OutMessage::AddNumber(int field, uint64_t value) {
  AppendTag(field, kVarint);
  AppendVarint(value);
}

void OutMessage::AddBytes(int field, absl::string_view bytes) {
  AppendTag(field, kBytes);
  AppendVarint(bytes.size());
  AppendBytes(bytes);
}

void OutMessage::AddTensor(int field, const TensorRef& tensor) {
  OutMessage message;
  if (tensor.dtype() != 0) message.AddNumber(kDtype, static_cast<uint64_t>(tensor.dtype()));
  if (!tensor.shape().empty()) {
    std::string sizes;
    for (const int64_t size : tensor.shape()) AppendVarintTo(sizes, static_cast<uint64_t>(size));
    message.AppendTag(kShape, kBytes);
    message.AppendVarint(sizes.size());
    message.own().append(sizes);
    message.size_ += sizes.size();
  }
  if (!tensor.bytes().empty()) message.AddBytes(kData, tensor.bytes());
  AddMessage(field, message);
}

void OutMessage::AddMessage(int field, const OutMessage& message) {
  AppendTag(field, kBytes);
  AppendVarint(message.size());
  for (const Segment& segment : message.segments()) {
    own().append(segment.own);
    if (!segment.borrowed.empty()) segments_.back().borrowed = segment.borrowed;
  }
  size_ += message.size();
}

void OutMessage::AddMessage(int field, const MessageLite& message) {
  AppendTag(field, kBytes);
  AppendVarint(message.ByteSizeLong());
  Append(message);
}

void OutMessage::Append(const MessageLite& message) {
  Stream stream(*this);
  CodedOutputStream output(&stream);
  output.EnableAliasing(true);
  message.SerializeToCodedStream(&output);
}

absl::Status ReadMessage(CodedInputStream& input, absl::Span<const InField> fields) {
  while (true) {
    const uint32_t tag = input.ReadTag();
    if (tag == 0) break;
    const InField* known = nullptr;
    for (const InField& field : fields) {
      if (tag == (static_cast<uint32_t>(field.number) << 3 | kBytes)) known = &field;
    }
    if (known == nullptr) {
      if (!SkipField(input, tag)) return Malformed();
      continue;
    }
    if (absl::Status status = ReadField(input, *known); !status.ok()) return status;
  }
  return input.ConsumedEntireMessage() ? absl::OkStatus() : Malformed();
}

}  // namespace attendant
