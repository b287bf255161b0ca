// AttendStream through a real stub, over loopback: flow control is the transport's.
#include "server/attend_stream.h"

#include <gmock/gmock.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <thread>

#include "absl/strings/match.h"
#include "core/workspace.h"
#include "server/peer_wait.h"
#include "tests/server/serving.h"
#include "tests/server/testing.h"

namespace attendant::server {
namespace {

using ::testing::HasSubstr;

using Stream = grpc::ClientReaderWriter<v1::AttendStreamRequest, v1::AttendStreamResponse>;

class AttendStreamTest : public testing::Test {
 protected:
  AttendStreamTest() {
    int port = 0;
    grpc::ServerBuilder builder;
    builder.RegisterService(&service_);
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.SetMaxReceiveMessageSize(-1);
    server_ = builder.BuildAndStart();
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    stub_ = v1::Attention::NewStub(grpc::CreateCustomChannel(
        absl::StrCat("127.0.0.1:", port), grpc::InsecureChannelCredentials(), arguments));
  }
  ~AttendStreamTest() override {
    service_.StopRunning();
    server_->Shutdown(std::chrono::system_clock::now());
    server_->Wait();
  }

  // Every call is answered and its memory is back.
  bool IsIdle() {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    if (!service_.WaitUntilIdle(deadline)) return false;
    while (core::Workspace::Process().current_bytes() != 0) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::yield();
    }
    return true;
  }

