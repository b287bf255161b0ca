// Calls against a server that answers by a script: retries, the pool, streams, async.
#include "client/cpp/calls.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <future>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attendant/v1/attention.grpc.pb.h"
#include "client/cpp/call_group.h"
#include "client/cpp/client.h"
#include "core/mutex.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "tests/no_threads.h"

namespace attendant {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// What a call of the script is answered with.
struct Answer {
  grpc::StatusCode code = grpc::StatusCode::OK;
  std::string pushback = {};    // the trailer; empty: none
  bool retry_info = false;      // of 1 ms
  int64_t drop_last_piece = 0;  // AttendStream leaves it out
  bool no_output = false;
  std::vector<int64_t> shape = {};  // of the output; empty: the query's
};

// Attend and AttendStream answer with the query as the output. Thread-safe.
class Script final : public v1::Attention::Service {
 public:
  void Will(std::vector<Answer> answers) {
    core::MutexLock lock(mutex_);
    answers_.assign(answers.begin(), answers.end());
  }
  void set_limit(int64_t bytes) { limit_ = bytes; }
  int calls() const { return calls_; }
  int streams() const { return streams_; }
  int infos() const { return infos_; }
  size_t peers() {
    core::MutexLock lock(mutex_);
    return peers_.size();
  }
  // Attend waits until so many wait.
  void WaitFor(int calls) {
    core::MutexLock lock(mutex_);
    together_ = calls;
  }

  grpc::Status Attend(grpc::ServerContext* context, const v1::AttendRequest* request,
                      v1::AttendResponse* response) override {
    ++calls_;
    Answer answer;
    const grpc::Status status = Next(*context, &answer);
    if (!answer.no_output) *response->mutable_output() = request->query();
    SetShape(answer, response->mutable_output());
    return status;
  }

  grpc::Status AttendStream(grpc::ServerContext* context,
                            grpc::ServerReaderWriter<v1::AttendStreamResponse,
                                                     v1::AttendStreamRequest>* stream) override {
    ++streams_;
    v1::AttendStreamRequest message;
    std::map<int, std::string> tensors;
    v1::AttendRequest header;
    while (stream->Read(&message)) {
      if (message.has_header()) {
        header = message.header();
        continue;
      }
      const v1::Piece& piece = message.piece();
      std::string& bytes = tensors[piece.tensor()];
      if (piece.data().size() > (1 << 20) || static_cast<size_t>(piece.offset()) != bytes.size()) {
        return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "a piece");
      }
      bytes += piece.data();
    }
    Answer answer;
    const grpc::Status status = Next(*context, &answer);
    if (!status.ok()) return status;
    header.mutable_query()->set_data(tensors[v1::PIECE_TENSOR_QUERY]);
    header.mutable_key()->set_data(tensors[v1::PIECE_TENSOR_KEY]);
    header.mutable_value()->set_data(tensors[v1::PIECE_TENSOR_VALUE]);
    if (header.options().has_mask()) {
      header.mutable_options()->mutable_mask()->set_data(tensors[v1::PIECE_TENSOR_MASK]);
    }
    {
      core::MutexLock lock(mutex_);
      streamed_ = header;
    }
    Send(tensors[v1::PIECE_TENSOR_QUERY], header.query(), answer, stream);
    return status;
  }

  grpc::Status Info(grpc::ServerContext*, const v1::InfoRequest*,
                    v1::InfoResponse* response) override {
    ++infos_;
    response->set_max_message_bytes(limit_);
    return grpc::Status::OK;
  }

  v1::AttendRequest streamed() {
    core::MutexLock lock(mutex_);
    return streamed_;
  }

 private:
  static void SetShape(const Answer& answer, v1::Tensor* output) {
    if (answer.shape.empty()) return;
    output->mutable_shape()->Assign(answer.shape.begin(), answer.shape.end());
  }

