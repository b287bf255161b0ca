#include "server/wire.h"

#include <gmock/gmock.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <random>

#include "core/errors.h"
#include "tests/server/testing.h"

namespace attendant::server {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;
using ::testing::HasSubstr;

std::string FieldIn(const absl::Status& status) { return core::FieldOf(status).value_or(""); }

absl::Status Read(const std::string& bytes, Message& message, size_t slice_bytes = SIZE_MAX) {
  grpc::ByteBuffer buffer = BytesIn(bytes, slice_bytes);
  message.Clear();
  return ReadHead(buffer, message);
}

// Calls visit for every `data` of a tensor or piece in the message.
void ForEachData(Message& message, const std::function<void(std::string&)>& visit) {
  if (auto* const tensor = dynamic_cast<v1::Tensor*>(&message)) visit(*tensor->mutable_data());
  if (auto* const piece = dynamic_cast<v1::Piece*>(&message)) visit(*piece->mutable_data());
  const Reflection& reflection = *message.GetReflection();
  std::vector<const FieldDescriptor*> fields;
  reflection.ListFields(message, &fields);
  for (const FieldDescriptor* field : fields) {
    if (field->message_type() == nullptr) continue;
    if (!field->is_repeated()) {
      ForEachData(*reflection.MutableMessage(&message, field), visit);
      continue;
    }
    for (int i = 0; i < reflection.FieldSize(message, field); ++i) {
      ForEachData(*reflection.MutableRepeatedMessage(&message, field, i), visit);
    }
  }
}

// Puts the data back where ReadHead left it in the message's bytes.
void Complete(const std::string& bytes, Message& head) {
  ForEachData(head, [&](std::string& data) {
    const DataPlace place = PlaceOf(data);
    if (!place.held.empty() || place.bytes == 0) return;
    ASSERT_GE(place.offset, 0);
    ASSERT_LE(place.offset + place.bytes, static_cast<int64_t>(bytes.size()));
    data = bytes.substr(static_cast<size_t>(place.offset), static_cast<size_t>(place.bytes));
  });
}

// That ReadHead and protobuf's own parser say and read the same. Returns their verdict.
template <typename T>
bool ExpectAsProtobuf(const std::string& bytes, size_t slice_bytes) {
  T expected;
  const bool valid = expected.ParseFromString(bytes);
  T actual;
  const absl::Status status = Read(bytes, actual, slice_bytes);
  EXPECT_EQ(status.ok(), valid) << status << "\n" << testing::PrintToString(bytes);
  EXPECT_EQ(FieldIn(status).empty(), status.ok()) << status;
  if (!status.ok() || !valid) return valid;
  Complete(bytes, actual);
  // A field of another wire type than the contract's is unknown to protobuf as well.
  for (Message* message : {static_cast<Message*>(&expected), static_cast<Message*>(&actual)}) {
    message->DiscardUnknownFields();
  }
  EXPECT_EQ(actual.SerializeAsString(), expected.SerializeAsString())
      << testing::PrintToString(bytes);
  return valid;
}

v1::Tensor RandomTensor(std::mt19937& rng) {
  v1::Tensor tensor;
  tensor.set_dtype(static_cast<v1::DataType>(rng() % 7));
  for (uint32_t i = rng() % 5; i > 0; --i) tensor.add_shape(static_cast<int64_t>(rng() % 300) - 4);
  tensor.mutable_data()->resize(rng() % 3 == 0 ? rng() % 20 : rng() % 200);
  for (char& byte : *tensor.mutable_data()) byte = static_cast<char>(rng());
  return tensor;
}

void RandomOptions(std::mt19937& rng, v1::AttendOptions* options) {
  options->set_path(static_cast<v1::Path>(rng() % 4));
  if (rng() % 2 == 0) options->set_scale(rng() % 9);
  if (rng() % 2 == 0) *options->mutable_mask() = RandomTensor(rng);
  for (uint32_t i = rng() % 4; i > 0; --i) options->add_key_lengths(rng());
  for (uint32_t i = rng() % 3; i > 0; --i) options->add_sinks(rng());
  if (rng() % 2 == 0) options->mutable_window()->set_left(rng() % 9);
  options->set_return_weights(rng() % 2 == 0);
}

void Fill(std::mt19937& rng, v1::AttendRequest& r) {
  *r.mutable_query() = RandomTensor(rng);
  *r.mutable_key() = RandomTensor(rng);
  if (rng() % 4 != 0) *r.mutable_value() = RandomTensor(rng);
  if (rng() % 2 == 0) RandomOptions(rng, r.mutable_options());
}
void Fill(std::mt19937& rng, v1::HeadRequest& r) {
  *r.mutable_x() = RandomTensor(rng);
  *r.mutable_w_q() = RandomTensor(rng);
  *r.mutable_w_o() = RandomTensor(rng);
  r.set_heads(rng() % 5);
  RandomOptions(rng, r.mutable_options());
}
void Fill(std::mt19937& rng, v1::BackwardRequest& r) {
  *r.mutable_query() = RandomTensor(rng);
  *r.mutable_d_output() = RandomTensor(rng);
  *r.mutable_logsumexp() = RandomTensor(rng);
  r.set_return_d_mask(true);
}
void Fill(std::mt19937& rng, v1::CheckRequest& r) {
  *r.mutable_candidate() = RandomTensor(rng);
  Fill(rng, *r.mutable_head());
  *r.mutable_head_candidate()->mutable_logits() = RandomTensor(rng);
  r.mutable_head_candidate()->mutable_stats()->set_kernel("a kernel");
}
void Fill(std::mt19937& rng, v1::MergeRequest& r) {
  for (uint32_t i = rng() % 4; i > 0; --i) {
    v1::MergePart* const part = r.add_parts();
    *part->mutable_output() = RandomTensor(rng);
    *part->mutable_logsumexp() = RandomTensor(rng);
  }
}
void Fill(std::mt19937& rng, v1::AttendStreamRequest& r) {
  if (rng() % 3 == 0) {
    Fill(rng, *r.mutable_header());
    return;
  }
  r.mutable_piece()->set_tensor(static_cast<v1::PieceTensor>(rng() % 9));
  r.mutable_piece()->set_offset(rng());
  *r.mutable_piece()->mutable_data() = RandomTensor(rng).data();
}

// Changes some bytes, most of them where tags and lengths are.
std::string Mutated(std::mt19937& rng, std::string bytes) {
  const auto at = [&] { return bytes.empty() ? 0 : rng() % bytes.size(); };
  for (uint32_t i = 1 + rng() % 3; i > 0; --i) {
    switch (rng() % 7) {
      case 0:
        if (!bytes.empty()) bytes[at()] = static_cast<char>(rng());
        break;
      case 1:  // a tag of the contract's, or an unknown group's
        if (!bytes.empty()) bytes[at()] = static_cast<char>(rng() % 100);
        break;
      case 2:
        bytes.resize(at());
        break;
      case 3:
        bytes.insert(at(), 1, static_cast<char>(rng() % 128));
        break;
      case 4:  // a long varint
        bytes.insert(at(), std::string(rng() % 12, '\x80') + '\1');
        break;
      case 5:
        if (!bytes.empty()) bytes.erase(at(), 1 + rng() % 3);
        break;
      default:  // twice: merged, or last wins
        bytes += bytes.substr(at());
        break;
    }
  }
  return bytes;
}

constexpr size_t kSlices[] = {1, 7, 64, SIZE_MAX};

template <typename T>
void ExpectManyAsProtobuf(uint32_t seed) {
  std::mt19937 rng(seed);
  int valid = 0;
  constexpr int kMessages = 700;
  for (int i = 0; i < kMessages && !testing::Test::HasFailure(); ++i) {
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", message " << i);
    T message;
    Fill(rng, message);
    std::string bytes = message.SerializeAsString();
    ASSERT_TRUE(ExpectAsProtobuf<T>(bytes, kSlices[rng() % 4]));
    for (int m = 0; m < 4; ++m) {
      if (ExpectAsProtobuf<T>(Mutated(rng, bytes), kSlices[rng() % 4])) ++valid;
    }
  }
  // Both verdicts are tried.
  EXPECT_GT(valid, kMessages / 4);
  EXPECT_LT(valid, 4 * kMessages - kMessages / 4);
}

