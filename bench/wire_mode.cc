// --mode=wire: what the wire adds to a call's computing, against the floor.
//
// Our server and an echo of as many bytes serve from processes of their own. A block calls each in
// turn, several times; its figure is a ratio of its own medians, and what is told is the median of
// the blocks' figures: whatever slows the machine for a second slows both sides of a ratio.
#include <grpcpp/create_channel.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "attendant/v1/attention.grpc.pb.h"
#include "bench/cases.h"
#include "bench/child.h"
#include "bench/echo.h"
#include "bench/measure.h"
#include "bench/modes.h"
#include "bench/report.h"
#include "bench/workload.h"
#include "client/cpp/client.h"
#include "core/cost.h"

namespace attendant::bench {
namespace {

constexpr int kLeastBlocks = 20;

// What a block of a case does.
enum class Kind {
  kLatency,  // one caller: RPC wall less compute, over the echo
  kGoodput,  // four clients at once, over 1 / (compute + echo)
  kStream,   // AttendStream's wall less compute, over the unary call's
};

struct WireCase {
  const char* name;
  Kind kind;
  bool unix_socket;
  int64_t batch;
  int64_t tokens;
  int calls;  // of each kind in a block: longer than the clock's and the scheduler's grain
};

// Of 8 heads of width 64. The stream's is 48 MiB in and 16 MiB out.
constexpr WireCase kCases[] = {
    {"t128_tcp", Kind::kLatency, false, 1, 128, 30},
    {"t2048_tcp", Kind::kLatency, false, 1, 2048, 5},
    {"t128_unix", Kind::kLatency, true, 1, 128, 30},
    {"t2048_unix", Kind::kLatency, true, 1, 2048, 5},
    {"four_clients_tcp", Kind::kGoodput, false, 1, 2048, 10},
    {"stream_tcp", Kind::kStream, false, 64, 128, 3},
    {"stream_unix", Kind::kStream, true, 64, 128, 3},
};

std::vector<std::string> WireCases() {
  std::vector<std::string> names;
  names.reserve(std::size(kCases));
  for (const WireCase& c : kCases) names.emplace_back(c.name);
  return names;
}

Case CaseOf(const WireCase& wire) {
  Case c;
  c.name = wire.name;
  c.batch = wire.batch;
  c.queries = wire.tokens;
  c.keys = wire.tokens;
  return c;
}

// A folder for sockets, while it lives.
class SocketFolder {
 public:
  SocketFolder() { path_ = mkdtemp(path_.data()); }
  ~SocketFolder() { std::filesystem::remove_all(path_); }
  SocketFolder(const SocketFolder&) = delete;
  SocketFolder& operator=(const SocketFolder&) = delete;
  std::string Socket(const char* name) const { return absl::StrCat("unix:", path_, "/", name); }

