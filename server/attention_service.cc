#include "server/attention_service.h"

#include <algorithm>
#include <memory>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/attend.h"
#include "core/cost.h"
#include "core/errors.h"
#include "core/explicit_gradient.h"
#include "core/explicit_path.h"
#include "core/gradient.h"
#include "core/head.h"
#include "core/merge.h"
#include "core/referee.h"
#include "core/version.h"
#include "server/check_codec.h"
#include "server/codec.h"
#include "server/status.h"

namespace attendant::server {
namespace {

using Clock = std::chrono::steady_clock;

double Seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

// Room in a response message beside its tensors' bytes: shapes, lengths and Stats.
constexpr int64_t kResponseOverhead = 4096;

// gRPC's own answer would have no text.
grpc::Status UnservedStatus(absl::string_view rpc) {
  return ToGrpcStatus(
      absl::UnimplementedError(absl::StrCat(rpc, " is not served by version ", core::Version())));
}

class UnservedStream final
    : public grpc::ServerBidiReactor<v1::AttendStreamRequest, v1::AttendStreamResponse> {
 public:
  UnservedStream() { Finish(UnservedStatus("AttendStream")); }

 private:
  void OnDone() override { delete this; }
};

int64_t ExplicitBytes(core::Problem problem) {
  problem.return_weights = false;
  return core::ExplicitWorkspaceBytes(problem, /*threads=*/0);
}

Work WorkOf(const core::Problem& problem, core::Kernel kernel, std::vector<core::Stage> stages,
            int64_t flops, v1::Stats* stats) {
  Work work;
  work.kernel = kernel;
  work.stages = std::move(stages);
  work.path = problem.path;
  work.dtype = problem.dtype;
  work.tokens = std::max(problem.queries, problem.keys);
  work.flops = flops;
  work.explicit_bytes = ExplicitBytes(problem);
  work.stats = stats;
  return work;
}

}  // namespace

// One call from arrival to answer; deletes itself when gRPC is done with it.
class AttentionService::Call final : public grpc::ServerUnaryReactor {
 public:
  Call(AttentionService& service, grpc::CallbackServerContext* context, Method method)
      : service_(service), context_(context), method_(method) {
    service_.metrics_.RequestStarted();
    service_.Add(this);
  }

  // Prepares and submits, or answers with an error. Called once, before gRPC knows of this call.
  void Start(const Prepare& prepare) {
    if (!service_.accepting()) {
      service_.metrics_.Shed(ShedReason::kDraining);
      Answer(UnavailableFor("the server is shutting down", absl::Seconds(1)));
      return;
    }
    // Memory for what a caller asks for may not be there; nothing else throws.
    absl::StatusOr<Work> work = absl::ResourceExhaustedError("out of memory");
    try {
      work = prepare(workspace_);
    } catch (const std::bad_alloc&) {
    }
    if (!work.ok()) {
      if (absl::IsResourceExhausted(work.status())) service_.metrics_.Shed(ShedReason::kMemory);
      Answer(work.status());
      return;
    }
    Submit(*std::move(work));
  }

  // Answers without computing.
  void Answer(const absl::Status& status) {
    service_.metrics_.RequestEnded(method_, path_, status.code(), Seconds(Clock::now() - arrival_));
    Finish(ToGrpcStatus(status));
  }

  // Stops the job, if there is one yet. REQUIRES: the service's mutex is held.
  void Stop(const absl::Status& why) {
    service_.mutex_.AssertHeld();
    if (job_ != nullptr) job_->Stop(why);
  }

 private:
  void Submit(Work work) {
    if (work.stats != nullptr) path_ = LabelOf(work.path);
    std::vector<core::Stage> stages = std::exchange(work.stages, {});
    auto job = std::make_shared<core::Job>(
        std::move(stages), [this, work](const absl::Status& status, const core::JobTimes& times) {
          OnJobDone(work, status, times);
        });
    job->set_deadline(context_->deadline());
    {
      core::MutexLock lock(service_.mutex_);
      job_ = job;
      job_number_ = service_.JobStarted();
    }
    service_.metrics_.JobStarted(work.flops);
    // From here on the answer may come, and this call be deleted, at any moment.
    service_.scheduler_.Submit(std::move(job));
  }

