// One problem over three real servers on loopback, against the same problem on one of them.
#include "client/cpp/sharded.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/call_group.h"
#include "client/cpp/shard_plan.h"
#include "tests/core/random_problems.h"
#include "tests/core/testing.h"
#include "tests/server/testing.h"

namespace attendant {
namespace {

using core::BFloat16;
using core::Float16;
using core::Problem;
using core::Sizes;
using ::testing::AllOf;
using ::testing::DoubleEq;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr double kHidden = -std::numeric_limits<double>::infinity();

v1::DataType ToProto(core::DType dtype) {
  switch (dtype) {
    case core::DType::kFloat64:
      return v1::DATA_TYPE_FLOAT64;
    case core::DType::kFloat16:
      return v1::DATA_TYPE_FLOAT16;
    case core::DType::kBFloat16:
      return v1::DATA_TYPE_BFLOAT16;
    case core::DType::kBool:
      return v1::DATA_TYPE_BOOL;
    default:
      return v1::DATA_TYPE_FLOAT32;
  }
}

template <typename T>
absl::string_view BytesOf(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// A problem with its tensors, as a client sends it.
template <typename S>
struct Request {
  Request(const Sizes& s, const core::AttendOptions& asked, uint32_t seed)
      : Request(core::ProblemOf<S>(s, asked), asked.mask.value_or(core::TensorSpec{}), seed) {}
  Request(const Problem& p, const core::TensorSpec& mask_spec, uint32_t seed)
      : problem(p), inputs(core::RandomInputs<S>(p, seed)) {
    options.set_layout(p.layout == core::Layout::kBthd ? v1::LAYOUT_BTHD : v1::LAYOUT_BHTD);
    options.set_scale(p.scale);
    if (p.causal == core::Causal::kTopLeft) options.set_causal(v1::CAUSAL_TOP_LEFT);
    if (p.causal == core::Causal::kBottomRight) options.set_causal(v1::CAUSAL_BOTTOM_RIGHT);
    options.mutable_key_lengths()->Assign(p.key_lengths.begin(), p.key_lengths.end());
    if (p.window.left.has_value()) options.mutable_window()->set_left(*p.window.left);
    if (p.window.right.has_value()) options.mutable_window()->set_right(*p.window.right);
    options.set_softcap(p.softcap);
    options.mutable_alibi_slopes()->Assign(p.alibi_slopes.begin(), p.alibi_slopes.end());
    options.mutable_sinks()->Assign(p.sinks.begin(), p.sinks.end());
    options.set_return_weights(p.return_weights);
    options.set_return_logsumexp(p.return_logsumexp);
    options.set_return_key_sums(p.return_key_sums);
    if (!p.mask.has_value()) return;
    inputs.mask = core::RandomMask(mask_spec, seed);
    options.mutable_mask()->set_dtype(ToProto(mask_spec.dtype));
    options.mutable_mask()->mutable_shape()->Assign(mask_spec.shape.begin(), mask_spec.shape.end());
    options.mutable_mask()->set_data(inputs.mask.data(), inputs.mask.size());
  }

  TensorRef RefOf(const std::vector<S>& values, int64_t heads, int64_t tokens,
                  int64_t width) const {
    std::vector<int64_t> shape = {problem.batch, heads, tokens, width};
    if (problem.layout == core::Layout::kBthd) std::swap(shape[1], shape[2]);
    return {ToProto(core::DTypeOf<S>()), std::move(shape), BytesOf(values)};
  }
  TensorRef query() const {
    return RefOf(inputs.query, problem.heads, problem.queries, problem.width);
  }
  TensorRef key() const { return RefOf(inputs.key, problem.kv_heads, problem.keys, problem.width); }
  TensorRef value() const {
    return RefOf(inputs.value, problem.kv_heads, problem.keys, problem.value_width);
  }

  Problem problem;
  core::Inputs<S> inputs;
  v1::AttendOptions options;
};

template <typename T>
std::vector<T> ElementsOf(const Tensor& tensor) {
  std::vector<T> elements(tensor.bytes.size() / sizeof(T));
  if (!elements.empty()) std::memcpy(elements.data(), tensor.bytes.data(), tensor.bytes.size());
  return elements;
}

void ExpectSameBits(const std::optional<Tensor>& a, const std::optional<Tensor>& b,
                    const char* name) {
  ASSERT_EQ(a.has_value(), b.has_value()) << name;
  if (!a.has_value()) return;
  EXPECT_EQ(a->dtype, b->dtype) << name;
  EXPECT_EQ(a->shape, b->shape) << name;
  EXPECT_TRUE(a->bytes == b->bytes) << name;
}

class ShardedTest : public testing::Test {
 protected:
  static constexpr size_t kServers = 3;

  static void SetUpTestSuite() {
    std::vector<std::string> addresses;
    for (auto& server : Servers()) {
      server = server::Server::Start(server::LoopbackConfig()).value();
      addresses.push_back(server->address());
    }
    One() = Client::Connect(addresses[0]).value();
    Three() = ShardedClient::Connect(addresses).value();
  }
  static void TearDownTestSuite() {
    Three().reset();
    One().reset();
    // A server's end waits for its metrics page: all at once.
    std::vector<std::thread> ends;
    for (auto& server : Servers()) ends.emplace_back([&server] { server.reset(); });
    for (std::thread& end : ends) end.join();
  }

  static std::array<std::unique_ptr<server::Server>, kServers>& Servers() {
    static std::array<std::unique_ptr<server::Server>, kServers> servers;
    return servers;
  }
  static std::unique_ptr<Client>& One() {
    static std::unique_ptr<Client> client;
    return client;
  }
  static std::unique_ptr<ShardedClient>& Three() {
    static std::unique_ptr<ShardedClient> client;
    return client;
  }

  template <typename S>
  static AttendResult OnOne(const Request<S>& request) {
    auto result = One()->Attend(request.query(), request.key(), request.value(), request.options);
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? *std::move(result) : AttendResult{};
  }
  template <typename S>
  static absl::StatusOr<ShardedResult> OnThree(const Request<S>& request, ShardBy by) {
    return Three()->AttendSharded(request.query(), request.key(), request.value(), request.options,
                                  by);
  }

  // servers: that compute a part.
  template <typename S>
  static void ExpectSameBitsByRows(const Request<S>& request, ShardBy by, int64_t servers) {
    SCOPED_TRACE(absl::StrCat(by == ShardBy::kBatch ? "by batch: " : "by heads: ",
                              core::Describe(request.problem)));
    const AttendResult one = OnOne(request);
    const auto three = OnThree(request, by);
    ASSERT_TRUE(three.ok()) << three.status();
    EXPECT_EQ(three->servers, servers);
    EXPECT_EQ(three->by, servers == 1 ? ShardBy::kAuto : by);
    ExpectSameBits(three->output, one.output, "output");
    ExpectSameBits(three->weights, one.weights, "weights");
    ExpectSameBits(three->logsumexp, one.logsumexp, "logsumexp");
    ExpectSameBits(three->key_sums, one.key_sums, "key_sums");
    EXPECT_EQ(three->stats.flops(), one.stats.flops());
  }

  // Both are within the tolerance of the truth. In half precision the parts are rounded once more.
  template <typename S>
  static void ExpectNearByKeys(Request<S> request) {
    SCOPED_TRACE(absl::StrCat("by keys: ", core::Describe(request.problem)));
    request.options.set_return_logsumexp(true);
    const AttendResult one = OnOne(request);
    const auto three = OnThree(request, ShardBy::kKeys);
    ASSERT_TRUE(three.ok()) << three.status();
    const auto tolerance =
        core::ToleranceOf<S>(request.problem, core::MagnitudesOf(request.problem, request.inputs));
    EXPECT_EQ(three->output.dtype, one.output.dtype);
    EXPECT_EQ(three->output.shape, one.output.shape);
    EXPECT_TRUE(core::Near(ElementsOf<S>(three->output), core::ToDouble(ElementsOf<S>(one.output)),
                           3 * tolerance.output))
        << "output";
    ASSERT_TRUE(three->logsumexp.has_value());
    EXPECT_EQ(three->logsumexp->dtype, one.logsumexp->dtype);
    EXPECT_EQ(three->logsumexp->shape, one.logsumexp->shape);
    EXPECT_TRUE(core::Near(ElementsOf<core::Wide<S>>(*three->logsumexp),
                           core::ToDouble(ElementsOf<core::Wide<S>>(*one.logsumexp)),
                           3 * tolerance.logsumexp))
        << "logsumexp";
  }

  // In both layouts.
  template <typename S>
  static void ExpectByKeys(const Sizes& sizes, core::AttendOptions options) {
    for (const core::Layout layout : core::kBothLayouts) {
      options.layout = layout;
      ExpectNearByKeys(Request<S>(sizes, options, 5));
    }
  }
};

// function: a template of the type that numbers are stored as.
template <typename Function>
void ForAllTypes(const Function& function) {
  function.template operator()<float>();
  function.template operator()<double>();
  function.template operator()<Float16>();
  function.template operator()<BFloat16>();
}

constexpr Sizes kGrouped{
    .batch = 2, .heads = 8, .kv_heads = 4, .queries = 9, .keys = 50, .width = 8, .value_width = 6};

// Every option that is cut, and one that is not.
template <typename S>
core::AttendOptions EveryOption(const Sizes& s) {
  core::AttendOptions options = core::ReturningAll(core::Causal::kBottomRight);
  for (int64_t h = 0; h < s.heads; ++h) {
    options.alibi_slopes.push_back(0.05 * static_cast<double>(h));
    options.sinks.push_back(static_cast<double>(h) - 2);
  }
  for (int64_t b = 0; b < s.batch; ++b) options.key_lengths.push_back(s.keys - 3 * b);
  options.window = core::Window{30, std::nullopt};
  options.softcap = 20;
  options.mask = core::TensorSpec{core::DTypeOf<S>(), {s.batch, s.heads, s.queries, s.keys}};
  return options;
}

TEST_F(ShardedTest, RowsHaveTheBitsOfOneServer) {
  ForAllTypes([&]<typename TypeParam>() {
    for (const int64_t batch : {1, 2, 3, 5}) {
      Sizes sizes = kGrouped;
      sizes.batch = batch;
      for (const core::Layout layout : core::kBothLayouts) {
        core::AttendOptions options = EveryOption<TypeParam>(sizes);
        options.layout = layout;
        const Request<TypeParam> request(sizes, options, 3);
        ExpectSameBitsByRows(request, ShardBy::kBatch, std::min<int64_t>(batch, 3));
        ExpectSameBitsByRows(request, ShardBy::kHeads, 3);
      }
    }
  });
}

// A mask of each head has three axes; two heads of two batches could be taken for one of each
// batch.
TEST_F(ShardedTest, MasksOfEachHeadAreCutAsSuch) {
  const Sizes sizes{.batch = 2, .heads = 6, .kv_heads = 6, .queries = 5, .keys = 7, .width = 4};
  core::AttendOptions options = core::ReturningAll();
  options.mask = core::TensorSpec{core::DType::kBool, {6, 5, 7}};
  const Request<float> request(sizes, options, 3);
  ExpectSameBitsByRows(request, ShardBy::kHeads, 3);
  ExpectSameBitsByRows(request, ShardBy::kBatch, 2);
}

TEST_F(ShardedTest, KeysArePlainAttention) {
  ForAllTypes([&]<typename TypeParam>() {
    ExpectByKeys<TypeParam>(kGrouped, {});
    ExpectByKeys<TypeParam>({.queries = 1, .keys = 1000, .width = 64, .value_width = 64}, {});
    ExpectByKeys<TypeParam>({.heads = 2, .kv_heads = 2, .queries = 300, .keys = 3, .width = 1}, {});
    ExpectByKeys<TypeParam>({.queries = 4, .keys = 2, .width = 3, .value_width = 2}, {});
    ExpectByKeys<TypeParam>({.queries = 4, .keys = 1, .width = 3, .value_width = 2}, {});
    ExpectByKeys<TypeParam>({.queries = 4, .keys = 0, .width = 3, .value_width = 2}, {});
    ExpectByKeys<TypeParam>({.queries = 4, .keys = 9, .width = 0, .value_width = 2}, {});
    ExpectByKeys<TypeParam>({.queries = 4, .keys = 9, .width = 2, .value_width = 0}, {});
    ExpectByKeys<TypeParam>({.queries = 0, .keys = 9, .width = 2, .value_width = 2}, {});
    ExpectByKeys<TypeParam>({.batch = 0, .queries = 3, .keys = 9, .width = 2, .value_width = 2},
                            {});
  });
}

// All of them by their positions alone: KeyBlocksTest.
TEST_F(ShardedTest, KeysKeepTheirPositions) {
  ForAllTypes([&]<typename TypeParam>() {
    Sizes sizes = kGrouped;
    for (const int64_t queries : {1, 9, 70}) {
      sizes.queries = queries;
      for (const auto causal :
           {core::Causal::kNone, core::Causal::kTopLeft, core::Causal::kBottomRight}) {
        for (const core::Window& window :
             {core::Window{}, core::Window{4, 20}, core::Window{25, {}}}) {
          core::AttendOptions options;
          options.causal = causal;
          options.window = window;
          const bool alibi = queries == 9;
          if (alibi) options.alibi_slopes = {0.5, 0.25, -0.1, 0, 1, 2, 0.125, 0.3};
          ExpectByKeys<TypeParam>(sizes, options);
          options.key_lengths = {17, 49};
          ExpectByKeys<TypeParam>(sizes, options);
        }
      }
    }
  });
}

TEST_F(ShardedTest, KeysKeepWhatElseIsAsked) {
  ForAllTypes([&]<typename TypeParam>() {
    const Sizes& s = kGrouped;
    for (const auto causal : {core::Causal::kNone, core::Causal::kTopLeft}) {
      core::AttendOptions options;
      options.causal = causal;
      options.softcap = 2;
      options.scale = -0.7;
      options.sinks = {0, 1, -5, kHidden, 3, 2, -1, 0.5};
      ExpectByKeys<TypeParam>(s, options);
      options.path = core::Path::kExplicit;
      ExpectByKeys<TypeParam>(s, options);
      for (const core::DType dtype : {core::DType::kBool, core::DTypeOf<TypeParam>(),
                                      core::WideOf(core::DTypeOf<TypeParam>())}) {
        for (const std::vector<int64_t>& shape :
             {std::vector<int64_t>{s.batch, s.heads, s.queries, s.keys},
              {s.batch, 1, 1, s.keys},
              {s.heads, s.queries, 1},
              {s.queries, s.keys},
              {s.keys},
              {1},
              {}}) {
          options.mask = core::TensorSpec{dtype, shape};
          ExpectByKeys<TypeParam>(s, options);
        }
      }
    }
  });
}

// And a row that sees none has its sink alone.
TEST_F(ShardedTest, KeysWithoutAnyQueryAreNotSent) {
  ForAllTypes([&]<typename TypeParam>() {
    core::AttendOptions options;
    options.key_lengths = {0, 3};
    const Request<TypeParam> few(kGrouped, options, 5);
    const auto result = OnThree(few, ShardBy::kKeys);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->servers, 1);
    EXPECT_EQ(result->by, ShardBy::kKeys);
    ExpectByKeys<TypeParam>(kGrouped, options);
    options.sinks = {1, 2, 3, 4, 5, 6, 7, 8};
    ExpectByKeys<TypeParam>(kGrouped, options);
    options.key_lengths = {0, 0};
    ExpectByKeys<TypeParam>(kGrouped, options);
  });
}

// The weight of a part is decided by its logsumexp: keys that outweigh all others by far.
TEST_F(ShardedTest, OnePartMayHaveAllTheWeight) {
  const std::vector<double> query = {100};
  const std::vector<double> key = {0, 0, 10, 0, 0, 9};
  const std::vector<double> value = {1, 2, 3, 4, 5, 6};
  v1::AttendOptions options;
  options.set_scale(1);
  options.set_return_logsumexp(true);
  const auto result = Three()->AttendSharded({query, {1, 1, 1, 1}}, {key, {1, 1, 6, 1}},
                                             {value, {1, 1, 6, 1}}, options, ShardBy::kKeys);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->servers, 3);
  EXPECT_THAT(result->output.values<double>(), ElementsAre(DoubleEq(3)));
  EXPECT_THAT(result->logsumexp->values<double>(), ElementsAre(DoubleEq(1000)));
  EXPECT_EQ(result->stats.flops(), 6 * 4);
}

TEST_F(ShardedTest, RandomProblems) {
  constexpr uint32_t kSeed = 20241130;
  const auto run = [&]<typename S>(uint32_t seed) {
    core::TensorSpec mask;
    const Problem problem = core::RandomProblems(seed).Next<S>(mask);
    Request<S> request(problem, mask, seed);
    ExpectSameBitsByRows(request, ShardBy::kBatch, std::clamp<int64_t>(problem.batch, 1, 3));
    ExpectSameBitsByRows(request, ShardBy::kHeads, std::min<int64_t>(problem.kv_heads, 3));
    request.options.set_return_weights(false);
    request.options.set_return_key_sums(false);
    const bool refused = !problem.alibi_slopes.empty() && problem.mask.has_value() &&
                         problem.causal != core::Causal::kTopLeft;
    if (!refused) return ExpectNearByKeys(request);
    EXPECT_EQ(OnThree(request, ShardBy::kKeys).status().code(), absl::StatusCode::kInvalidArgument);
  };
  for (uint32_t seed = kSeed; seed < kSeed + 100 && !HasFailure(); ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    switch (seed % 4) {
      case 0:
        run.template operator()<float>(seed);
        break;
      case 1:
        run.template operator()<double>(seed);
        break;
      case 2:
        run.template operator()<Float16>(seed);
        break;
      default:
        run.template operator()<BFloat16>(seed);
    }
  }
}

TEST_F(ShardedTest, AutoTakesWhatGivesAllServersWork) {
  const auto chosen = [&](const Sizes& sizes, const core::AttendOptions& options = {}) {
    const auto result = OnThree(Request<float>(sizes, options, 1), ShardBy::kAuto);
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? std::pair(result->by, result->servers) : std::pair(ShardBy::kAuto, 0L);
  };
  using Choice = std::pair<ShardBy, int64_t>;
  EXPECT_EQ(chosen({.batch = 3, .queries = 5, .keys = 9}), Choice(ShardBy::kBatch, 3));
  EXPECT_EQ(chosen({.batch = 2, .heads = 6, .kv_heads = 6, .queries = 5, .keys = 9}),
            Choice(ShardBy::kHeads, 3));
  EXPECT_EQ(chosen({.batch = 4, .heads = 6, .kv_heads = 6, .queries = 5, .keys = 9}),
            Choice(ShardBy::kHeads, 3));  // 2 heads each, not 2 batches of 4
  EXPECT_EQ(chosen({.batch = 2, .heads = 6, .kv_heads = 2, .queries = 5, .keys = 9}),
            Choice(ShardBy::kKeys, 3));
  core::AttendOptions weights;
  weights.return_weights = true;
  EXPECT_EQ(chosen({.batch = 1, .heads = 6, .kv_heads = 2, .queries = 5, .keys = 9}, weights),
            Choice(ShardBy::kHeads, 2));
  EXPECT_EQ(chosen({.queries = 5, .keys = 2}), Choice(ShardBy::kKeys, 2));
  EXPECT_EQ(chosen({.queries = 5, .keys = 1}), Choice(ShardBy::kAuto, 1));
}

TEST_F(ShardedTest, WhatKeysCannotServeIsRefused) {
  const auto refusal = [&](const core::AttendOptions& options) {
    const absl::Status status =
        OnThree(Request<float>(kGrouped, options, 1), ShardBy::kKeys).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("shard by heads"));
    return std::string(status.message());
  };
  core::AttendOptions options;
  options.return_weights = true;
  EXPECT_THAT(refusal(options), HasSubstr("options.return_weights"));
  options = {};
  options.return_key_sums = true;
  EXPECT_THAT(refusal(options), HasSubstr("options.return_key_sums"));
  options = {};
  options.alibi_slopes.assign(8, 0.5);
  options.mask = core::TensorSpec{core::DType::kBool, {1}};
  EXPECT_THAT(refusal(options), HasSubstr("options.alibi_slopes"));
  options.causal = core::Causal::kTopLeft;
  ExpectNearByKeys(Request<float>(kGrouped, options, 1));
}

