// Memory that is refused, an engine that fails, tiles that take long, and clients that go away at
// every stage: whatever comes together, every call ends once, and nothing of it stays.
#include "core/faults.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <random>
#include <thread>

#include "core/workspace.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "tests/server/serving.h"

namespace attendant::server {
namespace {

namespace faults = core::faults;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kCalls = 1000;
#else
constexpr int kCalls = 10'000;
#endif
constexpr int kClients = 8;

class FaultsTest : public testing::Test {
 protected:
  FaultsTest() {
    Serving::Options options;
    options.scheduler.max_running = 3;
    options.scheduler.max_queue = 4;
    options.limits.max_message_bytes = 1 << 20;
    options.limits.memory_budget_bytes = 8 << 20;
    options.limits.on_engine_fault = [this](const absl::Status&) { ++engine_faults_; };
    serving_ = std::make_unique<Serving>(options);
  }
  ~FaultsTest() override { faults::DisarmAll(); }

  grpc::Status Attend(const v1::AttendRequest& request, v1::AttendResponse* response) {
    grpc::ClientContext context;
    SetTestDeadline(context);
    return serving_->stub().Attend(&context, request, response);
  }

  void ExpectNothingIsLeft() {
    faults::DisarmAll();
    EXPECT_TRUE(Eventually([&] { return serving_->IsIdle(); })) << serving_->metrics().Text();
    EXPECT_TRUE(Eventually([&] { return core::Workspace::Process().current_bytes() == at_start_; }))
        << core::Workspace::Process().current_bytes() << " of " << at_start_;
    for (int i = 0; i < 100; ++i) {
      v1::AttendResponse response;
      const grpc::Status status = Attend(MeanRequest(), &response);
      ASSERT_TRUE(status.ok()) << status.error_message();
      ASSERT_THAT(ValuesOf<float>(response.output()), ElementsAre(2));
    }
  }

  const int64_t at_start_ = core::Workspace::Process().current_bytes();
  std::atomic<int> engine_faults_ = 0;
  std::unique_ptr<Serving> serving_;
};

TEST_F(FaultsTest, AnEngineFaultIsInternalAndIsReported) {
  faults::Arm(faults::Point::kEngineError, 1);
  v1::AttendResponse response;
  grpc::ClientContext context;
  SetTestDeadline(context);
  const grpc::Status status = serving_->stub().Attend(&context, MeanRequest(), &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INTERNAL) << status.error_message();
  EXPECT_EQ(PushbackOf(context), "");
  EXPECT_EQ(engine_faults_, 1);
  ExpectNothingIsLeft();
}

TEST_F(FaultsTest, MemoryThatIsRefusedIsWorthAnotherTryAndNoEngineFault) {
  // The first allocation, the second and so on, until there are no more.
  bool refused = true;
  int allocations = 0;
  while (refused) {
    faults::Arm(faults::Point::kAllocation, ++allocations);
    v1::AttendResponse response;
    grpc::ClientContext context;
    SetTestDeadline(context);
    const grpc::Status status =
        serving_->stub().Attend(&context, ConstantRequest({1, 2, 64, 8}, 1), &response);
    refused = faults::Fired(faults::Point::kAllocation) > 0;
    if (refused) {
      ExpectTryAgain(status, context, "machine_memory");
    } else {
      EXPECT_TRUE(status.ok()) << status.error_message();
    }
    ASSERT_LT(allocations, 100);
  }
  EXPECT_GT(allocations, 4) << "query, key, value and output at least";
  EXPECT_EQ(engine_faults_, 0);
  EXPECT_TRUE(
      serving_->Shows(absl::StrCat("attendant_shed_total{reason=\"memory\"} ", allocations - 1)));
  ExpectNothingIsLeft();
}

TEST(FaultyServerTest, IsNotReadyUntilASelfCheckPasses) {
  using HealthReply = grpc::health::v1::HealthCheckResponse;
  const auto server = Server::Start(LoopbackConfig());
  ASSERT_EQ(server.status(), absl::OkStatus());
  const auto channel = ChannelTo(**server);
  const auto stub = v1::Attention::NewStub(channel);
  const auto health = grpc::health::v1::Health::NewStub(channel);
  const auto becomes = [&](const std::string& service, HealthReply::ServingStatus wanted) {
    return Eventually([&] {
      grpc::ClientContext context;
      SetTestDeadline(context);
      grpc::health::v1::HealthCheckRequest request;
      request.set_service(service);
      HealthReply reply;
      return health->Check(&context, request, &reply).ok() && reply.status() == wanted;
    });
  };
  const auto attend = [&] {
    grpc::ClientContext context;
    SetTestDeadline(context);
    v1::AttendResponse response;
    return stub->Attend(&context, MeanRequest(), &response).error_code();
  };
  EXPECT_EQ(attend(), grpc::StatusCode::OK);
  // Every tile fails, those of the self-check too.
  faults::Arm(faults::Point::kEngineError, 1);
  EXPECT_EQ(attend(), grpc::StatusCode::INTERNAL);
  EXPECT_TRUE(becomes("", HealthReply::NOT_SERVING));
  EXPECT_TRUE(becomes("attendant.v1.Attention", HealthReply::NOT_SERVING));
  EXPECT_TRUE(becomes("liveness", HealthReply::SERVING));
  faults::DisarmAll();
  EXPECT_TRUE(becomes("", HealthReply::SERVING));
  EXPECT_EQ(attend(), grpc::StatusCode::OK);
}

// What one client does, call after call.
class Client {
 public:
  Client(v1::Attention::Stub& stub, uint32_t seed) : stub_(stub), rng_(seed) {}

