#include "core/errors.h"

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace attendant::core {
namespace {

constexpr char kFieldUrl[] = "attendant.core/field";
constexpr char kLimitUrl[] = "attendant.core/limit";

absl::Status Named(absl::StatusCode code, const char* url, absl::string_view name,
                   absl::string_view description) {
  absl::Status status(code, absl::StrCat(name, ": ", description));
  status.SetPayload(url, absl::Cord(name));
  return status;
}

std::optional<std::string> Payload(const absl::Status& status, const char* url) {
  const auto payload = status.GetPayload(url);
  if (!payload.has_value()) return std::nullopt;
  return std::string(*payload);
}

}  // namespace

absl::Status InvalidField(absl::string_view field, absl::string_view description) {
  return Named(absl::StatusCode::kInvalidArgument, kFieldUrl, field, description);
}

absl::Status OverLimit(absl::string_view subject, absl::string_view description) {
  return Named(absl::StatusCode::kResourceExhausted, kLimitUrl, subject, description);
}

std::optional<std::string> FieldOf(const absl::Status& status) {
  return Payload(status, kFieldUrl);
}

std::optional<std::string> LimitOf(const absl::Status& status) {
  return Payload(status, kLimitUrl);
}

std::string DescriptionOf(const absl::Status& status) {
  const auto field = FieldOf(status);
  const auto name = field.has_value() ? field : LimitOf(status);
  if (!name.has_value()) return std::string(status.message());
  return std::string(absl::StripPrefix(status.message(), absl::StrCat(*name, ": ")));
}

}  // namespace attendant::core
