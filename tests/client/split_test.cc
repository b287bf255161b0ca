// Head and Backward in parts against the whole, on a real server.
#include "client/cpp/split.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "tests/server/testing.h"

namespace attendant {
namespace {

using ::testing::HasSubstr;

// Random numbers that the test owns. Thread-compatible.
class Numbers {
 public:
  explicit Numbers(uint32_t seed) : generator_(seed) {}
  TensorRef Of(std::vector<int64_t> shape) {
    int64_t count = 1;
    for (const int64_t size : shape) count *= size;
    auto& values = *kept_.emplace_back(std::make_unique<std::vector<float>>());
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < count; ++i) values.push_back(normal(generator_));
    return {values, std::move(shape)};
  }

 private:
  std::mt19937 generator_;
  std::vector<std::unique_ptr<std::vector<float>>> kept_;
};

void SetMask(const TensorRef& mask, v1::AttendOptions* options) {
  options->mutable_mask()->set_dtype(mask.dtype());
  options->mutable_mask()->mutable_shape()->Assign(mask.shape().begin(), mask.shape().end());
  options->mutable_mask()->set_data(mask.bytes().data(), mask.bytes().size());
}

void ExpectSame(const Tensor& a, const Tensor& b, const char* name) {
  EXPECT_EQ(a.dtype, b.dtype) << name;
  EXPECT_EQ(a.shape, b.shape) << name;
  EXPECT_TRUE(a.bytes == b.bytes) << name;
}

class SplitTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    server() = server::Server::Start(server::LoopbackConfig()).value();
    client() = Client::Connect(server()->address()).value();
  }
  static void TearDownTestSuite() {
    client().reset();
    server().reset();
  }
  static std::unique_ptr<server::Server>& server() {
    static std::unique_ptr<server::Server> server;
    return server;
  }
  static std::unique_ptr<Client>& client() {
    static std::unique_ptr<Client> client;
    return client;
  }

  // In parts, and how many there were.
  absl::StatusOr<BackwardResult> InParts(const BackwardInputs& inputs,
                                         const v1::AttendOptions& options, int64_t limit) {
    calls_ = 0;
    return BackwardInParts(inputs, options, limit,
                           [&](const BackwardInputs& part, const v1::AttendOptions& o) {
                             ++calls_;
                             return client()->Backward(part, o);
                           });
  }
  absl::StatusOr<HeadResult> InParts(const HeadInputs& inputs, const v1::AttendOptions& options,
                                     int64_t limit) {
    calls_ = 0;
    return HeadInParts(inputs, options, limit,
                       [&](const HeadInputs& part, const v1::AttendOptions& o) {
                         ++calls_;
                         return client()->Head(part, o);
                       });
  }

  int calls_ = 0;
};

void ExpectSameGradient(const BackwardResult& a, const BackwardResult& b) {
  ExpectSame(a.d_query, b.d_query, "d_query");
  ExpectSame(a.d_key, b.d_key, "d_key");
  ExpectSame(a.d_value, b.d_value, "d_value");
  ASSERT_EQ(a.d_mask.has_value(), b.d_mask.has_value());
  if (a.d_mask.has_value()) ExpectSame(*a.d_mask, *b.d_mask, "d_mask");
  ASSERT_EQ(a.d_sinks.size(), b.d_sinks.size());
  for (size_t i = 0; i < a.d_sinks.size(); ++i) {
    EXPECT_NEAR(a.d_sinks[i], b.d_sinks[i], 1e-4) << i;
  }
  EXPECT_EQ(a.stats.flops(), b.stats.flops());
}