  void Run(int calls) {
    for (int i = 0; i < calls; ++i) {
      switch (Below(8)) {
        case 0:
          Gone();
          break;
        case 1:
          Late();
          break;
        case 2:
          GoneWhileSending();
          break;
        case 3:
          GoneWhileReceiving();
          break;
        case 4:
          OtherMethods();
          break;
        default:
          Stays();
          break;
      }
    }
  }

  // Statuses by code.
  const std::array<int, 17>& codes() const { return codes_; }
  int wrong_answers() const { return wrong_answers_; }

 private:
  int64_t Below(int64_t n) { return static_cast<int64_t>(rng_() % static_cast<uint64_t>(n)); }

  // Its values are all `number`, and so is the answer. Some are copied by a compute thread, the
  // last does not fit the budget beside another.
  v1::AttendRequest Request(float number) {
    const int64_t kind = Below(16);
    v1::AttendRequest request;
    if (kind == 0) {
      constexpr int64_t kKeys = 4096;
      request = ConstantRequest({1, 1, 2, 16}, 0.5f);
      SetTensor(v1::DATA_TYPE_FLOAT32, {1, 1, kKeys, 16}, std::vector<float>(kKeys * 16, 0.5f),
                request.mutable_key());
      SetTensor(v1::DATA_TYPE_FLOAT32, {1, 1, kKeys, 16}, std::vector<float>(kKeys * 16, number),
                request.mutable_value());
      return request;
    }
    const int64_t tokens = kind == 1 ? 1024 : 1 + Below(64);
    request = ConstantRequest({1, 1, tokens, 2}, 0.5f);
    SetTensor(v1::DATA_TYPE_FLOAT32, {1, 1, tokens, 2},
              std::vector<float>(static_cast<size_t>(2 * tokens), number), request.mutable_value());
    if (kind <= 2) request.mutable_options()->set_path(v1::PATH_EXPLICIT);
    return request;
  }

  void Note(const grpc::Status& status) { ++codes_[static_cast<size_t>(status.error_code())]; }

  void NoteAnswer(const grpc::Status& status, const v1::Tensor& output, float number) {
    Note(status);
    if (!status.ok()) return;
    const std::vector<float> answer = ValuesOf<float>(output);
    const bool right = !answer.empty() && std::all_of(answer.begin(), answer.end(), [&](float x) {
      return std::abs(x - number) <= 1e-5f * number;
    });
    if (!right) ++wrong_answers_;
  }

  void Stays() {
    const auto number = static_cast<float>(1 + Below(1000));
    grpc::ClientContext context;
    SetTestDeadline(context);
    v1::AttendResponse response;
    const grpc::Status status = stub_.Attend(&context, Request(number), &response);
    NoteAnswer(status, response.output(), number);
  }

  // At any moment, at once among them: before the request arrived, queued, computing, answered.
  void Gone() {
    PendingAttend call(stub_, Request(1));
    const auto moment = std::chrono::steady_clock::now() + std::chrono::microseconds(Below(1500));
    while (!call.over() && std::chrono::steady_clock::now() < moment) std::this_thread::yield();
    call.Cancel();
    const grpc::Status status = call.Await();
    NoteAnswer(status, call.response().output(), 1);
  }

  void Late() {
    PendingAttend call(stub_, Request(1), std::chrono::microseconds(100 + Below(2000)));
    const grpc::Status status = call.Await();
    NoteAnswer(status, call.response().output(), 1);
  }

  static v1::Tensor WithoutData(v1::Tensor tensor) {
    tensor.clear_data();
    return tensor;
  }
  static v1::AttendStreamRequest HeaderOf(const v1::AttendRequest& request) {
    v1::AttendStreamRequest message;
    *message.mutable_header() = request;
    *message.mutable_header()->mutable_query() = WithoutData(request.query());
    *message.mutable_header()->mutable_key() = WithoutData(request.key());
    *message.mutable_header()->mutable_value() = WithoutData(request.value());
    return message;
  }
  static v1::AttendStreamRequest PieceOf(v1::PieceTensor which, const v1::Tensor& tensor) {
    v1::AttendStreamRequest message;
    message.mutable_piece()->set_tensor(which);
    message.mutable_piece()->set_data(tensor.data());
    return message;
  }

