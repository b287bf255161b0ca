#include "server/status.h"

#include <gtest/gtest.h>

#include "core/errors.h"
#include "tests/server/testing.h"

namespace attendant::server {
namespace {

TEST(StatusTest, OkStaysOk) { EXPECT_TRUE(ToGrpcStatus(absl::OkStatus()).ok()); }

TEST(StatusTest, EveryCodeKeepsItsNumberAndMessage) {
  for (int code = 1; code <= 16; ++code) {
    const grpc::Status status =
        ToGrpcStatus(absl::Status(static_cast<absl::StatusCode>(code), "why"));
    EXPECT_EQ(status.error_code(), code);
    EXPECT_EQ(status.error_message(), "why");
  }
}

TEST(StatusTest, AFieldErrorCarriesBadRequest) {
  const grpc::Status status = ToGrpcStatus(core::InvalidField("key.shape[2]", "is 3, must be 4"));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(), "key.shape[2]: is 3, must be 4");
  const auto detail = DetailOf<google::rpc::BadRequest>(status);
  ASSERT_EQ(detail.field_violations_size(), 1);
  EXPECT_EQ(detail.field_violations(0).field(), "key.shape[2]");
  EXPECT_EQ(detail.field_violations(0).description(), "is 3, must be 4");
}

TEST(StatusTest, ALimitCarriesQuotaFailureAndNoRetry) {
  const grpc::Status status = ToGrpcStatus(core::OverLimit("max_message_bytes", "9 of 8"));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  const auto detail = DetailOf<google::rpc::QuotaFailure>(status);
  ASSERT_EQ(detail.violations_size(), 1);
  EXPECT_EQ(detail.violations(0).subject(), "max_message_bytes");
  EXPECT_EQ(detail.violations(0).description(), "9 of 8");
  EXPECT_FALSE(DetailOf<google::rpc::RetryInfo>(status).has_retry_delay());
}

TEST(StatusTest, UnavailableCarriesTheRetryDelay) {
  const grpc::Status status = ToGrpcStatus(UnavailableFor("draining", absl::Milliseconds(1500)));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  const auto detail = DetailOf<google::rpc::RetryInfo>(status);
  EXPECT_EQ(detail.retry_delay().seconds(), 1);
  EXPECT_EQ(detail.retry_delay().nanos(), 500'000'000);
}

TEST(StatusTest, ARetryDelayIsWholeMillisecondsAndOneAtLeast) {
  const auto delay_of = [](absl::Duration delay) {
    return RetryDelayOf(WithRetryDelay(absl::ResourceExhaustedError("full"), delay));
  };
  EXPECT_EQ(delay_of(absl::ZeroDuration()), absl::Milliseconds(1));
  EXPECT_EQ(delay_of(absl::Microseconds(1001)), absl::Milliseconds(2));
  EXPECT_EQ(delay_of(absl::Seconds(90)), absl::Seconds(90));
  EXPECT_EQ(RetryDelayOf(absl::ResourceExhaustedError("full")), std::nullopt);
}

TEST(StatusTest, LongTextsAreCutSoThatTheTrailersArrive) {
  // A percent sign is sent as three characters in grpc-message.
  const grpc::Status status = ToGrpcStatus(core::InvalidField("field", std::string(100'000, '%')));
  EXPECT_LT(3 * status.error_message().size() + 4 * status.error_details().size() / 3, 8192u);
}

}  // namespace
}  // namespace attendant::server