// Whatever a server refuses, it is the server that says so, and the error says which one.
TEST_F(ShardedTest, ErrorsNameTheFieldTheServerAndThePart) {
  const std::vector<float> ones(64, 1);
  const std::vector<int64_t> shape = {1, 4, 8, 2};
  v1::AttendOptions options;
  const auto message = [&](const std::vector<int64_t>& key_shape, ShardBy by) {
    const auto result =
        Three()->AttendSharded({ones, shape}, {ones, key_shape}, {ones, shape}, options, by);
    EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument) << result.status();
    return std::string(result.status().message());
  };
  for (const ShardBy by : {ShardBy::kAuto, ShardBy::kBatch, ShardBy::kHeads, ShardBy::kKeys}) {
    EXPECT_THAT(message({1, 4, 4, 4}, by),
                AllOf(HasSubstr("key.shape[3]: is 4, must be 2"),
                      HasSubstr(absl::StrCat("the whole at ", Servers()[0]->address()))));
    EXPECT_THAT(message({1, 4, 16}, by), HasSubstr("key.shape: has 3 dimensions"));
    EXPECT_THAT(message({1, 4, 8, 1}, by), HasSubstr("key."));
  }
  options.set_softcap(-1);
  EXPECT_THAT(message(shape, ShardBy::kHeads),
              AllOf(HasSubstr(" of 3 (key heads "), HasSubstr("options.softcap: is -1")));
  EXPECT_THAT(message(shape, ShardBy::kKeys),
              AllOf(HasSubstr(" of 3 (keys "), HasSubstr("options.softcap: is -1")));
  options.clear_softcap();
  options.mutable_sinks()->Add(std::numeric_limits<double>::quiet_NaN());
  EXPECT_THAT(message(shape, ShardBy::kKeys), HasSubstr("options.sinks: has 1 entries"));
  options.mutable_sinks()->Resize(4, 0);
  EXPECT_THAT(message(shape, ShardBy::kKeys), HasSubstr("options.sinks[0]: is nan"));
  options.clear_sinks();
  options.mutable_alibi_slopes()->Resize(4, 1e300);
  EXPECT_THAT(message(shape, ShardBy::kKeys), HasSubstr("options.alibi_slopes[0]: is 1e+300"));
}

