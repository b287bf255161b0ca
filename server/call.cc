#include "server/call.h"

#include <grpc/grpc.h>
#include <grpcpp/server_context.h>

#include <algorithm>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "core/errors.h"
#include "core/faults.h"
#include "server/codec.h"
#include "server/status.h"

namespace attendant::server {
namespace {

using Clock = std::chrono::steady_clock;

double Seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

}  // namespace

bool IsOfDeadline(std::chrono::nanoseconds left, std::chrono::nanoseconds allowed) {
  constexpr double kOnItsWay = 0.02;
  constexpr double kRounding = 0.015;
  return Seconds(left) <= kOnItsWay + kRounding * Seconds(allowed);
}

Calls::Calls(core::Scheduler& scheduler, Metrics& metrics, const Limits& limits,
             OnEngineFault on_engine_fault)
    : scheduler_(scheduler),
      metrics_(metrics),
      admission_(
          limits.memory_budget_bytes,
          [&scheduler] { return absl::FromChrono(scheduler.RetryDelay()); }, metrics),
      max_compute_time_(limits.max_compute_time),
      peer_limits_(limits.peer),
      on_engine_fault_(std::move(on_engine_fault)) {}

void Calls::Add(std::shared_ptr<Call> call) {
  core::MutexLock lock(mutex_);
  Call* const key = call.get();
  calls_.emplace(key, InFlight{std::move(call), accepting_});
  if (accepting_) ++awaited_;
}

void Calls::Remove(Call* call) {
  call->HandOver();
  // Destroyed when the lock is not held any more.
  std::shared_ptr<Call> removed;
  core::MutexLock lock(mutex_);
  const auto found = calls_.find(call);
  removed = std::move(found->second.call);
  if (found->second.awaited && --awaited_ == 0) idle_.NotifyAll();
  calls_.erase(found);
}

bool Calls::accepting() {
  core::MutexLock lock(mutex_);
  return accepting_;
}

void Calls::StopAccepting() {
  {
    core::MutexLock lock(mutex_);
    accepting_ = false;
  }
  for (const auto& call : All()) call->Refuse();
}

std::vector<std::shared_ptr<Call>> Calls::All() {
  std::vector<std::shared_ptr<Call>> all;
  core::MutexLock lock(mutex_);
  all.reserve(calls_.size());
  for (const auto& [key, in_flight] : calls_) all.push_back(in_flight.call);
  return all;
}

bool Calls::WaitUntilIdle(Clock::time_point deadline) {
  core::MutexLock lock(mutex_);
  while (awaited_ > 0) {
    if (!idle_.WaitUntil(mutex_, deadline) && awaited_ > 0) return false;
  }
  return true;
}

void Calls::StopRunning() {
  for (const auto& call : All()) {
    call->Stop(
        UnavailableFor("the server shut down before the call was complete", absl::Seconds(1)));
  }
}

void Calls::EndSlow(Clock::time_point now) {
  for (const auto& call : All()) call->EndIfSlow(peer_limits_, now);
}

int64_t Calls::JobStarted() {
  core::MutexLock lock(mutex_);
  ++jobs_started_;
  if (++jobs_running_ > 1) last_shared_job_ = jobs_started_;
  return jobs_started_;
}

bool Calls::JobEnded(int64_t number) {
  core::MutexLock lock(mutex_);
  --jobs_running_;
  return number > last_shared_job_;
}

Call::Call(Calls& calls, grpc::CallbackServerContext* context, Method method)
    : calls_(calls),
      context_(context),
      grpc_call_(context->c_call(), grpc_call_unref),
      method_(method) {
  grpc_call_ref(grpc_call_.get());
  calls_.metrics().RequestStarted();
  HandOver();
}

void Call::HandOver() { const core::MutexLock lock(mutex_); }

void Call::Stop(const absl::Status& why) {
  core::MutexLock lock(mutex_);
  if (why_.ok()) why_ = why;
  if (job_ != nullptr) job_->Stop(why);
}

void Call::AwaitPeer(int64_t bytes, PeerWait::Steps steps) {
  core::MutexLock lock(mutex_);
  peer_wait_.Begin(bytes, steps, Clock::now());
}

void Call::NotePeerMoved() {
  core::MutexLock lock(mutex_);
  peer_wait_.Moved(Clock::now());
}

void Call::AwaitPeerNoMore() {
  core::MutexLock lock(mutex_);
  peer_wait_.End();
}

void Call::EndIfSlow(const PeerLimits& limits, Clock::time_point now) {
  absl::Status status;
  {
    core::MutexLock lock(mutex_);
    status = peer_wait_.Check(limits, now);
    if (!status.ok()) peer_wait_.End();
  }
  if (!status.ok()) EndSlow(status);
}

absl::Status Call::Refusal() {
  calls_.metrics().Shed(ShedReason::kDraining);
  return UnavailableFor("the server is shutting down", absl::Seconds(1));
}

absl::StatusOr<Work> Call::PrepareWork(const Prepare& prepare) {
  return WithoutThrowing([&]() -> absl::StatusOr<Work> {
    if (!calls_.accepting()) return Refusal();
    if (std::chrono::system_clock::now() >= context_->deadline()) {
      return absl::DeadlineExceededError("the call's deadline had passed when it arrived");
    }
    return prepare(data_);
  });
}

std::shared_ptr<core::Job> Call::MakeJob(Work& work) {
  if constexpr (core::faults::kCompiledIn) {
    if (core::faults::Fires(core::faults::Point::kAllocation)) throw std::bad_alloc();
  }
  std::vector<core::Stage> stages = std::exchange(work.stages, {});
  if (!stages.empty()) {
    if (auto copy = data_.in.Copy()) stages.insert(stages.begin(), *std::move(copy));
  }
  auto job = std::make_shared<core::Job>(
      std::move(stages), [this, work](const absl::Status& status, const core::JobTimes& times) {
        OnJobDone(work, status, times);
      });
  job->set_deadline(context_->deadline());
  job->set_max_compute_time(calls_.max_compute_time());
  job->set_expected_seconds(work.expected_seconds);
  return job;
}

void Call::Submit(Work work) {
  if (work.stats != nullptr) path_ = LabelOf(work.path);
  std::shared_ptr<core::Job> job;
  const absl::Status made = WithoutThrowing([&] {
    job = MakeJob(work);
    return absl::OkStatus();
  });
  if (!made.ok()) {
    OnComputed(made, *work.response);
    return;
  }
  {
    core::MutexLock lock(mutex_);
    job_ = job;
    if (!why_.ok()) job->Stop(why_);
  }
  job_number_ = calls_.JobStarted();
  calls_.metrics().JobStarted(work.flops);
  const absl::Status submitted = calls_.scheduler().Submit(std::move(job));
  if (!submitted.ok()) OnJobDone(work, submitted, core::JobTimes());
}

void Call::OnJobDone(const Work& work, const absl::Status& status, const core::JobTimes& times) {
  calls_.metrics().JobEnded(work.flops);
  const bool alone = calls_.JobEnded(job_number_);
  data_.in.Free();
  // The response alone is left.
  data_.reservation.Keep(data_.memory->tensors.current_bytes());
  if (status.ok()) {
    if (work.stats != nullptr) RecordCompletion(work, times, alone);
  } else if (absl::IsInternal(status)) {
    calls_.ReportEngineFault(status);
  } else if (!absl::IsResourceExhausted(status) ||
             core::LimitOf(status) == core::Job::kMaxComputeTime) {
    const bool started = times.first_tile != Clock::time_point();
    calls_.metrics().JobCancelled(started ? CancelStage::kCompute : CancelStage::kQueue);
  }
  OnComputed(status, *work.response);
}

void Call::RecordCompletion(const Work& work, const core::JobTimes& times, bool alone) {
  // A problem without a tile has no times of its own. To copy the request is not to compute.
  const bool started = times.first_tile != Clock::time_point();
  ComputeRecord record;
  record.path = work.path;
  record.tokens = work.tokens;
  record.queue_seconds = started ? Seconds(times.first_tile - arrival_) : 0;
  record.compute_seconds =
      started ? Seconds(times.end - std::max(times.first_tile, data_.in.copied_at())) : 0;
  record.flops = work.flops;
  record.peak_workspace_bytes = data_.memory->scratch.peak_bytes();
  record.explicit_bytes = work.explicit_bytes;
  calls_.metrics().JobCompleted(record);
  // What is expected of a gradient is too rough to learn from.
  if (alone && method_ != Method::kBackward) {
    calls_.speed_correction().Observe(work.path, work.estimated_seconds, record.compute_seconds);
  }
  work.stats->set_path(PathOf(work.path));
  work.stats->set_compute_seconds(record.compute_seconds);
  work.stats->set_queue_seconds(record.queue_seconds);
  work.stats->set_peak_workspace_bytes(record.peak_workspace_bytes);
  work.stats->set_flops(work.flops);
  work.stats->set_threads(calls_.scheduler().threads());
  work.stats->set_kernel(core::NameOf(
      work.path == core::Path::kExplicit ? core::Kernel::kOneDnn : work.kernel, work.dtype));
}

void Call::Abort(const absl::Status& why) const {
  grpc_call_cancel_with_status(grpc_call_.get(), static_cast<grpc_status_code>(why.code()),
                               std::string(why.message()).c_str(), nullptr);
}

void Call::Leave() {
  // Whoever looks at all calls may hold this one a little longer than the service lives.
  data_.in.Free();
  data_.reservation = Reservation();
  calls_.Remove(this);
}

absl::Status Call::WhyCancelled() const {
  const auto left = context_->deadline() - std::chrono::system_clock::now();
  const bool late = IsOfDeadline(left, left + (Clock::now() - start_));
  return late ? absl::DeadlineExceededError("the call's deadline passed before it was answered")
              : absl::CancelledError("the caller cancelled the call");
}

absl::Status Call::WhyStopped() {
  core::MutexLock lock(mutex_);
  return why_;
}

grpc::Status Call::RecordAnswer(const absl::Status& status) {
  const absl::Status told = calls_.admission().Explain(status);
  if (const auto reason = ShedReasonOf(told); reason.has_value()) calls_.metrics().Shed(*reason);
  calls_.metrics().RequestEnded(method_, path_, told.code(), Seconds(Clock::now() - start_));
  HandOver();
  return AnswerOf(told, *context_);
}

}  // namespace attendant::server
