// --mode=rpc: what a call adds to the computing, and what it must at the least.
//
// A server in this process serves on loopback, and the C++ client calls it. In turn with that, the
// same problem is computed without a call, and as many bytes are sent and answered by an echo that
// parses nothing: the floor below which no server on this library gets.
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "bench/cases.h"
#include "bench/echo.h"
#include "bench/measure.h"
#include "bench/modes.h"
#include "bench/report.h"
#include "bench/workload.h"
#include "client/cpp/client.h"
#include "core/cost.h"
#include "core/scheduler.h"
#include "server/server.h"

namespace attendant::bench {
namespace {

constexpr char kLoopback[] = "127.0.0.1";

// What all cases share. REQUIRES: f32 cases.
struct Bench {
  const Settings& settings;
  Client& client;
  core::Scheduler& scheduler;
};

absl::StatusOr<CaseResult> Measure(const Case& c, const Bench& bench) {
  auto workload = Workload<float>::Make(c, 1);
  if (!workload.ok()) return workload.status();
  const auto ref = [](const core::Buffer<float>& buffer, std::vector<int64_t> shape) {
    return TensorRef(absl::MakeConstSpan(buffer.data(), buffer.size()), std::move(shape));
  };
  const auto& kv = workload->Next();
  const TensorRef query = ref(workload->query(), {c.batch, c.heads, c.queries, c.width});
  const TensorRef key = ref(kv.key, {c.batch, c.kv_heads, c.keys, c.width});
  const TensorRef value = ref(kv.value, {c.batch, c.kv_heads, c.keys, c.width});
  const auto request_bytes =
      static_cast<int64_t>(query.bytes().size() + key.bytes().size() + value.bytes().size());
  const int64_t response_bytes = core::ResponseBytes(workload->problem());
  const auto echo = EchoServer::Start({absl::StrCat(kLoopback, ":0")}, response_bytes);
  if (!echo.ok()) return echo.status();
  EchoClient echo_client((*echo)->addresses()[0], request_bytes, response_bytes);

  const auto call = [&] { return bench.client.Attend(query, key, value).status(); };
  const auto compute = [&] { return workload->Run(bench.scheduler, bench.settings.kernel); };
  const auto floor = [&] { return echo_client.Call(); };
  // One at a time, since a caller waits for one; none of them is short of a tenth of a millisecond.
  std::vector<double> walls, computes, floors;
  for (Repetitions repetitions(bench.settings.seconds); repetitions.Next();) {
    const auto wall = SecondsOf(1, call);
    if (!wall.ok()) return wall.status();
    const auto in_process = SecondsOf(1, compute);
    if (!in_process.ok()) return in_process.status();
    const auto echoed = SecondsOf(1, floor);
    if (!echoed.ok()) return echoed.status();
    walls.push_back(*wall);
    computes.push_back(*in_process);
    floors.push_back(*echoed);
  }
  CaseResult result = ResultFor(kRpcMode.name, c, bench.settings);
  *result.mutable_wall_seconds() = FigureOfTimes(walls);
  *result.mutable_compute_seconds() = FigureOfTimes(computes);
  *result.mutable_floor_seconds() = FigureOfTimes(floors);
  *result.mutable_wall_over_compute() = RatioOf(result.wall_seconds(), result.compute_seconds());
  return result;
}

void PrintHeader() {
  std::printf("milliseconds; floor: an echo of as many bytes, unparsed\n\n");
  std::printf("%-12s %9s %9s %9s %9s %9s %9s %9s %9s\n", "", "wall", "", "compute", "", "floor", "",
              "ratio", "");
  std::printf("%-12s %9s %9s %9s %9s %9s %9s %9s %9s\n", "case", "best", "median", "best", "median",
              "best", "median", "best", "median");
}

void Print(const CaseResult& r) {
  std::printf("%-12s", r.name().c_str());
  for (const Figure& seconds : {r.wall_seconds(), r.compute_seconds(), r.floor_seconds()}) {
    std::printf(" %9.3f %9.3f", seconds.best() * 1e3, seconds.median() * 1e3);
  }
  std::printf(" %9.3f %9.3f\n", r.wall_over_compute().best(), r.wall_over_compute().median());
  std::fflush(stdout);
}

absl::Status Run(const Settings& settings, const std::vector<std::string>& names,
                 std::vector<CaseResult>& results) {
  server::Config config;
  config.listen = {absl::StrCat(kLoopback, ":0")};
  config.metrics_listen = absl::StrCat(kLoopback, ":0");
  config.compute_threads = settings.threads;
  config.kernel = settings.kernel;
  config.measure_peak = false;
  const auto server = server::Server::Start(config);
  if (!server.ok()) return server.status();
  const auto client = Client::Connect((*server)->address());
  if (!client.ok()) return client.status();
  core::Scheduler scheduler(settings.threads);

  PrintMachine(settings);
  PrintHeader();
  for (const std::string& name : names) {
    auto result = Measure(CaseNamed(RpcCases(), name), {settings, **client, scheduler});
    if (!result.ok()) return result.status();
    Print(*result);
    results.push_back(*std::move(result));
  }
  return absl::OkStatus();
}

}  // namespace

const Mode kRpcMode = {
    "rpc",
    "a call to a server on loopback, beside its computing alone and the least a call can take",
    [] { return NamesOf(RpcCases()); },
    Run,
};

}  // namespace attendant::bench
