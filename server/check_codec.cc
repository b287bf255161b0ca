#include "server/check_codec.h"

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/cost.h"
#include "core/errors.h"
#include "server/codec.h"
#include "server/tensor_data.h"

namespace attendant::server {
namespace {

absl::Status CheckUnset(bool set, const char* field, const char* why) {
  return set ? core::InvalidField(field, why) : absl::OkStatus();
}

// That the request is about a head, or about attention alone, and not about both.
absl::Status CheckKind(const v1::CheckRequest& request) {
  if (!request.has_head() && !request.has_head_candidate()) {
    if (!request.has_query()) {
      return core::InvalidField("query",
                                "is unset; send query, key, value and candidate, or head and "
                                "head_candidate");
    }
    return CheckUnset(!request.has_candidate(), "candidate",
                      "is unset, must hold your output for query, key and value");
  }
  constexpr char kBeside[] = "is set beside head: send it, or head and head_candidate";
  for (absl::Status status : {
           CheckUnset(request.has_query(), "query", kBeside),
           CheckUnset(request.has_key(), "key", kBeside),
           CheckUnset(request.has_value(), "value", kBeside),
           CheckUnset(request.has_candidate(), "candidate", kBeside),
           CheckUnset(request.has_options(), "options",
                      "is set beside head, whose options are head.options"),
           CheckUnset(!request.has_head(), "head",
                      "is unset, must hold the inputs of head_candidate"),
       }) {
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// The caller's numbers, in the order in which they are computed.
struct Sent {
  core::Part part;
  std::string name;
  const v1::Tensor* tensor;
};

std::vector<Sent> SentIn(const v1::CheckRequest& request) {
  if (!request.has_head()) return {{core::Part::kOutput, "candidate", &request.candidate()}};
  const v1::HeadResponse& of = request.head_candidate();
  const std::tuple<core::Part, bool, const v1::Tensor*> all[] = {
      {core::Part::kQuery, of.has_query(), &of.query()},
      {core::Part::kKey, of.has_key(), &of.key()},
      {core::Part::kValue, of.has_value(), &of.value()},
      {core::Part::kLogits, of.has_logits(), &of.logits()},
      {core::Part::kWeights, of.has_weights(), &of.weights()},
      {core::Part::kContext, of.has_context(), &of.context()},
      {core::Part::kOutput, of.has_output(), &of.output()}};
  std::vector<Sent> sent;
  for (const auto& [part, is_set, tensor] : all) {
    if (!is_set) continue;
    sent.push_back({part, absl::StrCat("head_candidate.", core::NameOf(part)), tensor});
  }
  return sent;
}

// Adds them to the call.
absl::Status AddClaims(const v1::CheckRequest& request, CheckCall& call) {
  const std::vector<Sent> sent = SentIn(request);
  for (const Sent& one : sent) {
    auto spec = SpecOf(one.name, *one.tensor);
    if (!spec.ok()) return spec.status();
    call.inputs.claims.push_back({one.part, *std::move(spec), nullptr});
  }
  if (absl::Status status = core::CheckClaims(call.inputs.claims, call.problem); !status.ok()) {
    return status;
  }
  for (const Sent& one : sent) {
    if (absl::Status status = CheckBytes(one.name, *one.tensor); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<CheckCall> CallOfAttention(const v1::CheckRequest& request) {
  const auto problem = AttentionOf(request.query(), request.key(), request.value(),
                                   request.options(), [](core::AttendOptions& options) {
                                     options.path = core::Path::kChunked;
                                     options.return_weights = options.return_logsumexp =
                                         options.return_key_sums = false;
                                   });
  if (!problem.ok()) return problem.status();
  CheckCall call;
  call.problem = core::MakeCheckProblem(*problem);
  call.flops = core::ProductFlops(*problem);
  return call;
}

// The same error of a field inside head.
absl::Status OfHead(const absl::Status& status) {
  const auto field = core::FieldOf(status);
  if (!field.has_value()) return status;
  return core::InvalidField(absl::StrCat("head.", *field), core::DescriptionOf(status));
}

absl::StatusOr<CheckCall> CallOfHead(const v1::CheckRequest& request) {
  const v1::HeadRequest& head = request.head();
  const auto problem = ProblemOf(head);
  if (!problem.ok()) return OfHead(problem.status());
  CheckCall call;
  call.problem = core::MakeCheckProblem(*problem);
  call.flops = core::ProductFlops(*problem);
  return call;
}

v1::Verdict ToProto(core::Verdict verdict) {
  switch (verdict) {
    case core::Verdict::kMatch:
      return v1::VERDICT_MATCH;
    case core::Verdict::kRoundingOnly:
      return v1::VERDICT_ROUNDING_ONLY;
    case core::Verdict::kMismatch:
      break;
  }
  return v1::VERDICT_MISMATCH;
}

}  // namespace

absl::StatusOr<CheckCall> CheckCallOf(const v1::CheckRequest& request) {
  if (absl::Status status = CheckKind(request); !status.ok()) return status;
  auto call = request.has_head() ? CallOfHead(request) : CallOfAttention(request);
  if (!call.ok()) return call;
  if (absl::Status status = AddClaims(request, *call); !status.ok()) return status;
  return call;
}

absl::Status ReadInputs(const v1::CheckRequest& request, CallData& data,
                        core::CheckInputs& inputs) {
  if (request.has_head()) {
    const v1::HeadRequest& head = request.head();
    inputs.x = Read(head.x(), data);
    inputs.w_q = Read(head.w_q(), data);
    inputs.w_k = Read(head.w_k(), data);
    inputs.w_v = Read(head.w_v(), data);
    inputs.w_o = Read(head.w_o(), data);
    inputs.mask = ReadMask(head.options(), data);
  } else {
    inputs.query = Read(request.query(), data);
    inputs.key = Read(request.key(), data);
    inputs.value = Read(request.value(), data);
    inputs.mask = ReadMask(request.options(), data);
  }
  const std::vector<Sent> sent = SentIn(request);
  for (size_t i = 0; i < sent.size(); ++i) inputs.claims[i].data = Read(*sent[i].tensor, data);
  return data.status();
}

void FillResponse(const core::CheckReport& report, v1::CheckResponse* response) {
  response->set_verdict(ToProto(report.verdict));
  response->set_max_abs_difference(report.max_abs_difference);
  response->set_max_ulp_difference(report.max_ulp_difference);
  response->set_tolerance(report.tolerance);
  response->mutable_worst_index()->Add(report.worst_index.begin(), report.worst_index.end());
  response->set_first_departure(report.first_departure);
  for (const core::Finding& finding : report.findings) {
    v1::Finding* const to = response->add_findings();
    to->set_code(finding.code);
    to->set_message(finding.message);
    to->set_field(finding.field);
    to->set_residual(finding.residual);
  }
}

}  // namespace attendant::server