  void GoneWhileSending() {
    const v1::AttendRequest request = Request(1);
    grpc::ClientContext context;
    SetTestDeadline(context);
    const auto stream = stub_.AttendStream(&context);
    bool open = stream->Write(HeaderOf(request));
    if (Below(2) == 0) {
      open = open && stream->Write(PieceOf(v1::PIECE_TENSOR_QUERY, request.query()));
    }
    if (Below(2) == 0) {
      open = open && stream->Write(PieceOf(v1::PIECE_TENSOR_KEY, request.key()));
    }
    context.TryCancel();
    Note(stream->Finish());
  }

  // After the whole request; half of the time it stays to the end.
  void GoneWhileReceiving() {
    const auto number = static_cast<float>(1 + Below(1000));
    const v1::AttendRequest request = Request(number);
    grpc::ClientContext context;
    SetTestDeadline(context);
    const auto stream = stub_.AttendStream(&context);
    const bool sent = stream->Write(HeaderOf(request)) &&
                      stream->Write(PieceOf(v1::PIECE_TENSOR_QUERY, request.query())) &&
                      stream->Write(PieceOf(v1::PIECE_TENSOR_KEY, request.key())) &&
                      stream->Write(PieceOf(v1::PIECE_TENSOR_VALUE, request.value()));
    if (sent) stream->WritesDone();
    const bool stays = Below(2) == 0;
    v1::Tensor output;
    v1::AttendStreamResponse part;
    while (stream->Read(&part)) {
      if (!stays) context.TryCancel();
      if (part.has_piece()) output.mutable_data()->append(part.piece().data());
    }
    const grpc::Status status = stream->Finish();
    if (stays) {
      NoteAnswer(status, output, number);
    } else {
      Note(status);
    }
  }

  void OtherMethods() {
    grpc::ClientContext context;
    SetTestDeadline(context);
    const v1::AttendRequest attend = Request(1);
    const int64_t method = Below(3);
    if (method == 0) {
      v1::BackwardRequest request;
      *request.mutable_query() = attend.query();
      *request.mutable_key() = attend.key();
      *request.mutable_value() = attend.value();
      *request.mutable_d_output() = attend.query();
      v1::BackwardResponse response;
      Note(stub_.Backward(&context, request, &response));
    } else if (method == 1) {
      v1::CheckRequest request;
      *request.mutable_query() = attend.query();
      *request.mutable_key() = attend.key();
      *request.mutable_value() = attend.value();
      *request.mutable_candidate() = attend.query();
      v1::CheckResponse response;
      Note(stub_.Check(&context, request, &response));
    } else {
      v1::HeadRequest request;
      const std::vector<float> numbers(16, 0.5f);
      for (v1::Tensor* tensor : {request.mutable_x(), request.mutable_w_q(), request.mutable_w_k(),
                                 request.mutable_w_v(), request.mutable_w_o()}) {
        SetTensor(v1::DATA_TYPE_FLOAT32, {4, 4}, numbers, tensor);
      }
      v1::HeadResponse response;
      Note(stub_.Head(&context, request, &response));
    }
  }

  v1::Attention::Stub& stub_;
  std::mt19937 rng_;
  std::array<int, 17> codes_{};
  int wrong_answers_ = 0;
};

TEST_F(FaultsTest, AfterThousandsOfMixedFaultsNothingIsLeft) {
  // Numbers without a common factor, so that faults come together in every way.
  faults::Arm(faults::Point::kAllocation, 97);
  faults::Arm(faults::Point::kEngineError, 61);
  faults::Arm(faults::Point::kSlowTile, 251);
  std::vector<Client> clients;
  clients.reserve(kClients);
  for (uint32_t seed = 0; seed < kClients; ++seed) {
    clients.emplace_back(seed % 2 == 0 ? serving_->stub() : serving_->tcp_stub(), seed);
  }
  std::vector<std::thread> threads;
  threads.reserve(kClients);
  for (Client& client : clients) {
    threads.emplace_back([&client] { client.Run(kCalls / kClients); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const faults::Point point :
       {faults::Point::kAllocation, faults::Point::kEngineError, faults::Point::kSlowTile}) {
    EXPECT_GT(faults::Fired(point), 0);
  }
  std::array<int, 17> codes{};
  for (const Client& client : clients) {
    EXPECT_EQ(client.wrong_answers(), 0);
    for (size_t code = 0; code < codes.size(); ++code) codes[code] += client.codes()[code];
  }
  int expected = 0;
  for (const grpc::StatusCode code :
       {grpc::StatusCode::OK, grpc::StatusCode::CANCELLED, grpc::StatusCode::DEADLINE_EXCEEDED,
        grpc::StatusCode::RESOURCE_EXHAUSTED, grpc::StatusCode::INTERNAL}) {
    EXPECT_GT(codes[code], 0) << code;
    expected += codes[code];
  }
  EXPECT_EQ(expected, kClients * (kCalls / kClients)) << "no other code";
  // A caller that went away does not hear of one.
  EXPECT_GE(engine_faults_, codes[grpc::StatusCode::INTERNAL]);
  ExpectNothingIsLeft();
}

}  // namespace
}  // namespace attendant::server
