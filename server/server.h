// The assembled server: compute threads, gRPC with health and reflection, the metrics page.
#ifndef ATTENDANT_SERVER_SERVER_H_
#define ATTENDANT_SERVER_SERVER_H_

#include <grpcpp/server.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/scheduler.h"
#include "server/attention_service.h"
#include "server/config.h"
#include "server/health.h"
#include "server/metrics.h"
#include "server/sizes.h"
#include "server/unknown_service.h"
#include "server/upkeep.h"

namespace grpc {
class ServerBuilder;
}

namespace attendant::server {

// Thread-compatible.
class Server {
 public:
  // Serves from when it returns. Returns INVALID_ARGUMENT where the configuration's sizes cannot
  // hold together, RESOURCE_EXHAUSTED where the system has too few threads, UNAVAILABLE naming the
  // address where one cannot be listened on, INTERNAL where the libraries are not what they must
  // be.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const Config& config);
  // What Start checks before it listens anywhere: returns what it would, or what it would start
  // with, in one line.
  static absl::StatusOr<std::string> Check(const Config& config);
  // Ends what Shutdown has not.
  ~Server();

  // The first address, and all of them, with the ports that were taken.
  const std::string& address() const { return addresses_.front(); }
  const std::vector<std::string>& addresses() const { return addresses_; }
  const std::string& metrics_address() const { return metrics_address_; }
  // The metrics page.
  std::string metrics_text() const { return metrics_.Text(); }
  // One line for the log: version, addresses, threads, CPU, libraries.
  std::string Description() const;

  // The first step of a shutdown: health says NOT_SERVING, calls are still accepted.
  void StopBeingReady();
  // The second and last: refuses new calls, waits for the running ones until the timeout, cancels
  // what is left, and ends. Health watchers do not delay it.
  void Shutdown(absl::Duration timeout);

 private:
  struct Resources {
    Sizes sizes;
    int threads = 0;
  };

  static absl::StatusOr<Resources> CheckedResources(const Config& config);
  Server(const Config& config, const Resources& resources);
  absl::Status StartMetrics();
  absl::Status StartGrpc();
  void LimitMessages(grpc::ServerBuilder& builder) const;
  void TendConnections(grpc::ServerBuilder& builder) const;
  Upkeep::Duties DutiesOfUpkeep();

  const Config config_;
  const Sizes sizes_;
  std::vector<std::string> addresses_;
  std::string metrics_address_;
  // Destroyed last to first: gRPC before what its calls use.
  Metrics metrics_;
  core::Scheduler scheduler_;
  Health health_;
  AttentionService service_;
  UnknownService unknown_service_;
  std::unique_ptr<Upkeep> upkeep_;
  std::unique_ptr<grpc::Server> grpc_;
  bool ended_ = false;  // Shutdown has returned
};

}  // namespace attendant::server

#endif  // ATTENDANT_SERVER_SERVER_H_