  // In pieces from the end to the beginning, which the contract allows.
  static void Send(
      const std::string& bytes, const v1::Tensor& like, const Answer& answer,
      grpc::ServerReaderWriter<v1::AttendStreamResponse, v1::AttendStreamRequest>* stream) {
    v1::AttendStreamResponse head;
    head.mutable_header()->mutable_stats()->set_flops(5);
    if (answer.no_output) {
      stream->Write(head);
      return;
    }
    v1::Tensor& output = *head.mutable_header()->mutable_output();
    output.set_dtype(like.dtype());
    *output.mutable_shape() = like.shape();
    SetShape(answer, &output);
    stream->Write(head);
    constexpr size_t kBytes = 300000;
    const size_t pieces = (bytes.size() + kBytes - 1) / kBytes;
    for (size_t i = pieces; i > static_cast<size_t>(answer.drop_last_piece); --i) {
      v1::AttendStreamResponse piece;
      piece.mutable_piece()->set_tensor(v1::PIECE_TENSOR_OUTPUT);
      piece.mutable_piece()->set_offset(static_cast<int64_t>((i - 1) * kBytes));
      piece.mutable_piece()->set_data(bytes.substr((i - 1) * kBytes, kBytes));
      stream->Write(piece);
    }
  }

  grpc::Status Next(grpc::ServerContext& context, Answer* taken) {
    core::MutexLock lock(mutex_);
    peers_.insert(context.peer());
    if (together_ > 0) {
      ++waiting_;
      arrived_.NotifyAll();
      while (waiting_ < together_ && !context.IsCancelled()) {
        arrived_.WaitUntil(mutex_,
                           std::chrono::steady_clock::now() + std::chrono::milliseconds(20));
      }
    }
    if (answers_.empty()) return grpc::Status::OK;
    const Answer answer = answers_.front();
    answers_.pop_front();
    *taken = answer;
    if (!answer.pushback.empty()) {
      context.AddTrailingMetadata("grpc-retry-pushback-ms", answer.pushback);
    }
    if (answer.code == grpc::StatusCode::OK) return grpc::Status::OK;
    google::rpc::Status details;
    if (answer.retry_info) {
      google::rpc::RetryInfo info;
      info.mutable_retry_delay()->set_nanos(1000000);
      details.add_details()->PackFrom(info);
    }
    return grpc::Status(answer.code, "scripted", details.SerializeAsString());
  }

  std::atomic<int> calls_ = 0;
  std::atomic<int> streams_ = 0;
  std::atomic<int> infos_ = 0;
  std::atomic<int64_t> limit_ = 256 << 20;
  core::Mutex mutex_;
  core::CondVar arrived_;
  std::deque<Answer> answers_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> peers_ ABSL_GUARDED_BY(mutex_);
  v1::AttendRequest streamed_ ABSL_GUARDED_BY(mutex_);
  int together_ ABSL_GUARDED_BY(mutex_) = 0;
  int waiting_ ABSL_GUARDED_BY(mutex_) = 0;
};

class CallsTest : public testing::Test {
 protected:
  void SetUp() override {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&script_);
    builder.SetMaxReceiveMessageSize(-1);
    builder.SetMaxSendMessageSize(-1);
    server_ = builder.BuildAndStart();
    ASSERT_NE(server_, nullptr);
    address_ = absl::StrCat("127.0.0.1:", port);
    options_.retry.initial_backoff = absl::Milliseconds(1);
    options_.retry.max_attempts = 4;
  }

  std::unique_ptr<Client> Connect() { return Client::Connect(address_, options_).value(); }

  // An Attend of `bytes` bytes in the query.
  absl::StatusOr<AttendResult> Attend(Client& client, size_t bytes = 16) {
    query_.resize(bytes / sizeof(float));
    for (size_t i = 0; i < query_.size(); ++i) query_[i] = static_cast<float>(i);
    return client.Attend(query(), small(), small());
  }
  TensorRef query() const { return {query_, {1, 1, static_cast<int64_t>(query_.size()), 1}}; }
  TensorRef small() const { return {one_, {1, 1, 1, 1}}; }

  Script script_;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
  ClientOptions options_;
  std::vector<float> query_;
  std::vector<float> one_ = {1};
};

TEST_F(CallsTest, CallsThatAreShedOrMissTheirServerAreMadeAgain) {
  const auto client = Connect();
  script_.Will({{grpc::StatusCode::UNAVAILABLE},
                {grpc::StatusCode::RESOURCE_EXHAUSTED, "2"},
                {grpc::StatusCode::RESOURCE_EXHAUSTED, "", true}});
  const auto result = Attend(*client);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(result->output.values<float>(), ElementsAre(0, 1, 2, 3));
  EXPECT_EQ(script_.calls(), 4);
}

