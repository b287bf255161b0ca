// The assembled server: compute threads, gRPC with health and reflection, the metrics page.
#ifndef ATTENDANT_SERVER_SERVER_H_
#define ATTENDANT_SERVER_SERVER_H_

#include <grpcpp/server.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/scheduler.h"
#include "server/attention_service.h"
#include "server/config.h"
#include "server/metrics.h"

namespace attendant::server {

// Thread-compatible.
class Server {
 public:
  // Serves from when it returns. Returns UNAVAILABLE naming the address where one cannot be
  // listened on, INTERNAL where the libraries are not what they must be.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const Config& config);
  // Ends what Shutdown has not.
  ~Server();

  // The addresses with the ports that were taken.
  const std::string& address() const { return address_; }
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
  explicit Server(const Config& config);
  absl::Status StartMetrics();
  absl::Status StartGrpc();

  const Config config_;
  std::string address_;
  std::string metrics_address_;
  // Destroyed last to first: gRPC before what its calls use.
  Metrics metrics_;
  core::Scheduler scheduler_;
  AttentionService service_;
  std::unique_ptr<grpc::Server> grpc_;
};

}  // namespace attendant::server

#endif  // ATTENDANT_SERVER_SERVER_H_