 private:
  std::string path_ = "/tmp/attend_bench_XXXXXX";
};

// Where both serve, [0] over TCP and [1] over a unix socket.
struct Servers {
  Child attendant;
  Child echo;
  std::vector<std::string> attendant_at;
  std::vector<std::string> echo_at;
};

// The first word after `before` in what a server said.
std::string WordAfter(const std::string& said, const std::string& before) {
  const size_t begin = said.find(before) + before.size();
  return said.substr(begin, said.find_first_of(" ,;\n", begin) - begin);
}

void ServeEcho(const std::string& socket, int output) {
  const auto echo = EchoServer::Start({"127.0.0.1:0", socket}, int64_t{64} << 20);
  if (!echo.ok()) return;
  const std::string line = absl::StrCat("echo on ", (*echo)->addresses()[0], "\n");
  if (write(output, line.data(), line.size()) < 0) return;
  pause();
}

absl::StatusOr<Servers> StartServers(const Settings& settings, const SocketFolder& folder) {
  const std::string socket = folder.Socket("attendant");
  const std::string echo_socket = folder.Socket("echo");
  auto echo = Child::Fork([&](int output) { ServeEcho(echo_socket, output); });
  if (!echo.ok()) return echo.status();
  auto attendant = Child::Exec(
      {ProgramFolder() + "/attendant", "--listen=127.0.0.1:0", "--listen=" + socket,
       "--metrics_listen=127.0.0.1:0", "--measure_peak=false", "--drain_delay=0s",
       absl::StrCat("--compute_threads=", settings.threads),
       absl::StrCat("--kernel=", settings.kernel == core::Kernel::kFused ? "fused" : "onednn")});
  if (!attendant.ok()) return attendant.status();
  const auto echo_said = echo->ReadUntil("echo on ");
  if (!echo_said.ok()) return echo_said.status();
  const auto said = attendant->ReadUntil("serves gRPC on ");
  if (!said.ok()) return said.status();
  return Servers{*std::move(attendant),
                 *std::move(echo),
                 {WordAfter(*said, "serves gRPC on "), socket},
                 {WordAfter(*echo_said, "echo on "), echo_socket}};
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// A call that was made: how long it took, and how much of that was computing.
struct Timed {
  double wall = 0;
  double compute = 0;
};
using TimedCall = std::function<absl::StatusOr<Timed>()>;

// call: () -> absl::StatusOr<double>, the compute seconds.
template <typename Call>
absl::StatusOr<Timed> TimeOf(const Call& call) {
  const auto begin = Clock::now();
  const absl::StatusOr<double> compute = call();
  if (!compute.ok()) return compute.status();
  return Timed{std::chrono::duration<double>(Clock::now() - begin).count(), *compute};
}

// The tensors of a case, and what calls with them. Thread-compatible.
class Caller {
 public:
  static absl::StatusOr<std::unique_ptr<Caller>> Make(const Case& c, const std::string& server,
                                                      bool stream) {
    auto workload = Workload<float>::Make(c, 1);
    if (!workload.ok()) return workload.status();
    ClientOptions options;
    options.connections = 1;
    options.stream_above = stream ? 0 : int64_t{1} << 40;
    auto client = Client::Connect(server, options);
    if (!client.ok()) return client.status();
    return std::unique_ptr<Caller>(new Caller(c, *std::move(workload), *std::move(client), server));
  }

  absl::StatusOr<Timed> AttendInto() {
    return TimeOf([&]() -> absl::StatusOr<double> {
      const auto result = client_->AttendInto(query_, key_, value_, {}, {.output = output_});
      if (!result.ok()) return result.status();
      return result->stats.compute_seconds();
    });
  }
  absl::StatusOr<Timed> Attend() {
    return TimeOf([&]() -> absl::StatusOr<double> {
      const auto result = client_->Attend(query_, key_, value_);
      if (!result.ok()) return result.status();
      return result->stats.compute_seconds();
    });
  }
  // As a program would that has the generated stub: its tensors into a message, and back.
  absl::StatusOr<Timed> Protobuf() {
    return TimeOf([&]() -> absl::StatusOr<double> {
      v1::AttendRequest request;
      v1::AttendResponse response;
      const std::pair<const TensorRef*, v1::Tensor*> tensors[] = {
          {&query_, request.mutable_query()},
          {&key_, request.mutable_key()},
          {&value_, request.mutable_value()}};
      for (const auto& [from, to] : tensors) {
        to->set_dtype(from->dtype());
        to->mutable_shape()->Assign(from->shape().begin(), from->shape().end());
        to->set_data(from->bytes().data(), from->bytes().size());
      }
      grpc::ClientContext context;
      const grpc::Status status = stub_->Attend(&context, request, &response);
      if (!status.ok()) {
        return absl::Status(static_cast<absl::StatusCode>(status.error_code()),
                            status.error_message());
      }
      return response.stats().compute_seconds();
    });
  }

  int64_t request_bytes() const {
    return static_cast<int64_t>(query_.bytes().size() + key_.bytes().size() +
                                value_.bytes().size());
  }
  int64_t response_bytes() const { return core::ResponseBytes(workload_.problem()); }

 private:
  Caller(const Case& c, Workload<float> workload, std::unique_ptr<Client> client,
         const std::string& server)
      : workload_(std::move(workload)),
        client_(std::move(client)),
        query_(RefOf(c, workload_.query())),
        key_(RefOf(c, workload_.Next().key)),
        value_(RefOf(c, workload_.Next().value)),
        output_(workload_.query().size()) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    stub_ = v1::Attention::NewStub(
        grpc::CreateCustomChannel(server, grpc::InsecureChannelCredentials(), arguments));
  }
  static TensorRef RefOf(const Case& c, const core::Buffer<float>& buffer) {
    return {absl::MakeConstSpan(buffer.data(), static_cast<size_t>(buffer.size())),
            {c.batch, c.heads, c.queries, c.width}};
  }

  Workload<float> workload_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<v1::Attention::Stub> stub_;
  TensorRef query_;
  TensorRef key_;
  TensorRef value_;
  std::vector<float> output_;
};

// Calls each of `calls` in turn, `times` each: the medians of their walls, of their walls less
// compute, and of the compute of all.
struct BlockMedians {
  std::vector<double> walls;
  std::vector<double> added;
  double compute = 0;
};
absl::StatusOr<BlockMedians> RunBlock(int times, const std::vector<TimedCall>& calls) {
  std::vector<std::vector<double>> walls(calls.size());
  std::vector<std::vector<double>> added(calls.size());
  std::vector<double> computes;
  for (int i = 0; i < times; ++i) {
    for (size_t k = 0; k < calls.size(); ++k) {
      const auto timed = calls[k]();
      if (!timed.ok()) return timed.status();
      walls[k].push_back(timed->wall);
      added[k].push_back(timed->wall - timed->compute);
      if (timed->compute > 0) computes.push_back(timed->compute);
    }
  }
  BlockMedians medians;
  for (size_t k = 0; k < calls.size(); ++k) {
    medians.walls.push_back(Median(std::move(walls[k])));
    medians.added.push_back(Median(std::move(added[k])));
  }
  if (!computes.empty()) medians.compute = Median(std::move(computes));
  return medians;
}

// Figures by name, a value a block.
class Blocks {
 public:
  void Add(const char* name, double value) {
    for (auto& [known, values] : figures_) {
      if (known == name) return values.push_back(value);
    }
    figures_.push_back({name, {value}});
  }
  // Prints the medians, and puts them into the result.
  void Tell(const WireCase& c, CaseResult* result) const {
    std::printf("%-18s %4zu blocks", c.name, figures_[0].second.size());
    for (const auto& [name, values] : figures_) {
      const double median = Median(values);
      std::printf("  %s %.3f", name.c_str(), median);
      NamedFigure* const figure = result->add_wire();
      figure->set_name(name);
      figure->set_median(median);
      figure->set_lowest(*std::min_element(values.begin(), values.end()));
      figure->set_highest(*std::max_element(values.begin(), values.end()));
    }
    result->set_blocks(static_cast<int32_t>(figures_[0].second.size()));
    std::printf("\n");
    std::fflush(stdout);
  }

