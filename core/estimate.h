// What a call would cost, from its sizes alone.
#ifndef ATTENDANT_CORE_ESTIMATE_H_
#define ATTENDANT_CORE_ESTIMATE_H_

#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "core/cost.h"
#include "core/kernel.h"
#include "core/problem.h"
#include "core/speed.h"
#include "core/tensor_view.h"

namespace attendant::core {

// Sizes of the contract's EstimateRequest, unchecked.
struct EstimateSpec {
  DType dtype = DType::kFloat32;
  int64_t batch = 0;
  int64_t heads = 0;
  std::optional<int64_t> kv_heads;  // none: heads
  int64_t queries = 0;
  int64_t keys = 0;
  int64_t width = 0;
  std::optional<int64_t> value_width;  // none: width
  std::optional<int64_t> d_model;      // set: a whole head, else attention alone
  AttendOptions options;               // path is left aside: both are estimated
};

struct PathEstimate {
  PathCost cost;
  double seconds = 0;  // 0: not measured
};

struct Estimate {
  PathEstimate explicit_path;
  PathEstimate chunked_path;
  double crossover_tokens = 0;  // 0 without d_model
  int64_t request_bytes = 0;
  int64_t response_bytes = 0;
};

// Where it would be computed.
struct EstimateBasis {
  int threads = 1;                 // of the scheduler
  Kernel kernel = Kernel::kFused;  // of the chunked path
  Speed speed;
  PathFactors factors;
};

// Returns INVALID_ARGUMENT naming the field of EstimateRequest, for whatever Attend would refuse,
// or Head where d_model is set. What is beyond 2^63 - 1 although no tensor is, such as the
// operations, saturates there.
absl::StatusOr<Estimate> MakeEstimate(const EstimateSpec& spec, const EstimateBasis& basis);

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_ESTIMATE_H_
