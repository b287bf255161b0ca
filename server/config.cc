#include "server/config.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
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
#include "server/settings.h"

namespace attendant::server {
namespace {

constexpr int kMostThreads = 1024;
constexpr int kMostJobs = 1'000'000;
constexpr size_t kLongestSocketPath = 107;  // of sockaddr_un, less the zero at its end

std::string TextOf(absl::Duration duration) {
  return duration == absl::ZeroDuration() ? "0s" : absl::FormatDuration(duration);
}

// "5s", "250ms", "1m30s".
void AddDuration(Settings& settings, const std::string& name, absl::Duration& duration,
                 const std::string& help) {
  settings.Add({name, "DURATION", TextOf(duration), help,
                "no duration from 0s to 24h, such as 5s or 250ms",
                [&duration](const std::string& text) {
                  absl::Duration parsed;
                  if (!absl::ParseDuration(text, &parsed) || parsed < absl::ZeroDuration() ||
                      parsed > absl::Hours(24)) {
                    return false;
                  }
                  duration = parsed;
                  return true;
                }});
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

void AddCount(Settings& settings, const std::string& name, const Range& range, int& count,
              const std::string& help) {
  settings.Add(
      {name, "N", std::to_string(count), help,
       "no number from " + std::to_string(range.smallest) + " to " + std::to_string(range.largest),
       [range, &count](const std::string& text) { return ReadCount(text, range, count); }});
}

// 1 to kMostThreads, or "auto", which is 0.
void AddThreads(Settings& settings, const std::string& name, int& threads,
                const std::string& help) {
  settings.Add({name, "N", "auto", help,
                "neither auto nor a number from 1 to " + std::to_string(kMostThreads),
                [&threads](const std::string& text) {
                  if (text != "auto") return ReadCount(text, {1, kMostThreads}, threads);
                  threads = 0;
                  return true;
                }});
}

// Bytes with or without a unit, or "auto", which is 0.
void AddSize(Settings& settings, const std::string& name, int64_t& bytes, const std::string& help) {
  settings.Add({name, "BYTES", "auto", help,
                "neither auto nor a size from 1 byte to 8EiB less a byte, such as 64MiB",
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
                }});
}

void AddKernel(Settings& settings, const std::string& name, core::Kernel& kernel,
               const std::string& help) {
  settings.Add(
      {name, "NAME", "fused", help, "neither fused nor onednn", [&kernel](const std::string& text) {
         if (text != "fused" && text != "onednn") return false;
         kernel = text == "fused" ? core::Kernel::kFused : core::Kernel::kOneDnn;
         return true;
       }});
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

void AddAddress(Settings& settings, const std::string& name, std::string& address,
                const std::string& help) {
  settings.Add(
      {name, "HOST:PORT", address, help, kNoHostAndPort, [&address](const std::string& text) {
         if (!IsHostAndPort(text)) return false;
         address = text;
         return true;
       }});
}

// May be given more than once.
void AddAddresses(Settings& settings, const std::string& name, std::vector<std::string>& addresses,
                  const std::string& help) {
  settings.Add({name, "ADDRESS", absl::StrJoin(addresses, ","), help,
                absl::StrCat(kNoHostAndPort, ", and no unix:/PATH of at most ", kLongestSocketPath,
                             " bytes"),
                [&addresses](const std::string& text) {
                  if (!IsHostAndPort(text) && !IsSocketPath(text)) return false;
                  addresses.push_back(text);
                  return true;
                },
                [&addresses] { addresses.clear(); }});
}

// We would find it taken by ourselves. Port 0 is another one each time.
absl::Status CheckAddresses(const Config& config) {
  const auto& listen = config.listen;
  for (auto at = listen.begin(); at != listen.end(); ++at) {
    if (absl::EndsWith(*at, ":0")) continue;
    if (std::find(listen.begin(), at, *at) != at) {
      return absl::InvalidArgumentError(absl::StrCat("--listen: '", *at, "' is given twice"));
    }
    if (*at == config.metrics_listen) {
      return absl::InvalidArgumentError(
          absl::StrCat("--metrics_listen: '", *at, "' is given in --listen, too"));
    }
  }
  return absl::OkStatus();
}

void AddServing(Settings& settings, Config& config) {
  AddAddresses(settings, "listen", config.listen,
               "Where to serve gRPC: HOST:PORT or unix:/PATH; several by several\n"
               "flags or by commas");
  AddAddress(settings, "metrics_listen", config.metrics_listen,
             "Where to serve Prometheus metrics, over HTTP at /metrics");
  AddDuration(settings, "max_connection_age", config.max_connection_age,
              "Age at which a connection is asked to move elsewhere; its calls are\n"
              "finished first. 0s: never");
  AddDuration(settings, "drain_delay", config.drain_delay,
              "How long to go on accepting calls after SIGTERM, for balancers to notice");
  AddDuration(settings, "drain_timeout", config.drain_timeout,
              "How long running calls may then take before they are cancelled");
}

void AddComputing(Settings& settings, Config& config) {
  AddThreads(
      settings, "compute_threads", config.compute_threads,
      "Threads that compute: 1 to 1024, or auto: as many as whole CPUs are ours by affinity\n"
      "and cgroup quota");
  AddKernel(settings, "kernel", config.kernel,
            "What computes the chunked path: fused, our own, or onednn, library products");
  settings.Add({"measure_peak", "BOOL", "true",
                "Measure at start-up the CPU's peak, and what small problems take: the basis of\n"
                "Estimate's seconds; in about a quarter of a second",
                "neither true nor false", [&config](const std::string& text) {
                  return absl::SimpleAtob(text, &config.measure_peak);
                }});
}

void AddLimits(Settings& settings, Config& config) {
  AddCount(settings, "max_running", {1, kMostJobs}, config.max_running,
           "Calls that share the compute threads at a time, beside those of less than 1 ms");
  AddCount(settings, "max_queue", {0, kMostJobs}, config.max_queue,
           "Calls that wait for that; more are refused");
  AddDuration(settings, "max_queue_wait", config.max_queue_wait,
              "How long a call may wait before it is refused. 0s: not at all");
  AddDuration(settings, "max_compute_time", config.max_compute_time,
              "How long a call may compute before it is stopped, counted from when it starts;\n"
              "what is expected to take twice as long is refused. 0s: as long as it takes");
  AddSize(settings, "memory_budget", config.memory_budget,
          "What all calls together may hold: requests, workspace and responses; auto: half of the\n"
          "memory that is ours by machine and cgroup");
  AddSize(settings, "max_message_bytes", config.max_message_bytes,
          "Largest request and response; units such as MiB are understood; auto: 256MiB, or an\n"
          "eighth of the memory that is ours where that is less");
}

Settings SettingsOf(Config& config) {
  Settings settings;
  AddServing(settings, config);
  AddComputing(settings, config);
  AddLimits(settings, config);
  return settings;
}

}  // namespace

ParsedConfig ParseConfig(int argc, const char* const* argv) {
  ParsedConfig result;
  Settings settings = SettingsOf(result.config);
  auto action = settings.Read(argc, argv);
  absl::Status status = action.status();
  if (status.ok() && *action != Settings::Action::kHelp && *action != Settings::Action::kVersion) {
    status = CheckAddresses(result.config);
  }
  if (!status.ok()) {
    std::cerr << status.message() << "\nRun with --help for more information.\n";
    result.exit_code = 2;
    return result;
  }
  switch (*action) {
    case Settings::Action::kServe:
      return result;
    case Settings::Action::kCheck:
      result.check_only = true;
      return result;
    case Settings::Action::kHelp:
      std::cout << settings.Help();
      break;
    case Settings::Action::kVersion:
      std::cout << "attendant " << core::Version() << "\n";
      break;
    case Settings::Action::kPrint:
      std::cout << settings.Print();
      break;
  }
  result.exit_code = 0;
  return result;
}

std::vector<std::string> SettingNames() {
  Config config;
  return SettingsOf(config).names();
}

}  // namespace attendant::server
