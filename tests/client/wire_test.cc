// What the client writes against what protobuf writes, and what it reads of what protobuf wrote.
#include "client/cpp/wire.h"

#include <gmock/gmock.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "attendant/v1/attention.pb.h"

namespace attendant {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string TextOf(const OutMessage& message) {
  std::string text;
  for (const Segment& segment : message.segments()) {
    text += segment.own;
    text += std::string(segment.borrowed);
  }
  return text;
}

// Whether the memory is sent from where it lies.
bool Borrows(const OutMessage& message, absl::string_view bytes) {
  for (const Segment& segment : message.segments()) {
    if (segment.borrowed.data() == bytes.data() && segment.borrowed.size() == bytes.size()) {
      return true;
    }
  }
  return false;
}

absl::Status Read(const std::string& text, absl::Span<const InField> fields) {
  // In small blocks, as gRPC's slices are.
  google::protobuf::io::ArrayInputStream stream(text.data(), static_cast<int>(text.size()), 7);
  google::protobuf::io::CodedInputStream input(&stream);
  input.PushLimit(static_cast<int>(text.size()));
  return ReadMessage(input, fields);
}

void Set(const TensorRef& tensor, v1::Tensor* to) {
  to->set_dtype(tensor.dtype());
  to->mutable_shape()->Assign(tensor.shape().begin(), tensor.shape().end());
  to->set_data(tensor.bytes().data(), tensor.bytes().size());
}

v1::AttendOptions EveryOption(const std::string& mask) {
  v1::AttendOptions options;
  options.set_path(v1::PATH_EXPLICIT);
  options.set_scale(-0.5);
  options.set_causal(v1::CAUSAL_BOTTOM_RIGHT);
  options.mutable_mask()->set_dtype(v1::DATA_TYPE_BOOL);
  options.mutable_mask()->add_shape(static_cast<int64_t>(mask.size()));
  options.mutable_mask()->set_data(mask);
  options.add_key_lengths(300);
  options.mutable_window()->set_left(0);
  options.add_sinks(1.5);
  options.set_return_key_sums(true);
  return options;
}

TEST(OutMessageTest, BytesAreThoseOfProtobuf) {
  for (const size_t size : {size_t{0}, size_t{1}, size_t{1023}, size_t{1024}, size_t{70000}}) {
    SCOPED_TRACE(size);
    const std::string bytes(size, 'x');
    const TensorRef tensor(v1::DATA_TYPE_BOOL, {1, static_cast<int64_t>(size), -3}, bytes);
    const TensorRef empty(v1::DATA_TYPE_UNSPECIFIED, {}, "");
    const v1::AttendOptions options = EveryOption(bytes);
    OutMessage request;
    request.AddTensor(1, tensor);
    request.AddTensor(2, empty);
    request.AddTensor(3, tensor);
    request.AddMessage(4, options);
    v1::AttendRequest same;
    Set(tensor, same.mutable_query());
    Set(empty, same.mutable_key());
    Set(tensor, same.mutable_value());
    *same.mutable_options() = options;
    EXPECT_EQ(TextOf(request), same.SerializeAsString());
    EXPECT_EQ(request.size(), same.ByteSizeLong());
  }
}

TEST(OutMessageTest, LongBytesAreSentFromWhereTheyLie) {
  const std::string bytes(5000, 'x');
  const std::string mask(70000, '\1');
  const v1::AttendOptions options = EveryOption(mask);
  OutMessage request;
  request.AddTensor(1, {v1::DATA_TYPE_BOOL, {5000}, bytes});
  request.AddMessage(4, options);
  OutMessage outer;
  outer.AddMessage(6, request);
  EXPECT_TRUE(Borrows(outer, bytes));
  EXPECT_TRUE(Borrows(outer, options.mask().data()));
}

TEST(OutMessageTest, NumbersAndNestedMessages) {
  v1::AttendStreamRequest same;
  same.mutable_piece()->set_tensor(v1::PIECE_TENSOR_VALUE);
  same.mutable_piece()->set_offset(int64_t{1} << 40);
  same.mutable_piece()->set_data("abc");
  OutMessage piece;
  piece.AddNumber(1, v1::PIECE_TENSOR_VALUE);
  piece.AddNumber(2, uint64_t{1} << 40);
  piece.AddBytes(3, "abc");
  OutMessage message;
  message.AddMessage(2, piece);
  EXPECT_EQ(TextOf(message), same.SerializeAsString());
  v1::EstimateRequest estimate;
  estimate.set_batch(3);
  estimate.set_kv_heads(0);
  OutMessage appended;
  appended.Append(estimate);
  EXPECT_EQ(TextOf(appended), estimate.SerializeAsString());
}

v1::BackwardResponse Response() {
  v1::BackwardResponse response;
  Set({v1::DATA_TYPE_FLOAT32, {2, 3}, "0123456789abcdef01234567"}, response.mutable_d_query());
  Set({v1::DATA_TYPE_FLOAT64, {0, 300}, ""}, response.mutable_d_key());
  response.mutable_stats()->set_flops(1234567);
  response.add_d_sinks(0.25);
  response.add_d_sinks(-2);
  return response;
}

TEST(ReadMessageTest, ReadsWhatProtobufWrote) {
  Tensor d_query, d_key, d_value;
  TensorSink sinks[] = {{&d_query}, {&d_key}, {&d_value}};
  v1::Stats stats;
  std::vector<double> d_sinks;
  ASSERT_TRUE(Read(Response().SerializeAsString(),
                   {{1, &sinks[0]}, {2, &sinks[1]}, {3, &sinks[2]}, {5, &stats}, {6, &d_sinks}})
                  .ok());
  EXPECT_EQ(d_query.dtype, v1::DATA_TYPE_FLOAT32);
  EXPECT_THAT(d_query.shape, ElementsAre(2, 3));
  EXPECT_EQ(d_query.bytes, "0123456789abcdef01234567");
  EXPECT_THAT(d_key.shape, ElementsAre(0, 300));
  EXPECT_TRUE(sinks[1].present);
  EXPECT_FALSE(sinks[2].present);
  EXPECT_EQ(stats.flops(), 1234567);
  EXPECT_THAT(d_sinks, ElementsAre(0.25, -2));
}

TEST(ReadMessageTest, TheCallersMemoryIsWrittenWhereItIsAsLongAsTheTensor) {
  Tensor tensor;
  std::string memory(24, '?');
  TensorSink sink{&tensor, absl::MakeSpan(&memory[0], memory.size())};
  ASSERT_TRUE(Read(Response().SerializeAsString(), {{1, &sink}}).ok());
  EXPECT_EQ(memory, "0123456789abcdef01234567");
  EXPECT_EQ(sink.read, 24u);
  EXPECT_TRUE(tensor.bytes.empty());
  TensorSink shorter{&tensor, absl::MakeSpan(&memory[0], 23)};
  const absl::Status status = Read(Response().SerializeAsString(), {{1, &shorter}});
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), HasSubstr("24 bytes, the memory for it 23"));
}