  Metrics metrics_{{"test", "test", "test"}};
  core::Scheduler scheduler_{2};
  AttentionService service_{
      {.max_message_bytes = 1 << 20, .memory_budget_bytes = 256 << 20, .peak = {}},
      scheduler_,
      metrics_};
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<v1::Attention::Stub> stub_;
};

v1::AttendRequest RandomRequest(const std::vector<int64_t>& shape, uint32_t seed) {
  std::mt19937 rng(seed);
  std::uniform_real_distribution<float> uniform(-1, 1);
  v1::AttendRequest request = ConstantRequest(shape, 0);
  for (v1::Tensor* const tensor :
       {request.mutable_query(), request.mutable_key(), request.mutable_value()}) {
    auto* const values = reinterpret_cast<float*>(tensor->mutable_data()->data());
    std::generate_n(values, tensor->data().size() / sizeof(float), [&] { return uniform(rng); });
  }
  return request;
}

// With an output of 128 KiB a head, all of it 3.
v1::AttendRequest LargeAnswerRequest(int64_t heads) {
  v1::AttendRequest request = RandomRequest({1, heads, 2, 1}, 3);
  SetTensor(v1::DATA_TYPE_FLOAT32, {1, heads, 2, 16384},
            std::vector<float>(static_cast<size_t>(heads) * 2 * 16384, 3), request.mutable_value());
  return request;
}

v1::AttendStreamRequest HeaderOf(v1::AttendRequest request) {
  for (v1::Tensor* const tensor :
       {request.mutable_query(), request.mutable_key(), request.mutable_value()}) {
    tensor->clear_data();
  }
  if (request.options().has_mask()) request.mutable_options()->mutable_mask()->clear_data();
  v1::AttendStreamRequest message;
  *message.mutable_header() = std::move(request);
  return message;
}

v1::AttendStreamRequest PieceOf(v1::PieceTensor tensor, int64_t offset, std::string data) {
  v1::AttendStreamRequest message;
  message.mutable_piece()->set_tensor(tensor);
  message.mutable_piece()->set_offset(offset);
  message.mutable_piece()->set_data(std::move(data));
  return message;
}

std::vector<v1::AttendStreamRequest> PiecesOf(const v1::AttendRequest& request, size_t bytes) {
  std::vector<v1::AttendStreamRequest> pieces;
  const std::pair<v1::PieceTensor, const std::string*> tensors[] = {
      {v1::PIECE_TENSOR_QUERY, &request.query().data()},
      {v1::PIECE_TENSOR_KEY, &request.key().data()},
      {v1::PIECE_TENSOR_VALUE, &request.value().data()},
      {v1::PIECE_TENSOR_MASK, &request.options().mask().data()}};
  for (const auto& [tensor, data] : tensors) {
    for (size_t begin = 0; begin < data->size(); begin += bytes) {
      pieces.push_back(PieceOf(tensor, static_cast<int64_t>(begin), data->substr(begin, bytes)));
    }
  }
  return pieces;
}

// Reads the answer, a header and pieces in any order, into one response.
grpc::Status ReadAll(Stream& stream, v1::AttendResponse* response) {
  v1::AttendStreamResponse message;
  bool first = true;
  while (stream.Read(&message)) {
    EXPECT_EQ(message.has_header(), first);
    if (first) *response = message.header();
    first = false;
    if (!message.has_piece()) continue;
    const v1::Piece& piece = message.piece();
    // A message may have 1 MiB here.
    EXPECT_LT(message.ByteSizeLong(), size_t{1} << 20);
    v1::Tensor* const tensor =
        piece.tensor() == v1::PIECE_TENSOR_OUTPUT      ? response->mutable_output()
        : piece.tensor() == v1::PIECE_TENSOR_WEIGHTS   ? response->mutable_weights()
        : piece.tensor() == v1::PIECE_TENSOR_LOGSUMEXP ? response->mutable_logsumexp()
                                                       : response->mutable_key_sums();
    EXPECT_EQ(static_cast<int64_t>(tensor->data().size()), piece.offset());
    tensor->mutable_data()->append(piece.data());
  }
  return stream.Finish();
}

grpc::Status Send(Stream& stream, const std::vector<v1::AttendStreamRequest>& messages,
                  v1::AttendResponse* response) {
  for (const v1::AttendStreamRequest& message : messages) {
    if (!stream.Write(message)) break;
  }
  stream.WritesDone();
  return ReadAll(stream, response);
}

void ExpectSameTensors(v1::AttendResponse a, v1::AttendResponse b) {
  a.clear_stats();
  b.clear_stats();
  EXPECT_TRUE(a.SerializeAsString() == b.SerializeAsString());
}

TEST_F(AttendStreamTest, AnswersAsAttendDoesWhateverTheOrderOfThePieces) {
  v1::AttendRequest request = RandomRequest({1, 2, 150, 16}, 1);
  v1::AttendOptions& options = *request.mutable_options();
  SetTensor(v1::DATA_TYPE_FLOAT32, {150, 150}, std::vector<float>(150 * 150, 0.5f),
            options.mutable_mask());
  options.set_return_weights(true);
  options.set_return_logsumexp(true);
  options.set_return_key_sums(true);
  v1::AttendResponse expected;
  {
    grpc::ClientContext context;
    SetTestDeadline(context);
    ASSERT_TRUE(stub_->Attend(&context, request, &expected).ok());
  }
  std::mt19937 rng(2);
  // A thousand and more of 100 bytes, and whole tensors.
  for (const size_t bytes : {100, 7001, 1 << 20}) {
    auto messages = PiecesOf(request, bytes);
    std::shuffle(messages.begin(), messages.end(), rng);
    messages.insert(messages.begin(), HeaderOf(request));
    const int64_t before = CopiedTensorBytes();
    grpc::ClientContext context;
    SetTestDeadline(context);
    const auto stream = stub_->AttendStream(&context);
    v1::AttendResponse response;
    const grpc::Status status = Send(*stream, messages, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    ExpectSameTensors(response, expected);
    EXPECT_EQ(response.stats().flops(), expected.stats().flops());
    EXPECT_EQ(CopiedTensorBytes() - before, (3 * 2 * 150 * 16 + 150 * 150) * 4);
  }
  EXPECT_TRUE(IsIdle());
  EXPECT_THAT(metrics_.Text(), HasSubstr("attendant_requests_total{code=\"OK\","
                                         "method=\"AttendStream\",path=\"chunked\"} 3"));
}

TEST_F(AttendStreamTest, AnswersLargerThanAMessageComeInPieces) {
  // 4.5 MiB of output, where a message may have 1 MiB.
  const v1::AttendRequest request = LargeAnswerRequest(36);
  auto messages = PiecesOf(request, kLongestPiece);
  messages.insert(messages.begin(), HeaderOf(request));
  grpc::ClientContext context;
  SetTestDeadline(context);
  const auto stream = stub_->AttendStream(&context);
  v1::AttendResponse response;
  const grpc::Status status = Send(*stream, messages, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  const std::vector<float> output = ValuesOf<float>(response.output());
  EXPECT_EQ(output.size(), 36u * 2 * 16384);
  EXPECT_THAT(output, testing::Each(testing::FloatNear(3, 1e-5)));
}

TEST_F(AttendStreamTest, AnEmptyProblemNeedsNoPiece) {
  grpc::ClientContext context;
  SetTestDeadline(context);
  const auto stream = stub_->AttendStream(&context);
  v1::AttendResponse response;
  const grpc::Status status =
      Send(*stream, {HeaderOf(ConstantRequest({1, 2, 0, 4}, 0))}, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_THAT(response.output().shape(), testing::ElementsAre(1, 2, 0, 4));
}

TEST_F(AttendStreamTest, WhatIsWrongIsNamedWithItsRange) {
  const v1::AttendRequest request = RandomRequest({1, 1, 8, 4}, 4);  // 128 bytes each
  const v1::AttendStreamRequest header = HeaderOf(request);
  const std::vector<v1::AttendStreamRequest> all = PiecesOf(request, 128);
  const std::string bytes(64, 'x');
  constexpr auto kQuery = v1::PIECE_TENSOR_QUERY;
  v1::AttendStreamRequest with_data = header;
  with_data.mutable_header()->mutable_key()->set_data("four");
  struct Bad {
    std::vector<v1::AttendStreamRequest> messages;
    const char* field;
    const char* text;
  };
  const std::vector<Bad> cases = {
      {{}, "header", "no message came"},
      {{all[0]}, "header", "must be the first message"},
      {{header, header}, "piece", "is unset"},
      {{with_data}, "key.data", "has 4 bytes in the header"},
      {{header, PieceOf(kQuery, 100, bytes)},
       "piece.offset",
       "is 100: query has 128 bytes, and the piece 64"},
      {{header, PieceOf(kQuery, -1, bytes)}, "piece.offset", "is -1"},
      {{header, PieceOf(kQuery, INT64_MAX, bytes)}, "piece.offset", "query has 128 bytes"},
      {{header, PieceOf(kQuery, 0, bytes), PieceOf(kQuery, 32, bytes)},
       "piece.offset",
       "bytes 32 to 63 of query were sent before"},
      {{header, PieceOf(v1::PIECE_TENSOR_MASK, 0, bytes)}, "piece.tensor", "is 4"},
      {{header, PieceOf(v1::PIECE_TENSOR_OUTPUT, 0, bytes)}, "piece.tensor", "is 5"},
      {{header, PieceOf(kQuery, 0, std::string(kLongestPiece + 1, 'x'))},
       "piece.data",
       "at most 1048576"},
      {{header, PieceOf(kQuery, 64, bytes)}, "query", "bytes 0 to 63 of 128 were not sent"},
      {{header, all[0], all[2], PieceOf(v1::PIECE_TENSOR_KEY, 0, bytes)},
       "key",
       "bytes 64 to 127 of 128 were not sent"},
  };
  for (const Bad& bad : cases) {
    SCOPED_TRACE(bad.text);
    grpc::ClientContext context;
    SetTestDeadline(context);
    const auto stream = stub_->AttendStream(&context);
    v1::AttendResponse response;
    const grpc::Status status = Send(*stream, bad.messages, &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
    const auto detail = DetailOf<google::rpc::BadRequest>(status);
    ASSERT_EQ(detail.field_violations_size(), 1) << status.error_message();
    EXPECT_EQ(detail.field_violations(0).field(), bad.field);
    EXPECT_THAT(detail.field_violations(0).description(), HasSubstr(bad.text));
  }
  EXPECT_TRUE(IsIdle());
}

TEST_F(AttendStreamTest, ItIsRefusedFromItsHeaderBeforeAByteIsSent) {
  grpc::ClientContext context;
  SetTestDeadline(context);
  const auto stream = stub_->AttendStream(&context);
  // 1 GiB each, of which nothing is sent.
  v1::AttendRequest huge;
  for (v1::Tensor* const tensor :
       {huge.mutable_query(), huge.mutable_key(), huge.mutable_value()}) {
    tensor->set_dtype(v1::DATA_TYPE_FLOAT32);
    for (const int64_t size : {1, 8, 1 << 20, 32}) tensor->add_shape(size);
  }
  ASSERT_TRUE(stream->Write(HeaderOf(huge)));
  v1::AttendResponse response;
  const grpc::Status status = ReadAll(*stream, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(DetailOf<google::rpc::QuotaFailure>(status).violations(0).subject(), "memory_budget");
  EXPECT_TRUE(IsIdle());
}

TEST_F(AttendStreamTest, ACancelledUploadGivesItsMemoryBack) {
  const v1::AttendRequest request = RandomRequest({1, 1, 64, 16}, 5);
  grpc::ClientContext context;
  const auto stream = stub_->AttendStream(&context);
  ASSERT_TRUE(stream->Write(HeaderOf(request)));
  while (core::Workspace::Process().current_bytes() == 0) std::this_thread::yield();
  context.TryCancel();
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(IsIdle());
  EXPECT_THAT(metrics_.Text(), HasSubstr("attendant_cancelled_total{stage=\"receive\"} 1"));
  EXPECT_THAT(metrics_.Text(), HasSubstr("attendant_inflight_requests 0"));
}

TEST_F(AttendStreamTest, ADeadlineEndsAnUpload) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(100));
  const auto stream = stub_->AttendStream(&context);
  stream->Write(HeaderOf(RandomRequest({1, 1, 64, 16}, 6)));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(IsIdle());
}

TEST_F(AttendStreamTest, StoppedUploadsAreToldToRetry) {
  grpc::ClientContext context;
  SetTestDeadline(context);
  const auto stream = stub_->AttendStream(&context);
  ASSERT_TRUE(stream->Write(HeaderOf(RandomRequest({1, 1, 64, 16}, 7))));
  while (core::Workspace::Process().current_bytes() == 0) std::this_thread::yield();
  service_.StopAccepting();
  service_.StopRunning();
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_TRUE(DetailOf<google::rpc::RetryInfo>(status).has_retry_delay());
  // No new one is taken.
  grpc::ClientContext next;
  SetTestDeadline(next);
  v1::AttendResponse response;
  EXPECT_EQ(Send(*stub_->AttendStream(&next), {HeaderOf(MeanRequest())}, &response).error_code(),
            grpc::StatusCode::UNAVAILABLE);
  EXPECT_TRUE(IsIdle());
}

TEST_F(AttendStreamTest, WhenNoMoreAreAcceptedAStreamOfWhichNothingCameEnds) {
  const v1::AttendRequest request = RandomRequest({1, 1, 64, 16}, 11);
  grpc::ClientContext silent_context;
  grpc::ClientContext begun_context;
  SetTestDeadline(silent_context);
  SetTestDeadline(begun_context);
  const auto silent = stub_->AttendStream(&silent_context);
  const auto begun = stub_->AttendStream(&begun_context);
  ASSERT_TRUE(begun->Write(HeaderOf(request)));
  const auto both_are_here = [&] {
    return core::Workspace::Process().current_bytes() > 0 &&
           absl::StrContains(metrics_.Text(), "attendant_inflight_requests 2");
  };
  while (!both_are_here()) std::this_thread::yield();
  service_.StopAccepting();
  const grpc::Status status = silent->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
  EXPECT_TRUE(DetailOf<google::rpc::RetryInfo>(status).has_retry_delay());
  EXPECT_THAT(metrics_.Text(), HasSubstr("attendant_shed_total{reason=\"draining\"} 1"));
  EXPECT_FALSE(service_.WaitUntilIdle(std::chrono::steady_clock::now()));
  v1::AttendResponse response;
  EXPECT_TRUE(Send(*begun, PiecesOf(request, 1000), &response).ok());
  EXPECT_TRUE(IsIdle());
}

TEST_F(AttendStreamTest, StreamsThatAreStoppedWhileTheyWriteEndOnce) {
  const v1::AttendRequest request = LargeAnswerRequest(36);
  auto messages = PiecesOf(request, kLongestPiece);
  messages.insert(messages.begin(), HeaderOf(request));
  constexpr int kStreams = 30;
  for (int i = 0; i < kStreams; ++i) {
    grpc::ClientContext context;
    SetTestDeadline(context);
    const auto stream = stub_->AttendStream(&context);
    for (const auto& message : messages) ASSERT_TRUE(stream->Write(message));
    stream->WritesDone();
    v1::AttendStreamResponse message;
    ASSERT_TRUE(stream->Read(&message));
    std::thread stopper([&] { service_.StopRunning(); });
    while (stream->Read(&message)) {
    }
    stopper.join();
    const grpc::Status status = stream->Finish();
    EXPECT_THAT(status.error_code(),
                testing::AnyOf(grpc::StatusCode::OK, grpc::StatusCode::UNAVAILABLE))
        << status.error_message();
  }
  EXPECT_TRUE(IsIdle());
  EXPECT_THAT(metrics_.Text(), HasSubstr("attendant_inflight_requests 0"));
}

TEST_F(AttendStreamTest, ASlowReaderHoldsItsOwnCallOnly) {
  // 18 MiB of output: more than the transport takes from a server whose client does not read.
  const v1::AttendRequest request = LargeAnswerRequest(144);
  grpc::ClientContext context;
  SetTestDeadline(context);
  const auto stream = stub_->AttendStream(&context);
  ASSERT_TRUE(stream->Write(HeaderOf(request)));
  for (const auto& piece : PiecesOf(request, kLongestPiece)) ASSERT_TRUE(stream->Write(piece));
  stream->WritesDone();
  v1::AttendStreamResponse header;
  ASSERT_TRUE(stream->Read(&header));
  // Others are served meanwhile, and this one stays in flight.
  for (int i = 0; i < 3; ++i) {
    grpc::ClientContext other;
    SetTestDeadline(other);
    v1::AttendResponse response;
    EXPECT_TRUE(stub_->Attend(&other, MeanRequest(), &response).ok());
  }
  EXPECT_GT(core::Workspace::Process().current_bytes(), 0);
  EXPECT_FALSE(service_.WaitUntilIdle(std::chrono::steady_clock::now()));
  v1::AttendStreamResponse message;
  size_t bytes = 0;
  while (stream->Read(&message)) bytes += message.piece().data().size();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(bytes, 144 * 2 * 16384 * sizeof(float));
  EXPECT_TRUE(IsIdle());
}

TEST_F(AttendStreamTest, AnUploadThatStopsIsEnded) {
  // One that sends nothing, one that stops after its header, and one that goes on with nothing.
  grpc::ClientContext contexts[3];
  std::unique_ptr<Stream> streams[3];
  for (int i = 0; i < 3; ++i) {
    SetTestDeadline(contexts[i]);
    streams[i] = stub_->AttendStream(&contexts[i]);
  }
  const v1::AttendStreamRequest header = HeaderOf(RandomRequest({1, 1, 64, 16}, 9));
  streams[1]->Write(header);
  EXPECT_TRUE(Eventually([&] {
    return absl::StrContains(metrics_.Text(), "attendant_inflight_requests 3") &&
           core::Workspace::Process().current_bytes() > 0;
  }));
  const int64_t one = core::Workspace::Process().current_bytes();
  streams[2]->Write(header);
  EXPECT_TRUE(Eventually([&] { return core::Workspace::Process().current_bytes() == 2 * one; }));
  // The server waits for pieces well before `since`; empty ones come until after it.
  const auto since = PeerWait::Clock::now() + std::chrono::seconds(3);
  while (PeerWait::Clock::now() < since + std::chrono::milliseconds(500)) {
    streams[2]->Write(PieceOf(v1::PIECE_TENSOR_KEY, 0, ""));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  service_.EndSlowCalls(since + PeerLimits().idle / 2);
  service_.EndSlowCalls(since + PeerLimits().idle);
  for (const auto& stream : streams) {
    v1::AttendResponse response;
    const grpc::Status status = ReadAll(*stream, &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
    EXPECT_THAT(status.error_message(), HasSubstr("taken for 60 s: the call is idle"));
  }
  EXPECT_TRUE(IsIdle());
}

TEST_F(AttendStreamTest, AReaderThatStopsIsEnded) {
  const v1::AttendRequest request = LargeAnswerRequest(144);
  grpc::ClientContext context;
  SetTestDeadline(context);
  const auto stream = stub_->AttendStream(&context);
  stream->Write(HeaderOf(request));
  for (const auto& piece : PiecesOf(request, kLongestPiece)) {
    if (!stream->Write(piece)) break;
  }
  stream->WritesDone();
  // Computed, and on its way.
  EXPECT_TRUE(Eventually([&] {
    return !absl::StrContains(metrics_.Text(), "attendant_flops_total{path=\"chunked\"} 0\n");
  }));
  EXPECT_TRUE(Eventually([&] {
    service_.EndSlowCalls(PeerWait::Clock::now() + PeerLimits().idle);
    return absl::StrContains(metrics_.Text(), "attendant_inflight_requests 0");
  }));
  EXPECT_TRUE(IsIdle());
  EXPECT_THAT(metrics_.Text(), HasSubstr("attendant_requests_total{code=\"DEADLINE_EXCEEDED\","
                                         "method=\"AttendStream\",path=\"chunked\"} 1"));
  // The code alone reaches a caller who is still to read what came before.
  v1::AttendResponse response;
  const grpc::Status status = ReadAll(*stream, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED) << status.error_message();
  EXPECT_TRUE(status.error_details().empty());
}

}  // namespace
}  // namespace attendant::server
