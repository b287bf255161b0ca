#include "server/config.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
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

constexpr int kMostThreads = 1024;
constexpr int kMostJobs = 1'000'000;
constexpr size_t kLongestSocketPath = 107;  // of sockaddr_un, less the zero at its end

std::string EnvironmentName(const std::string& flag) {
  std::string name = "ATTENDANT_";
  for (const char c : flag.substr(2)) {
    name += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  return name;
}

struct Flag {
  std::string name;
  std::string type;
  std::string default_text;
  std::string help;
};

// read: takes the value from the text, or returns false. expected: what a text should have been.
void Add(CLI::App& app, const Flag& flag, const std::string& expected,
         const std::function<bool(const std::string&)>& read) {
  const std::string name = flag.name;
  app.add_option_function<std::string>(
         name,
         [name, expected, read](const std::string& text) {
           if (!read(text)) throw CLI::ValidationError(name, "'" + text + "' is " + expected);
         },
         flag.help)
      ->type_name(flag.type)
      ->default_str(flag.default_text)
      ->envname(EnvironmentName(name));
}

// "5s", "250ms", "1m30s".
void AddDuration(CLI::App& app, const std::string& name, absl::Duration& duration,
                 const std::string& help) {
  Add(app, {name, "DURATION", absl::FormatDuration(duration), help},
      "no duration from 0s to 24h, such as 5s or 250ms", [&duration](const std::string& text) {
        absl::Duration parsed;
        if (!absl::ParseDuration(text, &parsed) || parsed < absl::ZeroDuration() ||
            parsed > absl::Hours(24)) {
          return false;
        }
        duration = parsed;
        return true;
      });
}

struct Range {
  int smallest;
  int largest;
};

bool ReadCount(const std::string& text, const Range& range, int& count) {
  int parsed = 0;
  if (!absl::SimpleAtoi(text, &parsed) || parsed < range.smallest || parsed > range.largest) {
    return false;
  }
  count = parsed;
  return true;
}

void AddCount(CLI::App& app, const std::string& name, const Range& range, int& count,
              const std::string& help) {
  Add(app, {name, "N", std::to_string(count), help},
      "no number from " + std::to_string(range.smallest) + " to " + std::to_string(range.largest),
      [range, &count](const std::string& text) { return ReadCount(text, range, count); });
}

// 1 to kMostThreads, or "auto", which is 0.
void AddThreads(CLI::App& app, const std::string& name, int& threads, const std::string& help) {
  Add(app, {name, "N", "auto", help},
      "neither auto nor a number from 1 to " + std::to_string(kMostThreads),
      [&threads](const std::string& text) {
        if (text != "auto") return ReadCount(text, {1, kMostThreads}, threads);
        threads = 0;
        return true;
      });
}

// Bytes with or without a unit, or "auto", which is 0.
void AddSize(CLI::App& app, const std::string& name, int64_t& bytes, const std::string& help) {
  Add(app, {name, "BYTES", "auto", help},
      "neither auto nor a size of at least a byte, such as 64MiB",
      [&bytes](const std::string& text) {
        if (text == "auto") {
          bytes = 0;
          return true;
        }
        std::string number = text;
        int64_t parsed = 0;
        try {
          CLI::AsSizeValue(/*kb_is_1000=*/false)(number);
        } catch (const CLI::ValidationError&) {
          return false;
        }
        if (!absl::SimpleAtoi(number, &parsed) || parsed < 1) return false;
        bytes = parsed;
        return true;
      });
}

void AddKernel(CLI::App& app, const std::string& name, core::Kernel& kernel,
               const std::string& help) {
  Add(app, {name, "NAME", "fused", help}, "neither fused nor onednn",
      [&kernel](const std::string& text) {
        if (text != "fused" && text != "onednn") return false;
        kernel = text == "fused" ? core::Kernel::kFused : core::Kernel::kOneDnn;
        return true;
      });
}

// A name, or an address, which is in brackets where it is one of IPv6.
bool IsHost(absl::string_view host) {
  const bool opens = absl::ConsumePrefix(&host, "[");
  if (absl::ConsumeSuffix(&host, "]") != opens) return false;
  const absl::string_view others = opens ? ":.%-_" : ".-_";
  return !host.empty() && host.front() != '-' &&
         std::all_of(host.begin(), host.end(), [others](char c) {
           return absl::ascii_isalnum(static_cast<unsigned char>(c)) ||
                  absl::StrContains(others, c);
         });
}

bool IsHostAndPort(const std::string& text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos || !IsHost(text.substr(0, colon))) return false;
  const std::string port = text.substr(colon + 1);
  return !port.empty() && port.size() <= 5 &&
         port.find_first_not_of("0123456789") == std::string::npos && std::stoi(port) <= 65535;
}

