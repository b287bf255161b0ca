// What the server's tests share: a server on a free loopback port, stubs, small requests.
#ifndef ATTENDANT_TESTS_SERVER_TESTING_H_
#define ATTENDANT_TESTS_SERVER_TESTING_H_

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/byte_buffer.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attendant/v1/attention.grpc.pb.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "server/server.h"
#include "server/tensor_data.h"
#include "server/wire.h"

namespace attendant::server {

inline Config LoopbackConfig() {
  Config config;
  config.listen = {"127.0.0.1:0"};
  config.metrics_listen = "127.0.0.1:0";
  config.compute_threads = 2;
  config.drain_delay = absl::ZeroDuration();
  config.measure_peak = false;
  return config;
}

inline std::shared_ptr<grpc::Channel> ChannelTo(const Server& server) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  return grpc::CreateCustomChannel(server.address(), grpc::InsecureChannelCredentials(), arguments);
}

// Far beyond any test's call: a call that hangs fails instead.
inline void SetTestDeadline(grpc::ClientContext& context) {
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
}

template <typename T>
void SetTensor(v1::DataType dtype, const std::vector<int64_t>& shape, const std::vector<T>& values,
               v1::Tensor* tensor) {
  tensor->set_dtype(dtype);
  tensor->clear_shape();
  for (const int64_t size : shape) tensor->add_shape(size);
  tensor->set_data(values.data(), values.size() * sizeof(T));
}

template <typename T>
std::vector<T> ValuesOf(const v1::Tensor& tensor) {
  const auto* const values = reinterpret_cast<const T*>(tensor.data().data());
  return {values, values + tensor.data().size() / sizeof(T)};
}

// Float tensors of one shape whose values are all `value`.
inline v1::AttendRequest ConstantRequest(const std::vector<int64_t>& shape, float value) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  const std::vector<float> values(static_cast<size_t>(count), value);
  v1::AttendRequest request;
  SetTensor(v1::DATA_TYPE_FLOAT32, shape, values, request.mutable_query());
  SetTensor(v1::DATA_TYPE_FLOAT32, shape, values, request.mutable_key());
  SetTensor(v1::DATA_TYPE_FLOAT32, shape, values, request.mutable_value());
  return request;
}

// Two keys whose scores are equal: the output is the mean of their values, 2.
inline v1::AttendRequest MeanRequest() {
  v1::AttendRequest request;
  SetTensor<float>(v1::DATA_TYPE_FLOAT32, {1, 1, 1, 1}, {0}, request.mutable_query());
  SetTensor<float>(v1::DATA_TYPE_FLOAT32, {1, 1, 2, 1}, {5, 6}, request.mutable_key());
  SetTensor<float>(v1::DATA_TYPE_FLOAT32, {1, 1, 2, 1}, {1, 3}, request.mutable_value());
  return request;
}

// A call that computes for seconds and has a small answer: 3e11 FLOPs and 5e9 exponentials.
inline v1::AttendRequest LongRequest() {
  constexpr int64_t kTokens = 24576;
  v1::AttendRequest request = ConstantRequest({1, 8, kTokens, 32}, 0.5f);
  SetTensor(v1::DATA_TYPE_FLOAT32, {1, 8, kTokens, 1}, std::vector<float>(8 * kTokens),
            request.mutable_value());
  return request;
}

// The bytes of a message, in slices of so many bytes each, or all in one.
inline grpc::ByteBuffer BytesIn(const std::string& bytes, size_t slice_bytes = SIZE_MAX) {
  std::vector<grpc::Slice> slices;
  for (size_t begin = 0; begin < bytes.size(); begin += slices.back().size()) {
    slices.emplace_back(bytes.data() + begin, std::min(slice_bytes, bytes.size() - begin));
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

// A request as the server's own code meets it: read from its bytes, but for its tensors' data.
template <typename Message>
Message HeadOf(grpc::ByteBuffer& bytes) {
  Message head;
  const absl::Status status = ReadHead(bytes, head);
  EXPECT_TRUE(status.ok()) << status;
  return head;
}
template <typename Message>
Message HeadOf(const Message& sent) {
  grpc::ByteBuffer bytes = BytesIn(sent.SerializeAsString());
  return HeadOf<Message>(bytes);
}

// Such a request whose data is in `data`, to be copied there once the tensors were read.
template <typename Message>
Message Arrived(const Message& sent, CallData& data) {
  grpc::ByteBuffer bytes = BytesIn(sent.SerializeAsString());
  const Message head = HeadOf<Message>(bytes);
  data.in.SetMessage(bytes);
  return head;
}

// The whole of a message in its bytes.
template <typename Message>
Message Parsed(const grpc::ByteBuffer& bytes) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(bytes.Dump(&slices).ok());
  std::string all;
  for (const grpc::Slice& slice : slices) all.append(slice.begin(), slice.end());
  Message message;
  EXPECT_TRUE(message.ParseFromString(all));
  return message;
}

// The first detail of type Detail in a status, or one that is empty.
template <typename Detail>
Detail DetailOf(const grpc::Status& status) {
  google::rpc::Status proto;
  proto.ParseFromString(status.error_details());
  Detail detail;
  for (const auto& any : proto.details()) {
    if (any.UnpackTo(&detail)) break;
  }
  return detail;
}

}  // namespace attendant::server

#endif  // ATTENDANT_TESTS_SERVER_TESTING_H_