TEST_F(CallsTest, OthersAreNot) {
  const auto client = Connect();
  const Answer final_answers[] = {
      {grpc::StatusCode::RESOURCE_EXHAUSTED}, {grpc::StatusCode::RESOURCE_EXHAUSTED, "-1", true},
      {grpc::StatusCode::UNAVAILABLE, "-1"},  {grpc::StatusCode::INVALID_ARGUMENT},
      {grpc::StatusCode::INTERNAL},           {grpc::StatusCode::UNIMPLEMENTED}};
  int calls = 0;
  for (const Answer& answer : final_answers) {
    script_.Will({answer});
    const absl::Status status = Attend(*client).status();
    EXPECT_EQ(static_cast<int>(status.code()), static_cast<int>(answer.code));
    EXPECT_EQ(status.message(), "scripted");
    EXPECT_EQ(script_.calls(), ++calls);
  }
}

// A server that ends lets go of calls in the transport, which has no other word for it.
TEST_F(CallsTest, ACancelThatNobodyHereAskedForIsAServerThatIsGone) {
  const auto client = Connect();
  script_.Will({{grpc::StatusCode::CANCELLED}});
  EXPECT_TRUE(Attend(*client).ok());
  EXPECT_EQ(script_.calls(), 2);
  options_.retry.max_attempts = 1;
  script_.Will({{grpc::StatusCode::CANCELLED}});
  const absl::Status status = Attend(*Connect()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status.message(), "the server let go of the call: scripted");
}

// A server that is full is as full by another connection.
TEST_F(CallsTest, ACallThatMissedItsServerIsMadeAgainOnAnotherConnection) {
  const auto client = Connect();
  script_.Will({{grpc::StatusCode::RESOURCE_EXHAUSTED, "1"}});
  ASSERT_TRUE(Attend(*client).ok());
  EXPECT_EQ(script_.peers(), 1u);
  script_.Will({{grpc::StatusCode::UNAVAILABLE}});
  ASSERT_TRUE(Attend(*client).ok());
  EXPECT_EQ(script_.peers(), 2u);
  options_.connections = 1;
  script_.Will({{grpc::StatusCode::UNAVAILABLE}});
  ASSERT_TRUE(Attend(*Connect()).ok());
  EXPECT_EQ(script_.peers(), 3u);
}

TEST_F(CallsTest, AttemptsAreCountedAndTold) {
  const auto client = Connect();
  script_.Will(std::vector<Answer>(9, {grpc::StatusCode::UNAVAILABLE}));
  const absl::Status status = Attend(*client).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status.message(), "scripted (after 4 attempts)");
  EXPECT_EQ(script_.calls(), 4);
  options_.retry.max_attempts = 1;
  EXPECT_EQ(Attend(*Connect()).status().message(), "scripted");
  EXPECT_EQ(script_.calls(), 5);
}

// A wait that the deadline would cut short is not begun.
TEST_F(CallsTest, TheDeadlineBoundsTheAttempts) {
  options_.call_timeout = absl::Seconds(60);
  const auto client = Connect();
  script_.Will({{grpc::StatusCode::RESOURCE_EXHAUSTED, "3600000", true}});
  const absl::Time begin = absl::Now();
  const absl::Status status = Attend(*client).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_LT(absl::Now() - begin, absl::Seconds(50));
  EXPECT_TRUE(status.GetPayload("type.googleapis.com/google.rpc.RetryInfo").has_value());
}

TEST_F(CallsTest, AGroupsEndEndsAWaitForTheNextAttempt) {
  options_.call_timeout = absl::Hours(2);
  const auto client = Connect();
  Attend(*client).status().IgnoreError();
  script_.Will({{grpc::StatusCode::RESOURCE_EXHAUSTED, "3600000"}});
  CallGroup group(absl::Hours(2));
  auto status = std::async(std::launch::async, [&] {
    return client->Attend(query(), small(), small(), {}, &group).status();
  });
  while (script_.calls() < 2) std::this_thread::yield();
  group.Cancel();
  EXPECT_EQ(status.get().code(), absl::StatusCode::kCancelled);
}

