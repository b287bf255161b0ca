// One call from arrival to answer: what unary calls and streams have in common.
#ifndef ATTENDANT_SERVER_CALL_H_
#define ATTENDANT_SERVER_CALL_H_

#include <google/protobuf/message.h>
#include <grpcpp/support/server_callback.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <stdexcept>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attendant/v1/attention.pb.h"
#include "core/job.h"
#include "core/kernel.h"
#include "core/mutex.h"
#include "core/problem.h"
#include "core/scheduler.h"
#include "core/speed.h"
#include "server/admission.h"
#include "server/metrics.h"
#include "server/peer_wait.h"
#include "server/tensor_data.h"

namespace attendant::server {

// What a call computes, ready to be submitted.
struct Work {
  std::vector<core::Stage> stages;
  int64_t flops = 0;  // of the matrix products
  // The response beside its tensors; complete when the stages are, but for stats.
  std::shared_ptr<google::protobuf::Message> response;
  // Of the response, filled in when the work is complete. Null where the call is no attention: then
  // it has no path, and what is below means nothing.
  v1::Stats* stats = nullptr;
  core::Path path = core::Path::kChunked;
  core::Kernel kernel = core::Kernel::kFused;  // of the chunked path
  core::DType dtype = core::DType::kFloat32;
  int64_t tokens = 0;            // max(Tq, Tk)
  int64_t explicit_bytes = 0;    // of workspace, had the call been explicit
  double estimated_seconds = 0;  // by the rates that were measured; 0: none were
  double expected_seconds = 0;   // the same, or else by nominal rates: for the scheduler alone
};

// Lays out the work of a request, whose memory is made in `data`.
using Prepare = std::function<absl::StatusOr<Work>(CallData& data)>;

// What f returns, a Status or StatusOr; RESOURCE_EXHAUSTED where there is no memory for it. Nothing
// of ours throws but that, and gRPC would answer without a word.
template <typename Function>
auto WithoutThrowing(const Function& f) -> decltype(f()) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("out of memory");
  } catch (const std::length_error&) {
    return absl::ResourceExhaustedError("out of memory: more than a container can have");
  }
}

// Whether a cancel that comes so long before the deadline of a call that was allowed so long is the
// deadline's: a caller whose time is over cancels, and its clock runs out before ours. The timeout
// is rounded up on its way, by 1 % at most, and counts from when it arrives.
bool IsOfDeadline(std::chrono::nanoseconds left, std::chrono::nanoseconds allowed);

class Call;

// Told of a job that failed for a reason of ours, on a compute thread: it must not wait.
using OnEngineFault = std::function<void(const absl::Status&)>;

// The calls in flight, and what they share. Thread-safe.
class Calls {
 public:
  struct Limits {
    int64_t memory_budget_bytes = 0;  // of all calls together
    std::chrono::steady_clock::duration max_compute_time;
    PeerLimits peer = {};
  };

  // scheduler and metrics must outlive it, and it every call. on_engine_fault: or null.
  Calls(core::Scheduler& scheduler, Metrics& metrics, const Limits& limits,
        OnEngineFault on_engine_fault);

  core::Scheduler& scheduler() { return scheduler_; }
  Metrics& metrics() { return metrics_; }
  Admission& admission() { return admission_; }
  void ReportEngineFault(const absl::Status& status) const {
    if (on_engine_fault_ != nullptr) on_engine_fault_(status);
  }
  std::chrono::steady_clock::duration max_compute_time() const { return max_compute_time_; }
  core::SpeedCorrection& speed_correction() { return speed_correction_; }

  // From then on it is in flight, until Remove.
  void Add(std::shared_ptr<Call> call);
  void Remove(Call* call);

  bool accepting();
  // Refuses what comes from now on, and the calls in flight of which nothing has come yet.
  void StopAccepting();
  // Waits until every call was answered that came while calls were accepted; false where the
  // deadline passed first. The others have their refusal at once.
  bool WaitUntilIdle(std::chrono::steady_clock::time_point deadline);
  // Stops what is in flight: its callers get UNAVAILABLE.
  void StopRunning();
  // Ends the calls whose peers have kept them waiting for too long. To be called every second or
  // so.
  void EndSlow(std::chrono::steady_clock::time_point now);

  // Around a job. JobStarted returns its number; JobEnded whether it had the threads for itself.
  int64_t JobStarted();
  bool JobEnded(int64_t number);

 private:
  struct InFlight {
    std::shared_ptr<Call> call;
    bool awaited;  // it came while calls were accepted
  };

  std::vector<std::shared_ptr<Call>> All();