// Shapes whose bytes are none, and whose products overflow.
TEST_F(ShardedTest, EmptyTensorsOfHugeShapesAreRefused) {
  const std::vector<float> none;
  constexpr int64_t kHuge = int64_t{1} << 30;
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{kHuge, kHuge, kHuge, 0}, {kHuge * kHuge, 1, 1, 0}, {1, 1, -1, 0}}) {
    for (const ShardBy by : {ShardBy::kAuto, ShardBy::kBatch, ShardBy::kHeads, ShardBy::kKeys}) {
      const absl::Status status =
          Three()->AttendSharded({none, shape}, {none, shape}, {none, shape}, {}, by).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("query.shape"));
    }
  }
}

TEST_F(ShardedTest, OneServerOrOnePartIsAPlainCall) {
  const auto alone = ShardedClient::Connect({Servers()[1]->address()});
  ASSERT_TRUE(alone.ok()) << alone.status();
  EXPECT_EQ((*alone)->shards(), 1);
  const Request<float> request(kGrouped, {}, 1);
  const auto result = (*alone)->AttendSharded(request.query(), request.key(), request.value(),
                                              request.options, ShardBy::kKeys);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->servers, 1);
  ExpectSameBits(result->output, OnOne(request).output, "output");
  const std::vector<float> one = {1};
  const absl::Status status =
      (*alone)->AttendSharded({one, {1, 1, 1, 1}}, {one, {1}}, {one, {1, 1, 1, 1}}).status();
  EXPECT_THAT(std::string(status.message()), testing::StartsWith("key.shape"));
  EXPECT_EQ(ShardedClient::Connect({}).status().code(), absl::StatusCode::kInvalidArgument);
}

