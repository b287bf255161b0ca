#include "client/cpp/calls.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/impl/client_unary_call.h>
#include <grpcpp/security/credentials.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/retry.h"
#include "client/cpp/rpc.h"
#include "client/cpp/status.h"
#include "core/mutex.h"

namespace attendant {
namespace {

// gRPC keeps a message's length in 31 bits and aborts beyond.
constexpr int64_t kLargestMessage = std::numeric_limits<int32_t>::max();
// The least that a server's --max_message_bytes can be.
constexpr int64_t kAlwaysTaken = int64_t{64} << 10;

// A server that restarts is back in a second or so: gRPC's own 1 s growing to 120 s between
// attempts to connect would hold calls up long after.
constexpr int kFirstReconnectMs = 100;
constexpr int kLongestReconnectMs = 2000;

struct Connection {
  std::shared_ptr<grpc::Channel> channel;
  std::atomic<int> calls = 0;
};

grpc::ChannelArguments ArgumentsFor(const ClientOptions& options) {
  grpc::ChannelArguments arguments;
  // The server knows its limit and names it; the client's own default of 4 MiB would not.
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  // Else channels to one target share a connection.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS,
                   static_cast<int>(absl::ToInt64Milliseconds(options.keepalive_time)));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                   static_cast<int>(absl::ToInt64Milliseconds(options.keepalive_timeout)));
  // However long a computation sends nothing.
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kFirstReconnectMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kLongestReconnectMs);
  if (options.round_robin) arguments.SetLoadBalancingPolicyName("round_robin");
  return arguments;
}

// A call's place on a connection.
class Place {
 public:
  explicit Place(Connection& connection) : connection_(connection) { ++connection.calls; }
  ~Place() { --connection_.calls; }
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

 private:
  Connection& connection_;
};

// Waits, unless the group ends first: then false.
bool WaitIn(CallGroup& group, absl::Duration duration) {
  core::Mutex mutex;
  core::CondVar stopped;
  bool stop = false;
  const CallGroup::Member member(group, [&] {
    core::MutexLock lock(mutex);
    stop = true;
    stopped.NotifyAll();
  });
  const auto end = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(duration);
  core::MutexLock lock(mutex);
  while (!stop && stopped.WaitUntil(mutex, end)) {
  }
  return !stop;
}

Outcome AttemptUnary(grpc::Channel& channel, const char* method, const OutMessage& request,
                     const Calls::Reader& read, CallGroup& group) {
  // Before what refers to it: contexts keep a call's memory.
  Loan loan;
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(group.deadline()));
  const CallGroup::Member member(group, [&context] { context.TryCancel(); });
  grpc::ByteBuffer response;
  const grpc::internal::RpcMethod rpc(method, grpc::internal::RpcMethod::NORMAL_RPC);
  const grpc::Status status = grpc::internal::BlockingUnaryCall(
      &channel, rpc, &context, loan.Lend(request.segments()), &response);
  Outcome outcome = OutcomeOf(status, context);
  if (status.ok()) outcome.status = ReadBuffer(response, read);
  return outcome;
}

}  // namespace

struct Calls::State {
  explicit State(const ClientOptions& o)
      : options(o), connections(static_cast<size_t>(std::max(o.connections, 1))) {}

  // The one with the fewest calls, of those the first. One that cannot connect fails its calls at
  // once, so that it has the fewest: it comes after all others, and before those the one on which
  // this call has failed.
  Connection& Least(const Connection* failed) {
    Connection* least = nullptr;
    std::pair<int, int> lowest;
    for (Connection& connection : connections) {
      const bool down =
          connection.channel->GetState(/*try_to_connect=*/false) == GRPC_CHANNEL_TRANSIENT_FAILURE;
      const std::pair<int, int> rank = {(down ? 2 : 0) + (&connection == failed ? 1 : 0),
                                        connection.calls.load()};
      if (least == nullptr || rank < lowest) {
        least = &connection;
        lowest = rank;
      }
    }
    return *least;
  }

  // attempt: (grpc::Channel&) -> Outcome.
  template <typename Attempt>
  absl::Status Run(int most_attempts, CallGroup& group, const Attempt& attempt) {
    RetryOptions retries = options.retry;
    retries.max_attempts = most_attempts;
    Retry retry(retries, group.deadline(), seed++);
    const Connection* failed = nullptr;
    while (true) {
      Connection& connection = Least(failed);
      Outcome outcome = [&] {
        const Place place(connection);
        return attempt(*connection.channel);
      }();
      if (outcome.status.ok()) return outcome.status;
      if (absl::IsCancelled(outcome.status) && !group.cancelled()) {
        // Nobody here asked for that: a server that ends lets go of calls so, or a proxy does.
        outcome.status = absl::UnavailableError(
            absl::StrCat("the server let go of the call: ", outcome.status.message()));
      }
      // A server that is full is as full by another connection.
      failed = absl::IsUnavailable(outcome.status) ? &connection : nullptr;
      const auto wait = retry.Next(outcome, absl::Now());
      if (!wait.has_value()) return Told(outcome, retry.attempts());
      if (!WaitIn(group, *wait)) return absl::CancelledError("the call was cancelled");
    }
  }

