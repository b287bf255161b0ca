// Messages of the contract to and from what core works with.
//
// Requests are messages that server/wire.h has read: their tensors' data says where its bytes lie.
// Names in errors are paths from the request's root: `name` below is the tensor's, such as "query".
#ifndef ATTENDANT_SERVER_CODEC_H_
#define ATTENDANT_SERVER_CODEC_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "attendant/v1/attention.pb.h"
#include "core/estimate.h"
#include "core/gradient.h"
#include "core/head.h"
#include "core/merge.h"
#include "core/problem.h"
#include "core/tensor_view.h"

namespace attendant::server {

struct CallData;

// Bytes that a tensor's shape and dtype say. REQUIRES: they were checked.
int64_t BytesOf(const v1::Tensor& tensor);

// Returns INVALID_ARGUMENT naming `name`.dtype where the type is none of the contract's.
absl::StatusOr<core::TensorSpec> SpecOf(absl::string_view name, const v1::Tensor& tensor);

// Returns INVALID_ARGUMENT naming an option whose value is none of the contract's.
absl::StatusOr<core::AttendOptions> OptionsOf(const v1::AttendOptions& options);

// Returns INVALID_ARGUMENT naming `name`.data where its length is not what shape and dtype say.
// REQUIRES: the shape was checked.
absl::Status CheckBytes(absl::string_view name, const v1::Tensor& tensor);

// A tensor of a request, and where its type and shape go.
struct TensorPart {
  const char* name;
  const v1::Tensor* tensor;
  core::TensorSpec* spec;
};

// As SpecOf for each, of which none may be empty, and as CheckBytes for each: the first error.
absl::Status ReadSpecs(absl::Span<const TensorPart> parts);
absl::Status CheckBytes(absl::Span<const TensorPart> parts);

// Whether the tensors' data is in the message, of the length that shape and dtype say, or none of
// it.
enum class DataIs : uint8_t { kInTheMessage, kSentApart };

// Attention's problem from its tensors, whose byte counts and the mask's are checked as well.
// change: what is made of the options before they are checked, or null. Errors as of ProblemOf.
absl::StatusOr<core::Problem> AttentionOf(const v1::Tensor& query, const v1::Tensor& key,
                                          const v1::Tensor& value, const v1::AttendOptions& options,
                                          void (*change)(core::AttendOptions&) = nullptr,
                                          DataIs data = DataIs::kInTheMessage);

// A request's shapes and options as a checked problem, its byte counts checked as well. Returns
// INVALID_ARGUMENT naming the field.
absl::StatusOr<core::Problem> ProblemOf(const v1::AttendRequest& request,
                                        DataIs data = DataIs::kInTheMessage);
absl::StatusOr<core::HeadProblem> ProblemOf(const v1::HeadRequest& request);
absl::StatusOr<core::MergeProblem> ProblemOf(const v1::MergeRequest& request);
absl::StatusOr<core::GradientProblem> ProblemOf(const v1::BackwardRequest& request);

// Answers with what core::MakeEstimate says. Returns INVALID_ARGUMENT naming the field; a mask's
// data may be left out, and is checked where it is there.
absl::Status WriteEstimate(const v1::EstimateRequest& request, const core::EstimateBasis& basis,
                           v1::EstimateResponse* response);

// A tensor without data.
v1::Tensor TensorHead(core::DType dtype, absl::Span<const int64_t> shape);

// A request's tensor in the call's memory.
const unsigned char* Read(const v1::Tensor& tensor, CallData& data);
// The mask's, or null where there is none.
const unsigned char* ReadMask(const v1::AttendOptions& options, CallData& data);

// The request's tensors and the response's, in the call's memory, which is made here. Returns
// RESOURCE_EXHAUSTED where there is none. response: where d_sinks are computed.
template <typename S>
absl::StatusOr<core::AttendTensors<S>> TensorsOf(const core::Problem& problem,
                                                 const v1::AttendRequest& request, CallData& data);
template <typename S>
absl::StatusOr<core::HeadTensors<S>> TensorsOf(const core::HeadProblem& problem,
                                               const v1::HeadRequest& request, CallData& data);
template <typename S>
absl::StatusOr<core::MergeTensors<S>> TensorsOf(const core::MergeProblem& problem,
                                                const v1::MergeRequest& request, CallData& data);
template <typename S>
absl::StatusOr<core::GradientTensors<S>> TensorsOf(const core::GradientProblem& problem,
                                                   const v1::BackwardRequest& request,
                                                   CallData& data, v1::BackwardResponse* response);

// PATH_EXPLICIT or PATH_CHUNKED.
v1::Path PathOf(core::Path path);

}  // namespace attendant::server

#endif  // ATTENDANT_SERVER_CODEC_H_