 private:
  std::vector<std::pair<std::string, std::vector<double>>> figures_;
};

TimedCall EchoCall(EchoClient& echo) {
  return [&echo] {
    return TimeOf([&]() -> absl::StatusOr<double> {
      if (absl::Status status = echo.Call(); !status.ok()) return status;
      return 0.0;
    });
  };
}

// block: () -> absl::Status; the first warms up.
absl::Status RunBlocks(const Settings& settings, Blocks& blocks,
                       const std::function<absl::Status(Blocks&)>& block) {
  Blocks warm_up;
  if (absl::Status status = block(warm_up); !status.ok()) return status;
  const auto end = Clock::now() + std::chrono::duration<double>(settings.seconds);
  for (int i = 0; i < kLeastBlocks || Clock::now() < end; ++i) {
    if (absl::Status status = block(blocks); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status MeasureLatency(const WireCase& c, const Servers& servers, const Settings& settings,
                            Blocks& blocks) {
  const auto caller = Caller::Make(CaseOf(c), servers.attendant_at[c.unix_socket], false);
  if (!caller.ok()) return caller.status();
  EchoClient echo(servers.echo_at[c.unix_socket], (*caller)->request_bytes(),
                  (*caller)->response_bytes());
  const std::vector<TimedCall> calls = {EchoCall(echo), [&] { return (*caller)->AttendInto(); },
                                        [&] { return (*caller)->Attend(); },
                                        [&] { return (*caller)->Protobuf(); }};
  return RunBlocks(settings, blocks, [&](Blocks& to) {
    const auto m = RunBlock(c.calls, calls);
    if (!m.ok()) return m.status();
    to.Add("echo_ms", m->walls[0] * 1e3);
    to.Add("compute_ms", m->compute * 1e3);
    to.Add("wall_ms", m->walls[1] * 1e3);
    to.Add("attend_into/echo", m->added[1] / m->walls[0]);
    to.Add("attend/echo", m->added[2] / m->walls[0]);
    to.Add("protobuf/echo", m->added[3] / m->walls[0]);
    return absl::OkStatus();
  });
}

// Calls a second of all clients together, each waiting for its answers.
absl::StatusOr<double> GoodputOf(const std::vector<std::unique_ptr<Caller>>& callers, int calls) {
  std::atomic<bool> failed = false;
  const auto begin = Clock::now();
  std::vector<std::thread> threads;
  threads.reserve(callers.size());
  for (const auto& caller : callers) {
    threads.emplace_back([&failed, &caller, calls] {
      for (int i = 0; i < calls && !failed; ++i) {
        if (!caller->AttendInto().ok()) failed = true;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (failed) return absl::UnavailableError("a client's call failed");
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  return static_cast<double>(callers.size()) * calls / seconds;
}

absl::Status MeasureGoodput(const WireCase& c, const Servers& servers, const Settings& settings,
                            Blocks& blocks) {
  std::vector<std::unique_ptr<Caller>> callers;
  for (int i = 0; i < 4; ++i) {
    auto caller = Caller::Make(CaseOf(c), servers.attendant_at[c.unix_socket], false);
    if (!caller.ok()) return caller.status();
    callers.push_back(*std::move(caller));
  }
  EchoClient echo(servers.echo_at[c.unix_socket], callers[0]->request_bytes(),
                  callers[0]->response_bytes());
  const std::vector<TimedCall> alone = {EchoCall(echo), [&] { return callers[0]->AttendInto(); }};
  return RunBlocks(settings, blocks, [&](Blocks& to) {
    const auto goodput = GoodputOf(callers, c.calls);
    if (!goodput.ok()) return goodput.status();
    const auto m = RunBlock(5, alone);
    if (!m.ok()) return m.status();
    to.Add("calls/s", *goodput);
    to.Add("echo_ms", m->walls[0] * 1e3);
    to.Add("compute_ms", m->compute * 1e3);
    to.Add("goodput*(compute+echo)", *goodput * (m->compute + m->walls[0]));
    return absl::OkStatus();
  });
}

absl::Status MeasureStream(const WireCase& c, const Servers& servers, const Settings& settings,
                           Blocks& blocks) {
  const auto unary = Caller::Make(CaseOf(c), servers.attendant_at[c.unix_socket], false);
  if (!unary.ok()) return unary.status();
  const auto stream = Caller::Make(CaseOf(c), servers.attendant_at[c.unix_socket], true);
  if (!stream.ok()) return stream.status();
  EchoClient echo(servers.echo_at[c.unix_socket], (*unary)->request_bytes(),
                  (*unary)->response_bytes());
  const std::vector<TimedCall> calls = {EchoCall(echo), [&] { return (*unary)->AttendInto(); },
                                        [&] { return (*stream)->AttendInto(); }};
  return RunBlocks(settings, blocks, [&](Blocks& to) {
    const auto m = RunBlock(c.calls, calls);
    if (!m.ok()) return m.status();
    to.Add("echo_ms", m->walls[0] * 1e3);
    to.Add("compute_ms", m->compute * 1e3);
    to.Add("unary_ms", m->walls[1] * 1e3);
    to.Add("stream_ms", m->walls[2] * 1e3);
    to.Add("stream/unary", m->walls[2] / m->walls[1]);
    to.Add("stream/unary, less compute", m->added[2] / m->added[1]);
    return absl::OkStatus();
  });
}

absl::Status Run(const Settings& settings, const std::vector<std::string>& names,
                 std::vector<CaseResult>& results) {
  const SocketFolder folder;
  const auto servers = StartServers(settings, folder);
  if (!servers.ok()) return servers.status();
  PrintMachine(settings);
  std::printf("medians of blocks; attend_into, attend, protobuf: wall less compute\n\n");
  for (const WireCase& c : kCases) {
    if (std::find(names.begin(), names.end(), c.name) == names.end()) continue;
    Blocks blocks;
    const auto measure = c.kind == Kind::kLatency   ? &MeasureLatency
                         : c.kind == Kind::kGoodput ? &MeasureGoodput
                                                    : &MeasureStream;
    if (absl::Status status = measure(c, *servers, settings, blocks); !status.ok()) return status;
    CaseResult result = ResultFor(kWireMode.name, CaseOf(c), settings);
    blocks.Tell(c, &result);
    results.push_back(std::move(result));
  }
  return absl::OkStatus();
}

}  // namespace

const Mode kWireMode = {
    "wire",
    "what the wire adds to a call, in ratios to an echo of as many bytes; servers in processes of "
    "their own",
    WireCases,
    Run,
};

}  // namespace attendant::bench