bool IsSocketPath(absl::string_view text) {
  return absl::ConsumePrefix(&text, kUnixPrefix) && text.size() > 1 && text.front() == '/' &&
         text.size() <= kLongestSocketPath;
}

constexpr char kNoHostAndPort[] = "no HOST:PORT with a port from 0 (any free one) to 65535";

void AddAddress(CLI::App& app, const std::string& name, std::string& address,
                const std::string& help) {
  Add(app, {name, "HOST:PORT", address, help}, kNoHostAndPort, [&address](const std::string& text) {
    if (!IsHostAndPort(text)) return false;
    address = text;
    return true;
  });
}

// May be given more than once.
void AddAddresses(CLI::App& app, const std::string& name, std::vector<std::string>& addresses,
                  const std::string& help) {
  app.add_option(name, addresses, help)
      ->type_name("ADDRESS")
      ->default_str(absl::StrJoin(addresses, ","))
      ->envname(EnvironmentName(name))
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::Validator(
          [](const std::string& text) -> std::string {
            if (IsHostAndPort(text) || IsSocketPath(text)) return "";
            return absl::StrCat("'", text, "' is ", kNoHostAndPort,
                                ", and no unix:/PATH of at most ", kLongestSocketPath, " bytes");
          },
          ""));
}

// Whether the command line names the flag.
bool IsGiven(const std::string& name, int argc, const char* const* argv) {
  return std::any_of(argv + 1, argv + argc, [&name](absl::string_view argument) {
    return absl::ConsumePrefix(&argument, name) && (argument.empty() || argument.front() == '=');
  });
}

// The command line behind what the environment says, as flags: CLI11 by itself would let the file
// win over the environment.
std::vector<std::string> WithEnvironment(const CLI::App& app, int argc, const char* const* argv) {
  std::vector<std::string> arguments;
  for (const CLI::Option* const option : app.get_options()) {
    const std::string variable = option->get_envname();
    const char* const value = variable.empty() ? nullptr : std::getenv(variable.c_str());
    const std::string name = "--" + option->get_lnames().front();
    if (value == nullptr || *value == '\0' || IsGiven(name, argc, argv)) continue;
    arguments.push_back(absl::StrCat(name, "=", value));
  }
  arguments.insert(arguments.end(), argv + 1, argv + argc);
  return arguments;
}

// CLI11 would take the argument that follows for a value that is missing, a flag too.
void RefuseMissingValues(const CLI::App& app, const std::vector<std::string>& arguments) {
  for (const CLI::Option* const option : app.get_options()) {
    if (option->get_items_expected_max() == 0) continue;
    const std::string name = "--" + option->get_lnames().front();
    for (size_t i = 0; i < arguments.size(); ++i) {
      const bool ends = i + 1 == arguments.size() || absl::StartsWith(arguments[i + 1], "--");
      if (arguments[i] == name + "=" || (arguments[i] == name && ends)) {
        throw CLI::ValidationError(name, "has no value");
      }
    }
  }
}

// We would find it taken by ourselves. Port 0 is another one each time.
void RefuseRepeatedAddresses(const Config& config) {
  const auto& listen = config.listen;
  for (auto at = listen.begin(); at != listen.end(); ++at) {
    if (absl::EndsWith(*at, ":0")) continue;
    if (std::find(listen.begin(), at, *at) != at) {
      throw CLI::ValidationError("--listen", "'" + *at + "' is given twice");
    }
    if (*at == config.metrics_listen) {
      throw CLI::ValidationError("--metrics_listen", "'" + *at + "' is given in --listen, too");
    }
  }
}

