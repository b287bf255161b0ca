// The standard process_* metrics.
#ifndef ATTENDANT_SERVER_PROCESS_METRICS_H_
#define ATTENDANT_SERVER_PROCESS_METRICS_H_

#include <prometheus/collectable.h>

#include <vector>

namespace attendant::server {

// Reads /proc/self at each scrape. Thread-safe.
class ProcessMetrics : public prometheus::Collectable {
 public:
  std::vector<prometheus::MetricFamily> Collect() const override;
};

}  // namespace attendant::server

#endif  // ATTENDANT_SERVER_PROCESS_METRICS_H_