  void OnJobDone(const Work& work, const absl::Status& status, const core::JobTimes& times) {
    service_.metrics_.JobEnded(work.flops);
    const bool alone = service_.JobEnded(job_number_);
    if (status.ok()) {
      if (work.stats != nullptr) RecordCompletion(work, times, alone);
    } else if (absl::IsResourceExhausted(status)) {
      service_.metrics_.Shed(ShedReason::kMemory);
    } else if (!absl::IsInternal(status)) {
      const bool started = times.first_tile != Clock::time_point();
      service_.metrics_.JobCancelled(started ? CancelStage::kCompute : CancelStage::kQueue);
    }
    Answer(status);
  }

  void RecordCompletion(const Work& work, const core::JobTimes& times, bool alone) {
    // A problem without a tile has no times of its own.
    const bool started = times.first_tile != Clock::time_point();
    ComputeRecord record;
    record.path = work.path;
    record.tokens = work.tokens;
    record.queue_seconds = started ? Seconds(times.first_tile - arrival_) : 0;
    record.compute_seconds = started ? Seconds(times.end - times.first_tile) : 0;
    record.flops = work.flops;
    record.peak_workspace_bytes = workspace_.peak_bytes();
    record.explicit_bytes = work.explicit_bytes;
    service_.metrics_.JobCompleted(record);
    if (alone) {
      service_.speed_correction_.Observe(work.path, work.expected_seconds, record.compute_seconds);
    }
    work.stats->set_path(PathOf(work.path));
    work.stats->set_compute_seconds(record.compute_seconds);
    work.stats->set_queue_seconds(record.queue_seconds);
    work.stats->set_peak_workspace_bytes(record.peak_workspace_bytes);
    work.stats->set_flops(work.flops);
    work.stats->set_threads(service_.scheduler_.threads());
    work.stats->set_kernel(core::NameOf(
        work.path == core::Path::kExplicit ? core::Kernel::kOneDnn : work.kernel, work.dtype));
  }

  void OnCancel() override {
    // gRPC reports a passed deadline as a cancellation too.
    const bool late = std::chrono::system_clock::now() >= context_->deadline();
    core::MutexLock lock(service_.mutex_);
    Stop(late ? absl::DeadlineExceededError("the call's deadline passed while it was computed")
              : absl::CancelledError("the caller cancelled the call"));
  }

  // Ours neither wait nor compute: gRPC runs them where it is, without handing over to yet another
  // thread. Under load it would start up to two a CPU for that.
  bool InternalInlineable() override { return true; }

  void OnDone() override {
    AttentionService& service = service_;
    service.Remove(this);
    delete this;
  }