int64_t AttendCalls(const server::Server& server) {
  const std::string page = server.metrics_text();
  const std::string series =
      "\nattendant_requests_total{code=\"OK\",method=\"Attend\",path=\"chunked\"} ";
  const size_t at = page.find(series);
  return at == std::string::npos ? 0 : std::stoll(page.substr(at + series.size()));
}

TEST_F(ShardedTest, ABalancedNameSpreadsTheParts) {
  std::string name = "ipv4:";
  std::array<int64_t, kServers> before;
  for (size_t i = 0; i < kServers; ++i) {
    absl::StrAppend(&name, i == 0 ? "" : ",", Servers()[i]->address());
    before[i] = AttendCalls(*Servers()[i]);
  }
  EXPECT_EQ(ShardedClient::ConnectBalanced(name, 0).status().code(),
            absl::StatusCode::kInvalidArgument);
  const auto client = ShardedClient::ConnectBalanced(name, 4);
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_EQ((*client)->shards(), 4);
  const Request<float> request(kGrouped, core::ReturningAll(), 1);
  const AttendResult one = OnOne(request);
  ++before[0];
  // Connections to the second and third server may come later than the first.
  bool all = false;
  for (int call = 0; call < 2000 && !all; ++call) {
    const auto result = (*client)->AttendSharded(request.query(), request.key(), request.value(),
                                                 request.options, ShardBy::kHeads);
    ASSERT_TRUE(result.ok()) << result.status();
    ASSERT_EQ(result->servers, 4);
    ExpectSameBits(result->output, one.output, "output");
    ExpectSameBits(result->weights, one.weights, "weights");
    all = true;
    for (size_t i = 0; i < kServers; ++i) all = all && AttendCalls(*Servers()[i]) > before[i];
  }
  EXPECT_TRUE(all) << "a server got no part";
}

