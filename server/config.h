// The server's settings: flag > environment > file > default.
#ifndef ATTENDANT_SERVER_CONFIG_H_
#define ATTENDANT_SERVER_CONFIG_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "core/kernel.h"

namespace attendant::server {

// What an address that is a socket in the file system starts with; its path follows.
inline constexpr char kUnixPrefix[] = "unix:";

struct Config {
  std::vector<std::string> listen = {"0.0.0.0:50051"};  // HOST:PORT, or unix:/PATH
  std::string metrics_listen = "0.0.0.0:9464";
  int compute_threads = 0;                     // 0: as many as CPUs are ours
  core::Kernel kernel = core::Kernel::kFused;  // of the chunked path
  int max_running = 8;                         // jobs that share the compute threads
  int max_queue = 256;                         // jobs that wait for that
  absl::Duration max_queue_wait = absl::Seconds(10);
  absl::Duration max_compute_time = absl::Hours(1);  // of a job, from its first tile; 0: any
  int64_t memory_budget = 0;      // bytes of all calls together; 0: by what memory is ours
  int64_t max_message_bytes = 0;  // 0: by what memory is ours
  absl::Duration max_connection_age = absl::ZeroDuration();  // 0: connections stay
  absl::Duration drain_delay = absl::Seconds(5);
  absl::Duration drain_timeout = absl::Seconds(20);
  bool measure_peak = true;

  bool operator==(const Config&) const = default;
};

// What a command line asks for: to serve, to check what a start would, or to exit with a code after
// something was printed.
struct ParsedConfig {
  Config config;
  bool check_only = false;
  std::optional<int> exit_code;  // 0 after --help, --version or --print_config, 2 after an error
};

// Reads the command line, ATTENDANT_... of the environment, and the file that --config names.
// Prints help and --print_config to standard output, errors to standard error.
ParsedConfig ParseConfig(int argc, const char* const* argv);

// The flags that have a value, variable and line of the file, without their dashes.
std::vector<std::string> SettingNames();

}  // namespace attendant::server

#endif  // ATTENDANT_SERVER_CONFIG_H_