  AttentionService& service_;
  grpc::CallbackServerContext* const context_;
  const Method method_;
  const Clock::time_point arrival_ = Clock::now();
  PathLabel path_ = PathLabel::kNone;
  core::Workspace workspace_;
  std::shared_ptr<core::Job> job_ ABSL_GUARDED_BY(service_.mutex_);
  int64_t job_number_ = 0;
};

AttentionService::AttentionService(const Limits& limits, core::Scheduler& scheduler,
                                   Metrics& metrics)
    : limits_(limits), scheduler_(scheduler), metrics_(metrics) {}

grpc::ServerUnaryReactor* AttentionService::Run(grpc::CallbackServerContext* context, Method method,
                                                const Prepare& prepare) {
  auto* const call = new Call(*this, context, method);
  call->Start(prepare);
  return call;
}

grpc::ServerUnaryReactor* AttentionService::Attend(grpc::CallbackServerContext* context,
                                                   const v1::AttendRequest* request,
                                                   v1::AttendResponse* response) {
  return Run(context, Method::kAttend, [&](core::Workspace& workspace) -> absl::StatusOr<Work> {
    const auto problem = ProblemOf(*request);
    if (!problem.ok()) return problem.status();
    absl::Status fits = CheckResponseBytes(core::ResponseBytes(*problem));
    if (!fits.ok()) return fits;
    const core::Resources resources{&workspace, scheduler_.threads(), limits_.kernel};
    auto stages = core::WithStored(problem->dtype, [&]<typename S>() {
      return core::AttendStages(*problem, TensorsOf<S>(*problem, *request, response), resources);
    });
    if (!stages.ok()) return stages.status();
    Work work = WorkOf(*problem, limits_.kernel, *std::move(stages), core::ProductFlops(*problem),
                       response->mutable_stats());
    work.expected_seconds = core::SecondsOf(*problem, limits_.speed);
    return work;
  });
}

grpc::ServerUnaryReactor* AttentionService::Head(grpc::CallbackServerContext* context,
                                                 const v1::HeadRequest* request,
                                                 v1::HeadResponse* response) {
  return Run(context, Method::kHead, [&](core::Workspace& workspace) -> absl::StatusOr<Work> {
    const auto problem = ProblemOf(*request);
    if (!problem.ok()) return problem.status();
    absl::Status fits = CheckResponseBytes(core::ResponseBytes(*problem));
    if (!fits.ok()) return fits;
    const core::Resources resources{&workspace, scheduler_.threads(), limits_.kernel};
    auto stages = core::WithStored(problem->attend.dtype, [&]<typename S>() {
      return core::HeadStages(*problem, TensorsOf<S>(*problem, *request, response), resources);
    });
    if (!stages.ok()) return stages.status();
    Work work = WorkOf(problem->attend, limits_.kernel, *std::move(stages),
                       core::ProductFlops(*problem), response->mutable_stats());
    work.expected_seconds = core::SecondsOf(*problem, limits_.speed);
    return work;
  });
}

grpc::ServerUnaryReactor* AttentionService::Merge(grpc::CallbackServerContext* context,
                                                  const v1::MergeRequest* request,
                                                  v1::MergeResponse* response) {
  return Run(context, Method::kMerge, [&](core::Workspace&) -> absl::StatusOr<Work> {
    const auto problem = ProblemOf(*request);
    if (!problem.ok()) return problem.status();
    absl::Status fits = CheckResponseBytes(core::ResponseBytes(*problem));
    if (!fits.ok()) return fits;
    Work work;
    work.stages = core::WithStored(problem->dtype, [&]<typename S>() {
      return core::MergeStages<S>(*problem, TensorsOf<S>(*problem, *request, response));
    });
    work.flops = core::MergeFlops(*problem);
    return work;
  });
}

grpc::ServerUnaryReactor* AttentionService::Info(grpc::CallbackServerContext* context,
                                                 const v1::InfoRequest*,
                                                 v1::InfoResponse* response) {
  auto* const call = new Call(*this, context, Method::kInfo);
  response->set_version(core::Version());
  response->set_kernel(core::NameOf(limits_.kernel, core::DType::kFloat32));
  response->set_cpu(core::CpuName());
  response->set_compute_threads(scheduler_.threads());
  response->set_max_message_bytes(limits_.max_message_bytes);
  response->set_memory_budget_bytes(core::Workspace::Process().limit_bytes());
  response->set_peak_flops_float32(limits_.peak.float32);
  response->set_peak_flops_float64(limits_.peak.float64);
  call->Answer(absl::OkStatus());
  return call;
}

grpc::ServerUnaryReactor* AttentionService::Estimate(grpc::CallbackServerContext* context,
                                                     const v1::EstimateRequest* request,
                                                     v1::EstimateResponse* response) {
  auto* const call = new Call(*this, context, Method::kEstimate);
  const core::EstimateBasis basis{scheduler_.threads(), limits_.kernel, limits_.speed,
                                  speed_correction_.factors()};
  call->Answer(WriteEstimate(*request, basis, response));
  return call;
}

grpc::ServerBidiReactor<v1::AttendStreamRequest, v1::AttendStreamResponse>*
AttentionService::AttendStream(grpc::CallbackServerContext*) {
  return new UnservedStream();
}

grpc::ServerUnaryReactor* AttentionService::Backward(grpc::CallbackServerContext* context,
                                                     const v1::BackwardRequest* request,
                                                     v1::BackwardResponse* response) {
  return Run(context, Method::kBackward, [&](core::Workspace& workspace) -> absl::StatusOr<Work> {
    const auto problem = ProblemOf(*request);
    if (!problem.ok()) return problem.status();
    absl::Status fits = CheckResponseBytes(core::ResponseBytes(*problem));
    if (!fits.ok()) return fits;
    const core::Resources resources{&workspace, scheduler_.threads(), core::Kernel::kFused};
    auto stages = core::WithStored(problem->attend.dtype, [&]<typename S>() {
      return core::GradientStages(*problem, TensorsOf<S>(*problem, *request, response), resources);
    });
    if (!stages.ok()) return stages.status();
    Work work = WorkOf(problem->attend, resources.kernel, *std::move(stages),
                       core::ProductFlops(*problem), response->mutable_stats());
    work.explicit_bytes = core::ExplicitGradientWorkspaceBytes(*problem, /*threads=*/0);
    return work;
  });
}

grpc::ServerUnaryReactor* AttentionService::Check(grpc::CallbackServerContext* context,
                                                  const v1::CheckRequest* request,
                                                  v1::CheckResponse* response) {
  return Run(context, Method::kCheck, [&](core::Workspace& workspace) -> absl::StatusOr<Work> {
    const auto call = CheckCallOf(*request);
    if (!call.ok()) return call.status();
    const core::Resources resources{&workspace, scheduler_.threads(), limits_.kernel};
    const auto report = std::make_shared<core::CheckReport>();
    auto stages = core::CheckStages(call->problem, call->inputs, resources, report.get());
    if (!stages.ok()) return stages.status();
    stages->push_back({"response", 1, [report, response](const core::TileContext&) {
                         FillResponse(*report, response);
                         return absl::OkStatus();
                       }});
    Work work;
    work.stages = *std::move(stages);
    work.flops = call->flops;
    return work;
  });
}

absl::Status AttentionService::CheckResponseBytes(int64_t bytes) const {
  if (bytes <= limits_.max_message_bytes - kResponseOverhead) return absl::OkStatus();
  return core::OverLimit("max_message_bytes",
                         absl::StrCat("the response's tensors have ", bytes, " bytes, at most ",
                                      limits_.max_message_bytes - kResponseOverhead,
                                      " fit a message; ask for fewer returns or tokens at once"));
}

bool AttentionService::accepting() {
  core::MutexLock lock(mutex_);
  return accepting_;
}

void AttentionService::Add(Call* call) {
  core::MutexLock lock(mutex_);
  calls_.insert(call);
}

void AttentionService::Remove(Call* call) {
  core::MutexLock lock(mutex_);
  calls_.erase(call);
  if (calls_.empty()) idle_.NotifyAll();
}

int64_t AttentionService::JobStarted() {
  ++jobs_started_;
  if (++jobs_running_ > 1) last_shared_job_ = jobs_started_;
  return jobs_started_;
}

bool AttentionService::JobEnded(int64_t number) {
  core::MutexLock lock(mutex_);
  --jobs_running_;
  return number > last_shared_job_;
}

void AttentionService::StopAccepting() {
  core::MutexLock lock(mutex_);
  accepting_ = false;
}

bool AttentionService::WaitUntilIdle(Clock::time_point deadline) {
  core::MutexLock lock(mutex_);
  while (!calls_.empty()) {
    if (!idle_.WaitUntil(mutex_, deadline) && !calls_.empty()) return false;
  }
  return true;
}

void AttentionService::StopRunning() {
  core::MutexLock lock(mutex_);
  for (Call* const call : calls_) {
    call->Stop(
        UnavailableFor("the server shut down before the call was complete", absl::Seconds(1)));
  }
}

}  // namespace attendant::server
