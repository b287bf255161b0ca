#include "server/attention_service.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/attend.h"
#include "core/checked_math.h"
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
#include "server/tensor_data.h"
#include "server/wire.h"

namespace attendant::server {
namespace {

// Room in a response message beside its tensors' bytes: shapes, lengths and Stats.
constexpr int64_t kResponseOverhead = 4096;

core::Problem& AttentionIn(core::Problem& problem) { return problem; }
const core::Problem& AttentionIn(const core::Problem& problem) { return problem; }
template <typename Problem>
auto& AttentionIn(Problem& problem) {
  return problem.attend;
}

int64_t ExplicitBytes(core::Problem problem) {
  problem.return_weights = false;
  return core::ExplicitWorkspaceBytes(problem, /*threads=*/0);
}

// Work whose response is a Response with Stats.
template <typename Response>
Work WorkOf(const core::Problem& problem, core::Kernel kernel, int64_t flops) {
  Work work;
  work.kernel = kernel;
  work.path = problem.path;
  work.dtype = problem.dtype;
  work.tokens = std::max(problem.queries, problem.keys);
  work.flops = flops;
  work.explicit_bytes = ExplicitBytes(problem);
  auto response = std::make_shared<Response>();
  work.stats = response->mutable_stats();
  work.response = std::move(response);
  return work;
}

// A request of one message and its answer of one.
class UnaryCall final : public grpc::ServerUnaryReactor, public Call {
 public:
  UnaryCall(Calls& calls, grpc::CallbackServerContext* context, Method method,
            grpc::ByteBuffer* response)
      : Call(calls, context, method), response_(response) {}

  // Prepares and submits, or answers with an error. Called once, before gRPC knows of this call.
  void Start(const Prepare& prepare) {
    absl::StatusOr<Work> work = PrepareWork(prepare);
    if (!work.ok()) {
      Answer(work.status());
      return;
    }
    Submit(*std::move(work));
  }

  // Answers without computing.
  void Answer(absl::Status status, const google::protobuf::Message* response = nullptr) {
    if (status.ok()) status = Encode(*response);
    // Whoever does not read an answer would hold it for ever.
    AwaitPeer(static_cast<int64_t>(response_->Length()), PeerWait::Steps::kUnseen);
    Finish(RecordAnswer(status));
  }

 private:
  absl::Status Encode(const google::protobuf::Message& response) {
    return WithoutThrowing([&] {
      *response_ = data().out.TakeMessage(response);
      return absl::OkStatus();
    });
  }

  void OnComputed(const absl::Status& status, const google::protobuf::Message& response) override {
    Answer(status, &response);
  }
  void EndSlow(const absl::Status& why) override {
    calls().metrics().JobCancelled(CancelStage::kSend);
    Abort(why);
  }
  void OnCancel() override { Stop(WhyCancelled()); }
  void OnDone() override { Leave(); }

  // Ours neither wait nor compute: gRPC runs them where it is, without handing over to yet another
  // thread. Under load it would start up to two a CPU for that.
  bool InternalInlineable() override { return true; }