TensorRef RefOf(const v1::Tensor& tensor) {
  return {tensor.dtype(), {tensor.shape().begin(), tensor.shape().end()}, tensor.data()};
}

// Servers of its own, which it stops.
TEST(ShardedFailureTest, ADeadServerIsNamed) {
  std::vector<std::unique_ptr<server::Server>> servers;
  std::vector<std::string> addresses;
  for (int i = 0; i < 3; ++i) {
    servers.push_back(server::Server::Start(server::LoopbackConfig()).value());
    addresses.push_back(servers.back()->address());
  }
  const auto client = ShardedClient::Connect(addresses, {.retry = {.max_attempts = 1}});
  ASSERT_TRUE(client.ok()) << client.status();
  const Request<float> request(kGrouped, {}, 1);
  servers[1].reset();
  for (const ShardBy by : {ShardBy::kHeads, ShardBy::kKeys}) {
    const auto result = (*client)->AttendSharded(request.query(), request.key(), request.value(),
                                                 request.options, by);
    EXPECT_EQ(result.status().code(), absl::StatusCode::kUnavailable) << result.status();
    EXPECT_THAT(std::string(result.status().message()),
                AllOf(HasSubstr("shard 2 of 3"), HasSubstr(addresses[1])));
  }
  const auto late = ShardedClient::Connect(addresses, {.connect_timeout = absl::Milliseconds(200)});
  EXPECT_EQ(late.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(late.status().message()), HasSubstr(addresses[1]));
}

