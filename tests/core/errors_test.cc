#include "core/errors.h"

#include <gtest/gtest.h>

#include <string>

namespace attendant::core {
namespace {

TEST(ErrorsTest, InvalidFieldCarriesTheFieldAndSaysIt) {
  const absl::Status status = InvalidField("key.shape[2]", "is 3, must be 4");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "key.shape[2]: is 3, must be 4");
  EXPECT_EQ(FieldOf(status), "key.shape[2]");
  EXPECT_EQ(LimitOf(status), std::nullopt);
  EXPECT_EQ(DescriptionOf(status), "is 3, must be 4");
}

TEST(ErrorsTest, OverLimitCarriesTheLimitAndSaysIt) {
  const absl::Status status = OverLimit("workspace_bytes", "needs 2, 1 allowed");
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status.message(), "workspace_bytes: needs 2, 1 allowed");
  EXPECT_EQ(LimitOf(status), "workspace_bytes");
  EXPECT_EQ(FieldOf(status), std::nullopt);
  EXPECT_EQ(DescriptionOf(status), "needs 2, 1 allowed");
}

TEST(ErrorsTest, OtherStatusesNameNothing) {
  const absl::Status status = absl::InvalidArgumentError("key: is wrong");
  EXPECT_EQ(FieldOf(status), std::nullopt);
  EXPECT_EQ(LimitOf(status), std::nullopt);
  EXPECT_EQ(DescriptionOf(status), "key: is wrong");
  EXPECT_EQ(FieldOf(absl::OkStatus()), std::nullopt);
  EXPECT_EQ(LimitOf(absl::OkStatus()), std::nullopt);
  EXPECT_EQ(DescriptionOf(absl::OkStatus()), "");
}

TEST(ErrorsTest, ADescriptionMayHoldTheFieldAgain) {
  EXPECT_EQ(DescriptionOf(InvalidField("x", "x: is 1")), "x: is 1");
}

}  // namespace
}  // namespace attendant::core
