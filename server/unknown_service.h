// What is called and not served.
#ifndef ATTENDANT_SERVER_UNKNOWN_SERVICE_H_
#define ATTENDANT_SERVER_UNKNOWN_SERVICE_H_

#include <grpcpp/generic/async_generic_service.h>

#include "server/metrics.h"

namespace attendant::server {

// Answers UNIMPLEMENTED to every method that no other service has, and counts it. Thread-safe.
class UnknownService final : public grpc::CallbackGenericService {
 public:
  // metrics must outlive the service and its calls.
  explicit UnknownService(Metrics& metrics) : metrics_(metrics) {}

  grpc::ServerGenericBidiReactor* CreateReactor(
      grpc::GenericCallbackServerContext* context) override;

 private:
  Metrics& metrics_;
};

}  // namespace attendant::server

#endif  // ATTENDANT_SERVER_UNKNOWN_SERVICE_H_
