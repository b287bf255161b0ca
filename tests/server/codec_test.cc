#include "server/codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "core/cost.h"
#include "core/errors.h"
#include "tests/server/testing.h"

namespace attendant::server {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// As the server makes it of a request that arrives.
template <typename Request>
auto ProblemIn(const Request& request) {
  return ProblemOf(HeadOf(request));
}

std::string FieldIn(const absl::Status& status) { return core::FieldOf(status).value_or(""); }

TEST(CodecTest, ReadsTypesAndShapes) {
  v1::Tensor tensor;
  SetTensor<double>(v1::DATA_TYPE_FLOAT64, {2, 3}, {1, 2, 3, 4, 5, 6}, &tensor);
  const auto spec = SpecOf("query", tensor);
  ASSERT_TRUE(spec.ok());
  EXPECT_EQ(spec->dtype, core::DType::kFloat64);
  EXPECT_THAT(spec->shape, ElementsAre(2, 3));
}

TEST(CodecTest, ATypeOfNobodysIsNamed) {
  v1::Tensor tensor;
  tensor.set_dtype(static_cast<v1::DataType>(77));
  const absl::Status status = SpecOf("key", tensor).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldIn(status), "key.dtype");
  EXPECT_THAT(std::string(status.message()), HasSubstr("77"));
}

TEST(CodecTest, UnsetOptionsArePlainAttention) {
  const auto options = OptionsOf(v1::AttendOptions());
  ASSERT_TRUE(options.ok());
  EXPECT_EQ(options->path, core::Path::kChunked);
  EXPECT_EQ(options->layout, core::Layout::kBhtd);
  EXPECT_EQ(options->causal, core::Causal::kNone);
  EXPECT_FALSE(options->scale.has_value());
  EXPECT_FALSE(options->mask.has_value());
  EXPECT_FALSE(options->window.has_value());
}

TEST(CodecTest, EveryOptionArrives) {
  v1::AttendOptions proto;
  proto.set_path(v1::PATH_EXPLICIT);
  proto.set_layout(v1::LAYOUT_BTHD);
  proto.set_causal(v1::CAUSAL_BOTTOM_RIGHT);
  proto.set_scale(0);
  proto.mutable_mask()->set_dtype(v1::DATA_TYPE_BOOL);
  proto.add_key_lengths(3);
  proto.mutable_window()->set_left(0);
  proto.set_softcap(2);
  proto.add_alibi_slopes(0.5);
  proto.add_sinks(0.25);
  proto.set_return_weights(true);
  proto.set_return_logsumexp(true);
  proto.set_return_key_sums(true);
  const auto options = OptionsOf(proto);
  ASSERT_TRUE(options.ok());
  EXPECT_EQ(options->path, core::Path::kExplicit);
  EXPECT_EQ(options->layout, core::Layout::kBthd);
  EXPECT_EQ(options->causal, core::Causal::kBottomRight);
  EXPECT_EQ(options->scale, 0);
  EXPECT_EQ(options->mask->dtype, core::DType::kBool);
  EXPECT_THAT(options->key_lengths, ElementsAre(3));
  EXPECT_EQ(options->window->left, 0);
  EXPECT_FALSE(options->window->right.has_value());
  EXPECT_EQ(options->softcap, 2);
  EXPECT_THAT(options->alibi_slopes, ElementsAre(0.5));
  EXPECT_THAT(options->sinks, ElementsAre(0.25));
  EXPECT_TRUE(options->return_weights);
  EXPECT_TRUE(options->return_logsumexp);
  EXPECT_TRUE(options->return_key_sums);
}

