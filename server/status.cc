#include "server/status.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "core/errors.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace attendant::server {
namespace {

constexpr char kRetryDelayUrl[] = "attendant.server/retry_delay";
constexpr char kPushback[] = "grpc-retry-pushback-ms";

// gRPC 1.51 drops all details, and the code with them, when a call's trailers exceed 8 KiB. The
// message is sent twice (grpc-message, percent-encoded up to threefold, and the details) and its
// description once more.
constexpr size_t kLongestText = 1024;

std::string Cut(absl::string_view text) {
  if (text.size() <= kLongestText) return std::string(text);
  return absl::StrCat(text.substr(0, kLongestText), "...");
}

void AddDetails(const absl::Status& status, google::rpc::Status& proto) {
  if (const auto field = core::FieldOf(status); field.has_value()) {
    google::rpc::BadRequest detail;
    auto* violation = detail.add_field_violations();
    violation->set_field(Cut(*field));
    violation->set_description(Cut(core::DescriptionOf(status)));
    proto.add_details()->PackFrom(detail);
  }
  if (const auto limit = core::LimitOf(status); limit.has_value()) {
    google::rpc::QuotaFailure detail;
    auto* violation = detail.add_violations();
    violation->set_subject(Cut(*limit));
    violation->set_description(Cut(core::DescriptionOf(status)));
    proto.add_details()->PackFrom(detail);
  }
  if (auto delay = RetryDelayOf(status); delay.has_value()) {
    google::rpc::RetryInfo detail;
    auto& proto_delay = *detail.mutable_retry_delay();
    proto_delay.set_seconds(absl::IDivDuration(*delay, absl::Seconds(1), &*delay));
    proto_delay.set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(*delay)));
    proto.add_details()->PackFrom(detail);
  }
}

}  // namespace

absl::Status WithRetryDelay(absl::Status status, absl::Duration delay) {
  const int64_t milliseconds =
      std::max<int64_t>(absl::ToInt64Milliseconds(absl::Ceil(delay, absl::Milliseconds(1))), 1);
  status.SetPayload(kRetryDelayUrl, absl::Cord(absl::StrCat(milliseconds)));
  return status;
}

std::optional<absl::Duration> RetryDelayOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kRetryDelayUrl);
  int64_t milliseconds = 0;
  if (!payload.has_value() || !absl::SimpleAtoi(std::string(*payload), &milliseconds)) {
    return std::nullopt;
  }
  return absl::Milliseconds(milliseconds);
}

absl::Status UnavailableFor(absl::string_view why, absl::Duration retry_delay) {
  return WithRetryDelay(absl::UnavailableError(why), retry_delay);
}

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  google::rpc::Status proto;
  proto.set_code(static_cast<int>(status.code()));
  proto.set_message(Cut(status.message()));
  AddDetails(status, proto);
  const std::string details = proto.details_size() > 0 ? proto.SerializeAsString() : "";
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), proto.message(), details);
}

grpc::Status AnswerOf(const absl::Status& status, grpc::ServerContextBase& context) {
  if (absl::IsResourceExhausted(status)) {
    const auto delay = RetryDelayOf(status);
    context.AddTrailingMetadata(
        kPushback,
        absl::StrCat(delay.has_value() ? absl::ToInt64Milliseconds(*delay) : int64_t{-1}));
  }
  return ToGrpcStatus(status);
}

}  // namespace attendant::server
