// The rpcs of attendant.v1.Attention, one short adapter each.
#ifndef ATTENDANT_SERVER_ATTENTION_SERVICE_H_
#define ATTENDANT_SERVER_ATTENTION_SERVICE_H_

#include <grpcpp/support/server_callback.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attendant/v1/attention.grpc.pb.h"
#include "core/kernel.h"
#include "core/machine.h"
#include "core/mutex.h"
#include "core/problem.h"
#include "core/scheduler.h"
#include "core/speed.h"
#include "core/tensor_view.h"
#include "core/workspace.h"
#include "server/metrics.h"

namespace attendant::server {

// What a call computes, ready to be submitted.
struct Work {
  std::vector<core::Stage> stages;
  int64_t flops = 0;  // of the matrix products
  // Of the response, filled in when the work is complete. Null where the call is no attention: then
  // it has no path, and what is below means nothing.
  v1::Stats* stats = nullptr;
  core::Path path = core::Path::kChunked;
  core::Kernel kernel = core::Kernel::kFused;  // of the chunked path
  core::DType dtype = core::DType::kFloat32;
  int64_t tokens = 0;           // max(Tq, Tk)
  int64_t explicit_bytes = 0;   // of workspace, had the call been explicit
  double expected_seconds = 0;  // by the rates that were measured; 0: none were
};

// Thread-safe. Every call gets exactly one final status; a call that is cancelled or late gives its
// compute threads back at the next tile.
class AttentionService final : public v1::Attention::CallbackService {
 public:
  struct Limits {
    int64_t max_message_bytes = 0;
    core::PeakFlops peak;
    core::Kernel kernel = core::Kernel::kFused;  // of the chunked path
    core::Speed speed = {};
  };

  // scheduler and metrics must outlive the service, and the service every call.
  AttentionService(const Limits& limits, core::Scheduler& scheduler, Metrics& metrics);

  grpc::ServerUnaryReactor* Attend(grpc::CallbackServerContext* context,
                                   const v1::AttendRequest* request,
                                   v1::AttendResponse* response) override;
  grpc::ServerUnaryReactor* Head(grpc::CallbackServerContext* context,
                                 const v1::HeadRequest* request,
                                 v1::HeadResponse* response) override;
  grpc::ServerUnaryReactor* Merge(grpc::CallbackServerContext* context,
                                  const v1::MergeRequest* request,
                                  v1::MergeResponse* response) override;
  grpc::ServerUnaryReactor* Check(grpc::CallbackServerContext* context,
                                  const v1::CheckRequest* request,
                                  v1::CheckResponse* response) override;
  grpc::ServerUnaryReactor* Estimate(grpc::CallbackServerContext* context,
                                     const v1::EstimateRequest* request,
                                     v1::EstimateResponse* response) override;
  grpc::ServerUnaryReactor* Info(grpc::CallbackServerContext* context,
                                 const v1::InfoRequest* request,
                                 v1::InfoResponse* response) override;

  // The rest of the contract: UNIMPLEMENTED.
  grpc::ServerBidiReactor<v1::AttendStreamRequest, v1::AttendStreamResponse>* AttendStream(
      grpc::CallbackServerContext* context) override;
  grpc::ServerUnaryReactor* Backward(grpc::CallbackServerContext* context,
                                     const v1::BackwardRequest* request,
                                     v1::BackwardResponse* response) override;

  // New calls are answered UNAVAILABLE from now on; running ones go on.
  void StopAccepting();
  // Waits until every call was answered; false where the deadline passed first.
  bool WaitUntilIdle(std::chrono::steady_clock::time_point deadline);
  // Stops what still runs: its callers get UNAVAILABLE.
  void StopRunning();

 private:
  class Call;

  // Checks a request, makes room in its response, and lays out the work. The workspace belongs to
  // the call and outlives the work.
  using Prepare = std::function<absl::StatusOr<Work>(core::Workspace&)>;

  grpc::ServerUnaryReactor* Run(grpc::CallbackServerContext* context, Method method,
                                const Prepare& prepare);
  absl::Status CheckResponseBytes(int64_t bytes) const;
  bool accepting();
  void Add(Call* call);
  void Remove(Call* call);
  // Around a job. JobStarted returns its number; JobEnded whether it had the threads for itself.
  int64_t JobStarted() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool JobEnded(int64_t number) ABSL_LOCKS_EXCLUDED(mutex_);

  const Limits limits_;
  core::Scheduler& scheduler_;
  Metrics& metrics_;
  core::Mutex mutex_;
  core::CondVar idle_;
  bool accepting_ ABSL_GUARDED_BY(mutex_) = true;
  std::set<Call*> calls_ ABSL_GUARDED_BY(mutex_);
  int64_t jobs_started_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t jobs_running_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t last_shared_job_ ABSL_GUARDED_BY(mutex_) = 0;  // no job up to it had the threads alone
  core::SpeedCorrection speed_correction_;
};

}  // namespace attendant::server

#endif  // ATTENDANT_SERVER_ATTENTION_SERVICE_H_
