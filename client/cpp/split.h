// Head and Backward above the message limit, as several calls.
//
// Backward is cut by batches and, where one batch is still too large, by key heads with the query
// heads that read them: no gradient of one reaches another, so every number but d_sinks has the
// bits of the one call (on the chunked path). Head is cut by batches alone: its output sums over
// the heads, and parts of a sum, rounded each, are not the sum.
#ifndef ATTENDANT_CLIENT_CPP_SPLIT_H_
#define ATTENDANT_CLIENT_CPP_SPLIT_H_

#include <cstdint>
#include <functional>

#include "absl/status/statusor.h"
#include "attendant/v1/attention.pb.h"
#include "client/cpp/client.h"

namespace attendant {

// Room in a message beside its tensors' bytes: shapes, lengths and Stats.
inline constexpr int64_t kMessageOverhead = 4096;

// The bytes of a call's larger message; of shapes that are none, those of the request.
int64_t LargestMessage(const HeadInputs& inputs, const v1::AttendOptions& options);
int64_t LargestMessage(const BackwardInputs& inputs, const v1::AttendOptions& options);

// One part's call.
using HeadCall =
    std::function<absl::StatusOr<HeadResult>(const HeadInputs&, const v1::AttendOptions&)>;
using BackwardCall =
    std::function<absl::StatusOr<BackwardResult>(const BackwardInputs&, const v1::AttendOptions&)>;

// In as few parts as have messages of `limit` bytes at most, one after the other. Errors name the
// part, and the field as it is in the whole. Returns RESOURCE_EXHAUSTED where the least part does
// not fit. A problem that a server refuses is sent without its bytes, for it to say why.
absl::StatusOr<HeadResult> HeadInParts(const HeadInputs& inputs, const v1::AttendOptions& options,
                                       int64_t limit, const HeadCall& call);
absl::StatusOr<BackwardResult> BackwardInParts(const BackwardInputs& inputs,
                                               const v1::AttendOptions& options, int64_t limit,
                                               const BackwardCall& call);

// The options, the mask with dtype and shape but no data.
v1::AttendOptions WithoutMaskData(const v1::AttendOptions& options);

}  // namespace attendant

#endif  // ATTENDANT_CLIENT_CPP_SPLIT_H_