// 3 batches of 4 query and 2 key heads, 40 queries, 70 keys, widths 16 and 8: 78 KiB of request a
// batch, with the forward's results and without a mask.
TEST_F(SplitTest, AGradientInPartsHasTheBitsOfTheWhole) {
  for (const bool bthd : {false, true}) {
    for (const bool given : {false, true}) {
      SCOPED_TRACE(testing::Message() << "bthd " << bthd << ", given " << given);
      Numbers numbers(7);
      const auto of = [&](int64_t heads, int64_t tokens, int64_t width) {
        return numbers.Of(bthd ? std::vector<int64_t>{3, tokens, heads, width}
                               : std::vector<int64_t>{3, heads, tokens, width});
      };
      BackwardInputs inputs{of(4, 40, 16), of(2, 70, 16), of(2, 70, 8), of(4, 40, 8)};
      v1::AttendOptions options;
      options.set_layout(bthd ? v1::LAYOUT_BTHD : v1::LAYOUT_BHTD);
      options.set_causal(v1::CAUSAL_BOTTOM_RIGHT);
      for (const int64_t length : {70, 50, 61}) options.add_key_lengths(length);
      for (const double slope : {0.1, 0.2, 0.3, 0.4}) options.add_alibi_slopes(slope);
      for (const double sink : {0.0, -1.0, 0.5, 1.0}) options.add_sinks(sink);
      SetMask(numbers.Of({3, 4, 40, 70}), &options);
      inputs.return_d_mask = true;
      AttendResult forward;
      if (given) {
        options.set_return_logsumexp(true);
        forward = client()->Attend(inputs.query, inputs.key, inputs.value, options).value();
        inputs.output = forward.output.ref();
        inputs.logsumexp = forward.logsumexp->ref();
      }
      const auto whole = client()->Backward(inputs, options);
      ASSERT_TRUE(whole.ok()) << whole.status();
      const int64_t bytes = LargestMessage(inputs, options);
      for (const auto& [limit, calls] : {std::pair(bytes, 1), std::pair(bytes - 1, 2),
                                         std::pair(bytes / 2, 3), std::pair(bytes / 4, 6)}) {
        const auto parts = InParts(inputs, options, limit);
        ASSERT_TRUE(parts.ok()) << parts.status();
        EXPECT_EQ(calls_, calls);
        ExpectSameGradient(*parts, *whole);
      }
      const auto refused = InParts(inputs, options, bytes / 20);
      EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
      EXPECT_THAT(std::string(refused.status().message()), HasSubstr("one batch of one key head"));
    }
  }
}

// A mask that batches or heads share has a gradient that sums over them: it is not taken apart.
TEST_F(SplitTest, WhatDMaskSumsOverStaysWhole) {
  Numbers numbers(8);
  BackwardInputs inputs{numbers.Of({2, 4, 30, 32}), numbers.Of({2, 4, 30, 32}),
                        numbers.Of({2, 4, 30, 32}), numbers.Of({2, 4, 30, 32})};
  inputs.return_d_mask = true;
  v1::AttendOptions options;
  SetMask(numbers.Of({4, 1, 30}), &options);  // of each head
  const auto whole = client()->Backward(inputs, options);
  ASSERT_TRUE(whole.ok()) << whole.status();
  const int64_t bytes = LargestMessage(inputs, options);
  const auto parts = InParts(inputs, options, bytes / 3);
  ASSERT_TRUE(parts.ok()) << parts.status();
  EXPECT_EQ(calls_, 4);
  ExpectSameGradient(*parts, *whole);
  v1::AttendOptions shared;
  SetMask(numbers.Of({30}), &shared);
  const auto refused = InParts(inputs, shared, bytes / 3);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("d_mask sums over"));
  inputs.return_d_mask = false;
  EXPECT_TRUE(InParts(inputs, shared, bytes / 3).ok());
}

TEST_F(SplitTest, AHeadInPartsIsTheWhole) {
  Numbers numbers(9);
  HeadInputs inputs{numbers.Of({5, 24, 16}), numbers.Of({16, 24}), numbers.Of({16, 24}),
                    numbers.Of({16, 12}),    numbers.Of({12, 16}), 3};
  v1::AttendOptions options;
  for (const int64_t length : {24, 3, 0, 20, 9}) options.add_key_lengths(length);
  SetMask(numbers.Of({5, 1, 24, 24}), &options);
  for (const bool intermediates : {false, true}) {
    inputs.return_intermediates = intermediates;
    const auto whole = client()->Head(inputs, options);
    ASSERT_TRUE(whole.ok()) << whole.status();
    const int64_t bytes = LargestMessage(inputs, options);
    const auto parts = InParts(inputs, options, bytes - 1);
    ASSERT_TRUE(parts.ok()) << parts.status();
    EXPECT_EQ(calls_, 2);
    for (const auto tensor : {&HeadResult::output, &HeadResult::query, &HeadResult::logits,
                              &HeadResult::weights, &HeadResult::context}) {
      EXPECT_EQ((*parts.*tensor).shape, (*whole.*tensor).shape);
      const auto mine = (*parts.*tensor).values<float>();
      const auto theirs = (*whole.*tensor).values<float>();
      ASSERT_EQ(mine.size(), theirs.size());
      for (size_t i = 0; i < mine.size(); ++i) EXPECT_NEAR(mine[i], theirs[i], 1e-3);
    }
  }
  const auto refused = InParts(inputs, options, 5000);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("one batch of the head"));
}

// A head of `batch` sequences of four tokens, all zeros. Thread-compatible.
struct BareHead {
  explicit BareHead(int64_t batch)
      : x(static_cast<size_t>(batch * 16)),
        inputs{{x, {batch, 4, 4}}, {w, {4, 4}}, {w, {4, 4}}, {w, {4, 4}}, {w, {4, 4}}} {}

