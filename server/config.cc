#include "server/config.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "core/version.h"

namespace attendant::server {
namespace {

constexpr char kDescription[] =
    "Attendant: scaled dot-product attention as a gRPC service.\n"
    "Speaks plain text to whoever reaches its addresses: keep them inside a network you trust.\n"
    "Needs no privileges and writes no files. SIGTERM or SIGINT drains and exits 0; a second one\n"
    "exits at once.\n"
    "Each flag is also an environment variable (--listen is ATTENDANT_LISTEN) and a line of the\n"
    "file that --config names (listen=\"127.0.0.1:50051\"). A flag wins over the environment, the\n"
    "environment over the file.";

// gRPC keeps message sizes in 32 bits.
constexpr int64_t kLargestMessage = std::numeric_limits<int32_t>::max();
constexpr int64_t kSmallestMessage = 64 << 10;
constexpr int kMostThreads = 1024;

std::string EnvironmentName(const std::string& flag) {
  std::string name = "ATTENDANT_";
  for (const char c : flag.substr(2)) {
    name += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  return name;
}

template <typename T>
CLI::Option* Add(CLI::App& app, const std::string& flag, T& value, const std::string& help) {
  return app.add_option(flag, value, help)->envname(EnvironmentName(flag));
}

// "5s", "250ms", "1m30s".
void AddDuration(CLI::App& app, const std::string& flag, absl::Duration& duration,
                 const std::string& help) {
  app.add_option_function<std::string>(
         flag,
         [&duration, flag](const std::string& text) {
           absl::Duration parsed;
           if (!absl::ParseDuration(text, &parsed) || parsed < absl::ZeroDuration() ||
               parsed > absl::Hours(24)) {
             throw CLI::ValidationError(
                 flag, "'" + text + "' is no duration from 0s to 24h, such as 5s or 250ms");
           }
           duration = parsed;
         },
         help)
      ->type_name("DURATION")
      ->default_str(absl::FormatDuration(duration))
      ->envname(EnvironmentName(flag));
}

// 1 to kMostThreads, or "auto", which is 0.
void AddThreads(CLI::App& app, const std::string& flag, int& threads, const std::string& help) {
  app.add_option_function<std::string>(
         flag,
         [&threads, flag](const std::string& text) {
           if (text == "auto") {
             threads = 0;
             return;
           }
           int parsed = 0;
           if (!absl::SimpleAtoi(text, &parsed) || parsed < 1 || parsed > kMostThreads) {
             throw CLI::ValidationError(flag, "'" + text +
                                                  "' is neither auto nor a number from 1 to " +
                                                  std::to_string(kMostThreads));
           }
           threads = parsed;
         },
         help)
      ->type_name("N")
      ->default_str("auto")
      ->envname(EnvironmentName(flag));
}

void AddKernel(CLI::App& app, const std::string& flag, core::Kernel& kernel,
               const std::string& help) {
  app.add_option_function<std::string>(
         flag,
         [&kernel, flag](const std::string& text) {
           if (text != "fused" && text != "onednn") {
             throw CLI::ValidationError(flag, "'" + text + "' is neither fused nor onednn");
           }
           kernel = text == "fused" ? core::Kernel::kFused : core::Kernel::kOneDnn;
         },
         help)
      ->type_name("NAME")
      ->default_str("fused")
      ->envname(EnvironmentName(flag));
}

void AddAddress(CLI::App& app, const std::string& flag, std::string& address,
                const std::string& help) {
  Add(app, flag, address, help)
      ->capture_default_str()
      ->type_name("HOST:PORT")
      ->check([](const std::string& text) -> std::string {
        const size_t colon = text.rfind(':');
        if (colon != std::string::npos && colon > 0) {
          const std::string port = text.substr(colon + 1);
          const bool digits = !port.empty() && port.size() <= 5 &&
                              port.find_first_not_of("0123456789") == std::string::npos;
          if (digits && std::stoi(port) <= 65535) return "";
        }
        return "'" + text + "' is no HOST:PORT with a port from 0 (any free one) to 65535";
      });
}

// The command line behind what the environment says, as flags: CLI11 by itself would let the file
// win over the environment.
std::vector<std::string> WithEnvironment(const CLI::App& app, int argc, const char* const* argv) {
  std::vector<std::string> arguments;
  for (const CLI::Option* const option : app.get_options()) {
    const std::string name = option->get_envname();
    const char* const value = name.empty() ? nullptr : std::getenv(name.c_str());
    if (value == nullptr || *value == '\0') continue;
    arguments.push_back("--" + option->get_lnames().front() + "=" + value);
  }
  arguments.insert(arguments.end(), argv + 1, argv + argc);
  return arguments;
}

}  // namespace

ParsedConfig ParseConfig(int argc, const char* const* argv) {
  ParsedConfig result;
  Config& config = result.config;
  CLI::App app(kDescription, "attendant");
  app.get_formatter()->column_width(36);
  app.allow_config_extras(CLI::config_extras_mode::error);
  app.set_version_flag("--version", std::string("attendant ") + core::Version());
  app.set_config("--config", "", "File of settings, one 'name=value' a line")
      ->envname(EnvironmentName("--config"));
  AddAddress(app, "--listen", config.listen, "Where to serve gRPC");
  AddAddress(app, "--metrics_listen", config.metrics_listen,
             "Where to serve Prometheus metrics, over HTTP at /metrics");
  AddThreads(app, "--compute_threads", config.compute_threads,
             "Threads that compute: 1 to 1024, or auto: one a CPU that this process may use");
  AddKernel(app, "--kernel", config.kernel,
            "What computes the chunked path: fused, our own, or onednn, library products");
  Add(app, "--max_message_bytes", config.max_message_bytes,
      "Largest request and response, from 64KiB to 2GiB less a byte; units such as MiB are "
      "understood")
      ->transform(CLI::AsSizeValue(false).description(""))
      ->check(CLI::Range(kSmallestMessage, kLargestMessage).description(""))
      ->type_name("BYTES")
      ->default_str("256MiB");
  AddDuration(app, "--drain_delay", config.drain_delay,
              "How long to go on accepting calls after SIGTERM, for balancers to notice");
  AddDuration(app, "--drain_timeout", config.drain_timeout,
              "How long running calls may then take before they are cancelled");
  Add(app, "--measure_peak", config.measure_peak,
      "Measure at start-up the CPU's peak, and what small problems take: the basis of\n"
      "Estimate's seconds; in about a quarter of a second")
      ->type_name("BOOL")
      ->default_str("true");
  for (CLI::Option* const option : app.get_options()) {
    if (!option->get_envname().empty()) {
      option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    }
  }
  std::vector<std::string> arguments = WithEnvironment(app, argc, argv);
  std::reverse(arguments.begin(), arguments.end());  // the order that CLI11 wants
  try {
    app.parse(arguments);
  } catch (const CLI::ParseError& error) {
    result.exit_code = app.exit(error) == 0 ? 0 : 2;
  }
  return result;
}

}  // namespace attendant::server
