// The client library against a real server on loopback.
#include "client/cpp/client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/server/testing.h"

namespace attendant {
namespace {

using ::testing::ElementsAre;
using ::testing::FloatEq;
using ::testing::HasSubstr;

class ClientTest : public testing::Test {
 protected:
  void SetUp() override {
    auto server = server::Server::Start(server::LoopbackConfig());
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    auto client = Client::Connect(server_->address());
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
  }

  std::unique_ptr<server::Server> server_;
  std::unique_ptr<Client> client_;
};

TEST_F(ClientTest, AttendTakesSpansAndReturnsTensors) {
  const std::vector<float> query = {0};
  const std::vector<float> key = {5, 6};
  const std::vector<float> value = {1, 3};
  v1::AttendOptions options;
  options.set_return_weights(true);
  options.set_return_logsumexp(true);
  const auto result =
      client_->Attend({query, {1, 1, 1, 1}}, {key, {1, 1, 2, 1}}, {value, {1, 1, 2, 1}}, options);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(result->output.shape, ElementsAre(1, 1, 1, 1));
  EXPECT_THAT(result->output.values<float>(), ElementsAre(2));
  EXPECT_TRUE(result->output.values<double>().empty());
  ASSERT_TRUE(result->weights.has_value());
  EXPECT_THAT(result->weights->values<float>(), ElementsAre(0.5f, 0.5f));
  ASSERT_TRUE(result->logsumexp.has_value());
  EXPECT_FALSE(result->key_sums.has_value());
  EXPECT_EQ(result->stats.path(), v1::PATH_CHUNKED);
}

TEST_F(ClientTest, CheckNamesTheMistake) {
  const std::vector<double> query = {0, 0};
  const std::vector<double> key = {5, 6};
  const std::vector<double> value = {1, 3};
  const std::vector<double> mine = {2, 2};
  const std::vector<int64_t> shape = {1, 1, 2, 1};
  v1::AttendOptions options;
  EXPECT_EQ(client_->Check({query, shape}, {key, shape}, {value, shape}, {mine, shape}, options)
                ->verdict(),
            v1::VERDICT_MATCH);
  options.set_causal(v1::CAUSAL_TOP_LEFT);
  const auto response =
      client_->Check({query, shape}, {key, shape}, {value, shape}, {mine, shape}, options);
  ASSERT_TRUE(response.ok()) << response.status();
  ASSERT_GE(response->findings_size(), 1);
  EXPECT_EQ(response->findings(0).code(), "causal_ignored");
  const auto refused =
      client_->Check({query, shape}, {key, shape}, {value, shape}, {mine, {2, 1}}, options);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("candidate.shape"));
}

TEST_F(ClientTest, CheckHeadSaysWhereItDeparts) {
  const std::vector<double> x = {1, 2};
  const std::vector<double> two = {2};
  const HeadInputs inputs{{x, {2, 1}}, {two, {1, 1}}, {two, {1, 1}}, {two, {1, 1}}, {two, {1, 1}}};
  const std::vector<double> logits = {4, 8, 8, 17};
  HeadCandidate candidate;
  candidate.logits = TensorRef(logits, {1, 1, 2, 2});
  const auto response = client_->CheckHead(inputs, candidate);
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_EQ(response->verdict(), v1::VERDICT_MISMATCH);
  EXPECT_EQ(response->first_departure(), "logits");
  EXPECT_EQ(response->max_abs_difference(), 1);
  EXPECT_THAT(response->worst_index(), ElementsAre(0, 0, 1, 1));
}

TEST_F(ClientTest, HeadReturnsIntermediatesOnRequest) {
  const std::vector<double> x = {1, 2};
  const std::vector<double> two = {2};
  HeadInputs inputs{{x, {2, 1}}, {two, {1, 1}}, {two, {1, 1}}, {two, {1, 1}}, {two, {1, 1}}};
  auto plain = client_->Head(inputs);
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_EQ(plain->output.values<double>().size(), 2u);
  EXPECT_TRUE(plain->logits.bytes.empty());
  inputs.return_intermediates = true;
  auto full = client_->Head(inputs);
  ASSERT_TRUE(full.ok()) << full.status();
  EXPECT_THAT(full->logits.values<double>(), ElementsAre(4, 8, 8, 16));
  EXPECT_THAT(full->query.values<double>(), ElementsAre(2, 4));
}

TEST_F(ClientTest, PartsOfTheKeysMergeIntoTheWhole) {
  const std::vector<float> query = {1};
  const std::vector<float> keys = {0.5, -1, 2};
  const std::vector<float> values = {1, 3, 9};
  v1::AttendOptions options;
  options.set_return_logsumexp(true);
  const auto attend = [&](size_t first, size_t count) {
    const std::vector<int64_t> shape = {1, 1, static_cast<int64_t>(count), 1};
    return client_
        ->Attend({query, {1, 1, 1, 1}}, {absl::MakeConstSpan(keys).subspan(first, count), shape},
                 {absl::MakeConstSpan(values).subspan(first, count), shape}, options)
        .value();
  };
  const AttendResult whole = attend(0, 3);
  const AttendResult low = attend(0, 1);
  const AttendResult high = attend(1, 2);
  const auto merged = client_->Merge(
      {{low.output.ref(), low.logsumexp->ref()}, {high.output.ref(), high.logsumexp->ref()}});
  ASSERT_TRUE(merged.ok()) << merged.status();
  EXPECT_FLOAT_EQ(merged->output.values<float>()[0], whole.output.values<float>()[0]);
  EXPECT_FLOAT_EQ(merged->logsumexp.values<float>()[0], whole.logsumexp->values<float>()[0]);
  EXPECT_EQ(client_->Merge({}).status().code(), absl::StatusCode::kInvalidArgument);
}

// Two keys of the same score with the values 1 and 3: half of d_output each, and scores that are
// pulled apart.
TEST_F(ClientTest, BackwardReturnsGradientsWithAndWithoutTheForwardsResults) {
  const std::vector<float> query = {0};
  const std::vector<float> keys = {5, 6};
  const std::vector<float> values = {1, 3};
  const std::vector<float> d_output = {4};
  const std::vector<float> mask = {0, 0};
  v1::AttendOptions options;
  options.mutable_mask()->set_dtype(v1::DATA_TYPE_FLOAT32);
  options.mutable_mask()->add_shape(2);
  options.mutable_mask()->set_data(mask.data(), mask.size() * sizeof(float));
  BackwardInputs inputs = {.query = {query, {1, 1, 1, 1}},
                           .key = {keys, {1, 1, 2, 1}},
                           .value = {values, {1, 1, 2, 1}},
                           .d_output = {d_output, {1, 1, 1, 1}},
                           .return_d_mask = true};
  options.set_return_logsumexp(true);
  const auto forward = client_->Attend(inputs.query, inputs.key, inputs.value, options);
  ASSERT_TRUE(forward.ok()) << forward.status();
  for (const bool given : {false, true}) {
    if (given) {
      inputs.output = forward->output.ref();
      inputs.logsumexp = forward->logsumexp->ref();
    }
    const auto result = client_->Backward(inputs, options);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_THAT(result->d_value.values<float>(), ElementsAre(FloatEq(2), FloatEq(2)));
    ASSERT_TRUE(result->d_mask.has_value());
    EXPECT_THAT(result->d_mask->values<float>(), ElementsAre(FloatEq(-2), FloatEq(2)));
    EXPECT_THAT(result->d_query.values<float>(), ElementsAre(FloatEq(2)));  // -2 * 5 + 2 * 6
    EXPECT_TRUE(result->d_sinks.empty());
  }
  inputs.logsumexp.reset();
  EXPECT_EQ(client_->Backward(inputs, options).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(ClientTest, EstimateTellsWhatACallWouldCost) {
  v1::EstimateRequest request;
  request.set_batch(1);
  request.set_heads(1);
  request.set_queries(5);
  request.set_keys(5);
  request.set_width(4);
  request.set_d_model(8);
  const auto estimate = client_->Estimate(request);
  ASSERT_TRUE(estimate.ok()) << estimate.status();
  EXPECT_EQ(estimate->chunked_path().steps_size(), 5);
  EXPECT_EQ(estimate->crossover_tokens(), 16);
  request.set_heads(0);
  const absl::Status refused = client_->Estimate(request).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("heads: is 0"));
}

TEST_F(ClientTest, AServersErrorKeepsItsCodeAndField) {
  const std::vector<float> one = {1};
  const auto result = client_->Attend({one, {1, 1, 1, 1}}, {one, {1, 1, 1}}, {one, {1, 1, 1, 1}});
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("key.shape"));
}

TEST_F(ClientTest, AMessageOf12MiBPasses) {
  const std::vector<int64_t> shape = {1, 8, 2048, 64};
  const std::vector<float> ones(8 * 2048 * 64, 1);
  const auto result = client_->Attend({ones, shape}, {ones, shape}, {ones, shape});
  ASSERT_TRUE(result.ok()) << result.status();
  ASSERT_EQ(result->output.values<float>().size(), ones.size());
  for (const float value : result->output.values<float>()) ASSERT_NEAR(value, 1, 1e-5);
}

// Above its limit a server gets and gives pieces, and the answer is the same.
TEST_F(ClientTest, AStreamHasTheBitsOfOneMessage) {
  server::Config config = server::LoopbackConfig();
  config.max_message_bytes = 200000;
  const auto small = server::Server::Start(config).value();
  const auto through = Client::Connect(small->address()).value();
  const std::vector<int64_t> shape = {1, 2, 300, 32};
  std::vector<float> query(2 * 300 * 32), key(query.size()), value(query.size());
  for (size_t i = 0; i < query.size(); ++i) {
    query[i] = std::sin(static_cast<float>(i));
    key[i] = std::cos(static_cast<float>(3 * i));
    value[i] = std::sin(static_cast<float>(5 * i));
  }
  const std::vector<float> mask(300 * 300, -0.5f);
  v1::AttendOptions options;
  options.set_causal(v1::CAUSAL_TOP_LEFT);
  options.mutable_mask()->set_dtype(v1::DATA_TYPE_FLOAT32);
  options.mutable_mask()->add_shape(300);
  options.mutable_mask()->add_shape(300);
  options.mutable_mask()->set_data(mask.data(), mask.size() * sizeof(float));
  options.set_return_weights(true);
  options.set_return_logsumexp(true);
  options.set_return_key_sums(true);
  const auto whole = client_->Attend({query, shape}, {key, shape}, {value, shape}, options);
  ASSERT_TRUE(whole.ok()) << whole.status();
  const auto pieces = through->Attend({query, shape}, {key, shape}, {value, shape}, options);
  ASSERT_TRUE(pieces.ok()) << pieces.status();
  EXPECT_TRUE(pieces->output.bytes == whole->output.bytes);
  EXPECT_TRUE(pieces->weights->bytes == whole->weights->bytes);
  EXPECT_TRUE(pieces->logsumexp->bytes == whole->logsumexp->bytes);
  EXPECT_TRUE(pieces->key_sums->bytes == whole->key_sums->bytes);
  EXPECT_EQ(pieces->weights->shape, whole->weights->shape);
  EXPECT_EQ(pieces->stats.flops(), whole->stats.flops());
  // What is wrong is named as ever.
  options.set_softcap(-1);
  const auto refused = through->Attend({query, shape}, {key, shape}, {value, shape}, options);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("options.softcap: is -1"));
  const auto bytes = through->Attend({query, shape}, {key, {1, 2, 301, 32}}, {value, shape});
  EXPECT_EQ(bytes.status().code(), absl::StatusCode::kInvalidArgument) << bytes.status();
}

