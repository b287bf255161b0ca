// attendant: the server.
#include <pthread.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <ctime>
#include <iostream>
#include <string>

#include "core/machine.h"
#include "server/config.h"
#include "server/server.h"

namespace attendant::server {
namespace {

constexpr int kExitCannotServe = 1;
constexpr int kExitBadConfig = 2;

sigset_t ShutdownSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  return signals;
}

// From now on a signal ends the process at once. A handler, since process 1 of a container has no
// default action.
void ExitAtNextSignal() {
  struct sigaction action {};
  action.sa_handler = [](int signal) { _exit(128 + signal); };
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGINT, &action, nullptr);
  const sigset_t signals = ShutdownSignals();
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
}

int ExitCodeOf(const absl::Status& status) {
  return absl::IsInvalidArgument(status) ? kExitBadConfig : kExitCannotServe;
}

int CheckOnly(const Config& config) {
  const auto checked = Server::Check(config);
  if (!checked.ok()) {
    std::cerr << checked.status().message() << "\n";
    return ExitCodeOf(checked.status());
  }
  std::cout << *checked << "\n";
  return 0;
}

int Main(int argc, char** argv) {
  core::KeepFreedMemory();
  const ParsedConfig parsed = ParseConfig(argc, argv);
  if (parsed.exit_code.has_value()) return *parsed.exit_code;
  if (parsed.check_only) return CheckOnly(parsed.config);
  spdlog::set_default_logger(spdlog::stderr_color_mt("attendant"));
  spdlog::set_pattern("%Y-%m-%dT%H:%M:%S.%e%z %^%l%$ %v");

  // A log that nobody reads any more is no reason to die.
  std::signal(SIGPIPE, SIG_IGN);
  // Blocked before any thread exists, so that all inherit it and the signal waits for sigwait.
  const sigset_t signals = ShutdownSignals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);

  auto server = Server::Start(parsed.config);
  if (!server.ok()) {
    spdlog::error("{}", std::string(server.status().message()));
    return ExitCodeOf(server.status());
  }
  spdlog::info("{}", (*server)->Description());

  int signal = 0;
  sigwait(&signals, &signal);
  spdlog::info("signal {}: not ready any more, accepting calls for {}, then finishing within {}",
               signal, absl::FormatDuration(parsed.config.drain_delay),
               absl::FormatDuration(parsed.config.drain_timeout));
  (*server)->StopBeingReady();
  ExitAtNextSignal();
  absl::SleepFor(parsed.config.drain_delay);
  (*server)->Shutdown(parsed.config.drain_timeout);
  spdlog::info("drained");
  // Every call is answered, and nothing is left to write. The metrics listener would take up to two
  // seconds to stop: the process ends without it.
  spdlog::shutdown();
  std::_Exit(0);
}

}  // namespace
}  // namespace attendant::server

int main(int argc, char** argv) { return attendant::server::Main(argc, argv); }
