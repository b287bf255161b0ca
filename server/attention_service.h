// The rpcs of attendant.v1.Attention, one short adapter each.
#ifndef ATTENDANT_SERVER_ATTENTION_SERVICE_H_
#define ATTENDANT_SERVER_ATTENTION_SERVICE_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <chrono>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attendant/v1/attention.grpc.pb.h"
#include "core/attend.h"
#include "core/gradient.h"
#include "core/kernel.h"
#include "core/machine.h"
#include "core/problem.h"
#include "core/scheduler.h"
#include "core/speed.h"
#include "server/admission.h"
#include "server/attend_stream.h"
#include "server/call.h"
#include "server/metrics.h"

namespace attendant::server {

// The generated service, with every method's messages as the bytes that arrived.
using RawService = v1::Attention::WithRawCallbackMethod_Attend<
    v1::Attention::WithRawCallbackMethod_AttendStream<v1::Attention::WithRawCallbackMethod_Head<
        v1::Attention::WithRawCallbackMethod_Backward<v1::Attention::WithRawCallbackMethod_Check<
            v1::Attention::WithRawCallbackMethod_Estimate<
                v1::Attention::WithRawCallbackMethod_Merge<
                    v1::Attention::WithRawCallbackMethod_Info<v1::Attention::Service>>>>>>>>;

// Thread-safe. Every call gets exactly one final status; a call that is cancelled or late gives its
// compute threads back at the next tile. gRPC's threads never compute.
class AttentionService final : public RawService {
 public:
  struct Limits {
    int64_t max_message_bytes = 0;
    int64_t memory_budget_bytes = INT64_MAX;  // of all calls together
    // Of a call, from its first tile on.
    std::chrono::steady_clock::duration max_compute_time =
        std::chrono::steady_clock::duration::max();
    // For Info to tell; the scheduler keeps them.
    int max_running = 0;
    int max_queue = 0;
    core::PeakFlops peak;
    core::Kernel kernel = core::Kernel::kFused;  // of the chunked path
    core::Speed speed = {};
    OnEngineFault on_engine_fault = nullptr;
    PeerLimits peer = {};
  };

  // scheduler and metrics must outlive the service, and the service every call.
  AttentionService(const Limits& limits, core::Scheduler& scheduler, Metrics& metrics);

  grpc::ServerUnaryReactor* Attend(grpc::CallbackServerContext* context,
                                   const grpc::ByteBuffer* request,
                                   grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Head(grpc::CallbackServerContext* context,
                                 const grpc::ByteBuffer* request,
                                 grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Backward(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Merge(grpc::CallbackServerContext* context,
                                  const grpc::ByteBuffer* request,
                                  grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Check(grpc::CallbackServerContext* context,
                                  const grpc::ByteBuffer* request,
                                  grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Estimate(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Info(grpc::CallbackServerContext* context,
                                 const grpc::ByteBuffer* request,
                                 grpc::ByteBuffer* response) override;
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* AttendStream(
      grpc::CallbackServerContext* context) override;

  // New calls are answered UNAVAILABLE from now on; running ones go on.
  void StopAccepting() { calls_.StopAccepting(); }
  // Waits until every call was answered; false where the deadline passed first.
  bool WaitUntilIdle(std::chrono::steady_clock::time_point deadline) {
    return calls_.WaitUntilIdle(deadline);
  }
  // Stops what still runs: its callers get UNAVAILABLE.
  void StopRunning() { calls_.StopRunning(); }
  // Ends the calls whose peers keep them waiting for too long. To be called every second or so.
  void EndSlowCalls(std::chrono::steady_clock::time_point now = std::chrono::steady_clock::now()) {
    calls_.EndSlow(now);
  }

 private:
  // One call's bytes, from and to gRPC.
  struct Arrived {
    grpc::CallbackServerContext* context;
    Method method;
    const grpc::ByteBuffer* request;
    grpc::ByteBuffer* response;
  };

  // Reads the request without its tensors' data, and computes what plan makes of it.
  template <typename Request, typename Plan>
  grpc::ServerUnaryReactor* Run(const Arrived& arrived, const Plan& plan);
  // Answers with the response that fill makes: (request, response) -> Status. For what takes no
  // time; also while the server shuts down.
  template <typename Request, typename Response, typename Fill>
  grpc::ServerUnaryReactor* AnswerAtOnce(const Arrived& arrived, const Fill& fill);

  // Writes how long the work is taken to be. Problem, or what else SecondsOf takes.
  template <typename Problem>
  void Expect(const Problem& problem, Work& work) const;

  // What a problem needs, by cost: Problem, HeadProblem or GradientProblem.
  template <typename Problem>
  Need NeedOf(Problem problem) const;
  template <typename Problem>
  int64_t WorkspaceOf(const Problem& problem) const;
  int64_t WorkspaceOf(const core::GradientProblem& problem) const;

  // A message within the limit. It is ours to check: gRPC would also have all of it in memory
  // first, and its refusal would neither be counted nor tell the caller not to try again.
  absl::Status CheckMessage(const grpc::ByteBuffer& message) const;

  // What a problem is expected to take, against what a call may: refused where it is more than
  // twice as long, as expectations are right to a factor of two. Where nobody knows it is admitted.
  template <typename Problem>
  absl::Status CheckTime(Problem problem);

  // What a problem needs, against what a call may have: the one place where a call is admitted,
  // before a byte of its tensors is copied.
  template <typename Problem>
  absl::Status Admit(const Problem& problem, CallData& data);
  absl::Status Admit(const Need& need, CallData& data);
  // The part of that which is about all calls together: for a stream, whose response is no message.
  absl::Status Reserve(const Need& need, CallData& data);

  absl::StatusOr<Work> PlanAttend(const core::Problem& problem, const v1::AttendRequest& request,
                                  CallData& data);
  absl::StatusOr<Work> PlanHead(const v1::HeadRequest& request, CallData& data);
  absl::StatusOr<Work> PlanBackward(const v1::BackwardRequest& request, CallData& data);
  absl::StatusOr<Work> PlanMerge(const v1::MergeRequest& request, CallData& data);
  absl::StatusOr<Work> PlanCheck(const v1::CheckRequest& request, CallData& data);

  core::Resources ResourcesOf(const CallData& data) const {
    return {&data.memory->scratch, scheduler_.threads(), limits_.kernel};
  }

  const Limits limits_;
  const core::Speed nominal_speed_;
  core::Scheduler& scheduler_;
  Calls calls_;
};

}  // namespace attendant::server

#endif  // ATTENDANT_SERVER_ATTENTION_SERVICE_H_