  grpc::ByteBuffer* const response_;
};

}  // namespace

AttentionService::AttentionService(const Limits& limits, core::Scheduler& scheduler,
                                   Metrics& metrics)
    : limits_(limits),
      nominal_speed_(core::NominalSpeed(scheduler.threads())),
      scheduler_(scheduler),
      calls_(scheduler, metrics, {limits.memory_budget_bytes, limits.max_compute_time, limits.peer},
             limits.on_engine_fault) {}

template <typename Request, typename Plan>
grpc::ServerUnaryReactor* AttentionService::Run(const Arrived& arrived, const Plan& plan) {
  const auto call =
      std::make_shared<UnaryCall>(calls_, arrived.context, arrived.method, arrived.response);
  calls_.Add(call);
  call->Start([&](CallData& data) -> absl::StatusOr<Work> {
    // gRPC made it for this call alone, and would keep its bytes until the call is done.
    auto& bytes = const_cast<grpc::ByteBuffer&>(*arrived.request);
    Request request;
    if (absl::Status status = CheckMessage(bytes); !status.ok()) return status;
    if (absl::Status status = ReadHead(bytes, request); !status.ok()) return status;
    data.in.SetMessage(bytes);
    return plan(request, data);
  });
  return call.get();
}

template <typename Request, typename Response, typename Fill>
grpc::ServerUnaryReactor* AttentionService::AnswerAtOnce(const Arrived& arrived, const Fill& fill) {
  const auto call =
      std::make_shared<UnaryCall>(calls_, arrived.context, arrived.method, arrived.response);
  calls_.Add(call);
  Request request;
  Response response;
  call->Answer(WithoutThrowing([&] {
                 absl::Status status = CheckMessage(*arrived.request);
                 if (!status.ok()) return status;
                 status = ReadHead(const_cast<grpc::ByteBuffer&>(*arrived.request), request);
                 return status.ok() ? fill(request, response) : status;
               }),
               &response);
  return call.get();
}

grpc::ServerUnaryReactor* AttentionService::Attend(grpc::CallbackServerContext* context,
                                                   const grpc::ByteBuffer* request,
                                                   grpc::ByteBuffer* response) {
  return Run<v1::AttendRequest>(
      {context, Method::kAttend, request, response},
      [this](const v1::AttendRequest& message, CallData& data) -> absl::StatusOr<Work> {
        const auto problem = ProblemOf(message);
        if (!problem.ok()) return problem.status();
        absl::Status admitted = Admit(*problem, data);
        if (!admitted.ok()) return admitted;
        return PlanAttend(*problem, message, data);
      });
}

grpc::ServerUnaryReactor* AttentionService::Head(grpc::CallbackServerContext* context,
                                                 const grpc::ByteBuffer* request,
                                                 grpc::ByteBuffer* response) {
  return Run<v1::HeadRequest>(
      {context, Method::kHead, request, response},
      [this](const auto& message, CallData& data) { return PlanHead(message, data); });
}

grpc::ServerUnaryReactor* AttentionService::Backward(grpc::CallbackServerContext* context,
                                                     const grpc::ByteBuffer* request,
                                                     grpc::ByteBuffer* response) {
  return Run<v1::BackwardRequest>(
      {context, Method::kBackward, request, response},
      [this](const auto& message, CallData& data) { return PlanBackward(message, data); });
}

grpc::ServerUnaryReactor* AttentionService::Merge(grpc::CallbackServerContext* context,
                                                  const grpc::ByteBuffer* request,
                                                  grpc::ByteBuffer* response) {
  return Run<v1::MergeRequest>(
      {context, Method::kMerge, request, response},
      [this](const auto& message, CallData& data) { return PlanMerge(message, data); });
}

grpc::ServerUnaryReactor* AttentionService::Check(grpc::CallbackServerContext* context,
                                                  const grpc::ByteBuffer* request,
                                                  grpc::ByteBuffer* response) {
  return Run<v1::CheckRequest>(
      {context, Method::kCheck, request, response},
      [this](const auto& message, CallData& data) { return PlanCheck(message, data); });
}

grpc::ServerUnaryReactor* AttentionService::Estimate(grpc::CallbackServerContext* context,
                                                     const grpc::ByteBuffer* request,
                                                     grpc::ByteBuffer* response) {
  return AnswerAtOnce<v1::EstimateRequest, v1::EstimateResponse>(
      {context, Method::kEstimate, request, response},
      [this](const v1::EstimateRequest& message, v1::EstimateResponse& answer) {
        const core::EstimateBasis basis{scheduler_.threads(), limits_.kernel, limits_.speed,
                                        calls_.speed_correction().factors()};
        return WriteEstimate(message, basis, &answer);
      });
}

grpc::ServerUnaryReactor* AttentionService::Info(grpc::CallbackServerContext* context,
                                                 const grpc::ByteBuffer* request,
                                                 grpc::ByteBuffer* response) {
  return AnswerAtOnce<v1::InfoRequest, v1::InfoResponse>(
      {context, Method::kInfo, request, response},
      [this](const v1::InfoRequest&, v1::InfoResponse& answer) {
        answer.set_version(core::Version());
        answer.set_kernel(core::NameOf(limits_.kernel, core::DType::kFloat32));
        answer.set_cpu(core::CpuName());
        answer.set_compute_threads(scheduler_.threads());
        answer.set_max_message_bytes(limits_.max_message_bytes);
        answer.set_memory_budget_bytes(limits_.memory_budget_bytes);
        answer.set_max_running(limits_.max_running);
        answer.set_max_queue(limits_.max_queue);
        answer.set_peak_flops_float32(limits_.peak.float32);
        answer.set_peak_flops_float64(limits_.peak.float64);
        return absl::OkStatus();
      });
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* AttentionService::AttendStream(
    grpc::CallbackServerContext* context) {
  return ServeAttendStream(
      calls_, context,
      [this](const v1::AttendRequest& header, CallData& data) -> absl::StatusOr<Work> {
        const auto problem = ProblemOf(header, DataIs::kSentApart);
        if (!problem.ok()) return problem.status();
        if (absl::Status status = CheckTime(*problem); !status.ok()) return status;
        absl::Status reserved = Reserve(NeedOf(*problem), data);
        if (!reserved.ok()) return reserved;
        return PlanAttend(*problem, header, data);
      },
      std::min(kLongestPiece, limits_.max_message_bytes - kResponseOverhead));
}

absl::StatusOr<Work> AttentionService::PlanAttend(const core::Problem& problem,
                                                  const v1::AttendRequest& request,
                                                  CallData& data) {
  Work work = WorkOf<v1::AttendResponse>(problem, limits_.kernel, core::ProductFlops(problem));
  auto stages = core::WithStored(problem.dtype,
                                 [&]<typename S>() -> absl::StatusOr<std::vector<core::Stage>> {
                                   const auto tensors = TensorsOf<S>(problem, request, data);
                                   if (!tensors.ok()) return tensors.status();
                                   return core::AttendStages(problem, *tensors, ResourcesOf(data));
                                 });
  if (!stages.ok()) return stages.status();
  work.stages = *std::move(stages);
  Expect(problem, work);
  return work;
}

absl::StatusOr<Work> AttentionService::PlanHead(const v1::HeadRequest& request, CallData& data) {
  const auto problem = ProblemOf(request);
  if (!problem.ok()) return problem.status();
  absl::Status admitted = Admit(*problem, data);
  if (!admitted.ok()) return admitted;
  Work work =
      WorkOf<v1::HeadResponse>(problem->attend, limits_.kernel, core::ProductFlops(*problem));
  auto stages = core::WithStored(problem->attend.dtype,
                                 [&]<typename S>() -> absl::StatusOr<std::vector<core::Stage>> {
                                   const auto tensors = TensorsOf<S>(*problem, request, data);
                                   if (!tensors.ok()) return tensors.status();
                                   return core::HeadStages(*problem, *tensors, ResourcesOf(data));
                                 });
  if (!stages.ok()) return stages.status();
  work.stages = *std::move(stages);
  Expect(*problem, work);
  return work;
}

absl::StatusOr<Work> AttentionService::PlanBackward(const v1::BackwardRequest& request,
                                                    CallData& data) {
  const auto problem = ProblemOf(request);
  if (!problem.ok()) return problem.status();
  absl::Status admitted = Admit(*problem, data);
  if (!admitted.ok()) return admitted;
  core::Resources resources = ResourcesOf(data);
  resources.kernel = core::Kernel::kFused;
  Work work =
      WorkOf<v1::BackwardResponse>(problem->attend, resources.kernel, core::ProductFlops(*problem));
  work.explicit_bytes = core::ExplicitGradientWorkspaceBytes(*problem, /*threads=*/0);
  Expect(*problem, work);
  auto* const response = static_cast<v1::BackwardResponse*>(work.response.get());
  auto stages = core::WithStored(
      problem->attend.dtype, [&]<typename S>() -> absl::StatusOr<std::vector<core::Stage>> {
        const auto tensors = TensorsOf<S>(*problem, request, data, response);
        if (!tensors.ok()) return tensors.status();
        return core::GradientStages(*problem, *tensors, resources);
      });
  if (!stages.ok()) return stages.status();
  work.stages = *std::move(stages);
  return work;
}

absl::StatusOr<Work> AttentionService::PlanMerge(const v1::MergeRequest& request, CallData& data) {
  const auto problem = ProblemOf(request);
  if (!problem.ok()) return problem.status();
  const Need need{.request_bytes = core::RequestBytes(*problem),
                  .response_bytes = core::ResponseBytes(*problem)};
  absl::Status admitted = Admit(need, data);
  if (!admitted.ok()) return admitted;
  auto stages = core::WithStored(problem->dtype,
                                 [&]<typename S>() -> absl::StatusOr<std::vector<core::Stage>> {
                                   auto tensors = TensorsOf<S>(*problem, request, data);
                                   if (!tensors.ok()) return tensors.status();
                                   return core::MergeStages<S>(*problem, *std::move(tensors));
                                 });
  if (!stages.ok()) return stages.status();
  Work work;
  work.stages = *std::move(stages);
  work.flops = core::MergeFlops(*problem);
  Expect(*problem, work);
  work.response = std::make_shared<v1::MergeResponse>();
  return work;
}

absl::StatusOr<Work> AttentionService::PlanCheck(const v1::CheckRequest& request, CallData& data) {
  auto call = CheckCallOf(request);
  if (!call.ok()) return call.status();
  const core::Resources resources = ResourcesOf(data);
  const std::vector<core::Claim>& claims = call->inputs.claims;
  const Need need{.request_bytes = core::RequestBytes(call->problem, claims),
                  .workspace_bytes = core::CheckWorkspaceBytes(call->problem, claims, resources)};
  if (absl::Status admitted = Admit(need, data); !admitted.ok()) return admitted;
  absl::Status read = ReadInputs(request, data, call->inputs);
  if (!read.ok()) return read;
  const auto report = std::make_shared<core::CheckReport>();
  auto stages = core::CheckStages(call->problem, call->inputs, resources, report.get());
  if (!stages.ok()) return stages.status();
  const auto response = std::make_shared<v1::CheckResponse>();
  stages->push_back({"response", 1, [report, response](const core::TileContext&) {
                       FillResponse(*report, response.get());
                       return absl::OkStatus();
                     }});
  Work work;
  work.stages = *std::move(stages);
  work.flops = call->flops;
  work.response = response;
  return work;
}

template <typename Problem>
void AttentionService::Expect(const Problem& problem, Work& work) const {
  work.estimated_seconds = core::SecondsOf(problem, limits_.speed);
  work.expected_seconds = work.estimated_seconds > 0 ? work.estimated_seconds
                                                     : core::SecondsOf(problem, nominal_speed_);
}

int64_t AttentionService::WorkspaceOf(const core::GradientProblem& problem) const {
  const int threads = scheduler_.threads();
  return core::SaturatingSum({core::GradientWorkspaceBytes(problem, threads),
                              core::CopyBytes(problem.attend, threads, core::Kernel::kFused)});
}

template <typename Problem>
int64_t AttentionService::WorkspaceOf(const Problem& problem) const {
  const int threads = scheduler_.threads();
  return core::SaturatingSum({core::CostOf(problem, threads, limits_.kernel).workspace_bytes,
                              core::CopyBytes(AttentionIn(problem), threads, limits_.kernel)});
}

template <typename Problem>
Need AttentionService::NeedOf(Problem problem) const {
  Need need{.request_bytes = core::RequestBytes(problem),
            .workspace_bytes = WorkspaceOf(problem),
            .response_bytes = core::ResponseBytes(problem)};
  // The problem is held too, by the call and by its stages: with millions of batches that is much.
  need.request_bytes =
      core::SaturatingSum({need.request_bytes, 2 * core::OptionBytes(AttentionIn(problem))});
  if (core::Path& path = AttentionIn(problem).path; path != core::Path::kChunked) {
    path = core::Path::kChunked;
    need.chunked_workspace_bytes = WorkspaceOf(problem);
  }
  return need;
}

absl::Status AttentionService::CheckMessage(const grpc::ByteBuffer& message) const {
  // The caller sent none, or left before all of it was here.
  if (!message.Valid()) return core::InvalidField("request", "is unset: no message came");
  const auto bytes = static_cast<int64_t>(message.Length());
  if (bytes <= limits_.max_message_bytes) return absl::OkStatus();
  return core::OverLimit("max_message_bytes",
                         absl::StrCat("the request has ", bytes, " bytes, at most ",
                                      limits_.max_message_bytes, " fit a message"));
}

template <typename Problem>
absl::Status AttentionService::CheckTime(Problem problem) {
  // The products of keys that a mask hides are not computed: what each pair takes is left.
  if (core::Problem& p = AttentionIn(problem); p.mask.has_value()) p.width = p.value_width = 0;
  const core::PathFactors factors = calls_.speed_correction().factors();
  const bool is_explicit = AttentionIn(problem).path == core::Path::kExplicit;
  const double expected = core::SecondsOf(problem, limits_.speed) *
                          (is_explicit ? factors.explicit_path : factors.chunked_path);
  const double most = std::chrono::duration<double>(limits_.max_compute_time).count();
  if (expected <= 2 * most) return absl::OkStatus();
  return core::OverLimit(core::Job::kMaxComputeTime,
                         absl::StrCat("the call is expected to compute for ", expected,
                                      " s when it has all threads, at most ", most,
                                      " s are allowed; ask for fewer batches, heads or tokens at "
                                      "once"));
}

template <typename Problem>
absl::Status AttentionService::Admit(const Problem& problem, CallData& data) {
  if (absl::Status status = CheckTime(problem); !status.ok()) return status;
  return Admit(NeedOf(problem), data);
}

absl::Status AttentionService::Admit(const Need& need, CallData& data) {
  const int64_t most = limits_.max_message_bytes - kResponseOverhead;
  if (need.response_bytes > most) {
    return core::OverLimit(
        "max_message_bytes",
        absl::StrCat("the response's tensors have ", need.response_bytes, " bytes, at most ", most,
                     " fit a message; ask for fewer returns or tokens at once"));
  }
  return Reserve(need, data);
}

absl::Status AttentionService::Reserve(const Need& need, CallData& data) {
  auto reservation = calls_.admission().Reserve(need);
  if (!reservation.ok()) return reservation.status();
  data.reservation = *std::move(reservation);
  // So that nothing is taken that was not reserved.
  data.memory->scratch.SetLimit(need.workspace_bytes);
  data.memory->tensors.SetLimit(core::SaturatingSum({need.request_bytes, need.response_bytes}));
  return absl::OkStatus();
}

}  // namespace attendant::server