TEST_F(CallsTest, AMessageOf64MiBIsSentAgain) {
  const auto client = Connect();
  script_.Will({{grpc::StatusCode::UNAVAILABLE}, {grpc::StatusCode::RESOURCE_EXHAUSTED, "1"}});
  const auto result = Attend(*client, 64 << 20);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(script_.calls(), 3);
  EXPECT_TRUE(result->output.values<float>() == absl::MakeConstSpan(query_));
}

TEST_F(CallsTest, AttendIntoWritesToTheCallersMemory) {
  const auto client = Connect();
  query_ = {5, 6, 7};
  std::vector<float> output(3);
  const auto result = client->AttendInto(query(), small(), small(), {}, {.output = output});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(output, ElementsAre(5, 6, 7));
  EXPECT_THAT(result->output.shape, ElementsAre(1, 1, 3, 1));
  EXPECT_TRUE(result->output.bytes.empty());
  std::vector<float> shorter(2);
  const auto refused = client->AttendInto(query(), small(), small(), {}, {.output = shorter});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refused.status().message(), "output: the memory for it has 8 bytes, it has 12");
  const auto unasked =
      client->AttendInto(query(), small(), small(), {}, {.output = output, .weights = output});
  EXPECT_THAT(std::string(unasked.status().message()), HasSubstr("options.return_weights"));
  EXPECT_EQ(script_.calls(), 1);
}

TEST_F(CallsTest, AMessageAboveTheLimitIsNeverSent) {
  script_.set_limit(100000);
  const auto client = Connect();
  query_.resize(50000);
  const auto result = client->Check(query(), small(), small(), small());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(result.status().message()),
              AllOf(HasSubstr("max_message_bytes"), HasSubstr("100000")));
  EXPECT_EQ(script_.infos(), 1);
  // What every server takes needs no question, and an answer is remembered.
  ASSERT_TRUE(Attend(*Connect(), 1000).ok());
  EXPECT_EQ(script_.infos(), 1);
  ASSERT_TRUE(Attend(*client, 90000).ok());
  EXPECT_EQ(script_.infos(), 1);
}

TEST_F(CallsTest, AHigherLimitIsFoundOut) {
  script_.set_limit(100000);
  const auto client = Connect();
  ASSERT_TRUE(Attend(*client, 200000).ok());
  EXPECT_EQ(script_.streams(), 1);
  EXPECT_EQ(client->Check(query(), small(), small(), small()).status().code(),
            absl::StatusCode::kResourceExhausted);
  script_.set_limit(400000);
  // The script has no Check: it was sent.
  EXPECT_EQ(client->Check(query(), small(), small(), small()).status().code(),
            absl::StatusCode::kUnimplemented);
  ASSERT_TRUE(Attend(*client, 200000).ok());
  EXPECT_EQ(script_.streams(), 1);
  EXPECT_EQ(script_.calls(), 1);
  EXPECT_EQ(script_.infos(), 3);
}

// Whoever answers so: nothing is thrown, and nothing is taken for an answer.
TEST_F(CallsTest, AnAnswerOfAnotherShapeIsInternal) {
  constexpr int64_t kHuge = int64_t{1} << 40;
  const Answer answers[] = {{.no_output = true},          {.shape = {1, 1, 5, 1}},
                            {.shape = {1, 1, 1, 4}},      {.shape = {4}},
                            {.shape = {kHuge, kHuge, 1}}, {.shape = {1, 1, -4, 1}}};
  for (const bool stream : {false, true}) {
    if (stream) options_.stream_above = 0;
    const auto client = Connect();
    for (const Answer& answer : answers) {
      script_.Will({answer, answer});
      const absl::Status status = Attend(*client).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
      std::vector<float> output(query_.size());
      const absl::Status into =
          client->AttendInto(query(), small(), small(), {}, {.output = output}).status();
      EXPECT_EQ(into.code(), absl::StatusCode::kInternal) << into;
    }
  }
  EXPECT_EQ(script_.calls(), 12);
  EXPECT_EQ(script_.streams(), 12);
}

