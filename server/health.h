// What the server says of itself over grpc.health.v1.
#ifndef ATTENDANT_SERVER_HEALTH_H_
#define ATTENDANT_SERVER_HEALTH_H_

#include "core/mutex.h"

namespace grpc {
class HealthCheckServiceInterface;
}

namespace attendant::server {

// Whether calls can be computed: kFaulty until a self-check passes, kBroken where none did.
enum class Engine { kSound, kFaulty, kBroken };

// Readiness, "" and "attendant.v1.Attention", is SERVING while the engine is sound and no shutdown
// has begun; "liveness" while the engine is not broken. Thread-safe.
class Health {
 public:
  // Where to tell from now on, until it is replaced; null: nowhere.
  void Serve(grpc::HealthCheckServiceInterface* service);
  void SetEngine(Engine engine);
  // For good: a shutdown has begun.
  void StopBeingReady();

 private:
  void Tell() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  core::Mutex mutex_;
  grpc::HealthCheckServiceInterface* service_ ABSL_GUARDED_BY(mutex_) = nullptr;
  Engine engine_ ABSL_GUARDED_BY(mutex_) = Engine::kSound;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace attendant::server

#endif  // ATTENDANT_SERVER_HEALTH_H_