  // The status of a call's last attempt, with how many there were.
  absl::Status Told(const Outcome& last, int attempts) {
    const absl::Status& status = last.status;
    if (absl::IsResourceExhausted(status) && !last.pushback && !RetryDelayOf(status)) {
      // The limit may be another one than it was.
      core::MutexLock lock(mutex);
      limit.reset();
    }
    if (attempts == 1) return status;
    return Reworded(status, absl::StrCat(status.message(), " (after ", attempts, " attempts)"));
  }

  const ClientOptions options;
  std::vector<Connection> connections;
  std::atomic<uint32_t> seed = std::random_device()();
  core::Mutex mutex;
  std::optional<int64_t> limit ABSL_GUARDED_BY(mutex);
};

Calls::Calls(std::unique_ptr<State> state) : state_(std::move(state)) {}

Calls::~Calls() = default;

absl::StatusOr<std::unique_ptr<Calls>> Calls::Connect(const std::string& target,
                                                      const ClientOptions& options) {
  auto state = std::make_unique<State>(options);
  for (Connection& connection : state->connections) {
    connection.channel = grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(),
                                                   ArgumentsFor(options));
  }
  const auto deadline =
      std::chrono::system_clock::now() + absl::ToChronoNanoseconds(options.connect_timeout);
  // The others connect when calls overlap.
  if (!state->connections[0].channel->WaitForConnected(deadline)) {
    return absl::UnavailableError(absl::StrCat("no server answered at ", target, " within ",
                                               absl::FormatDuration(options.connect_timeout)));
  }
  return std::unique_ptr<Calls>(new Calls(std::move(state)));
}

absl::Status Calls::Unary(const char* method, const OutMessage& request, const Reader& read,
                          CallGroup& group) {
  return Send(method, request, read, state_->options.retry.max_attempts, group);
}

absl::Status Calls::Send(const char* method, const OutMessage& request, const Reader& read,
                         int most_attempts, CallGroup& group) {
  const auto bytes = static_cast<int64_t>(request.size());
  const auto limit = MessageLimit(bytes, group);
  if (!limit.ok()) return limit.status();
  if (bytes > *limit) {
    return absl::ResourceExhaustedError(absl::StrCat("max_message_bytes: the request has ", bytes,
                                                     " bytes, the server takes ", *limit));
  }
  return state_->Run(most_attempts, group, [&](grpc::Channel& channel) {
    return AttemptUnary(channel, method, request, read, group);
  });
}

absl::Status Calls::Unary(const char* method, const OutMessage& request,
                          google::protobuf::MessageLite* response, CallGroup& group,
                          std::optional<int> most_attempts) {
  const auto read = [response](google::protobuf::io::CodedInputStream& input) {
    return response->ParseFromCodedStream(&input)
               ? absl::OkStatus()
               : absl::InternalError("the answer is no message of the contract");
  };
  return Send(method, request, read, most_attempts.value_or(state_->options.retry.max_attempts),
              group);
}

absl::Status Calls::Stream(const StreamCall& call, CallGroup& group) {
  return state_->Run(state_->options.retry.max_attempts, group,
                     [&](grpc::Channel& channel) { return AttemptStream(channel, call, group); });
}

absl::StatusOr<int64_t> Calls::MessageLimit(int64_t bytes, CallGroup& group) {
  if (bytes <= kAlwaysTaken) return kAlwaysTaken;
  {
    core::MutexLock lock(state_->mutex);
    if (state_->limit.has_value() && bytes <= *state_->limit) return *state_->limit;
  }
  v1::InfoResponse info;
  absl::Status status = Unary(kInfo, OutMessage(), &info, group);
  // Servers of other makers may not say.
  if (!status.ok() && !absl::IsUnimplemented(status)) return status;
  const int64_t said = status.ok() ? info.max_message_bytes() : 0;
  const int64_t limit = said > 0 ? std::min(said, kLargestMessage) : kLargestMessage;
  core::MutexLock lock(state_->mutex);
  state_->limit = limit;
  return limit;
}

}  // namespace attendant