TEST_F(CallsTest, AttendGoesInPiecesAboveTheLimit) {
  script_.set_limit(1 << 20);
  const auto client = Connect();
  const auto result = Attend(*client, 3000000);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(result->output.values<float>() == absl::MakeConstSpan(query_));
  EXPECT_THAT(result->output.shape, ElementsAre(1, 1, 750000, 1));
  EXPECT_EQ(result->stats.flops(), 5);
  EXPECT_EQ(script_.calls(), 0);
  EXPECT_EQ(script_.streams(), 1);
  std::vector<float> output(query_.size());
  ASSERT_TRUE(client->AttendInto(query(), small(), small(), {}, {.output = output}).ok());
  EXPECT_TRUE(output == query_);
}

TEST_F(CallsTest, AStreamCarriesEveryTensorAndOption) {
  options_.stream_above = 0;
  const auto client = Connect();
  v1::AttendOptions options;
  options.set_scale(0.5);
  options.mutable_mask()->set_dtype(v1::DATA_TYPE_BOOL);
  options.mutable_mask()->add_shape(5000);
  options.mutable_mask()->set_data(std::string(5000, '\1'));
  options.add_sinks(2);
  query_ = {1, 2, 3};
  ASSERT_TRUE(client->Attend(query(), small(), small(), options).ok());
  const v1::AttendRequest sent = script_.streamed();
  EXPECT_EQ(sent.options().SerializeAsString(), options.SerializeAsString());
  EXPECT_EQ(sent.query().data(), std::string(query().bytes()));
  EXPECT_EQ(sent.key().data(), std::string(small().bytes()));
  EXPECT_EQ(sent.value().data(), std::string(small().bytes()));
}

TEST_F(CallsTest, AStreamIsMadeAgainAndMissesNothing) {
  options_.stream_above = 0;
  const auto client = Connect();
  script_.Will({{grpc::StatusCode::UNAVAILABLE}});
  const auto result = Attend(*client, 2000000);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(result->output.values<float>() == absl::MakeConstSpan(query_));
  EXPECT_EQ(script_.streams(), 2);
  script_.Will({{.drop_last_piece = 1}});
  const absl::Status status = Attend(*client, 2000000).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), HasSubstr("not each byte"));
  EXPECT_EQ(script_.streams(), 3);
}

// The server answers each call when all are there: on a connection each at most.
TEST_F(CallsTest, CallsAtOnceAreSpreadOverConnections) {
  options_.connections = 3;
  const auto client = Connect();
  query_ = {1};
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(client->Attend(query(), small(), small()).ok());
  EXPECT_EQ(script_.peers(), 1u);
  script_.WaitFor(6);
  std::vector<std::thread> threads;
  std::atomic<int> ok = 0;
  for (int i = 0; i < 6; ++i) {
    threads.emplace_back([&] { ok += client->Attend(query(), small(), small()).ok() ? 1 : 0; });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ok, 6);
  EXPECT_EQ(script_.peers(), 3u);
}

TEST_F(CallsTest, AsyncCallsRunAtOnceAndSayWhenTheyAreDone) {
  const auto client = Connect();
  query_ = {1, 2};
  script_.WaitFor(8);
  std::vector<std::future<absl::StatusOr<AttendResult>>> results;
  for (int i = 0; i < 8; ++i) {
    auto done = std::make_shared<std::promise<absl::StatusOr<AttendResult>>>();
    results.push_back(done->get_future());
    client->AttendAsync(query(), small(), small(), {}, [done](absl::StatusOr<AttendResult> result) {
      done->set_value(std::move(result));
    });
  }
  for (auto& result : results) {
    const auto answer = result.get();
    ASSERT_TRUE(answer.ok()) << answer.status();
    EXPECT_THAT(answer->output.values<float>(), ElementsAre(1, 2));
  }
}

TEST_F(CallsTest, AnAsyncCallForWhichThereIsNoThreadIsToldSo) {
  const auto client = Connect();
  query_ = {1};
  absl::Status told;
  const auto note = [&](const absl::StatusOr<AttendResult>& result) { told = result.status(); };
  {
    const NoThreads none;
    client->AttendAsync(query(), small(), small(), {}, note);
  }
  EXPECT_TRUE(absl::IsResourceExhausted(told)) << told;
  EXPECT_EQ(script_.calls(), 0);
  // The next one has a thread again.
  std::promise<absl::Status> done;
  client->AttendAsync(query(), small(), small(), {},
                      [&](const absl::StatusOr<AttendResult>& r) { done.set_value(r.status()); });
  EXPECT_EQ(done.get_future().get(), absl::OkStatus());
}

