// attend_load: a server under calls that come when they come, whether it keeps up or not.
#include <pthread.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "bench/load/schedule.h"
#include "bench/load/summary.h"
#include "client/cpp/client.h"
#include "core/machine.h"
#include "core/mutex.h"
#include "core/version.h"

namespace attendant::load {
namespace {

constexpr char kDescription[] =
    "attend_load: a server under calls that come when they come, whether it keeps up or not.\n"
    "Latencies count from when a call was to start. SIGINT or SIGTERM ends it early, with its "
    "report.";

constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;
constexpr int kExitNoServer = 3;

// Between two health checks.
constexpr absl::Duration kHealthPeriod = absl::Milliseconds(50);

struct Arguments {
  std::string server = "127.0.0.1:50051";
  ClientOptions client;
  std::vector<Size> sizes = {{{1, 8, 128, 64}, 1}};
  std::vector<Phase> phases;
  double rate = 100;
  absl::Duration duration = absl::Seconds(10);
  absl::Duration warmup = absl::Seconds(1);
  Arrivals arrivals = Arrivals::kPoisson;
  uint32_t seed = 1;
  bool health = false;
  bool strict = false;
  std::string json;
};

// Set by a signal, read by everyone. Thread-safe.
class Stop {
 public:
  // Before any thread starts.
  Stop() {
    sigset_t signals = Signals();
    pthread_sigmask(SIG_BLOCK, &signals, nullptr);
    std::thread([this] {
      const sigset_t awaited = Signals();
      int signal = 0;
      sigwait(&awaited, &signal);
      core::MutexLock lock(mutex_);
      stopped_ = true;
      changed_.NotifyAll();
    }).detach();
  }
  // Waits until then; false where it was stopped before.
  bool WaitUntil(absl::Time time) {
    core::MutexLock lock(mutex_);
    const auto until =
        std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(time - absl::Now());
    while (!stopped_ && changed_.WaitUntil(mutex_, until)) {
    }
    return !stopped_;
  }

 private:
  static sigset_t Signals() {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    return signals;
  }

  core::Mutex mutex_;
  core::CondVar changed_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
};

// Query, key and value of a size: normal numbers.
struct Tensors {
  explicit Tensors(const Size& size) : shape(size.shape) {
    size_t count = 1;
    for (const int64_t axis : shape) count *= static_cast<size_t>(axis);
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    for (auto* const values : {&query, &key, &value}) {
      values->reserve(count);
      for (size_t i = 0; i < count; ++i) values->push_back(normal(generator));
    }
  }
  std::vector<int64_t> shape;
  std::vector<float> query, key, value;
};

// Checks health every now and then, on a connection of its own, until it is ended.
class HealthChecks {
 public:
  explicit HealthChecks(Client& client) : thread_([this, &client] { Run(client); }) {}
  Health End() {
    ended_ = true;
    thread_.join();
    health_.latencies = LatenciesOf(std::move(seconds_));
    return health_;
  }

 private:
  void Run(Client& client) {
    for (absl::Time next = absl::Now(); !ended_; next += kHealthPeriod) {
      absl::SleepFor(next - absl::Now());
      if (!client.CheckHealth().ok()) ++health_.failed;
      seconds_.push_back(absl::ToDoubleSeconds(absl::Now() - next));
    }
  }

  std::atomic<bool> ended_ = false;
  std::vector<double> seconds_;
  Health health_;
  std::thread thread_;
};

// The calls' records as they end. Thread-safe.
class Records {
 public:
  void Add(const Record& record) {
    core::MutexLock lock(mutex_);
    records_.push_back(record);
    added_.NotifyAll();
  }
  // Waits until there are so many.
  std::vector<Record> Await(size_t count) {
    core::MutexLock lock(mutex_);
    while (records_.size() < count) added_.Wait(mutex_);
    return records_;
  }