TEST_F(ClientTest, InfoAndHealth) {
  const auto info = client_->Info();
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->compute_threads(), 2);
  EXPECT_TRUE(client_->CheckHealth().ok());
  EXPECT_TRUE(client_->CheckHealth("attendant.v1.Attention").ok());
  EXPECT_EQ(client_->CheckHealth("nobody").code(), absl::StatusCode::kNotFound);
  server_->StopBeingReady();
  EXPECT_EQ(client_->CheckHealth().code(), absl::StatusCode::kUnavailable);
}

TEST_F(ClientTest, ACallEndsWithItsTimeout) {
  auto impatient = Client::Connect(server_->address(), {.call_timeout = absl::Milliseconds(100)});
  ASSERT_TRUE(impatient.ok());
  const v1::AttendRequest request = server::LongRequest();
  const auto ref = [](const v1::Tensor& tensor) {
    return TensorRef(tensor.dtype(), {tensor.shape().begin(), tensor.shape().end()}, tensor.data());
  };
  const auto result =
      (*impatient)->Attend(ref(request.query()), ref(request.key()), ref(request.value()));
  EXPECT_EQ(result.status().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST(ClientConnectTest, NoServerIsUnavailableAndNamed) {
  // Port 1 is reserved, and nobody serves gRPC there.
  const auto client = Client::Connect("127.0.0.1:1", {.connect_timeout = absl::Milliseconds(200)});
  EXPECT_EQ(client.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(client.status().message()), HasSubstr("127.0.0.1:1"));
}

}  // namespace
}  // namespace attendant
