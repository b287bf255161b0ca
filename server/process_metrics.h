// The standard process_* metrics.
#ifndef ATTENDANT_SERVER_PROCESS_METRICS_H_
#define ATTENDANT_SERVER_PROCESS_METRICS_H_

#include <prometheus/collectable.h>

#include <cstdint>
#include <vector>

namespace attendant::server {

// Bytes of the process that are in memory now.
int64_t ResidentBytes();

// Reads /proc/self at each scrape. Thread-safe.
class ProcessMetrics : public prometheus::Collectable {
 public:
  std::vector<prometheus::MetricFamily> Collect() const override;
};

}  // namespace attendant::server

#endif  // ATTENDANT_SERVER_PROCESS_METRICS_H_