  std::vector<float> x;
  std::vector<float> w = std::vector<float>(16);
  HeadInputs inputs;
};

TEST(HeadInPartsTest, ThereAreAsFewAsFit) {
  constexpr int64_t kBatch = 13;
  const BareHead whole(kBatch);
  for (int64_t most = 1; most < kBatch; ++most) {
    const int64_t limit = LargestMessage(BareHead(most).inputs, {});
    std::vector<int64_t> parts;
    const auto call = [&](const HeadInputs& part, const v1::AttendOptions&) {
      parts.push_back(part.x.shape()[0]);
      HeadResult result;
      result.output = {part.x.dtype(), part.x.shape(), std::string(part.x.bytes())};
      return result;
    };
    const auto result = HeadInParts(whole.inputs, {}, limit, call);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->output.shape, whole.inputs.x.shape());
    EXPECT_EQ(static_cast<int64_t>(parts.size()), (kBatch + most - 1) / most);
    EXPECT_LE(*std::max_element(parts.begin(), parts.end()), most);
  }
}

// The lengths that go with every part leave no room for one: that is found at once, not after
// looking at all ways to cut.
TEST(HeadInPartsTest, WhatOneBatchCannotIsNotLookedForInMore) {
  constexpr int64_t kBatch = 200000;
  const BareHead whole(kBatch);
  v1::AttendOptions options;
  options.mutable_key_lengths()->Resize(kBatch, 4);
  const auto call = [](const HeadInputs&, const v1::AttendOptions&) -> absl::StatusOr<HeadResult> {
    ADD_FAILURE() << "a part was sent";
    return absl::InternalError("unreachable");
  };
  const absl::Status status = HeadInParts(whole.inputs, options, 100000, call).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("one batch of the head"));
}

// A part's field is the whole's, and of what is wrong altogether the server speaks.
TEST_F(SplitTest, ErrorsNameTheFieldOfTheWhole) {
  Numbers numbers(10);
  BackwardInputs inputs{numbers.Of({2, 4, 30, 32}), numbers.Of({2, 4, 31, 32}),
                        numbers.Of({2, 4, 32, 32}), numbers.Of({2, 4, 30, 32})};
  const absl::Status shapes = InParts(inputs, {}, 10000).status();
  EXPECT_EQ(shapes.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(shapes.message()), HasSubstr("value.shape[2]: is 32, must be 31"));
  inputs.value = {v1::DATA_TYPE_FLOAT32, {2, 4, 31, 32}, inputs.value.bytes()};
  const absl::Status bytes = InParts(inputs, {}, 10000).status();
  EXPECT_EQ(bytes.message(), "value.data: has 32768 bytes, must have 31744 (the shape's)");
  inputs.value = numbers.Of({2, 4, 31, 32});
  v1::AttendOptions options;
  options.set_softcap(-1);
  const absl::Status option = InParts(inputs, options, 40000).status();
  EXPECT_EQ(option.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(option.message()),
              AllOf(HasSubstr("batch 0 to 0"), HasSubstr("options.softcap: is -1")));
  const HeadInputs head{numbers.Of({5, 24, 16}), numbers.Of({16, 24}), numbers.Of({16, 23}),
                        numbers.Of({16, 12}),    numbers.Of({12, 16}), 3};
  const absl::Status of_head = InParts(head, {}, 9000).status();
  EXPECT_EQ(of_head.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(of_head.message()), HasSubstr("w_k.shape[1]"));
}

// The client does it by itself.
TEST_F(SplitTest, TheClientSplitsAboveTheServersLimit) {
  server::Config config = server::LoopbackConfig();
  config.max_message_bytes = 100000;
  const auto small = server::Server::Start(config).value();
  const auto through = Client::Connect(small->address()).value();
  Numbers numbers(11);
  const BackwardInputs inputs{numbers.Of({2, 4, 60, 32}), numbers.Of({2, 4, 60, 32}),
                              numbers.Of({2, 4, 60, 32}), numbers.Of({2, 4, 60, 32})};
  const auto parts = through->Backward(inputs);
  ASSERT_TRUE(parts.ok()) << parts.status();
  ExpectSameGradient(*parts, *client()->Backward(inputs));
  const HeadInputs head{numbers.Of({9, 60, 64}), numbers.Of({64, 24}), numbers.Of({64, 24}),
                        numbers.Of({64, 12}),    numbers.Of({12, 64}), 3};
  const auto output = through->Head(head);
  ASSERT_TRUE(output.ok()) << output.status();
  EXPECT_EQ(output->output.shape, head.x.shape());
}

}  // namespace
}  // namespace attendant