TEST(CodecTest, UnknownEnumValuesAreNamed) {
  v1::AttendOptions path;
  path.set_path(static_cast<v1::Path>(9));
  EXPECT_EQ(FieldIn(OptionsOf(path).status()), "options.path");
  v1::AttendOptions layout;
  layout.set_layout(static_cast<v1::Layout>(9));
  EXPECT_EQ(FieldIn(OptionsOf(layout).status()), "options.layout");
  v1::AttendOptions causal;
  causal.set_causal(static_cast<v1::Causal>(-1));
  EXPECT_EQ(FieldIn(OptionsOf(causal).status()), "options.causal");
}

TEST(CodecTest, ByteCountsAreCheckedAgainstShapeAndType) {
  v1::AttendRequest request = MeanRequest();
  EXPECT_TRUE(ProblemIn(request).ok());
  request.mutable_value()->mutable_data()->push_back('x');
  const absl::Status status = ProblemIn(request).status();
  EXPECT_EQ(FieldIn(status), "value.data");
  EXPECT_THAT(std::string(status.message()), HasSubstr("has 9 bytes, shape and dtype say 8"));
}

TEST(CodecTest, AMasksBytesAreCheckedAndRead) {
  v1::AttendRequest request = MeanRequest();
  v1::Tensor& mask = *request.mutable_options()->mutable_mask();
  mask.set_dtype(v1::DATA_TYPE_BOOL);
  mask.add_shape(2);
  mask.set_data(std::string("\1\0\1", 3));
  const absl::Status status = ProblemIn(request).status();
  EXPECT_EQ(FieldIn(status), "options.mask.data");
  EXPECT_THAT(std::string(status.message()), HasSubstr("has 3 bytes, shape and dtype say 2"));
  mask.mutable_data()->resize(2);
  const auto problem = ProblemIn(request);
  ASSERT_TRUE(problem.ok()) << problem.status();
  CallData data;
  const auto tensors = TensorsOf<float>(*problem, Arrived(request, data), data);
  ASSERT_TRUE(tensors.ok());
  EXPECT_FALSE(data.in.Copy().has_value());
  EXPECT_EQ(std::memcmp(tensors->mask, "\1\0", 2), 0);
}

TEST(CodecTest, ShapesAreCheckedBeforeBytes) {
  v1::AttendRequest request = MeanRequest();
  request.mutable_key()->set_shape(2, -1);
  EXPECT_EQ(FieldIn(ProblemIn(request).status()), "key.shape[2]");
}

TEST(CodecTest, ResponsesAreMadeToMeasureInTheRequestsLayout) {
  v1::AttendRequest request = ConstantRequest({2, 3, 4, 5}, 0);
  request.mutable_options()->set_layout(v1::LAYOUT_BTHD);
  request.mutable_options()->set_return_weights(true);
  request.mutable_options()->set_return_logsumexp(true);
  request.mutable_options()->set_return_key_sums(true);
  const auto problem = ProblemIn(request);
  ASSERT_TRUE(problem.ok()) << problem.status();
  EXPECT_EQ(problem->queries, 3);
  EXPECT_EQ(problem->heads, 4);
  CallData data;
  const auto tensors = TensorsOf<float>(*problem, Arrived(request, data), data);
  ASSERT_TRUE(tensors.ok());
  // One head's tokens lie heads * width elements apart.
  EXPECT_EQ(tensors->output.Head(0, 1).stride, 20);
  const auto response = Parsed<v1::AttendResponse>(data.out.TakeMessage(v1::AttendResponse()));
  EXPECT_THAT(response.output().shape(), ElementsAre(2, 3, 4, 5));
  EXPECT_THAT(response.weights().shape(), ElementsAre(2, 4, 3, 3));
  EXPECT_THAT(response.logsumexp().shape(), ElementsAre(2, 4, 3));
  EXPECT_THAT(response.key_sums().shape(), ElementsAre(2, 4, 3));
  EXPECT_EQ(response.output().data().size(), 2 * 3 * 4 * 5 * sizeof(float));
}