// The parts of a long call stop with the one that failed: their servers are idle again, though
// nothing else ended them.
TEST(ShardedFailureTest, TheFirstErrorStopsTheOthers) {
  std::vector<std::unique_ptr<server::Server>> servers;
  std::vector<std::string> addresses;
  for (int i = 0; i < 2; ++i) {
    servers.push_back(server::Server::Start(server::LoopbackConfig()).value());
    addresses.push_back(servers.back()->address());
  }
  const auto client = ShardedClient::Connect(
      addresses, {.call_timeout = absl::Minutes(10), .retry = {.max_attempts = 1}});
  ASSERT_TRUE(client.ok()) << client.status();
  servers[1].reset();
  const v1::AttendRequest request = server::LongRequest();
  const auto result = (*client)->AttendSharded(RefOf(request.query()), RefOf(request.key()),
                                               RefOf(request.value()), {}, ShardBy::kHeads);
  EXPECT_EQ(result.status().code(), absl::StatusCode::kUnavailable) << result.status();
  EXPECT_EQ(AttendCalls(*servers[0]), 0) << "the other part was computed to its end";
}

TEST(ShardedFailureTest, TheWholeEndsWithItsTimeout) {
  const auto server = server::Server::Start(server::LoopbackConfig()).value();
  const auto client = ShardedClient::Connect({server->address(), server->address()},
                                             {.call_timeout = absl::Milliseconds(100)});
  ASSERT_TRUE(client.ok()) << client.status();
  const v1::AttendRequest request = server::LongRequest();
  const auto result = (*client)->AttendSharded(RefOf(request.query()), RefOf(request.key()),
                                               RefOf(request.value()));
  EXPECT_EQ(result.status().code(), absl::StatusCode::kDeadlineExceeded) << result.status();
}

