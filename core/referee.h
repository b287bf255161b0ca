// The referee: a caller's own numbers against ours, and which known mistake makes ours into theirs.
//
// Everything is computed in double. First the answer itself, as Attend would; where the caller's
// numbers are further from it than rounding explains, attention as each known mistake would compute
// it, then as each two of them would. A variant is given up at the first row that differs; one that
// is left after a few rows is computed to the end, so that a finding always covers every number.
// docs/check.md says what is found, by which tolerance, and what it costs.
#ifndef ATTENDANT_CORE_REFEREE_H_
#define ATTENDANT_CORE_REFEREE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/attend.h"
#include "core/head.h"
#include "core/job.h"
#include "core/mistakes.h"
#include "core/variant_rows.h"

namespace attendant::core {

enum class Verdict : uint8_t { kMatch, kRoundingOnly, kMismatch };

struct Finding {
  std::string code;
  std::string message;
  std::string field;
  double residual = 0;
};

// Differences are those of the first part that departs, or of the last that the caller sent.
struct CheckReport {
  Verdict verdict = Verdict::kMatch;
  // Infinite where one side is NaN or infinite and the other is not the same.
  double max_abs_difference = 0;
  // In units of the last place of the candidate's dtype; 2^63 - 1 where one side alone is NaN.
  int64_t max_ulp_difference = 0;
  // What the verdict allowed where the largest difference is.
  double tolerance = 0;
  std::vector<Finding> findings;
  std::vector<int64_t> worst_index;  // in the candidate's axes; empty where it has no elements
  std::string first_departure;       // of a head, such as "logits"; empty where all match
};

// Numbers of the caller's.
struct Claim {
  Part part = Part::kOutput;
  TensorSpec spec;             // any floating type
  const void* data = nullptr;  // row-major; may be null without elements
};

// Row-major, in the problem's dtype; owned by the caller, who keeps it until the job is done.
struct CheckInputs {
  // Without a head.
  const void* query = nullptr;
  const void* key = nullptr;
  const void* value = nullptr;
  // Of a head.
  const void* x = nullptr;
  const void* w_q = nullptr;
  const void* w_k = nullptr;
  const void* w_v = nullptr;
  const void* w_o = nullptr;
  const void* mask = nullptr;  // as the problem's mask says
  std::vector<Claim> claims;   // one or more, in the order of Part, each part once
};

// "query" .. "output".
absl::string_view NameOf(Part part);

CheckProblem MakeCheckProblem(const Problem& problem);
CheckProblem MakeCheckProblem(const HeadProblem& problem);

// Returns INVALID_ARGUMENT naming "candidate" or "head_candidate.<part>" and what is wrong with it,
// or "head_candidate" where there is no claim. Says in the problem whether the output is all there
// is.
absl::Status CheckClaims(const std::vector<Claim>& claims, CheckProblem& problem);

// Bytes of the tensors in a request. REQUIRES: the claims were checked.
int64_t RequestBytes(const CheckProblem& problem, const std::vector<Claim>& claims);

// An upper bound of the scratch that a check holds, in bytes: most of it for the search of a
// mistake, which a candidate that matches does without. The resources' workspace is not looked at.
// REQUIRES: the claims were checked.
int64_t CheckWorkspaceBytes(const CheckProblem& problem, const std::vector<Claim>& claims,
                            const Resources& resources);

// The stages that fill in the report; it must outlive them, and is complete when the last of them
// is. Returns RESOURCE_EXHAUSTED where the workspace does not suffice.
// REQUIRES: the claims were checked.
absl::StatusOr<std::vector<Stage>> CheckStages(const CheckProblem& problem,
                                               const CheckInputs& inputs,
                                               const Resources& resources, CheckReport* report);

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_REFEREE_H_