  core::Scheduler& scheduler_;
  Metrics& metrics_;
  Admission admission_;
  const std::chrono::steady_clock::duration max_compute_time_;
  const PeerLimits peer_limits_;
  const OnEngineFault on_engine_fault_;
  core::SpeedCorrection speed_correction_;
  core::Mutex mutex_;
  core::CondVar idle_;
  bool accepting_ ABSL_GUARDED_BY(mutex_) = true;
  std::map<Call*, InFlight> calls_ ABSL_GUARDED_BY(mutex_);
  int64_t awaited_ ABSL_GUARDED_BY(mutex_) = 0;  // of those
  int64_t jobs_started_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t jobs_running_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t last_shared_job_ ABSL_GUARDED_BY(mutex_) = 0;  // no job up to it had the threads alone
};

// Thread-safe but for what says otherwise. Derived classes are gRPC's reactors. A call gets exactly
// one final status; one that is cancelled or late gives its compute threads back at the next tile.
class Call {
 public:
  virtual ~Call() = default;
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // Ends the call early: no tile of its job starts any more. REQUIRES: !why.ok(), no lock is held.
  virtual void Stop(const absl::Status& why);
  // No calls are accepted any more: ends one of which nothing has come yet. REQUIRES: no lock is
  // held.
  virtual void Refuse() {}
  // Ends a call whose peer has kept it waiting for too long. REQUIRES: no lock is held.
  void EndIfSlow(const PeerLimits& limits, std::chrono::steady_clock::time_point now);

  // Called before gRPC may take the call to another thread, and there: what was done before is seen
  // after. gRPC sees to that itself, by locks that ThreadSanitizer does not know.
  void HandOver();

 protected:
  Call(Calls& calls, grpc::CallbackServerContext* context, Method method);

  Calls& calls() { return calls_; }
  grpc::CallbackServerContext* context() { return context_; }
  // Not thread-safe: of whoever moves the call on.
  CallData& data() { return data_; }

  // What a call is told that is not accepted any more; counted.
  absl::Status Refusal();
  // Prepares the work, or says why not. Not to be called twice.
  absl::StatusOr<Work> PrepareWork(const Prepare& prepare);
  // All of a request is here, that began to come when the call did: from now on it waits.
  void NoteArrival() { arrival_ = std::chrono::steady_clock::now(); }
  // Computes it, and then calls OnComputed. From here on the call may be answered, and deleted, at
  // any moment.
  void Submit(Work work);
  // On a compute thread, once: the job's end. response: as Work has it; complete where status is
  // OK.
  virtual void OnComputed(const absl::Status& status,
                          const google::protobuf::Message& response) = 0;

  // From now on the call waits for its peer, to send or to take so many bytes, until it moves on or
  // waits no more. EndSlow is called once a wait.
  void AwaitPeer(int64_t bytes, PeerWait::Steps steps);
  void NotePeerMoved();
  void AwaitPeerNoMore();
  virtual void EndSlow(const absl::Status& why) = 0;

  // Ends the call where it stands: what it writes is not sent any more, and its caller hears code
  // and message of `why`, unless it was answered. Whoever holds the call may do so, also after it,
  // when its context is gone. REQUIRES: no lock is held, as gRPC may call back from here.
  void Abort(const absl::Status& why) const;
  // The last of a call: gRPC is done with it.
  void Leave();

  // Why a call ends that gRPC calls cancelled: it reports a passed deadline as that too.
  absl::Status WhyCancelled() const;
  // Why the call is to end, if Stop was called.
  absl::Status WhyStopped();
  // Records the answer, and returns what gRPC is to be told. Called once, before that.
  [[nodiscard]] grpc::Status RecordAnswer(const absl::Status& status);

 private:
  std::shared_ptr<core::Job> MakeJob(Work& work);
  void OnJobDone(const Work& work, const absl::Status& status, const core::JobTimes& times);
  void RecordCompletion(const Work& work, const core::JobTimes& times, bool alone);

  Calls& calls_;
  grpc::CallbackServerContext* const context_;
  // Of the context, and counted: it outlives that.
  const std::unique_ptr<grpc_call, void (*)(grpc_call*)> grpc_call_;
  const Method method_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point arrival_ = start_;
  PathLabel path_ = PathLabel::kNone;
  CallData data_;
  int64_t job_number_ = 0;
  core::Mutex mutex_;
  absl::Status why_ ABSL_GUARDED_BY(mutex_);  // the call is to stop
  PeerWait peer_wait_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<core::Job> job_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attendant::server

#endif  // ATTENDANT_SERVER_CALL_H_