TEST(WireTest, AttendRequestsAreReadAsProtobufReadsThem) {
  ExpectManyAsProtobuf<v1::AttendRequest>(1);
}
TEST(WireTest, HeadRequestsAreReadAsProtobufReadsThem) { ExpectManyAsProtobuf<v1::HeadRequest>(2); }
TEST(WireTest, BackwardRequestsAreReadAsProtobufReadsThem) {
  ExpectManyAsProtobuf<v1::BackwardRequest>(3);
}
TEST(WireTest, CheckRequestsAreReadAsProtobufReadsThem) {
  ExpectManyAsProtobuf<v1::CheckRequest>(4);
}
TEST(WireTest, MergeRequestsAreReadAsProtobufReadsThem) {
  ExpectManyAsProtobuf<v1::MergeRequest>(5);
}
TEST(WireTest, StreamMessagesAreReadAsProtobufReadsThem) {
  ExpectManyAsProtobuf<v1::AttendStreamRequest>(6);
}

TEST(WireTest, WhereverAMessageIsCutOffItsVerdictIsProtobufs) {
  std::mt19937 rng(7);
  v1::CheckRequest request;
  Fill(rng, request);
  const std::string bytes = request.SerializeAsString();
  for (size_t length = 0; length <= bytes.size(); ++length) {
    ExpectAsProtobuf<v1::CheckRequest>(bytes.substr(0, length), 64);
  }
}

TEST(WireTest, NoBytesAreAnEmptyMessage) {
  v1::AttendRequest message;
  EXPECT_TRUE(Read("", message).ok());
  EXPECT_FALSE(message.has_query());
  grpc::ByteBuffer empty(nullptr, 0);
  EXPECT_TRUE(ReadHead(empty, message).ok());
}

