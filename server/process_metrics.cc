#include "server/process_metrics.h"

#include <prometheus/metric_family.h>
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>

namespace attendant::server {
namespace {

// Numbers of /proc/self/stat by their place in proc(5), which counts from 1.
class Stat {
 public:
  Stat() {
    std::ifstream file("/proc/self/stat");
    std::string line;
    std::getline(file, line);
    // The name, second, stands in brackets and may hold blanks.
    const size_t name_end = line.rfind(')');
    if (name_end == std::string::npos) return;
    std::istringstream rest(line.substr(name_end + 1));
    for (std::string field; rest >> field;) fields_.push_back(field);
  }
  double operator[](size_t place) const {
    const size_t index = place - 3;
    return index < fields_.size() ? std::strtod(fields_[index].c_str(), nullptr) : 0;
  }

 private:
  std::vector<std::string> fields_;
};

// Seconds since the epoch at which the machine was started.
double BootTime() {
  std::ifstream file("/proc/stat");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("btime ", 0) == 0) return std::strtod(line.c_str() + 6, nullptr);
  }
  return 0;
}

double OpenDescriptors() {
  std::error_code error;
  double count = 0;
  for (std::filesystem::directory_iterator it("/proc/self/fd", error), end; !error && it != end;
       it.increment(error)) {
    ++count;
  }
  return count;
}

prometheus::MetricFamily Family(const char* name, const char* help, prometheus::MetricType type,
                                double value) {
  prometheus::MetricFamily family;
  family.name = name;
  family.help = help;
  family.type = type;
  prometheus::ClientMetric metric;
  if (type == prometheus::MetricType::Counter) {
    metric.counter.value = value;
  } else {
    metric.gauge.value = value;
  }
  family.metric.push_back(std::move(metric));
  return family;
}

}  // namespace

int64_t ResidentBytes() { return static_cast<int64_t>(Stat()[24]) * sysconf(_SC_PAGE_SIZE); }

std::vector<prometheus::MetricFamily> ProcessMetrics::Collect() const {
  using prometheus::MetricType;
  const Stat stat;
  const double ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
  const double page = static_cast<double>(sysconf(_SC_PAGE_SIZE));
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  rlimit descriptors{};
  getrlimit(RLIMIT_NOFILE, &descriptors);
  return {
      Family("process_cpu_seconds_total", "User and system CPU time spent, in seconds.",
             MetricType::Counter, (stat[14] + stat[15]) / ticks),
      Family("process_start_time_seconds", "Start time of the process, seconds since the epoch.",
             MetricType::Gauge, BootTime() + stat[22] / ticks),
      Family("process_threads", "Threads of the process.", MetricType::Gauge, stat[20]),
      Family("process_virtual_memory_bytes", "Virtual memory size.", MetricType::Gauge, stat[23]),
      Family("process_resident_memory_bytes", "Resident memory size.", MetricType::Gauge,
             stat[24] * page),
      Family("process_resident_memory_peak_bytes", "Largest resident memory size since the start.",
             MetricType::Gauge, static_cast<double>(usage.ru_maxrss) * 1024),
      Family("process_open_fds", "Open file descriptors.", MetricType::Gauge, OpenDescriptors()),
      Family("process_max_fds", "Largest number of open file descriptors.", MetricType::Gauge,
             static_cast<double>(descriptors.rlim_cur)),
  };
}

}  // namespace attendant::server
