// The rpcs through a real stub over an in-process channel.
#include "server/attention_service.h"

#include <gmock/gmock.h>
#include <grpcpp/impl/client_unary_call.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include <array>
#include <cmath>
#include <future>
#include <latch>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "core/workspace.h"
#include "tests/server/testing.h"

namespace attendant::server {
namespace {

using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// A tenth of a GFLOP/s on the chunked path in float32, less than under any sanitizer; nothing else
// was measured.
core::Speed MadeUpSpeed() {
  core::Speed speed;
  speed.of[static_cast<size_t>(core::DType::kFloat32)].chunked_path.flop_seconds = 1e-8;
  return speed;
}

constexpr int64_t kMaxMessageBytes = 64 << 20;

class AttentionServiceTest : public testing::Test {
 protected:
  AttentionServiceTest() {
    grpc::ServerBuilder builder;
    builder.RegisterService(&service_);
    builder.SetMaxReceiveMessageSize(-1);
    server_ = builder.BuildAndStart();
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    stub_ = v1::Attention::NewStub(server_->InProcessChannel(arguments));
  }
  ~AttentionServiceTest() override {
    // Whatever a test started is stopped, not waited for.
    service_.StopRunning();
    server_->Shutdown(std::chrono::system_clock::now());
    server_->Wait();
  }

  grpc::Status Attend(const v1::AttendRequest& request, v1::AttendResponse* response) {
    grpc::ClientContext context;
    SetTestDeadline(context);
    return stub_->Attend(&context, request, response);
  }

  grpc::Status Estimate(const v1::EstimateRequest& request, v1::EstimateResponse* response) {
    grpc::ClientContext context;
    SetTestDeadline(context);
    response->Clear();
    return stub_->Estimate(&context, request, response);
  }

  grpc::Status Check(const v1::CheckRequest& request, v1::CheckResponse* response) {
    grpc::ClientContext context;
    SetTestDeadline(context);
    return stub_->Check(&context, request, response);
  }

  // gRPC may free a response a moment after its client has it.
  static bool MemoryComesBack() {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (core::Workspace::Process().current_bytes() != 0) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::yield();
    }
    return true;
  }

  // True while a job is queued or computed.
  bool Computing() const {
    return metrics_.Text().find("attendant_inflight_flops 0\n") == std::string::npos;
  }

  // Returns when a compute thread is inside a tile that waits for `release`.
  void OccupyThreads(std::latch& release) {
    auto entered = std::make_shared<std::latch>(scheduler_.threads());
    const absl::Status submitted = scheduler_.Submit(std::make_shared<core::Job>(
        std::vector<core::Stage>{{"hold", scheduler_.threads(),
                                  [entered, &release](const core::TileContext&) {
                                    entered->count_down();
                                    release.wait();
                                    return absl::OkStatus();
                                  }}},
        [](const absl::Status&, const core::JobTimes&) {}));
    ASSERT_EQ(submitted, absl::OkStatus());
    entered->wait();
  }

