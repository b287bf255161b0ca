#include "server/status.h"

#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "core/errors.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace attendant::server {
namespace {

constexpr char kRetryDelayUrl[] = "attendant.server/retry_delay";

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
  if (const auto delay = status.GetPayload(kRetryDelayUrl); delay.has_value()) {
    google::rpc::RetryInfo detail;
    detail.mutable_retry_delay()->ParseFromString(std::string(*delay));
    proto.add_details()->PackFrom(detail);
  }
}

}  // namespace

absl::Status UnavailableFor(absl::string_view why, absl::Duration retry_delay) {
  absl::Status status = absl::UnavailableError(why);
  google::protobuf::Duration delay;
  const int64_t seconds = absl::IDivDuration(retry_delay, absl::Seconds(1), &retry_delay);
  delay.set_seconds(seconds);
  delay.set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(retry_delay)));
  status.SetPayload(kRetryDelayUrl, absl::Cord(delay.SerializeAsString()));
  return status;
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

}  // namespace attendant::server