 private:
  core::Mutex mutex_;
  core::CondVar added_;
  std::vector<Record> records_ ABSL_GUARDED_BY(mutex_);
};

template <typename Value, typename Parse>
CLI::Option* AddParsed(CLI::App& app, const std::string& flag, Value& value,
                       const std::string& help, const Parse& parse) {
  return app.add_option_function<std::string>(
      flag,
      [&value, flag, parse](const std::string& text) {
        auto parsed = parse(text);
        if (!parsed.ok()) {
          throw CLI::ValidationError(flag, std::string(parsed.status().message()));
        }
        value = *std::move(parsed);
      },
      help);
}

void AddDuration(CLI::App& app, const std::string& flag, absl::Duration& duration,
                 const std::string& help) {
  AddParsed(app, flag, duration, help,
            [](const std::string& text) -> absl::StatusOr<absl::Duration> {
              absl::Duration parsed;
              if (absl::ParseDuration(text, &parsed) && parsed >= absl::ZeroDuration() &&
                  parsed <= absl::Hours(24)) {
                return parsed;
              }
              return absl::InvalidArgumentError("'" + text +
                                                "' is no duration up to 24h, such as 5s or 250ms");
            })
      ->type_name("DURATION")
      ->default_str(absl::FormatDuration(duration));
}

void AddLoad(CLI::App& app, Arguments& arguments) {
  auto* const rate = app.add_option("--rate", arguments.rate, "Calls a second")
                         ->check(CLI::Range(0.001, 1e6).description(""))
                         ->capture_default_str()
                         ->type_name("R");
  AddDuration(app, "--duration", arguments.duration,
              "How long to start calls, the warm-up included");
  AddParsed(app, "--phases", arguments.phases,
            "Several rates one after the other, such as 50:10s,500:30s,50:15s", ParsePhases)
      ->type_name("R:D,...")
      ->excludes(rate)
      ->excludes(app.get_option("--duration"));
  AddDuration(app, "--warmup", arguments.warmup,
              "Calls that start before are made, and not counted");
  app.add_flag_callback(
      "--constant", [&] { arguments.arrivals = Arrivals::kConstant; },
      "Calls at equal intervals (as a Poisson process: like those of many callers)");
  app.add_option("--seed", arguments.seed, "Of the arrivals")
      ->capture_default_str()
      ->type_name("N");
  AddParsed(app, "--sizes", arguments.sizes,
            "Shapes of query, key and value, with how often each comes, such as\n"
            "1x8x128x64:9,1x8x2048x64:1",
            ParseSizes)
      ->type_name("BxHxTxD[:W],...")
      ->default_str(arguments.sizes[0].name());
}

void AddClient(CLI::App& app, Arguments& arguments) {
  ClientOptions& client = arguments.client;
  app.add_option("--server", arguments.server, "Where the server is: host:port, or any gRPC name")
      ->capture_default_str()
      ->type_name("NAME")
      ->envname("ATTENDANT_SERVER");
  app.add_flag("--round_robin", client.round_robin,
               "Call all addresses that the name stands for, in turn");
  app.add_option("--connections", client.connections, "Connections at most")
      ->check(CLI::Range(1, 1024).description(""))
      ->capture_default_str()
      ->type_name("N");
  app.add_option("--attempts", client.retry.max_attempts, "Of a call; 1: none is made again")
      ->check(CLI::Range(1, 100).description(""))
      ->capture_default_str()
      ->type_name("N");
  AddDuration(app, "--timeout", client.call_timeout, "How long a call may take");
  client.async_calls = 1024;
  app.add_option("--most_calls", client.async_calls,
                 "Calls in flight at most; later ones wait, and their latency with them")
      ->check(CLI::Range(1, 32768).description(""))
      ->capture_default_str()
      ->type_name("N");
}

absl::Duration WholeOf(const std::vector<Phase>& phases) {
  absl::Duration whole;
  for (const Phase& phase : phases) whole += phase.duration;
  return whole;
}

// Makes the schedule's calls; returns how many, and how long they were started.
size_t MakeCalls(Client& client, const Arguments& arguments, const std::vector<Arrival>& schedule,
                 Stop& stop, Records& records, absl::Duration* ran) {
  std::vector<Tensors> tensors;
  tensors.reserve(arguments.sizes.size());
  for (const Size& size : arguments.sizes) tensors.emplace_back(size);
  const absl::Time start = absl::Now() + absl::Milliseconds(10);
  size_t made = 0;
  for (const Arrival& arrival : schedule) {
    if (!stop.WaitUntil(start + arrival.at)) break;
    ++made;
    const Tensors& t = tensors[arrival.size];
    client.AttendAsync(
        {t.query, t.shape}, {t.key, t.shape}, {t.value, t.shape}, {},
        [&records, arrival, start](const absl::StatusOr<AttendResult>& result) {
          records.Add({arrival, absl::Now() - (start + arrival.at), result.status().code()});
        });
  }
  if (made == schedule.size()) {
    stop.WaitUntil(start + WholeOf(arguments.phases));
  }
  *ran = absl::Now() - start;
  // The tensors are in use until then.
  records.Await(made);
  return made;
}

int Run(const Arguments& arguments) {
  const auto schedule =
      MakeSchedule(arguments.phases, arguments.sizes, arguments.arrivals, arguments.seed);
  if (!schedule.ok()) {
    std::fprintf(stderr, "attend_load: %s\n", std::string(schedule.status().message()).c_str());
    return kExitUsage;
  }
  std::ofstream json;
  if (!arguments.json.empty()) {
    json.open(arguments.json);
    if (!json) {
      std::fprintf(stderr, "attend_load: --json: cannot write '%s'\n", arguments.json.c_str());
      return kExitUsage;
    }
  }
  core::KeepFreedMemory();
  Stop* const stop = new Stop;  // its thread waits to the end of the process
  Records records;
  ClientOptions once = arguments.client;
  once.retry.max_attempts = 1;
  const auto client = Client::Connect(arguments.server, arguments.client);
  const auto health_client = Client::Connect(arguments.server, once);
  for (const auto& status : {client.status(), health_client.status()}) {
    if (status.ok()) continue;
    std::fprintf(stderr, "attend_load: %s\n", std::string(status.message()).c_str());
    return kExitNoServer;
  }
  std::optional<HealthChecks> checks;
  if (arguments.health) checks.emplace(**health_client);
  absl::Duration ran;
  const size_t made = MakeCalls(**client, arguments, *schedule, *stop, records, &ran);
  std::optional<Health> health;
  if (checks.has_value()) health = checks->End();
  const Summary summary =
      Summarize(records.Await(made), arguments.phases, arguments.sizes, arguments.warmup, ran);
  const Health* const shown = health.has_value() ? &*health : nullptr;
  std::fputs(ToText(summary, shown).c_str(), stdout);
  if (json.is_open() && !(json << ToJson(summary, shown)).flush()) {
    std::fprintf(stderr, "attend_load: --json: '%s' was not written\n", arguments.json.c_str());
    return kExitFailed;
  }
  if (!arguments.strict) return 0;
  if (summary.all.calls == 0) std::fprintf(stderr, "attend_load: --strict: no call was counted\n");
  return summary.all.calls == 0 || summary.all.refused.count > 0 ? kExitFailed : 0;
}

int Main(int argc, char** argv) {
  Arguments arguments;
  CLI::App app(kDescription, "attend_load");
  app.get_formatter()->column_width(36);
  app.set_version_flag("--version", std::string("attend_load ") + core::Version());
  AddClient(app, arguments);
  AddLoad(app, arguments);
  app.add_flag("--health", arguments.health, "Check health meanwhile, 20 times a second");
  app.add_flag("--strict", arguments.strict,
               "Exit 1 where a call was not answered, or none counted");
  app.add_option("--json", arguments.json, "Where to write the report, with a line of each second")
      ->type_name("FILE");
  app.footer("Exit codes: 0 done, 1 failed, 2 wrong arguments, 3 no server.");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  const char* const flag = arguments.phases.empty() ? "--duration" : "--phases";
  if (arguments.phases.empty()) arguments.phases = {{arguments.rate, arguments.duration}};
  if (const absl::Duration whole = WholeOf(arguments.phases); whole <= arguments.warmup) {
    std::fprintf(
        stderr, "attend_load: %s: %s is not longer than --warmup=%s, and no call would count\n",
        flag, absl::FormatDuration(whole).c_str(), absl::FormatDuration(arguments.warmup).c_str());
    return kExitUsage;
  }
  return Run(arguments);
}

}  // namespace
}  // namespace attendant::load

int main(int argc, char** argv) { return attendant::load::Main(argc, argv); }