  Metrics metrics_{{"test", "test", "test"}};
  core::Scheduler scheduler_{2};
  AttentionService service_{
      {.max_message_bytes = kMaxMessageBytes, .peak = {1e9, 5e8}, .speed = MadeUpSpeed()},
      scheduler_,
      metrics_};
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<v1::Attention::Stub> stub_;
};

TEST_F(AttentionServiceTest, AttendTakesHalfPrecision) {
  // The mean of 1 and 3.
  const std::tuple<v1::DataType, uint16_t, uint16_t, uint16_t> types[] = {
      {v1::DATA_TYPE_FLOAT16, 0x3c00, 0x4200, 0x4000},
      {v1::DATA_TYPE_BFLOAT16, 0x3f80, 0x4040, 0x4000}};
  for (const auto& [dtype, one, three, two] : types) {
    v1::AttendRequest request;
    SetTensor<uint16_t>(dtype, {1, 1, 1, 1}, {0}, request.mutable_query());
    SetTensor<uint16_t>(dtype, {1, 1, 2, 1}, {one, three}, request.mutable_key());
    SetTensor<uint16_t>(dtype, {1, 1, 2, 1}, {one, three}, request.mutable_value());
    v1::AttendResponse response;
    const grpc::Status status = Attend(request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(response.output().dtype(), dtype);
    EXPECT_THAT(ValuesOf<uint16_t>(response.output()), ElementsAre(two));
  }
}

TEST_F(AttentionServiceTest, AttendTakesAMask) {
  v1::AttendRequest request = MeanRequest();
  v1::Tensor& mask = *request.mutable_options()->mutable_mask();
  mask.set_dtype(v1::DATA_TYPE_BOOL);
  mask.add_shape(2);
  mask.set_data(std::string("\0\1", 2));
  v1::AttendResponse response;
  const grpc::Status status = Attend(request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_THAT(ValuesOf<float>(response.output()), ElementsAre(3));
}

TEST_F(AttentionServiceTest, AttendAnswersWithOutputAndStats) {
  v1::AttendResponse response;
  const grpc::Status status = Attend(MeanRequest(), &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_THAT(response.output().shape(), ElementsAre(1, 1, 1, 1));
  EXPECT_THAT(ValuesOf<float>(response.output()), ElementsAre(2));
  EXPECT_FALSE(response.has_weights());
  EXPECT_EQ(response.stats().path(), v1::PATH_CHUNKED);
  EXPECT_EQ(response.stats().flops(), 2 * 2 * (1 + 1));
  EXPECT_EQ(response.stats().threads(), 2);
  EXPECT_GT(response.stats().compute_seconds(), 0);
  EXPECT_GT(response.stats().queue_seconds(), 0);
  EXPECT_GT(response.stats().peak_workspace_bytes(), 0);
  EXPECT_THAT(response.stats().kernel(), HasSubstr("fused/"));
}

TEST_F(AttentionServiceTest, BothPathsAndBothTypesReturnWhatIsAskedFor) {
  for (const v1::Path path : {v1::PATH_EXPLICIT, v1::PATH_CHUNKED, v1::PATH_AUTO}) {
    v1::AttendRequest request;
    SetTensor<double>(v1::DATA_TYPE_FLOAT64, {1, 1, 2, 1}, {0, 0}, request.mutable_query());
    SetTensor<double>(v1::DATA_TYPE_FLOAT64, {1, 1, 2, 1}, {5, 6}, request.mutable_key());
    SetTensor<double>(v1::DATA_TYPE_FLOAT64, {1, 1, 2, 1}, {1, 3}, request.mutable_value());
    request.mutable_options()->set_path(path);
    request.mutable_options()->set_causal(v1::CAUSAL_TOP_LEFT);
    request.mutable_options()->set_return_weights(true);
    request.mutable_options()->set_return_logsumexp(true);
    request.mutable_options()->set_return_key_sums(true);
    v1::AttendResponse response;
    ASSERT_TRUE(Attend(request, &response).ok());
    EXPECT_THAT(ValuesOf<double>(response.output()), ElementsAre(1, 2));
    EXPECT_THAT(ValuesOf<double>(response.weights()), ElementsAre(1, 0, 0.5, 0.5));
    EXPECT_THAT(ValuesOf<double>(response.logsumexp()), ElementsAre(0, std::log(2.0)));
    EXPECT_THAT(ValuesOf<double>(response.key_sums()), ElementsAre(1.5, 0.5));
    EXPECT_EQ(response.stats().path(),
              path == v1::PATH_EXPLICIT ? v1::PATH_EXPLICIT : v1::PATH_CHUNKED);
  }
}

TEST_F(AttentionServiceTest, AnErrorNamesItsFieldInTheDetails) {
  v1::AttendRequest request = MeanRequest();
  request.mutable_value()->set_shape(2, 3);
  v1::AttendResponse response;
  const grpc::Status status = Attend(request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  const auto detail = DetailOf<google::rpc::BadRequest>(status);
  ASSERT_EQ(detail.field_violations_size(), 1);
  EXPECT_EQ(detail.field_violations(0).field(), "value.shape[2]");
  EXPECT_EQ(detail.field_violations(0).description(), "is 3, must be 2 (the key's tokens)");
  EXPECT_THAT(metrics_.Text(), HasSubstr("attendant_requests_total{code=\"INVALID_ARGUMENT\","
                                         "method=\"Attend\",path=\"none\"} 1"));
}

TEST_F(AttentionServiceTest, AnEmptyRequestIsToldWhatToSend) {
  v1::AttendResponse response;
  const grpc::Status status = Attend({}, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), testing::StartsWith("query: is not set"));
}

TEST_F(AttentionServiceTest, AnEmptyProblemIsAnsweredWithoutATile) {
  v1::AttendResponse response;
  ASSERT_TRUE(Attend(ConstantRequest({0, 2, 3, 4}, 0), &response).ok());
  EXPECT_THAT(response.output().shape(), ElementsAre(0, 2, 3, 4));
  EXPECT_EQ(response.stats().compute_seconds(), 0);
}

TEST_F(AttentionServiceTest, ALargerResponseThanTheLimitIsRefusedBeforeItIsComputed) {
  // 2 * 4096 * 4096 floats of weights are 128 MiB, of 64 MiB that a message may have.
  v1::AttendRequest request = ConstantRequest({1, 2, 4096, 1}, 0);
  request.mutable_options()->set_return_weights(true);
  v1::AttendResponse response;
  const grpc::Status status = Attend(request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  const auto detail = DetailOf<google::rpc::QuotaFailure>(status);
  ASSERT_EQ(detail.violations_size(), 1);
  EXPECT_EQ(detail.violations(0).subject(), "max_message_bytes");
  EXPECT_THAT(metrics_.Text(), HasSubstr("attendant_flops_total{path=\"chunked\"} 0"));
}

TEST_F(AttentionServiceTest, HeadAnswersWithIntermediates) {
  v1::HeadRequest request;
  SetTensor<double>(v1::DATA_TYPE_FLOAT64, {2, 1}, {1, 2}, request.mutable_x());
  for (v1::Tensor* weight : {request.mutable_w_q(), request.mutable_w_k(), request.mutable_w_v(),
                             request.mutable_w_o()}) {
    SetTensor<double>(v1::DATA_TYPE_FLOAT64, {1, 1}, {2}, weight);
  }
  request.mutable_options()->set_scale(0);
  request.set_return_intermediates(true);
  grpc::ClientContext context;
  SetTestDeadline(context);
  v1::HeadResponse response;
  const grpc::Status status = stub_->Head(&context, request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_THAT(response.output().shape(), ElementsAre(2, 1));
  EXPECT_THAT(ValuesOf<double>(response.output()), ElementsAre(6, 6));
  EXPECT_THAT(ValuesOf<double>(response.query()), ElementsAre(2, 4));
  EXPECT_THAT(ValuesOf<double>(response.logits()), ElementsAre(0, 0, 0, 0));
  EXPECT_THAT(ValuesOf<double>(response.context()), ElementsAre(3, 3));
  EXPECT_THAT(response.stats().kernel(), HasSubstr("fused/"));
}

// A generic stub: any bytes as the request.
grpc::Status SendBytes(grpc::ChannelInterface* channel, const char* method,
                       const grpc::ByteBuffer& request, grpc::ByteBuffer* response) {
  grpc::ClientContext context;
  SetTestDeadline(context);
  const std::string path = absl::StrCat("/attendant.v1.Attention/", method);
  const grpc::internal::RpcMethod rpc(path.c_str(), grpc::internal::RpcMethod::NORMAL_RPC);
  return grpc::internal::BlockingUnaryCall(channel, rpc, &context, request, response);
}

TEST_F(AttentionServiceTest, MalformedBytesAreNamedOnEveryMethod) {
  const auto channel = server_->InProcessChannel({});
  for (const char* const method : {"Attend", "Head", "Backward", "Merge", "Check", "Estimate"}) {
    SCOPED_TRACE(method);
    grpc::ByteBuffer response;
    // A message in field 1 that claims 1.9 GB.
    std::string bytes;
    AppendLengthPrefix(1, 1'900'000'000, bytes);
    const grpc::Status status = SendBytes(channel.get(), method, BytesIn(bytes), &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(DetailOf<google::rpc::BadRequest>(status).field_violations_size(), 1);
    // No bytes are a message too.
    const grpc::Status empty = SendBytes(channel.get(), method, BytesIn(""), &response);
    EXPECT_EQ(empty.error_code(), std::string("Estimate") == method
                                      ? grpc::StatusCode::OK
                                      : grpc::StatusCode::INVALID_ARGUMENT);
  }
}

TEST_F(AttentionServiceTest, EachTensorByteIsCopiedOnce) {
  // Copied at once, and by the job's first stage.
  for (const int64_t tokens : {int64_t{16}, int64_t{4096}}) {
    const v1::AttendRequest request = ConstantRequest({1, 1, tokens, 32}, 0.5f);
    const int64_t before = CopiedTensorBytes();
    v1::AttendResponse response;
    const grpc::Status status = Attend(request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(CopiedTensorBytes() - before, 3 * tokens * 32 * 4);
    EXPECT_EQ(ValuesOf<float>(response.output())[0], 0.5f);
    EXPECT_EQ(response.output().data().size(), static_cast<size_t>(tokens) * 32 * 4);
  }
}

// What call answers, where new memory holds bytes of `fill`'s complement before it is written.
template <typename Response, typename Call>
std::string AnswerOver(int fill, const Call& call) {
  mallopt(M_PERTURB, fill);
  Response response;
  const grpc::Status status = call(&response);
  mallopt(M_PERTURB, 0);
  EXPECT_TRUE(status.ok()) << status.error_message();
  response.clear_stats();
  return response.SerializeAsString();
}

// Sizes 0 where loops run over nothing, rows that see no key, and plain ones.
std::vector<v1::AttendRequest> EdgeRequests() {
  std::vector<v1::AttendRequest> requests;
  for (const auto& [queries, keys, width, value_width] : {std::array<int64_t, 4>{5, 7, 3, 2},
                                                          {5, 0, 3, 2},
                                                          {5, 7, 0, 2},
                                                          {5, 7, 3, 0},
                                                          {5, 0, 0, 2},
                                                          {300, 40, 16, 16}}) {
    v1::AttendRequest request;
    const auto fill = [](int64_t tokens, int64_t size, v1::Tensor* tensor) {
      SetTensor(v1::DATA_TYPE_FLOAT32, {2, 2, tokens, size},
                std::vector<float>(static_cast<size_t>(4 * tokens * size), 0.5f), tensor);
    };
    fill(queries, width, request.mutable_query());
    fill(keys, width, request.mutable_key());
    fill(keys, value_width, request.mutable_value());
    request.mutable_options()->set_causal(v1::CAUSAL_BOTTOM_RIGHT);
    for (const int64_t length : {int64_t{0}, keys})
      request.mutable_options()->add_key_lengths(length);
    request.mutable_options()->set_return_weights(true);
    request.mutable_options()->set_return_logsumexp(true);
    request.mutable_options()->set_return_key_sums(true);
    requests.push_back(std::move(request));
  }
  return requests;
}

TEST_F(AttentionServiceTest, EveryByteOfAResponseIsWritten) {
  for (v1::AttendRequest request : EdgeRequests()) {
    for (const v1::Path path : {v1::PATH_CHUNKED, v1::PATH_EXPLICIT}) {
      request.mutable_options()->set_path(path);
      SCOPED_TRACE(request.options().ShortDebugString());
      const auto attend = [&](v1::AttendResponse* response) { return Attend(request, response); };
      EXPECT_EQ(AnswerOver<v1::AttendResponse>(0x11, attend),
                AnswerOver<v1::AttendResponse>(0xee, attend));
      v1::BackwardRequest gradient;
      *gradient.mutable_query() = request.query();
      *gradient.mutable_key() = request.key();
      *gradient.mutable_value() = request.value();
      *gradient.mutable_options() = request.options();
      v1::AttendResponse forward;
      ASSERT_TRUE(Attend(request, &forward).ok());
      *gradient.mutable_d_output() = forward.output();
      const int64_t keys = request.key().shape(2);
      SetTensor(v1::DATA_TYPE_FLOAT32, {2, 1, 1, keys},
                std::vector<float>(static_cast<size_t>(2 * keys), 0.25f),
                gradient.mutable_options()->mutable_mask());
      gradient.set_return_d_mask(true);
      const auto backward = [&](v1::BackwardResponse* response) {
        grpc::ClientContext context;
        SetTestDeadline(context);
        return stub_->Backward(&context, gradient, response);
      };
      EXPECT_EQ(AnswerOver<v1::BackwardResponse>(0x11, backward),
                AnswerOver<v1::BackwardResponse>(0xee, backward));
    }
  }
}

TEST_F(AttentionServiceTest, EveryByteOfAHeadIsWritten) {
  for (const auto& [tokens, d_model, width, value_width] :
       {std::array<int64_t, 4>{5, 6, 3, 2}, {5, 0, 3, 2}, {5, 6, 0, 2}, {5, 6, 3, 0}}) {
    for (const v1::Path path : {v1::PATH_CHUNKED, v1::PATH_EXPLICIT}) {
      v1::HeadRequest request;
      const auto fill = [](const std::vector<int64_t>& shape, v1::Tensor* tensor) {
        SetTensor(v1::DATA_TYPE_FLOAT32, shape,
                  std::vector<float>(static_cast<size_t>(shape[0] * shape[1]), 0.5f), tensor);
      };
      fill({tokens, d_model}, request.mutable_x());
      fill({d_model, 2 * width}, request.mutable_w_q());
      fill({d_model, 2 * width}, request.mutable_w_k());
      fill({d_model, 2 * value_width}, request.mutable_w_v());
      fill({2 * value_width, d_model}, request.mutable_w_o());
      request.set_heads(2);
      request.set_return_intermediates(true);
      request.mutable_options()->set_path(path);
      const auto head = [&](v1::HeadResponse* response) {
        grpc::ClientContext context;
        SetTestDeadline(context);
        return stub_->Head(&context, request, response);
      };
      EXPECT_EQ(AnswerOver<v1::HeadResponse>(0x11, head), AnswerOver<v1::HeadResponse>(0xee, head))
          << request.ShortDebugString();
    }
  }
}

TEST_F(AttentionServiceTest, WhatIsRefusedIsNotCopied) {
  v1::AttendRequest request = ConstantRequest({1, 2, 4096, 4}, 0);
  request.mutable_options()->set_return_weights(true);  // 128 MiB, of 64 that a message may have
  const int64_t before = CopiedTensorBytes();
  v1::AttendResponse response;
  EXPECT_EQ(Attend(request, &response).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(CopiedTensorBytes(), before);
  EXPECT_TRUE(MemoryComesBack());
}

TEST_F(AttentionServiceTest, TheShapeMayComeAfterTheData) {
  v1::AttendRequest whole = ConstantRequest({1, 1, 40, 8}, 2);
  v1::AttendRequest data;
  v1::AttendRequest shapes = whole;
  for (const auto mutable_tensor :
       {&v1::AttendRequest::mutable_query, &v1::AttendRequest::mutable_key,
        &v1::AttendRequest::mutable_value}) {
    (data.*mutable_tensor)()->set_data((whole.*mutable_tensor)()->data());
    (shapes.*mutable_tensor)()->clear_data();
  }
  grpc::ByteBuffer response;
  const grpc::Status status =
      SendBytes(server_->InProcessChannel({}).get(), "Attend",
                BytesIn(data.SerializeAsString() + shapes.SerializeAsString(), 100), &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(ValuesOf<float>(Parsed<v1::AttendResponse>(response).output()),
            std::vector<float>(320, 2));
}

TEST_F(AttentionServiceTest, HeadNamesItsFields) {
  v1::HeadRequest request;
  SetTensor<double>(v1::DATA_TYPE_FLOAT64, {2, 1}, {1, 2}, request.mutable_x());
  grpc::ClientContext context;
  SetTestDeadline(context);
  v1::HeadResponse response;
  const grpc::Status status = stub_->Head(&context, request, &response);
  EXPECT_EQ(DetailOf<google::rpc::BadRequest>(status).field_violations(0).field(), "w_q");
}

TEST_F(AttentionServiceTest, InfoSaysWhatAClientMustKnow) {
  grpc::ClientContext context;
  SetTestDeadline(context);
  v1::InfoResponse response;
  ASSERT_TRUE(stub_->Info(&context, {}, &response).ok());
  EXPECT_FALSE(response.version().empty());
  EXPECT_FALSE(response.cpu().empty());
  EXPECT_EQ(response.compute_threads(), 2);
  EXPECT_EQ(response.max_message_bytes(), kMaxMessageBytes);
  EXPECT_EQ(response.peak_flops_float32(), 1e9);
  EXPECT_EQ(response.peak_flops_float64(), 5e8);
}

// Requests of random sizes and options, as an Estimate and as the call that it is about.
class RandomCalls {
 public:
  explicit RandomCalls(uint32_t seed) : rng_(seed) {}

  v1::EstimateRequest Next() {
    v1::EstimateRequest r;
    constexpr v1::DataType kDTypes[] = {v1::DATA_TYPE_FLOAT32, v1::DATA_TYPE_FLOAT64,
                                        v1::DATA_TYPE_FLOAT16, v1::DATA_TYPE_BFLOAT16};
    r.set_dtype(kDTypes[Below(4)]);
    r.set_batch(1 + Below(2));
    r.set_kv_heads(1 + Below(2));
    r.set_heads(r.kv_heads() * (1 + Below(2)));
    // Few queries against many keys, whose segments are computed apart, or many against each other.
    const bool few = Below(4) == 0;
    r.set_queries(few ? 1 + Below(3) : Below(400));
    r.set_keys(few ? Below(9000) : Below(400));
    r.set_width(1 + Below(70));
    r.set_value_width(1 + Below(70));
    SetOptions(r);
    return r;
  }

  v1::EstimateRequest NextHead() {
    v1::EstimateRequest r = Next();
    r.clear_kv_heads();
    r.set_queries(Below(300));
    r.set_keys(r.queries());
    r.set_d_model(1 + Below(100));
    v1::AttendOptions& options = *r.mutable_options();
    options.clear_mask();
    options.clear_key_lengths();
    if (Below(2) == 0) SetMask(r);
    return r;
  }

 private:
  int64_t Below(int64_t n) { return static_cast<int64_t>(rng_()) % n; }

  void SetOptions(v1::EstimateRequest& r) {
    v1::AttendOptions& options = *r.mutable_options();
    options.set_layout(Below(2) == 0 ? v1::LAYOUT_BTHD : v1::LAYOUT_BHTD);
    options.set_causal(static_cast<v1::Causal>(Below(4)));
    options.set_return_weights(Below(3) == 0);
    options.set_return_logsumexp(Below(3) == 0);
    options.set_return_key_sums(Below(3) == 0);
    if (Below(3) == 0) options.mutable_window()->set_left(Below(100));
    for (int64_t b = 0, given = Below(3); b < r.batch() && given == 0; ++b) {
      options.add_key_lengths(Below(r.keys() + 1));
    }
    for (int64_t h = 0, given = Below(3); h < r.heads() && given == 0; ++h) options.add_sinks(1);
    if (Below(2) == 0) SetMask(r);
  }

  void SetMask(v1::EstimateRequest& r) {
    v1::Tensor& mask = *r.mutable_options()->mutable_mask();
    mask.set_dtype(Below(2) == 0 ? v1::DATA_TYPE_BOOL : r.dtype());
    for (const int64_t size : {r.batch(), r.heads(), r.queries(), r.keys()}) {
      mask.add_shape(Below(3) == 0 ? 1 : size);
    }
  }

  std::mt19937 rng_;
};

// Zeros of that shape: costs depend on sizes alone. Returns their bytes.
int64_t MakeZeros(v1::DataType dtype, const std::vector<int64_t>& shape, v1::Tensor* tensor) {
  int64_t bytes = dtype == v1::DATA_TYPE_BOOL      ? 1
                  : dtype == v1::DATA_TYPE_FLOAT32 ? 4
                  : dtype == v1::DATA_TYPE_FLOAT64 ? 8
                                                   : 2;
  tensor->set_dtype(dtype);
  tensor->clear_shape();
  for (const int64_t size : shape) {
    tensor->add_shape(size);
    bytes *= size;
  }
  tensor->set_data(std::string(static_cast<size_t>(bytes), 0));
  return bytes;
}

// Returns the bytes of its tensors.
int64_t MakeMask(const v1::EstimateRequest& r, v1::Path path, v1::AttendOptions* options) {
  *options = r.options();
  options->set_path(path);
  if (!options->has_mask()) return 0;
  const v1::Tensor& mask = r.options().mask();
  return MakeZeros(mask.dtype(), {mask.shape().begin(), mask.shape().end()},
                   options->mutable_mask());
}

int64_t MakeCall(const v1::EstimateRequest& r, v1::Path path, v1::AttendRequest* call) {
  const auto make = [&](int64_t heads, int64_t tokens, int64_t width, v1::Tensor* tensor) {
    std::vector<int64_t> shape = {r.batch(), heads, tokens, width};
    if (r.options().layout() == v1::LAYOUT_BTHD) std::swap(shape[1], shape[2]);
    return MakeZeros(r.dtype(), shape, tensor);
  };
  return make(r.heads(), r.queries(), r.width(), call->mutable_query()) +
         make(r.kv_heads(), r.keys(), r.width(), call->mutable_key()) +
         make(r.kv_heads(), r.keys(), r.value_width(), call->mutable_value()) +
         MakeMask(r, path, call->mutable_options());
}

int64_t MakeCall(const v1::EstimateRequest& r, v1::Path path, v1::HeadRequest* call) {
  const auto weight = [&](int64_t width, v1::Tensor* tensor) {
    return MakeZeros(r.dtype(), {r.d_model(), r.heads() * width}, tensor);
  };
  call->set_heads(r.heads());
  return MakeZeros(r.dtype(), {r.batch(), r.queries(), r.d_model()}, call->mutable_x()) +
         weight(r.width(), call->mutable_w_q()) + weight(r.width(), call->mutable_w_k()) +
         weight(r.value_width(), call->mutable_w_v()) +
         MakeZeros(r.dtype(), {r.heads() * r.value_width(), r.d_model()}, call->mutable_w_o()) +
         MakeMask(r, path, call->mutable_options());
}

// Makes the call on both paths, and holds what it took against the estimate. make_call:
// (ClientContext*, Request, Response*) -> Status; returned_bytes: (Response) -> bytes of tensors.
template <typename Request, typename Response, typename Call, typename Bytes>
void ExpectAsEstimated(const v1::EstimateRequest& request, const v1::EstimateResponse& estimate,
                       const Call& make_call, const Bytes& returned_bytes) {
  for (const v1::Path path : {v1::PATH_EXPLICIT, v1::PATH_CHUNKED}) {
    Request call;
    EXPECT_EQ(MakeCall(request, path, &call), estimate.request_bytes());
    Response response;
    grpc::ClientContext context;
    SetTestDeadline(context);
    const grpc::Status status = make_call(&context, call, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    const v1::PathCost& cost =
        path == v1::PATH_EXPLICIT ? estimate.explicit_path() : estimate.chunked_path();
    const auto peak = static_cast<double>(response.stats().peak_workspace_bytes());
    EXPECT_NEAR(static_cast<double>(cost.workspace_bytes()), peak, 0.01 * peak)
        << v1::Path_Name(path);
    EXPECT_EQ(returned_bytes(response), estimate.response_bytes());
    int64_t products = cost.flops();
    for (const v1::Step& step : cost.steps()) {
      if (step.name() == "softmax") products -= step.flops();
    }
    EXPECT_EQ(products, response.stats().flops());
  }
}

TEST_F(AttentionServiceTest, FiftyRandomCallsTakeTheWorkspaceThatIsEstimated) {
  constexpr uint32_t kSeed = 66;
  RandomCalls random(kSeed);
  for (int made = 0; made < 50;) {
    const v1::EstimateRequest request = random.Next();
    SCOPED_TRACE(testing::Message() << "seed " << kSeed << ": " << request.ShortDebugString());
    v1::EstimateResponse estimate;
    const grpc::Status status = Estimate(request, &estimate);
    ASSERT_TRUE(status.ok()) << status.error_message();
    if (estimate.response_bytes() > 1 << 20) continue;  // small ones show as much
    ++made;
    ExpectAsEstimated<v1::AttendRequest, v1::AttendResponse>(
        request, estimate,
        [&](auto* context, const auto& call, auto* response) {
          return stub_->Attend(context, call, response);
        },
        [](const v1::AttendResponse& r) {
          return static_cast<int64_t>(r.output().data().size() + r.weights().data().size() +
                                      r.logsumexp().data().size() + r.key_sums().data().size());
        });
  }
}

TEST_F(AttentionServiceTest, RandomHeadsTakeTheWorkspaceThatIsEstimated) {
  constexpr uint32_t kSeed = 67;
  RandomCalls random(kSeed);
  for (int made = 0; made < 25; ++made) {
    const v1::EstimateRequest request = random.NextHead();
    SCOPED_TRACE(testing::Message() << "seed " << kSeed << ": " << request.ShortDebugString());
    v1::EstimateResponse estimate;
    const grpc::Status status = Estimate(request, &estimate);
    ASSERT_TRUE(status.ok()) << status.error_message();
    ExpectAsEstimated<v1::HeadRequest, v1::HeadResponse>(
        request, estimate,
        [&](auto* context, const auto& call, auto* response) {
          return stub_->Head(context, call, response);
        },
        [](const v1::HeadResponse& r) { return static_cast<int64_t>(r.output().data().size()); });
  }
}

TEST_F(AttentionServiceTest, EstimateNamesItsFieldsAndIsCounted) {
  v1::EstimateRequest request;
  v1::EstimateResponse response;
  request.set_batch(1);
  request.set_heads(8);
  request.set_queries(16);
  request.set_keys(16);
  request.set_width(-4);
  const auto field_of = [](const grpc::Status& status) {
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    const auto detail = DetailOf<google::rpc::BadRequest>(status);
    return detail.field_violations_size() == 1 ? detail.field_violations(0).field() : "";
  };
  EXPECT_EQ(field_of(Estimate(request, &response)), "width");
  request.set_width(4);
  request.set_dtype(static_cast<v1::DataType>(77));
  EXPECT_EQ(field_of(Estimate(request, &response)), "dtype");
  request.clear_dtype();
  v1::Tensor& mask = *request.mutable_options()->mutable_mask();
  mask.set_dtype(v1::DATA_TYPE_BOOL);
  mask.add_shape(16);
  EXPECT_TRUE(Estimate(request, &response).ok());  // without its data
  mask.set_data("too short");
  EXPECT_EQ(field_of(Estimate(request, &response)), "options.mask.data");
  mask.set_shape(0, 15);
  EXPECT_EQ(field_of(Estimate(request, &response)), "options.mask.shape[0]");
  // Draining, it answers as Info does.
  service_.StopAccepting();
  mask.set_shape(0, 16);
  mask.clear_data();
  EXPECT_TRUE(Estimate(request, &response).ok());
  EXPECT_THAT(
      metrics_.Text(),
      HasSubstr("attendant_requests_total{code=\"OK\",method=\"Estimate\",path=\"none\"} 2"));
}

TEST_F(AttentionServiceTest, EstimatedSecondsFollowWhatCallsTookAlone) {
  v1::EstimateRequest request;
  request.set_batch(1);
  request.set_heads(2);
  request.set_queries(4096);
  request.set_keys(4096);
  request.set_width(32);
  request.set_value_width(16);
  v1::AttendRequest call = ConstantRequest({1, 2, 4096, 32}, 0.5f);
  SetTensor(v1::DATA_TYPE_FLOAT32, {1, 2, 4096, 16}, std::vector<float>(2 * 4096 * 16),
            call.mutable_value());
  const auto estimated = [&] {
    v1::EstimateResponse response;
    EXPECT_TRUE(Estimate(request, &response).ok());
    EXPECT_EQ(response.explicit_path().seconds(), 0);  // not measured
    return response.chunked_path().seconds();
  };
  const int64_t flops = int64_t{2} * 2 * 4096 * 4096 * (32 + 16);
  const double by_rate = 1e-8 * static_cast<double>(flops);
  EXPECT_DOUBLE_EQ(estimated(), by_rate);

  // Two that share the threads say nothing.
  std::latch release(1);
  OccupyThreads(release);
  v1::AttendResponse responses[2];
  std::future<grpc::Status> calls[2];
  for (int i = 0; i < 2; ++i) {
    calls[i] = std::async(std::launch::async, [&, i] { return Attend(call, &responses[i]); });
  }
  const std::string both = absl::StrCat("attendant_inflight_flops ", 2 * flops);
  while (metrics_.Text().find(both) == std::string::npos) std::this_thread::yield();
  release.count_down();
  for (auto& answer : calls) EXPECT_TRUE(answer.get().ok());
  EXPECT_DOUBLE_EQ(estimated(), by_rate);

  // One alone, and faster than that, moves the estimate a quarter of the way, by factors.
  ASSERT_TRUE(Attend(call, &responses[0]).ok());
  const double took = responses[0].stats().compute_seconds();
  EXPECT_NEAR(estimated() / (by_rate * std::pow(took / by_rate, 0.25)), 1, 1e-6);
}

// Two keys of the same score: d_value is half of d_output; their values 1 and 3 around the output 2
// pull the scores apart, and the sink takes weight from both.
TEST_F(AttentionServiceTest, BackwardAnswersWithGradients) {
  const v1::AttendRequest forward = MeanRequest();
  v1::BackwardRequest request;
  *request.mutable_query() = forward.query();
  *request.mutable_key() = forward.key();
  *request.mutable_value() = forward.value();
  SetTensor<float>(v1::DATA_TYPE_FLOAT32, {1, 1, 1, 1}, {4}, request.mutable_d_output());
  SetTensor<float>(v1::DATA_TYPE_FLOAT32, {2}, {0, 0}, request.mutable_options()->mutable_mask());
  request.set_return_d_mask(true);
  v1::BackwardResponse response;
  const auto backward = [&] {
    grpc::ClientContext context;
    SetTestDeadline(context);
    return stub_->Backward(&context, request, &response);
  };
  for (const v1::Path path : {v1::PATH_CHUNKED, v1::PATH_EXPLICIT}) {
    request.mutable_options()->set_path(path);
    const grpc::Status status = backward();
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_THAT(ValuesOf<float>(response.d_value()), ElementsAre(2, 2));
    // Weight 1/2, times 4 * value less 4 * output.
    EXPECT_THAT(ValuesOf<float>(response.d_mask()), ElementsAre(-2, 2));
    EXPECT_THAT(response.d_mask().shape(), ElementsAre(2));
    EXPECT_THAT(response.d_query().shape(), ElementsAre(1, 1, 1, 1));
    EXPECT_EQ(response.d_sinks_size(), 0);
    EXPECT_EQ(response.stats().path(), path);
    EXPECT_GT(response.stats().flops(), 0);
    EXPECT_GT(response.stats().peak_workspace_bytes(), 0);
  }
  EXPECT_THAT(
      metrics_.Text(),
      HasSubstr("attendant_requests_total{code=\"OK\",method=\"Backward\",path=\"chunked\"} 1"));

  // Half of the weight is a sink's: the output is 1.
  request.mutable_options()->add_sinks(std::log(2.));
  ASSERT_TRUE(backward().ok());
  ASSERT_EQ(response.d_sinks_size(), 1);
  EXPECT_FLOAT_EQ(static_cast<float>(response.d_sinks(0)), -0.5f * 4);

  // With the forward's results none runs: they are believed.
  request.mutable_options()->clear_sinks();
  SetTensor<float>(v1::DATA_TYPE_FLOAT32, {1, 1, 1, 1}, {2}, request.mutable_output());
  grpc::Status status = backward();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("logsumexp: is not set"));
  SetTensor<float>(v1::DATA_TYPE_FLOAT32, {1, 1, 1}, {std::log(2.f)}, request.mutable_logsumexp());
  ASSERT_TRUE(backward().ok());
  EXPECT_FLOAT_EQ(ValuesOf<float>(response.d_value())[0], 2);

  request.mutable_d_output()->mutable_data()->pop_back();
  status = backward();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("d_output.data: has 3 bytes"));
}

TEST_F(AttentionServiceTest, PartsOfTheKeysAreMerged) {
  v1::MergeRequest request;
  for (const float value : {1.f, 3.f}) {
    v1::MergePart* const part = request.add_parts();
    SetTensor<float>(v1::DATA_TYPE_FLOAT32, {1, 1, 2, 1}, {value, value}, part->mutable_output());
    SetTensor<float>(v1::DATA_TYPE_FLOAT32, {1, 1, 2}, {0, value == 1 ? 0 : -INFINITY},
                     part->mutable_logsumexp());
  }
  v1::MergeResponse response;
  const auto merge = [&] {
    grpc::ClientContext context;
    SetTestDeadline(context);
    return stub_->Merge(&context, request, &response);
  };
  ASSERT_TRUE(merge().ok());
  EXPECT_THAT(ValuesOf<float>(response.output()), ElementsAre(2, 1));
  EXPECT_THAT(response.logsumexp().shape(), ElementsAre(1, 1, 2));
  EXPECT_FLOAT_EQ(ValuesOf<float>(response.logsumexp())[0], std::log(2.f));
  EXPECT_THAT(metrics_.Text(),
              HasSubstr("attendant_requests_total{code=\"OK\",method=\"Merge\",path=\"none\"} 1"));
  EXPECT_THAT(metrics_.Text(), HasSubstr("attendant_inflight_flops 0"));

  request.mutable_parts(1)->mutable_output()->mutable_data()->pop_back();
  const grpc::Status status = merge();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("parts[1].output.data: has 7 bytes"));
}

// A request to Check whose output sees every key though its options ask for a causal edge.
v1::CheckRequest UncausalCheck() {
  v1::CheckRequest request;
  SetTensor<double>(v1::DATA_TYPE_FLOAT64, {1, 1, 2, 1}, {0, 0}, request.mutable_query());
  SetTensor<double>(v1::DATA_TYPE_FLOAT64, {1, 1, 2, 1}, {5, 6}, request.mutable_key());
  SetTensor<double>(v1::DATA_TYPE_FLOAT64, {1, 1, 2, 1}, {1, 3}, request.mutable_value());
  SetTensor<double>(v1::DATA_TYPE_FLOAT64, {1, 1, 2, 1}, {2, 2}, request.mutable_candidate());
  request.mutable_options()->set_causal(v1::CAUSAL_TOP_LEFT);
  return request;
}

TEST_F(AttentionServiceTest, CheckNamesTheMistake) {
  v1::CheckResponse response;
  const grpc::Status status = Check(UncausalCheck(), &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.verdict(), v1::VERDICT_MISMATCH);
  EXPECT_EQ(response.max_abs_difference(), 1);
  EXPECT_EQ(response.max_ulp_difference(), int64_t{1} << 52);
  EXPECT_THAT(response.worst_index(), ElementsAre(0, 0, 0, 0));
  EXPECT_GT(response.tolerance(), 0);
  EXPECT_LT(response.tolerance(), 1e-13);
  EXPECT_EQ(response.first_departure(), "");
  ASSERT_GE(response.findings_size(), 1);
  const v1::Finding& finding = response.findings(0);
  EXPECT_EQ(finding.code(), "causal_ignored");
  EXPECT_EQ(finding.field(), "options.causal");
  EXPECT_THAT(finding.message(), HasSubstr("queries saw keys after their own"));
  EXPECT_EQ(finding.residual(), 0);
  EXPECT_THAT(metrics_.Text(),
              HasSubstr("attendant_requests_total{code=\"OK\",method=\"Check\",path=\"none\"} 1"));
  EXPECT_TRUE(MemoryComesBack());
}

TEST_F(AttentionServiceTest, CheckMatchesWhatAttendAnswers) {
  v1::CheckRequest request = UncausalCheck();
  SetTensor<double>(v1::DATA_TYPE_FLOAT64, {1, 1, 2, 1}, {1, 2}, request.mutable_candidate());
  // Ignored: neither path nor returns are Check's.
  request.mutable_options()->set_path(v1::PATH_EXPLICIT);
  request.mutable_options()->set_return_weights(true);
  v1::CheckResponse response;
  ASSERT_TRUE(Check(request, &response).ok());
  EXPECT_EQ(response.verdict(), v1::VERDICT_MATCH);
  EXPECT_EQ(response.findings_size(), 0);
  // Of another type, which holds both numbers exactly.
  SetTensor<float>(v1::DATA_TYPE_FLOAT32, {1, 1, 2, 1}, {1, 2}, request.mutable_candidate());
  response.Clear();
  ASSERT_TRUE(Check(request, &response).ok());
  EXPECT_EQ(response.verdict(), v1::VERDICT_MATCH);
}

v1::CheckRequest HeadCheck() {
  v1::CheckRequest request;
  v1::HeadRequest& head = *request.mutable_head();
  SetTensor<double>(v1::DATA_TYPE_FLOAT64, {2, 1}, {1, 2}, head.mutable_x());
  for (v1::Tensor* weight :
       {head.mutable_w_q(), head.mutable_w_k(), head.mutable_w_v(), head.mutable_w_o()}) {
    SetTensor<double>(v1::DATA_TYPE_FLOAT64, {1, 1}, {2}, weight);
  }
  head.mutable_options()->set_scale(0);
  SetTensor<double>(v1::DATA_TYPE_FLOAT64, {2, 1}, {3, 3},
                    request.mutable_head_candidate()->mutable_output());
  return request;
}

TEST_F(AttentionServiceTest, CheckTakesAHead) {
  v1::CheckRequest request = HeadCheck();
  v1::CheckResponse response;
  grpc::Status status = Check(request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.verdict(), v1::VERDICT_MISMATCH);
  EXPECT_EQ(response.first_departure(), "output");
  EXPECT_THAT(response.worst_index(), ElementsAre(0, 0));
  ASSERT_EQ(response.findings_size(), 1);
  EXPECT_EQ(response.findings(0).code(), "w_o_missing");
  EXPECT_EQ(response.findings(0).field(), "head.w_o");
  // Of intermediates alone.
  v1::HeadResponse& candidate = *request.mutable_head_candidate();
  candidate.clear_output();
  SetTensor<double>(v1::DATA_TYPE_FLOAT64, {1, 1, 2, 2}, {.5, .5, .5, .5},
                    candidate.mutable_weights());
  SetTensor<double>(v1::DATA_TYPE_FLOAT64, {1, 1, 2, 1}, {2, 4}, candidate.mutable_query());
  response.Clear();
  status = Check(request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.verdict(), v1::VERDICT_MATCH);
  EXPECT_EQ(response.first_departure(), "");
}

TEST_F(AttentionServiceTest, CheckNamesTheFieldThatIsWrong) {
  struct Bad {
    const char* field;
    const char* description;
    v1::CheckRequest request;
  };
  std::vector<Bad> all;
  const auto add = [&](const char* field, const char* description, v1::CheckRequest request,
                       const auto& spoil) {
    spoil(request);
    all.push_back({field, description, std::move(request)});
  };
  add("query", "is unset; send query, key, value and candidate, or head", {}, [](auto&) {});
  add("candidate", "is unset", UncausalCheck(), [](auto& r) { r.clear_candidate(); });
  add("key.shape[3]", "is 2, must be 1", UncausalCheck(),
      [](auto& r) { r.mutable_key()->set_shape(3, 2); });
  add("candidate.shape[2]", "is 3, must be 2 (the query's tokens)", UncausalCheck(),
      [](auto& r) { r.mutable_candidate()->set_shape(2, 3); });
  add("candidate.dtype", "is UNSPECIFIED", UncausalCheck(),
      [](auto& r) { r.mutable_candidate()->clear_dtype(); });
  add("candidate.data", "has 15 bytes, shape and dtype say 16", UncausalCheck(),
      [](auto& r) { r.mutable_candidate()->mutable_data()->pop_back(); });
  add("options.softcap", "is -1", UncausalCheck(),
      [](auto& r) { r.mutable_options()->set_softcap(-1); });
  add("options.mask.data", "has 0 bytes", UncausalCheck(), [](auto& r) {
    r.mutable_options()->mutable_mask()->set_dtype(v1::DATA_TYPE_BOOL);
    r.mutable_options()->mutable_mask()->add_shape(2);
  });
  add("query", "is set beside head", HeadCheck(), [](auto& r) { r.mutable_query(); });
  add("options", "is set beside head, whose options are head.options", HeadCheck(),
      [](auto& r) { r.mutable_options(); });
  add("head", "is unset", HeadCheck(), [](auto& r) { r.clear_head(); });
  add("head.w_q.shape[0]", "is 2, must be 1", HeadCheck(),
      [](auto& r) { r.mutable_head()->mutable_w_q()->set_shape(0, 2); });
  add("head.options.scale", "must be finite", HeadCheck(),
      [](auto& r) { r.mutable_head()->mutable_options()->set_scale(INFINITY); });
  add("head_candidate", "is empty", HeadCheck(),
      [](auto& r) { r.mutable_head_candidate()->Clear(); });
  add("head_candidate.output.shape[1]", "is 2, must be 1 (the width of x)", HeadCheck(),
      [](auto& r) { r.mutable_head_candidate()->mutable_output()->set_shape(1, 2); });
  add("head_candidate.logits.shape", "has 2 dimensions (2, 2), must have 4", HeadCheck(),
      [](auto& r) {
        SetTensor<double>(v1::DATA_TYPE_FLOAT64, {2, 2}, {0, 0, 0, 0},
                          r.mutable_head_candidate()->mutable_logits());
      });
  for (const Bad& bad : all) {
    SCOPED_TRACE(bad.field);
    v1::CheckResponse response;
    const grpc::Status status = Check(bad.request, &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    const auto detail = DetailOf<google::rpc::BadRequest>(status);
    ASSERT_EQ(detail.field_violations_size(), 1) << status.error_message();
    EXPECT_EQ(detail.field_violations(0).field(), bad.field);
    EXPECT_THAT(detail.field_violations(0).description(), HasSubstr(bad.description));
  }
}

TEST_F(AttentionServiceTest, ADeadlineThatPassesInTheQueueIsNeverComputed) {
  std::latch release(1);
  OccupyThreads(release);
  // On a busy machine a deadline can pass before the call arrives: longer ones, until one is
  // queued.
  bool queued = false;
  for (auto allowed = std::chrono::milliseconds(50); !queued; allowed *= 2) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + allowed);
    v1::AttendResponse response;
    auto call = std::async(std::launch::async,
                           [&] { return stub_->Attend(&context, MeanRequest(), &response); });
    while (call.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
      queued = queued || Computing();
      std::this_thread::yield();
    }
    EXPECT_EQ(call.get().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  }
  release.count_down();
  ASSERT_TRUE(service_.WaitUntilIdle(std::chrono::steady_clock::now() + std::chrono::seconds(30)));
  EXPECT_THAT(metrics_.Text(), Not(HasSubstr("attendant_cancelled_total{stage=\"queue\"} 0")));
  EXPECT_THAT(metrics_.Text(), HasSubstr("attendant_flops_total{path=\"chunked\"} 0"));
  EXPECT_THAT(metrics_.Text(), HasSubstr("attendant_inflight_requests 0"));
  EXPECT_THAT(metrics_.Text(), HasSubstr("attendant_inflight_flops 0"));
}

TEST_F(AttentionServiceTest, ACancelledCallGivesItsThreadsBack) {
  grpc::ClientContext context;
  v1::AttendResponse response;
  auto call = std::async(std::launch::async,
                         [&] { return stub_->Attend(&context, LongRequest(), &response); });
  while (!Computing()) std::this_thread::yield();
  context.TryCancel();
  EXPECT_EQ(call.get().error_code(), grpc::StatusCode::CANCELLED);
  ASSERT_TRUE(service_.WaitUntilIdle(std::chrono::steady_clock::now() + std::chrono::seconds(30)));
  // Before its first tile where the cancellation was quicker.
  EXPECT_THAT(metrics_.Text(), AnyOf(HasSubstr("attendant_cancelled_total{stage=\"compute\"} 1"),
                                     HasSubstr("attendant_cancelled_total{stage=\"queue\"} 1")));
  EXPECT_THAT(metrics_.Text(), HasSubstr("attendant_flops_total{path=\"chunked\"} 0"));
  EXPECT_TRUE(MemoryComesBack());
  v1::AttendResponse next;
  EXPECT_TRUE(Attend(MeanRequest(), &next).ok());
}

TEST_F(AttentionServiceTest, WhenDrainingNewCallsAreToldToRetryAndRunningOnesFinish) {
  std::latch release(1);
  OccupyThreads(release);
  v1::AttendResponse running;
  auto call = std::async(std::launch::async, [&] { return Attend(MeanRequest(), &running); });
  while (!Computing()) std::this_thread::yield();
  service_.StopAccepting();
  v1::AttendResponse refused;
  const grpc::Status status = Attend(MeanRequest(), &refused);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_GT(DetailOf<google::rpc::RetryInfo>(status).retry_delay().seconds(), 0);
  EXPECT_FALSE(service_.WaitUntilIdle(std::chrono::steady_clock::now()));
  release.count_down();
  EXPECT_TRUE(call.get().ok());
  EXPECT_THAT(ValuesOf<float>(running.output()), ElementsAre(2));
  EXPECT_TRUE(service_.WaitUntilIdle(std::chrono::steady_clock::now() + std::chrono::seconds(30)));
  EXPECT_THAT(metrics_.Text(), HasSubstr("attendant_shed_total{reason=\"draining\"} 1"));
}

TEST_F(AttentionServiceTest, StoppedCallsAreToldToRetry) {
  v1::AttendResponse response;
  auto call = std::async(std::launch::async, [&] { return Attend(LongRequest(), &response); });
  while (!Computing()) std::this_thread::yield();
  service_.StopRunning();
  const grpc::Status status = call.get();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_TRUE(DetailOf<google::rpc::RetryInfo>(status).has_retry_delay());
}

TEST_F(AttentionServiceTest, ManyCallersAtOnceGetTheirOwnAnswers) {
  constexpr int kCallers = 8;
  constexpr int kCalls = 25;
  std::vector<std::thread> callers;
  std::atomic<int> wrong = 0;
  for (int caller = 0; caller < kCallers; ++caller) {
    callers.emplace_back([&, caller] {
      for (int i = 0; i < kCalls; ++i) {
        // Constant values come back as they are, whatever the weights.
        const auto value = static_cast<float>(caller * kCalls + i);
        v1::AttendRequest request = ConstantRequest({1, 2, 1 + i, 4}, 0.25f);
        std::vector<float> values(static_cast<size_t>(2 * (1 + i) * 4), value);
        SetTensor(v1::DATA_TYPE_FLOAT32, {1, 2, 1 + i, 4}, values, request.mutable_value());
        v1::AttendResponse response;
        if (!Attend(request, &response).ok()) ++wrong;
        for (const float got : ValuesOf<float>(response.output())) {
          if (std::abs(got - value) > 1e-5f * value) ++wrong;
        }
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_THAT(
      metrics_.Text(),
      HasSubstr("attendant_requests_total{code=\"OK\",method=\"Attend\",path=\"chunked\"} 200"));
}

}  // namespace
}  // namespace attendant::server