// No beginning of a message but those that end between fields is taken for one, and none is read
// beyond its end.
TEST(ReadMessageTest, EveryTruncationIsNoticed) {
  const std::string text = Response().SerializeAsString();
  for (size_t size = 0; size < text.size(); ++size) {
    Tensor d_query, d_key;
    TensorSink sinks[] = {{&d_query}, {&d_key}};
    v1::Stats stats;
    std::vector<double> d_sinks;
    const std::string cut = text.substr(0, size);
    const bool read = Read(cut, {{1, &sinks[0]}, {2, &sinks[1]}, {5, &stats}, {6, &d_sinks}}).ok();
    EXPECT_EQ(read, v1::BackwardResponse().ParseFromString(cut)) << size;
  }
}

TEST(ReadMessageTest, UnknownFieldsAreSkipped) {
  // Field 9 in each wire type, then the stats.
  std::string text(
      "\x48\x96\x01\x49"
      "12345678\x4a\x03"
      "abc\x4d"
      "1234",
      22);
  v1::BackwardResponse response;
  response.mutable_stats()->set_flops(7);
  text += response.SerializeAsString();
  v1::Stats stats;
  ASSERT_TRUE(Read(text, {{5, &stats}}).ok());
  EXPECT_EQ(stats.flops(), 7);
}

}  // namespace
}  // namespace attendant