TEST(CodecTest, WhatIsSummedOverHalvesIsReturnedAsFloats) {
  v1::AttendRequest request;
  for (v1::Tensor* tensor :
       {request.mutable_query(), request.mutable_key(), request.mutable_value()}) {
    tensor->set_dtype(v1::DATA_TYPE_BFLOAT16);
    for (const int64_t size : {1, 1, 2, 3}) tensor->add_shape(size);
    tensor->mutable_data()->resize(2 * 3 * 2);
  }
  request.mutable_options()->set_return_weights(true);
  request.mutable_options()->set_return_logsumexp(true);
  request.mutable_options()->set_return_key_sums(true);
  const auto problem = ProblemIn(request);
  ASSERT_TRUE(problem.ok()) << problem.status();
  CallData data;
  ASSERT_TRUE(TensorsOf<core::BFloat16>(*problem, Arrived(request, data), data).ok());
  const auto response = Parsed<v1::AttendResponse>(data.out.TakeMessage(v1::AttendResponse()));
  EXPECT_EQ(response.output().dtype(), v1::DATA_TYPE_BFLOAT16);
  EXPECT_EQ(response.output().data().size(), 2 * 3 * 2);
  EXPECT_EQ(response.weights().dtype(), v1::DATA_TYPE_BFLOAT16);
  EXPECT_EQ(response.logsumexp().dtype(), v1::DATA_TYPE_FLOAT32);
  EXPECT_EQ(response.logsumexp().data().size(), 2 * 4);
  EXPECT_EQ(response.key_sums().dtype(), v1::DATA_TYPE_FLOAT32);
  EXPECT_EQ(response.key_sums().data().size(), 2 * 4);
  EXPECT_EQ(core::ResponseBytes(*problem), (2 * 3 + 2 * 2) * 2 + (2 + 2) * 4);
}

TEST(CodecTest, HeadResponsesHoldTheIntermediatesOnRequestOnly) {
  v1::HeadRequest request;
  SetTensor<float>(v1::DATA_TYPE_FLOAT32, {2, 3}, std::vector<float>(6), request.mutable_x());
  for (v1::Tensor* weight : {request.mutable_w_q(), request.mutable_w_k(), request.mutable_w_v()}) {
    SetTensor<float>(v1::DATA_TYPE_FLOAT32, {3, 4}, std::vector<float>(12), weight);
  }
  SetTensor<float>(v1::DATA_TYPE_FLOAT32, {4, 3}, std::vector<float>(12), request.mutable_w_o());
  request.set_heads(2);
  const auto response_to = [](const v1::HeadRequest& sent) {
    CallData data;
    EXPECT_TRUE(TensorsOf<float>(*ProblemIn(sent), Arrived(sent, data), data).ok());
    return Parsed<v1::HeadResponse>(data.out.TakeMessage(v1::HeadResponse()));
  };
  const v1::HeadResponse plain = response_to(request);
  EXPECT_THAT(plain.output().shape(), ElementsAre(2, 3));
  EXPECT_FALSE(plain.has_query());
  request.set_return_intermediates(true);
  const v1::HeadResponse full = response_to(request);
  EXPECT_THAT(full.query().shape(), ElementsAre(1, 2, 2, 2));
  EXPECT_THAT(full.logits().shape(), ElementsAre(1, 2, 2, 2));
  EXPECT_THAT(full.context().shape(), ElementsAre(1, 2, 2, 2));
  v1::Tensor& mask = *request.mutable_options()->mutable_mask();
  mask.set_dtype(v1::DATA_TYPE_FLOAT32);
  mask.add_shape(2);
  EXPECT_EQ(FieldIn(ProblemIn(request).status()), "options.mask.data");
  mask.mutable_data()->resize(8);
  EXPECT_TRUE(ProblemIn(request).ok());
  request.mutable_w_k()->mutable_data()->pop_back();
  EXPECT_EQ(FieldIn(ProblemIn(request).status()), "w_k.data");
}

}  // namespace
}  // namespace attendant::server
