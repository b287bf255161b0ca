#include "server/server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/server_builder.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/gemm.h"
#include "core/machine.h"
#include "core/version.h"
#include "core/workspace.h"
#include "grpc/health/v1/health.pb.h"

namespace attendant::server {
namespace {

// The services that health knows: readiness under two names, and liveness.
constexpr const char* kReadiness[] = {"", "attendant.v1.Attention"};
constexpr char kLiveness[] = "liveness";

// The best of a few turns, as a machine that is busy at the start would show less.
constexpr int kPeakTurns = 8;
constexpr double kPeakTurnSeconds = 1e-3;

std::string WithPort(const std::string& address, int port) {
  return absl::StrCat(address.substr(0, address.rfind(':')), ":", port);
}

core::PeakFlops MeasurePeak(const Config& config, core::Scheduler& scheduler, Metrics& metrics) {
  if (!config.measure_peak) return {};
  const auto measure = [&scheduler](core::DType dtype) {
    return core::MeasurePeakFlops(scheduler, dtype, kPeakTurnSeconds);
  };
  core::PeakFlops peak;
  for (int turn = 0; turn < kPeakTurns; ++turn) {
    peak.float32 = std::max(peak.float32, measure(core::DType::kFloat32));
    peak.float64 = std::max(peak.float64, measure(core::DType::kFloat64));
  }
  metrics.SetMachinePeak(peak);
  return peak;
}

core::Speed MeasureSpeed(const Config& config, core::Scheduler& scheduler) {
  return config.measure_peak ? core::MeasureSpeed(scheduler, config.kernel) : core::Speed();
}

}  // namespace

Server::Server(const Config& config)
    : config_(config),
      metrics_({core::Version(), core::NameOf(config.kernel, core::DType::kFloat32),
                core::SimdTarget()}),
      scheduler_(config.compute_threads > 0 ? config.compute_threads : core::AvailableCpus()),
      service_({config.max_message_bytes, MeasurePeak(config, scheduler_, metrics_), config.kernel,
                MeasureSpeed(config, scheduler_)},
               scheduler_, metrics_) {}

Server::~Server() {
  if (grpc_ != nullptr) Shutdown(absl::ZeroDuration());
}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const Config& config) {
  if (absl::Status status = core::CheckBlas(); !status.ok()) return status;
  // Half of the machine for scratch: the rest is for messages and everything else.
  core::Workspace::Process().SetLimit(core::PhysicalMemoryBytes() / 2);
  std::unique_ptr<Server> server(new Server(config));
  if (absl::Status status = server->StartMetrics(); !status.ok()) return status;
  if (absl::Status status = server->StartGrpc(); !status.ok()) return status;
  return server;
}

absl::Status Server::StartMetrics() {
  const auto port = metrics_.Listen(config_.metrics_listen);
  if (!port.ok()) return port.status();
  metrics_address_ = WithPort(config_.metrics_listen, *port);
  return absl::OkStatus();
}

absl::Status Server::StartGrpc() {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  // gRPC serves health without its description: naming the message links that, for reflection.
  grpc::health::v1::HealthCheckRequest::descriptor();
  const int max_bytes = static_cast<int>(config_.max_message_bytes);
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort(config_.listen, grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&service_);
  builder.SetMaxReceiveMessageSize(max_bytes);
  builder.SetMaxSendMessageSize(max_bytes);
  // A taken port is an error, not a port shared with whoever has it.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // gRPC inflates before it applies the limit: a small message could become any size.
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  grpc_ = builder.BuildAndStart();
  if (grpc_ == nullptr || port == 0) {
    return absl::UnavailableError(absl::StrCat("cannot serve gRPC on ", config_.listen,
                                               ": the port is taken, or the address is not this "
                                               "machine's"));
  }
  address_ = WithPort(config_.listen, port);
  for (const char* const service : kReadiness) {
    grpc_->GetHealthCheckService()->SetServingStatus(service, true);
  }
  grpc_->GetHealthCheckService()->SetServingStatus(kLiveness, true);
  return absl::OkStatus();
}

std::string Server::Description() const {
  return absl::StrCat(
      "attendant ", core::Version(), " serves gRPC on ", address_, ", metrics on http://",
      metrics_address_, "/metrics; ", scheduler_.threads(), " compute threads on ", core::CpuName(),
      "; ", core::GemmLibraryVersion(), " (", core::NameOf(config_.kernel, core::DType::kFloat32),
      ", ", core::NameOf(config_.kernel, core::DType::kFloat64), "), SIMD ", core::SimdTarget());
}

void Server::StopBeingReady() {
  for (const char* const service : kReadiness) {
    grpc_->GetHealthCheckService()->SetServingStatus(service, false);
  }
}

void Server::Shutdown(absl::Duration timeout) {
  using Clock = std::chrono::steady_clock;
  service_.StopAccepting();
  if (!service_.WaitUntilIdle(Clock::now() + absl::ToChronoNanoseconds(timeout))) {
    service_.StopRunning();
    // Their tiles end, and their callers are told, well within this.
    service_.WaitUntilIdle(Clock::now() + std::chrono::seconds(5));
  }
  // No call of ours is left, so what this cuts short are health watchers and reflection.
  grpc_->Shutdown(std::chrono::system_clock::now());
  grpc_->Wait();
  grpc_.reset();
}

}  // namespace attendant::server
