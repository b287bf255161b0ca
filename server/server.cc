#include "server/server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/server_builder.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "core/gemm.h"
#include "core/machine.h"
#include "core/self_check.h"
#include "core/version.h"
#include "grpc/health/v1/health.pb.h"
#include "server/cpu.h"
#include "server/unix_socket.h"

namespace attendant::server {
namespace {

// The best of a few turns, as a machine that is busy at the start would show less.
constexpr int kPeakTurns = 8;
constexpr double kPeakTurnSeconds = 1e-3;

// gRPC's own is two hours. A client of ours may ping every 10 s; half of that leaves room for
// clocks and queues on the way.
constexpr absl::Duration kShortestPingInterval = absl::Seconds(5);
constexpr absl::Duration kKeepaliveTime = absl::Minutes(1);
constexpr absl::Duration kKeepaliveTimeout = absl::Seconds(20);
// Calls of one connection at a time: a client that wants more waits, or opens another.
constexpr int kMostStreams = 1000;
constexpr int kReflectionThreads = 4;
// How long a call that was on its way when the server ended has to arrive, and to hear that it
// should go elsewhere.
constexpr std::chrono::milliseconds kLastCalls{200};

absl::Status CannotServe(absl::string_view address, absl::string_view why) {
  return absl::UnavailableError(absl::StrCat("cannot serve gRPC on --listen=", address, ": ", why));
}

std::string WithPort(const std::string& address, int port) {
  if (absl::StartsWith(address, kUnixPrefix)) return address;
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

std::chrono::nanoseconds MaxComputeTime(const Config& config) {
  return config.max_compute_time > absl::ZeroDuration()
             ? absl::ToChronoNanoseconds(config.max_compute_time)
             : std::chrono::nanoseconds::max();
}

}  // namespace

Server::Server(const Config& config, const Resources& resources)
    : config_(config),
      sizes_(resources.sizes),
      metrics_({core::Version(), core::NameOf(config.kernel, core::DType::kFloat32),
                core::SimdTarget()}),
      scheduler_({.threads = resources.threads,
                  .max_running = config.max_running,
                  .max_queue = config.max_queue,
                  .max_queue_wait = absl::ToChronoNanoseconds(config.max_queue_wait)}),
      service_({.max_message_bytes = sizes_.max_message_bytes,
                .memory_budget_bytes = sizes_.memory_budget,
                .max_compute_time = MaxComputeTime(config),
                .max_running = config.max_running,
                .max_queue = config.max_queue,
                .peak = MeasurePeak(config, scheduler_, metrics_),
                .kernel = config.kernel,
                .speed = MeasureSpeed(config, scheduler_),
                .on_engine_fault = [this](const absl::Status&) { upkeep_->EngineFault(); }},
               scheduler_, metrics_),
      unknown_service_(metrics_),
      upkeep_(std::make_unique<Upkeep>(DutiesOfUpkeep())) {
  metrics_.SetQueueDepthSource([this] { return int64_t{scheduler_.queued()}; });
}

Server::~Server() {
  if (grpc_ != nullptr && !ended_) Shutdown(absl::ZeroDuration());
  metrics_.SetQueueDepthSource(nullptr);
}

absl::StatusOr<Server::Resources> Server::CheckedResources(const Config& config) {
  if (absl::Status status = core::CheckBlas(); !status.ok()) return status;
  const CgroupLimits limits = ReadCgroupLimits();
  const auto sizes = ShareMemory(config, UsableMemoryBytes(core::PhysicalMemoryBytes(), limits));
  if (!sizes.ok()) return sizes.status();
  return Resources{*sizes, config.compute_threads > 0 ? config.compute_threads
                                                      : UsableCpus(core::AvailableCpus(), limits)};
}

absl::StatusOr<std::string> Server::Check(const Config& config) {
  const auto resources = CheckedResources(config);
  if (!resources.ok()) return resources.status();
  const Sizes& sizes = resources->sizes;
  return absl::StrCat("the settings hold together: ", resources->threads,
                      " compute threads, a memory budget of ", sizes.memory_budget,
                      " bytes, messages of at most ", sizes.max_message_bytes, " bytes");
}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const Config& config) {
  const auto resources = CheckedResources(config);
  if (!resources.ok()) return resources.status();
  if (absl::Status status = CheckThreads(resources->threads); !status.ok()) return status;
  std::unique_ptr<Server> server(new Server(config, *resources));
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
  grpc::ServerBuilder builder;
  builder.RegisterService(&service_);
  builder.RegisterCallbackGenericService(&unknown_service_);
  LimitMessages(builder);
  TendConnections(builder);
  std::vector<int> ports(config_.listen.size());
  for (size_t i = 0; i < ports.size(); ++i) {
    absl::string_view path = config_.listen[i];
    if (absl::ConsumePrefix(&path, kUnixPrefix)) {
      absl::Status status = MakeWayForSocket(std::string(path));
      if (!status.ok()) return CannotServe(config_.listen[i], status.message());
    }
    builder.AddListeningPort(config_.listen[i], grpc::InsecureServerCredentials(), &ports[i]);
  }
  grpc_ = builder.BuildAndStart();
  // gRPC listens in this order, and stops where it cannot.
  for (size_t i = 0; i < ports.size(); ++i) {
    if (ports[i] == 0) {
      return CannotServe(config_.listen[i], "it is taken, or is not this machine's to listen on");
    }
    addresses_.push_back(WithPort(config_.listen[i], ports[i]));
  }
  if (grpc_ == nullptr) return absl::InternalError("gRPC did not start");
  health_.Serve(grpc_->GetHealthCheckService());
  return absl::OkStatus();
}

void Server::LimitMessages(grpc::ServerBuilder& builder) const {
  // The service checks what it gets itself; by then all of a message is in memory, as it would be
  // if gRPC checked. The quota is what bounds that.
  builder.SetMaxReceiveMessageSize(-1);
  builder.SetMaxSendMessageSize(static_cast<int>(sizes_.max_message_bytes));
  // gRPC inflates outside the quota: a small message could become any size.
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  grpc::ResourceQuota quota("attendant");
  quota.Resize(static_cast<size_t>(sizes_.receive_quota));
  // Reflection blocks a thread for each of its streams.
  quota.SetMaxThreads(kReflectionThreads);
  builder.SetResourceQuota(quota);
  builder.SetSyncServerOption(grpc::ServerBuilder::NUM_CQS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MIN_POLLERS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MAX_POLLERS, 1);
}

void Server::TendConnections(grpc::ServerBuilder& builder) const {
  const auto set = [&builder](const char* name, absl::Duration duration) {
    builder.AddChannelArgument(name, static_cast<int>(absl::ToInt64Milliseconds(duration)));
  };
  // A taken port is an error, not a port shared with whoever has it.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMostStreams);
  // A client may ping through a long computation, and while it has no call.
  set(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, kShortestPingInterval);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  // A caller whose machine is gone would else keep its calls for hours.
  set(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveTime);
  set(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeout);
  // Told to go, a client opens its next connection and lets its calls on this one finish, for as
  // long as they take: gRPC's default sets no limit to that.
  if (config_.max_connection_age > absl::ZeroDuration()) {
    set(GRPC_ARG_MAX_CONNECTION_AGE_MS, config_.max_connection_age);
  }
}

Upkeep::Duties Server::DutiesOfUpkeep() {
  Upkeep::Duties duties;
  duties.activity = [this] { return metrics_.activity(); };
  duties.self_check = [this] { return core::SelfCheck(scheduler_, config_.kernel); };
  duties.tend_calls = [this] { service_.EndSlowCalls(); };
  duties.report = [this](Engine engine) { health_.SetEngine(engine); };
  return duties;
}

std::string Server::Description() const {
  return absl::StrCat(
      "attendant ", core::Version(), " serves gRPC on ", absl::StrJoin(addresses_, " and "),
      ", metrics on http://", metrics_address_, "/metrics; ", scheduler_.threads(),
      " compute threads on ", core::CpuName(), "; ", core::GemmLibraryVersion(), " (",
      core::NameOf(config_.kernel, core::DType::kFloat32), ", ",
      core::NameOf(config_.kernel, core::DType::kFloat64), "), SIMD ", core::SimdTarget());
}

void Server::StopBeingReady() { health_.StopBeingReady(); }

void Server::Shutdown(absl::Duration timeout) {
  using Clock = std::chrono::steady_clock;
  service_.StopAccepting();
  if (!service_.WaitUntilIdle(Clock::now() + absl::ToChronoNanoseconds(timeout))) {
    service_.StopRunning();
    // Their tiles end, and their callers are told, well within this.
    service_.WaitUntilIdle(Clock::now() + std::chrono::seconds(5));
  }
  // No call of ours is left but refusals on their way, so what this cuts short are health watchers
  // and reflection.
  grpc_->Shutdown(std::chrono::system_clock::now() + kLastCalls);
  grpc_->Wait();
  // grpc_ stays: gRPC's threads may take ten seconds to end, and a process that exits need not
  // wait.
  ended_ = true;
  health_.Serve(nullptr);
}

}  // namespace attendant::server
