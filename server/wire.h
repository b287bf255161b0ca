// The bytes of a message, read without touching what its tensors hold.
//
//   message  = { field }                       up to the end, or the length that came before it
//   field    = tag value                       tag: varint of number << 3 | wire type, 1 to 5 bytes
//   value    = varint                          wire type 0
//            | 8 bytes                         1
//            | length, as many bytes           2: a message, string, bytes or packed numbers
//            | { field } tag                   3, closed by 4: a group, which the contract has none
//            of | 4 bytes                         5
//   length   = varint below 2^31, 1 to 5 bytes
//   Tensor   = { dtype | shape | data | unknown field }      in any order, any of them repeated
//   Piece    = { tensor | offset | data | unknown field }
//
// Source: https://protobuf.dev/programming-guides/encoding/
//
// A request is read in two passes. The first, here, walks over this grammar and skips the bytes of
// every `data`: what is left is short, and protobuf itself parses it. So last-wins, merging of
// messages that come twice, packed and unpacked numbers and fields in any order are protobuf's own,
// and no order of fields needs another reader. In the parsed message each `data` says where its
// bytes lie. The second pass, once the call is admitted, copies them: server/tensor_data.h.
#ifndef ATTENDANT_SERVER_WIRE_H_
#define ATTENDANT_SERVER_WIRE_H_

#include <google/protobuf/message.h>
#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace attendant::server {

// Everything of a message beside its tensors' bytes: the lengths of a million batches fit. Parsed
// it takes a few times as much, before anything is admitted.
inline constexpr int64_t kLongestHead = int64_t{4} << 20;
// Repeated messages in one message, such as the parts of a MergeRequest. Two bytes can be one, and
// parsed it takes a hundred.
inline constexpr int kMostRepeated = 1 << 16;

// Reads all of `bytes` but its tensors' data into `message`, which is empty. Unknown fields are
// skipped. Returns INVALID_ARGUMENT naming the field where the bytes are no such message, or hold
// more than kMostRepeated repeated ones; RESOURCE_EXHAUSTED where what is beside the data is longer
// than kLongestHead. REQUIRES: bytes is valid.
absl::Status ReadHead(grpc::ByteBuffer& bytes, google::protobuf::Message& message);

// Where the bytes of a `data` field of such a message are.
struct DataPlace {
  int64_t bytes = 0;
  int64_t offset = 0;      // of the first of them in the message's bytes
  absl::string_view held;  // themselves, where they are so few that they stayed in the message
};
DataPlace PlaceOf(const std::string& data);

// Appends them as protobuf writes them.
void AppendVarint(uint64_t value, std::string& out);
// Tag and length of a field whose bytes follow.
void AppendLengthPrefix(int number, int64_t bytes, std::string& out);

}  // namespace attendant::server

#endif  // ATTENDANT_SERVER_WIRE_H_