// What is wrong with the file that --config names.
CLI::ConfigError AboutFile(const CLI::App& app, const std::string& what) {
  const auto path = app.get_config_ptr()->as<std::string>();
  return CLI::ConfigError(absl::StrCat("--config=", path, ": ", what));
}

std::string WhatIsWrong(const CLI::ConfigError& error) {
  absl::string_view what = error.what();
  if (!absl::ConsumePrefix(&what, "INI was not able to parse ")) return std::string(what);
  return absl::StrCat("'", what, "' is no setting");
}

void Parse(CLI::App& app, std::vector<std::string> arguments) {
  RefuseMissingValues(app, arguments);
  std::reverse(arguments.begin(), arguments.end());  // the order that CLI11 wants
  try {
    app.parse(arguments);
  } catch (const CLI::ConfigError& error) {
    throw AboutFile(app, WhatIsWrong(error));
  } catch (const CLI::FileError&) {
    throw AboutFile(app, "is no file that can be read");
  }
}

void AddServing(CLI::App& app, Config& config) {
  AddAddresses(app, "--listen", config.listen,
               "Where to serve gRPC: HOST:PORT or unix:/PATH; several by several\n"
               "flags or by commas");
  AddAddress(app, "--metrics_listen", config.metrics_listen,
             "Where to serve Prometheus metrics, over HTTP at /metrics");
  AddDuration(app, "--max_connection_age", config.max_connection_age,
              "Age at which a connection is asked to move elsewhere; its calls are\n"
              "finished first. 0s: never");
  AddDuration(app, "--drain_delay", config.drain_delay,
              "How long to go on accepting calls after SIGTERM, for balancers to notice");
  AddDuration(app, "--drain_timeout", config.drain_timeout,
              "How long running calls may then take before they are cancelled");
}

void AddComputing(CLI::App& app, Config& config) {
  AddThreads(
      app, "--compute_threads", config.compute_threads,
      "Threads that compute: 1 to 1024, or auto: as many as whole CPUs are ours by affinity\n"
      "and cgroup quota");
  AddKernel(app, "--kernel", config.kernel,
            "What computes the chunked path: fused, our own, or onednn, library products");
  Add(app,
      {"--measure_peak", "BOOL", "true",
       "Measure at start-up the CPU's peak, and what small problems take: the basis of\n"
       "Estimate's seconds; in about a quarter of a second"},
      "neither true nor false",
      [&config](const std::string& text) { return absl::SimpleAtob(text, &config.measure_peak); });
}

void AddLimits(CLI::App& app, Config& config) {
  AddCount(app, "--max_running", {1, kMostJobs}, config.max_running,
           "Calls that share the compute threads at a time, beside those of less than 1 ms");
  AddCount(app, "--max_queue", {0, kMostJobs}, config.max_queue,
           "Calls that wait for that; more are refused");
  AddDuration(app, "--max_queue_wait", config.max_queue_wait,
              "How long a call may wait before it is refused. 0s: not at all");
  AddDuration(app, "--max_compute_time", config.max_compute_time,
              "How long a call may compute before it is stopped, counted from when it starts;\n"
              "what is expected to take twice as long is refused. 0s: as long as it takes");
  AddSize(app, "--memory_budget", config.memory_budget,
          "What all calls together may hold: requests, workspace and responses; auto: half of the\n"
          "memory that is ours by machine and cgroup");
  AddSize(app, "--max_message_bytes", config.max_message_bytes,
          "Largest request and response; units such as MiB are understood; auto: 256MiB, or an\n"
          "eighth of the memory that is ours where that is less");
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
  AddServing(app, config);
  AddComputing(app, config);
  AddLimits(app, config);
  for (CLI::Option* const option : app.get_options()) {
    if (!option->get_envname().empty() && option->get_name() != "--listen") {
      option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    }
  }
  try {
    Parse(app, WithEnvironment(app, argc, argv));
    RefuseRepeatedAddresses(config);
  } catch (const CLI::ParseError& error) {
    result.exit_code = app.exit(error) == 0 ? 0 : 2;
  }
  return result;
}

}  // namespace attendant::server