TEST(WireTest, DataOfEveryLengthIsFoundAgain) {
  for (size_t length = 0; length < 40; ++length) {
    v1::AttendRequest request;
    request.mutable_key()->set_data(std::string(length, 'x'));
    EXPECT_TRUE(ExpectAsProtobuf<v1::AttendRequest>(request.SerializeAsString(), 3));
  }
}

TEST(WireTest, DataThatComesTwiceIsTheLast) {
  v1::AttendRequest first;
  first.mutable_query()->set_data(std::string(100, 'a'));
  first.mutable_query()->add_shape(3);
  v1::AttendRequest second;
  second.mutable_query()->set_data(std::string(50, 'b'));
  second.mutable_query()->add_shape(4);
  const std::string bytes = first.SerializeAsString() + second.SerializeAsString();
  v1::AttendRequest read;
  ASSERT_TRUE(Read(bytes, read).ok());
  EXPECT_THAT(read.query().shape(), testing::ElementsAre(3, 4));
  Complete(bytes, read);
  EXPECT_EQ(read.query().data(), std::string(50, 'b'));
}

TEST(WireTest, AShortMessageMayNotClaimGigabytes) {
  // query { data: 1.9 GB of which 10 bytes came }: nothing of that size is allocated.
  std::string bytes;
  std::string claim;
  AppendLengthPrefix(v1::Tensor::kDataFieldNumber, 1'900'000'000, claim);
  claim += std::string(10, 'x');
  AppendLengthPrefix(v1::AttendRequest::kQueryFieldNumber, static_cast<int64_t>(claim.size()),
                     bytes);
  bytes += claim;
  v1::AttendRequest message;
  absl::Status status = Read(bytes, message);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldIn(status), "query.data");
  EXPECT_THAT(std::string(status.message()), HasSubstr("1900000000, and 10 bytes are left"));
  // The same of a message, and of a field that nobody knows.
  for (const int number : {1, 77}) {
    bytes.clear();
    AppendLengthPrefix(number, 1'900'000'000, bytes);
    EXPECT_EQ(Read(bytes + "0123456789", message).code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST(WireTest, WhatIsMalformedIsNamed) {
  const auto field_of = [](Message&& message, const std::string& bytes) {
    return FieldIn(Read(bytes, message));
  };
  EXPECT_EQ(field_of(v1::AttendRequest(), std::string(1, '\0')), "request");
  v1::MergeRequest merge;
  merge.add_parts()->mutable_output()->set_data("abc");
  merge.add_parts()->mutable_logsumexp()->set_data("abc");
  std::string bytes = merge.SerializeAsString();
  bytes[bytes.size() - 4] = 9;  // of three bytes
  EXPECT_EQ(field_of(v1::MergeRequest(), bytes), "parts[1].logsumexp.data");
  // A packed number that does not end, in a shape whose length is right.
  EXPECT_EQ(field_of(v1::AttendRequest(), std::string("\x1a\x04\x12\x02\x01\x80", 6)),
            "value.shape[0]");
  EXPECT_EQ(field_of(v1::CheckRequest(), std::string("\x3a\x05\x42\x03\x3a\x01\xff", 7)),
            "head_candidate.stats.kernel");
  // A query of wire type 6, and one whose length does not end.
  v1::AttendRequest attend;
  EXPECT_THAT(std::string(Read("\x0e", attend).message()),
              HasSubstr("query: is not as protobuf writes it: it has an unknown wire type"));
  EXPECT_THAT(std::string(Read("\x0a\x80", attend).message()),
              HasSubstr("query: is not as protobuf writes it: its length does not end"));
}

TEST(WireTest, WhatIsBesideTheDataIsBounded) {
  v1::AttendRequest request;
  request.mutable_options()->mutable_key_lengths()->Resize(static_cast<int>(kLongestHead) + 9, 1);
  v1::AttendRequest message;
  absl::Status status = Read(request.SerializeAsString(), message);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("options.key_lengths"));
  // Of a field that nobody knows nothing is kept.
  std::string bytes;
  AppendLengthPrefix(77, kLongestHead + 9, bytes);
  bytes += std::string(static_cast<size_t>(kLongestHead) + 9, 'x');
  EXPECT_TRUE(Read(bytes, message).ok());
}

TEST(WireTest, RepeatedMessagesAreBounded) {
  v1::MergeRequest request;
  for (int i = 0; i < kMostRepeated; ++i) request.add_parts();
  v1::MergeRequest message;
  EXPECT_EQ(Read(request.SerializeAsString(), message), absl::OkStatus());
  EXPECT_EQ(message.parts_size(), kMostRepeated);
  request.add_parts();
  const absl::Status status = Read(request.SerializeAsString(), message);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldIn(status), "parts[65536]");
  EXPECT_THAT(std::string(status.message()), HasSubstr("65536 repeated messages"));
}

}  // namespace
}  // namespace attendant::server
