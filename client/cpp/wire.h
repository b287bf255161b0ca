// Messages of the contract as bytes, without copying tensors: a request is told as segments that
// refer to the caller's memory, and an answer's elements are read straight to where they belong.
#ifndef ATTENDANT_CLIENT_CPP_WIRE_H_
#define ATTENDANT_CLIENT_CPP_WIRE_H_

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/message_lite.h>

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/cpp/client.h"

namespace attendant {

// Bytes in the order they are sent: some are the message's own, longer ones stay where they lie.
struct Segment {
  std::string own;
  absl::string_view borrowed;  // after `own`
  size_t size() const { return own.size() + borrowed.size(); }
};

// A message to be sent. What protobuf parses from its bytes is what it would have written itself.
// Thread-compatible. What is borrowed must outlive it.
class OutMessage {
 public:
  // Fields in any order; a number or a text that is proto3's default may be left out by the caller.
  void AddNumber(int field, uint64_t value);
  void AddBytes(int field, absl::string_view bytes);
  void AddTensor(int field, const TensorRef& tensor);
  void AddMessage(int field, const OutMessage& message);
  // The message's own long bytes fields are borrowed.
  void AddMessage(int field, const google::protobuf::MessageLite& message);
  // The fields of a message as if they were this one's.
  void Append(const google::protobuf::MessageLite& message);

  size_t size() const { return size_; }
  const std::vector<Segment>& segments() const { return segments_; }

 private:
  class Stream;

  std::string& own();
  void AppendTag(int field, int wire_type);
  void AppendVarint(uint64_t value);
  void AppendBytes(absl::string_view bytes);

  std::vector<Segment> segments_;
  size_t size_ = 0;
};

// Where a tensor of an answer goes: dtype and shape to `tensor`, its bytes there too or, where it
// is given, to the caller's memory.
struct TensorSink {
  Tensor* tensor = nullptr;
  std::optional<absl::Span<char>> into = std::nullopt;
  bool present = false;
  size_t read = 0;  // bytes, to the caller's memory
};

// A field of an answer that is looked for; others are skipped.
struct InField {
  int number = 0;
  std::variant<TensorSink*, google::protobuf::MessageLite*, std::vector<double>*> to;
};

// Reads a message to the input's limit, which must be set. A tensor's bytes are copied once.
// Returns INTERNAL where the bytes are no such message, and where a tensor has not as many bytes as
// the caller's memory.
absl::Status ReadMessage(google::protobuf::io::CodedInputStream& input,
                         absl::Span<const InField> fields);

}  // namespace attendant

#endif  // ATTENDANT_CLIENT_CPP_WIRE_H_
