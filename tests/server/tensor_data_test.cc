#include "server/tensor_data.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "core/scheduler.h"
#include "tests/server/testing.h"

namespace attendant::server {
namespace {

using ::testing::HasSubstr;

bool IsAligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % 64 == 0; }

v1::Tensor Bytes(int64_t count) {
  v1::Tensor tensor;
  tensor.set_dtype(v1::DATA_TYPE_BOOL);
  tensor.add_shape(count);
  for (int64_t i = 0; i < count; ++i) {
    tensor.mutable_data()->push_back(static_cast<char>(i * 7 + i / 251));
  }
  return tensor;
}

TEST(TensorDataTest, SmallRequestsAreCopiedAtOnceWhateverTheirSlices) {
  v1::AttendRequest request;
  *request.mutable_query() = Bytes(3);  // stays in the message
  *request.mutable_key() = Bytes(16);   // as long as a mark
  *request.mutable_value() = Bytes(1000);
  for (const size_t slice_bytes : {size_t{1}, size_t{7}, size_t{4096}}) {
    grpc::ByteBuffer bytes = BytesIn(request.SerializeAsString(), slice_bytes);
    const auto head = HeadOf<v1::AttendRequest>(bytes);
    CallData data;
    data.in.SetMessage(bytes);
    EXPECT_EQ(bytes.Length(), 0u);
    const int64_t before = CopiedTensorBytes();
    std::vector<const unsigned char*> read;
    for (const v1::Tensor* tensor : {&head.query(), &head.key(), &head.value()}) {
      read.push_back(data.in.Add(*tensor));
    }
    ASSERT_FALSE(data.in.Copy().has_value());
    EXPECT_EQ(CopiedTensorBytes() - before, 3 + 16 + 1000);
    EXPECT_EQ(data.memory->tensors.current_bytes(), 3 + 16 + 1000);
    const v1::Tensor* const sent[] = {&request.query(), &request.key(), &request.value()};
    for (int i = 0; i < 3; ++i) {
      EXPECT_TRUE(IsAligned(read[i]));
      EXPECT_EQ(std::memcmp(read[i], sent[i]->data().data(), sent[i]->data().size()), 0);
    }
    data.in.Free();
    EXPECT_EQ(data.memory->tensors.current_bytes(), 0);
  }
}

TEST(TensorDataTest, LargeRequestsAreCopiedByAStageEachByteOnce) {
  v1::AttendRequest request;
  *request.mutable_query() = Bytes(5);
  *request.mutable_key() = Bytes(kCopyTile + 3);
  *request.mutable_value() = Bytes(2 * kCopyTile);
  grpc::ByteBuffer bytes = BytesIn(request.SerializeAsString(), 5000);
  const auto head = HeadOf<v1::AttendRequest>(bytes);
  CallData data;
  data.in.SetMessage(bytes);
  const int64_t before = CopiedTensorBytes();
  const unsigned char* const query = data.in.Add(head.query());
  const unsigned char* const key = data.in.Add(head.key());
  const unsigned char* const value = data.in.Add(head.value());
  auto stage = data.in.Copy();
  ASSERT_TRUE(stage.has_value());
  EXPECT_EQ(stage->tiles, 4);
  core::Scheduler scheduler(2);
  ASSERT_TRUE(scheduler.Run({*std::move(stage)}).ok());
  EXPECT_EQ(CopiedTensorBytes() - before, 5 + 3 * kCopyTile + 3);
  EXPECT_NE(data.in.copied_at(), std::chrono::steady_clock::time_point());
  const auto same = [](const unsigned char* read, const v1::Tensor& sent) {
    return std::memcmp(read, sent.data().data(), sent.data().size()) == 0;
  };
  EXPECT_TRUE(same(query, request.query()));
  EXPECT_TRUE(same(key, request.key()));
  EXPECT_TRUE(same(value, request.value()));
}

TEST(TensorDataTest, ATensorWithoutBytesIsSomewhere) {
  CallData data;
  EXPECT_NE(data.in.Add(Bytes(0)), nullptr);
  EXPECT_NE(data.out.Add(1, Bytes(0)), nullptr);
  EXPECT_TRUE(data.status().ok());
  EXPECT_FALSE(data.in.Copy().has_value());
  const auto response = Parsed<v1::AttendResponse>(data.out.TakeMessage(v1::AttendResponse()));
  EXPECT_EQ(response.output().dtype(), v1::DATA_TYPE_BOOL);
  EXPECT_THAT(response.output().shape(), testing::ElementsAre(0));
}

TEST(TensorDataTest, WhatDoesNotFitIsSaid) {
  CallData data;
  data.memory->tensors.SetLimit(100);
  v1::Tensor head;
  head.set_dtype(v1::DATA_TYPE_FLOAT32);
  head.add_shape(20);
  EXPECT_NE(data.in.Add(head), nullptr);
  EXPECT_TRUE(data.status().ok());
  data.out.Add(1, head);
  EXPECT_EQ(data.status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(TensorDataTest, AResponsesSlicesOwnItsMemory) {
  auto data = std::make_unique<CallData>();
  const std::shared_ptr<CallMemory> memory = data->memory;
  v1::Tensor head;
  head.set_dtype(v1::DATA_TYPE_FLOAT32);
  head.add_shape(300);
  unsigned char* const output = data->out.Add(v1::AttendResponse::kOutputFieldNumber, head);
  unsigned char* const sums = data->out.Add(v1::AttendResponse::kKeySumsFieldNumber, head);
  EXPECT_TRUE(IsAligned(output));
  std::memset(output, 1, 1200);
  std::memset(sums, 2, 1200);
  v1::AttendResponse rest;
  rest.mutable_stats()->set_kernel("a kernel");
  grpc::ByteBuffer bytes = data->out.TakeMessage(rest);
  data.reset();
  EXPECT_EQ(memory->tensors.current_bytes(), 2400);
  {
    // No copy: the output is where it was computed.
    std::vector<grpc::Slice> slices;
    ASSERT_TRUE(bytes.Dump(&slices).ok());
    EXPECT_THAT(slices, testing::Contains(testing::Truly(
                            [&](const grpc::Slice& slice) { return slice.begin() == output; })));
  }
  v1::AttendResponse expected = rest;
  *expected.mutable_output() = head;
  expected.mutable_output()->set_data(std::string(1200, 1));
  *expected.mutable_key_sums() = head;
  expected.mutable_key_sums()->set_data(std::string(1200, 2));
  EXPECT_EQ(Parsed<v1::AttendResponse>(bytes).SerializeAsString(), expected.SerializeAsString());
  bytes.Clear();
  EXPECT_EQ(memory->tensors.current_bytes(), 0);
}

}  // namespace
}  // namespace attendant::server