TEST_F(CallsTest, TheClientsEndCancelsAsyncCallsAndTellsThem) {
  options_.async_calls = 1;
  auto client = Connect();
  query_ = {1};
  script_.WaitFor(100);
  std::atomic<int> cancelled = 0;
  for (int i = 0; i < 3; ++i) {
    client->AttendAsync(query(), small(), small(), {}, [&](const absl::StatusOr<AttendResult>& r) {
      cancelled += absl::IsCancelled(r.status()) ? 1 : 0;
    });
  }
  client.reset();
  EXPECT_EQ(cancelled, 3);
}

TEST_F(CallsTest, ACallFromACallbackWhileTheClientEndsIsCancelledToo) {
  auto client = Connect();
  query_ = {1};
  script_.WaitFor(100);
  std::atomic<int> cancelled = 0;
  std::atomic<int> again = 0;
  Client* const ending = client.get();
  for (int i = 0; i < 3; ++i) {
    ending->AttendAsync(query(), small(), small(), {}, [&](const absl::StatusOr<AttendResult>& r) {
      cancelled += absl::IsCancelled(r.status()) ? 1 : 0;
      ending->AttendAsync(query(), small(), small(), {},
                          [&](const absl::StatusOr<AttendResult>& second) {
                            again += absl::IsCancelled(second.status()) ? 1 : 0;
                          });
    });
  }
  client.reset();
  EXPECT_EQ(cancelled, 3);
  EXPECT_EQ(again, 3);
}

// A listener that speaks enough HTTP/2 to be sent to, and reads nothing afterwards. Thread-hostile.
class StuckServer {
 public:
  StuckServer() : listener_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    bind(listener_, reinterpret_cast<sockaddr*>(&address), size);
    listen(listener_, 8);
    getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { Serve(); });
  }
  ~StuckServer() {
    shutdown(listener_, SHUT_RDWR);
    thread_.join();
    for (const int socket : sockets_) close(socket);
    close(listener_);
  }
  std::string address() const { return absl::StrCat("127.0.0.1:", port_); }

 private:
  void Serve() {
    for (int socket = 0; (socket = accept(listener_, nullptr, nullptr)) >= 0;) {
      sockets_.push_back(socket);
      // SETTINGS with INITIAL_WINDOW_SIZE (4) of 2^31 - 1; WINDOW_UPDATE of the connection by 2^30.
      static constexpr char kFrames[] =
          "\0\0\6\4\0\0\0\0\0\0\4\x7f\xff\xff\xff"
          "\0\0\4\x8\0\0\0\0\0\x40\0\0\0";
      send(socket, kFrames, sizeof(kFrames) - 1, MSG_NOSIGNAL);
    }
  }

  const int listener_;
  int port_ = 0;
  std::vector<int> sockets_;
  std::thread thread_;
};

// The kernel takes no more of the message: only the lost sign of life ends the write, and with it
// the call. Meanwhile the caller's memory must stay, and the call does not return.
TEST(StuckWriteTest, KeepaliveBoundsHowFarTheDeadlineIsOverrun) {
  const StuckServer server;
  ClientOptions options;
  options.call_timeout = absl::Milliseconds(300);
  options.keepalive_time = absl::Seconds(1);
  options.keepalive_timeout = absl::Seconds(1);
  options.retry.max_attempts = 1;
  auto calls = Calls::Connect(server.address(), options);
  ASSERT_TRUE(calls.ok()) << calls.status();
  const std::string bytes(size_t{64} << 20, 'x');
  StreamCall call;
  call.sent = {{v1::PIECE_TENSOR_QUERY, bytes}};
  call.limit = 1 << 20;
  const absl::Time begin = absl::Now();
  CallGroup group(options.call_timeout);
  EXPECT_FALSE((*calls)->Stream(call, group).ok());
  // Not that it could not be sent at all.
  EXPECT_GE(absl::Now() - begin, options.call_timeout);
  EXPECT_LT(absl::Now() - begin, absl::Seconds(40));
}

}  // namespace
}  // namespace attendant
