#include "server/health.h"

#include <grpcpp/health_check_service_interface.h>

namespace attendant::server {
namespace {

constexpr const char* kReadiness[] = {"", "attendant.v1.Attention"};
constexpr char kLiveness[] = "liveness";

}  // namespace

void Health::Serve(grpc::HealthCheckServiceInterface* service) {
  core::MutexLock lock(mutex_);
  service_ = service;
  Tell();
}

void Health::SetEngine(Engine engine) {
  core::MutexLock lock(mutex_);
  engine_ = engine;
  Tell();
}

void Health::StopBeingReady() {
  core::MutexLock lock(mutex_);
  stopping_ = true;
  Tell();
}

void Health::Tell() {
  if (service_ == nullptr) return;
  const bool ready = engine_ == Engine::kSound && !stopping_;
  for (const char* const name : kReadiness) service_->SetServingStatus(name, ready);
  service_->SetServingStatus(kLiveness, engine_ != Engine::kBroken);
}

}  // namespace attendant::server
