#include "client/cpp/retry.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "google/rpc/error_details.pb.h"

namespace attendant {
namespace {

// As far as a wait is spread: what the server asked for is never waited less.
constexpr double kSpread = 0.2;

}  // namespace

void ReadPushback(absl::string_view text, Outcome* outcome) {
  int64_t milliseconds = 0;
  if (absl::SimpleAtoi(text, &milliseconds) && milliseconds >= 0) {
    outcome->pushback = absl::Milliseconds(milliseconds);
  } else {
    outcome->never = true;
  }
}

std::optional<absl::Duration> RetryDelayOf(const absl::Status& status) {
  const auto payload = status.GetPayload("type.googleapis.com/google.rpc.RetryInfo");
  google::rpc::RetryInfo info;
  if (!payload.has_value() || !info.ParseFromString(std::string(*payload))) return std::nullopt;
  return absl::Seconds(info.retry_delay().seconds()) +
         absl::Nanoseconds(info.retry_delay().nanos());
}

std::optional<absl::Duration> Retry::Next(const Outcome& outcome, absl::Time now) {
  ++attempts_;
  if (attempts_ >= options_.max_attempts || outcome.never) return std::nullopt;
  const std::optional<absl::Duration> asked =
      outcome.pushback.has_value() ? outcome.pushback : RetryDelayOf(outcome.status);
  const bool helps = absl::IsUnavailable(outcome.status) ||
                     (absl::IsResourceExhausted(outcome.status) && asked.has_value());
  if (!helps) return std::nullopt;
  const double spread = std::uniform_real_distribution<double>(0, kSpread)(generator_);
  const absl::Duration backoff =
      std::min(options_.initial_backoff * std::pow(2, attempts_ - 1), options_.max_backoff);
  absl::Duration wait = backoff * (1 - kSpread + 2 * spread);
  // At least the backoff: a server that asks for a short time again and again would have had all
  // attempts while it is full.
  if (asked.has_value()) wait = std::max(wait, *asked * (1 + spread));
  // An attempt that starts at the deadline would only hide why the call failed.
  if (now + wait >= deadline_) return std::nullopt;
  return wait;
}

}  // namespace attendant