TEST(CallGroupTest, CancelStopsTheCallsThatRunAndThoseThatJoinLater) {
  CallGroup group(absl::Minutes(1));
  int first = 0;
  int second = 0;
  int late = 0;
  {
    const CallGroup::Member gone(group, [&] { ++first; });
  }
  const CallGroup::Member running(group, [&] { ++second; });
  group.Cancel();
  const CallGroup::Member joining(group, [&] { ++late; });
  EXPECT_EQ(first, 0);
  EXPECT_EQ(second, 1);
  EXPECT_EQ(late, 1);
}

TEST(SplitEvenlyTest, IsInOrderAndNoPartIsEmpty) {
  EXPECT_THAT(SplitEvenly(10, 3), ElementsAre(Range{0, 4}, Range{4, 7}, Range{7, 10}));
  EXPECT_THAT(SplitEvenly(2, 3), ElementsAre(Range{0, 1}, Range{1, 2}));
  EXPECT_TRUE(SplitEvenly(0, 3).empty());
}

// What a block's server sees of its own positions.
Problem LocalProblem(const ShardSizes& sizes, const KeyBlock& block) {
  Problem local;
  local.batch = block.batch.size();
  local.heads = local.kv_heads = 1;
  local.queries = block.queries.size();
  local.keys = block.keys.size();
  local.causal = block.causal == v1::CAUSAL_TOP_LEFT       ? core::Causal::kTopLeft
                 : block.causal == v1::CAUSAL_BOTTOM_RIGHT ? core::Causal::kBottomRight
                                                           : core::Causal::kNone;
  local.window = {block.left, block.right};
  local.key_lengths = block.key_lengths;
  EXPECT_GT(local.queries, 0);
  EXPECT_GT(local.keys, 0);
  EXPECT_LE(block.queries.end, sizes.queries);
  EXPECT_GE(block.left.value_or(0), 0);
  EXPECT_GE(block.right.value_or(0), 0);
  return local;
}

// Query i's keys are those of the block that it is in, at its distance.
void ExpectQueryKeepsItsKeys(const Problem& whole, const v1::AttendOptions& options, Range keys,
                             int64_t batch, int64_t i, const std::vector<KeyBlock>& blocks,
                             const ShardSizes& sizes) {
  const core::KeyRange seen = whole.VisibleKeys(batch, i);
  core::KeyRange expected = {std::max(seen.begin, keys.begin), std::min(seen.end, keys.end)};
  if (expected.size() <= 0) expected = {};
  core::KeyRange actual;
  int found = 0;
  for (const KeyBlock& block : blocks) {
    if (batch < block.batch.begin || batch >= block.batch.end) continue;
    if (i < block.queries.begin || i >= block.queries.end) continue;
    ++found;
    const Problem local = LocalProblem(sizes, block);
    const int64_t b = batch - block.batch.begin;
    const int64_t query = i - block.queries.begin;
    actual = local.VisibleKeys(b, query);
    const int64_t position = whole.Offset(batch) + i;
    for (int64_t j = actual.begin; j < actual.end && options.alibi_slopes_size() > 0; ++j) {
      const int64_t key = block.keys.begin + j;
      const int64_t distance =
          block.alibi_from.has_value()
              ? std::abs(position - *block.alibi_from) + std::abs(*block.alibi_from - key)
              : std::abs(query + local.Offset(b) - j);
      ASSERT_EQ(distance, std::abs(position - key));
    }
    actual = {actual.begin + block.keys.begin, actual.end + block.keys.begin};
    if (actual.size() <= 0) actual = {};
  }
  ASSERT_LE(found, 1);
  ASSERT_EQ(actual.begin, expected.begin);
  ASSERT_EQ(actual.end, expected.end);
}

