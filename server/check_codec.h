// CheckRequest and CheckResponse to and from what the referee works with.
#ifndef ATTENDANT_SERVER_CHECK_CODEC_H_
#define ATTENDANT_SERVER_CHECK_CODEC_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "attendant/v1/attention.pb.h"
#include "core/referee.h"

namespace attendant::server {

struct CallData;

struct CheckCall {
  core::CheckProblem problem;
  core::CheckInputs inputs;  // without their data
  int64_t flops = 0;         // of our own answer's matrix products
};

// Shapes, options and byte counts, checked. Path and the return_* options are ignored. Returns
// INVALID_ARGUMENT naming the field, such as "candidate.shape[2]" or "head.w_q.dtype".
absl::StatusOr<CheckCall> CheckCallOf(const v1::CheckRequest& request);

// Makes room for the request's data in the call's memory, and says in the inputs where it is.
// Returns RESOURCE_EXHAUSTED where there is none.
absl::Status ReadInputs(const v1::CheckRequest& request, CallData& data, core::CheckInputs& inputs);

void FillResponse(const core::CheckReport& report, v1::CheckResponse* response);

}  // namespace attendant::server

#endif  // ATTENDANT_SERVER_CHECK_CODEC_H_