TEST(KeyBlocksTest, EveryQueryKeepsItsKeysAndDistances) {
  constexpr uint32_t kSeed = 1;
  std::mt19937 rng(kSeed);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(rng() % n); };
  for (int n = 0; n < 3000 && !testing::Test::HasFatalFailure(); ++n) {
    ShardSizes sizes;
    sizes.batch = 1 + below(4);
    sizes.heads = sizes.kv_heads = 1;
    sizes.queries = 1 + below(14);
    sizes.keys = 1 + below(14);
    v1::AttendOptions options;
    options.set_causal(static_cast<v1::Causal>(below(4)));
    if (below(2) == 0) options.mutable_window()->set_left(below(16));
    if (below(2) == 0) options.mutable_window()->set_right(below(16));
    if (below(8) == 0) {
      options.mutable_window()->set_right(std::numeric_limits<int64_t>::max());
      options.mutable_window()->set_left(std::numeric_limits<int64_t>::max());
    }
    if (below(2) == 0) options.add_alibi_slopes(1);
    for (int64_t b = 0, lengths = below(2); b < sizes.batch * lengths; ++b) {
      options.add_key_lengths(below(3) == 0 ? sizes.keys : below(sizes.keys + 1));
    }
    Problem whole;
    whole.batch = sizes.batch;
    whole.heads = whole.kv_heads = 1;
    whole.queries = sizes.queries;
    whole.keys = sizes.keys;
    whole.causal = options.causal() == v1::CAUSAL_TOP_LEFT       ? core::Causal::kTopLeft
                   : options.causal() == v1::CAUSAL_BOTTOM_RIGHT ? core::Causal::kBottomRight
                                                                 : core::Causal::kNone;
    if (options.window().has_left()) {
      whole.window.left = std::min<int64_t>(options.window().left(), 1000);
    }
    if (options.window().has_right()) {
      whole.window.right = std::min<int64_t>(options.window().right(), 1000);
    }
    whole.key_lengths.assign(options.key_lengths().begin(), options.key_lengths().end());
    for (const Range keys : SplitEvenly(sizes.keys, 1 + below(5))) {
      const std::vector<KeyBlock> blocks = KeyBlocksOf(sizes, options, keys);
      for (int64_t batch = 0; batch < sizes.batch; ++batch) {
        for (int64_t i = 0; i < sizes.queries; ++i) {
          SCOPED_TRACE(absl::StrCat("problem ", n, " of seed ", kSeed, ": Tq=", sizes.queries,
                                    " Tk=", sizes.keys, " keys ", keys.begin, " to ", keys.end,
                                    " batch ", batch, " query ", i, " ",
                                    options.ShortDebugString()));
          ASSERT_NO_FATAL_FAILURE(
              ExpectQueryKeepsItsKeys(whole, options, keys, batch, i, blocks, sizes));
        }
      }
    }
  }
}

// Decoding: one query a batch sees all keys before it, so that one call serves all batches.
TEST(KeyBlocksTest, OneCallServesBatchesOfDifferentLengths) {
  ShardSizes sizes;
  sizes.batch = 4;
  sizes.queries = 1;
  sizes.keys = 90;
  v1::AttendOptions options;
  options.set_causal(v1::CAUSAL_BOTTOM_RIGHT);
  for (const int64_t length : {90, 40, 35, 62}) options.add_key_lengths(length);
  const std::vector<KeyBlock> blocks = KeyBlocksOf(sizes, options, {30, 60});
  ASSERT_EQ(blocks.size(), 1u);
  EXPECT_EQ(blocks[0].batch, (Range{0, 4}));
  EXPECT_THAT(blocks[0].key_lengths, ElementsAre(30, 10, 5, 30));
  EXPECT_EQ(blocks[0].causal, v1::CAUSAL_NONE);
  EXPECT_FALSE(blocks[0].right.has_value());
}

// A window needs few of the queries for each range of keys.
TEST(KeyBlocksTest, OnlyQueriesThatSeeAKeyAreSent) {
  ShardSizes sizes;
  sizes.batch = 1;
  sizes.queries = sizes.keys = 300;
  v1::AttendOptions options;
  options.set_causal(v1::CAUSAL_TOP_LEFT);
  options.mutable_window()->set_left(10);
  const std::vector<KeyBlock> blocks = KeyBlocksOf(sizes, options, {100, 200});
  ASSERT_EQ(blocks.size(), 1u);
  EXPECT_EQ(blocks[0].queries, (Range{100, 210}));
  EXPECT_EQ(blocks[0].keys, (Range{100, 200}));
}

}  // namespace
}  // namespace attendant
