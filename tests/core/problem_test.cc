#include "core/problem.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/errors.h"
#include "tests/core/oracle.h"

namespace attendant::core {
namespace {

constexpr Layout kLayouts[] = {Layout::kBhtd, Layout::kBthd};

struct Sizes {
  int64_t batch = 2;
  int64_t heads = 4;
  int64_t kv_heads = 2;
  int64_t queries = 3;
  int64_t keys = 5;
  int64_t width = 8;
  int64_t value_width = 6;
};

struct Request {
  TensorSpec query;
  TensorSpec key;
  TensorSpec value;
  AttendOptions options;

  absl::StatusOr<Problem> Make() const { return MakeProblem(query, key, value, options); }
  absl::Status Refusal() const { return Make().status(); }
};

std::vector<int64_t> Shape(Layout layout, int64_t batch, int64_t heads, int64_t tokens,
                           int64_t width) {
  if (layout == Layout::kBhtd) return {batch, heads, tokens, width};
  return {batch, tokens, heads, width};
}

Request RequestOf(const Sizes& s, Layout layout = Layout::kBhtd, DType dtype = DType::kFloat32) {
  Request request;
  request.query = {dtype, Shape(layout, s.batch, s.heads, s.queries, s.width)};
  request.key = {dtype, Shape(layout, s.batch, s.kv_heads, s.keys, s.width)};
  request.value = {dtype, Shape(layout, s.batch, s.kv_heads, s.keys, s.value_width)};
  request.options.layout = layout;
  return request;
}

Problem ProblemOf(int64_t queries, int64_t keys, Causal causal) {
  Problem problem;
  problem.batch = problem.heads = problem.kv_heads = 1;
  problem.queries = queries;
  problem.keys = keys;
  problem.causal = causal;
  return problem;
}

// INVALID_ARGUMENT that names this field, and whose message has all these parts.
MATCHER_P2(IsRefusal, field, parts, "") {
  const std::string message(arg.message());
  *result_listener << "whose field is " << FieldOf(arg).value_or("not named");
  return arg.code() == absl::StatusCode::kInvalidArgument && FieldOf(arg) == std::string(field) &&
         message.find(std::string(field)) == 0 &&
         std::all_of(parts.begin(), parts.end(), [&](const std::string& part) {
           return message.find(part) != std::string::npos;
         });
}

auto IsInvalid(std::string field, std::vector<std::string> parts) {
  return IsRefusal(std::move(field), std::move(parts));
}

std::string At(const std::string& name, int axis) {
  return name + ".shape[" + std::to_string(axis) + "]";
}

// The request's tensors by name.
std::vector<std::pair<std::string, TensorSpec Request::*>> Tensors() {
  return {{"query", &Request::query}, {"key", &Request::key}, {"value", &Request::value}};
}

TEST(MakeProblemTest, ReadsTheSizesInEitherLayout) {
  for (const Layout layout : kLayouts) {
    const auto problem = RequestOf({}, layout, DType::kFloat64).Make();
    ASSERT_TRUE(problem.ok()) << problem.status();
    EXPECT_EQ(problem->dtype, DType::kFloat64);
    EXPECT_EQ(problem->layout, layout);
    EXPECT_EQ(problem->batch, 2);
    EXPECT_EQ(problem->heads, 4);
    EXPECT_EQ(problem->kv_heads, 2);
    EXPECT_EQ(problem->queries, 3);
    EXPECT_EQ(problem->keys, 5);
    EXPECT_EQ(problem->width, 8);
    EXPECT_EQ(problem->value_width, 6);
  }
}

TEST(MakeProblemTest, TakesTheOptions) {
  Request request = RequestOf({});
  request.options.path = Path::kExplicit;
  request.options.causal = Causal::kTopLeft;
  request.options.scale = -2.5;
  request.options.return_weights = true;
  request.options.return_logsumexp = true;
  request.options.return_key_sums = true;
  const auto problem = request.Make();
  ASSERT_TRUE(problem.ok()) << problem.status();
  EXPECT_EQ(problem->path, Path::kExplicit);
  EXPECT_EQ(problem->causal, Causal::kTopLeft);
  EXPECT_EQ(problem->scale, -2.5);
  EXPECT_TRUE(problem->return_weights);
  EXPECT_TRUE(problem->return_logsumexp);
  EXPECT_TRUE(problem->return_key_sums);
}

TEST(MakeProblemTest, ReturnsNothingButTheOutputUnlessAsked) {
  const auto problem = RequestOf({}).Make();
  ASSERT_TRUE(problem.ok()) << problem.status();
  EXPECT_EQ(problem->path, Path::kChunked);
  EXPECT_EQ(problem->causal, Causal::kNone);
  EXPECT_FALSE(problem->return_weights);
  EXPECT_FALSE(problem->return_logsumexp);
  EXPECT_FALSE(problem->return_key_sums);
}

TEST(MakeProblemTest, EachSizeMayBeZero) {
  const std::pair<const char*, Sizes> cases[] = {
      {"batch", {.batch = 0}},
      {"heads", {.heads = 0}},
      {"all heads", {.heads = 0, .kv_heads = 0}},
      {"queries", {.queries = 0}},
      {"keys", {.keys = 0}},
      {"width", {.width = 0}},
      {"value width", {.value_width = 0}},
      {"everything", {0, 0, 0, 0, 0, 0, 0}},
  };
  for (const auto& [name, sizes] : cases) {
    SCOPED_TRACE(name);
    for (const Layout layout : kLayouts) {
      for (const Path path : {Path::kExplicit, Path::kChunked}) {
        Request request = RequestOf(sizes, layout);
        request.options.path = path;
        request.options.return_weights = true;
        EXPECT_TRUE(request.Make().ok()) << request.Make().status();
      }
    }
  }
}

TEST(MakeProblemTest, RefusesAnotherRank) {
  for (const auto& [name, tensor] : Tensors()) {
    Request request = RequestOf({});
    (request.*tensor).shape = {1, 2, 7};
    EXPECT_THAT(request.Refusal(),
                IsInvalid(name + ".shape", {"has 3 dimensions (1, 2, 7)", "must have 4"}));
    (request.*tensor).shape = {};
    EXPECT_THAT(request.Refusal(), IsInvalid(name + ".shape", {"has 0", "must have 4"}));
    (request.*tensor).shape = {1, 1, 1, 1, 1};
    EXPECT_THAT(request.Refusal(), IsInvalid(name + ".shape", {"has 5", "must have 4"}));
  }
}

TEST(MakeProblemTest, DoesNotRepeatALongShape) {
  Request request = RequestOf({});
  request.query.shape.assign(100'000, 1);
  const absl::Status refusal = request.Refusal();
  EXPECT_THAT(refusal, IsInvalid("query.shape", {"has 100000 dimensions", "must have 4"}));
  EXPECT_LT(refusal.message().size(), 200u);
}

TEST(MakeProblemTest, RefusesANegativeSize) {
  for (const auto& [name, tensor] : Tensors()) {
    for (int axis = 0; axis < 4; ++axis) {
      Request request = RequestOf({});
      (request.*tensor).shape[axis] = -3;
      EXPECT_THAT(request.Refusal(), IsInvalid(At(name, axis), {"is -3", "must be 0 or more"}));
      (request.*tensor).shape[axis] = std::numeric_limits<int64_t>::min();
      EXPECT_THAT(request.Refusal(), IsInvalid(At(name, axis), {"is -9223372036854775808"}));
    }
  }
}

TEST(MakeProblemTest, RefusesADTypeThatIsNotFloating) {
  for (const auto& [name, tensor] : Tensors()) {
    Request request = RequestOf({});
    (request.*tensor).dtype = DType::kUnspecified;
    EXPECT_THAT(
        request.Refusal(),
        IsInvalid(name + ".dtype", {"is UNSPECIFIED", "must be FLOAT32, FLOAT64, FLOAT16"}));
    (request.*tensor).dtype = DType::kBool;
    EXPECT_THAT(request.Refusal(), IsInvalid(name + ".dtype", {"is BOOL", "must be FLOAT32"}));
  }
}

TEST(MakeProblemTest, TakesEveryFloatingType) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16}) {
    const auto problem = RequestOf({}, Layout::kBhtd, dtype).Make();
    ASSERT_TRUE(problem.ok()) << problem.status();
    EXPECT_EQ(problem->dtype, dtype);
  }
}

TEST(MakeProblemTest, TakesAMaskOfHalfPrecisionWithQueriesOfIt) {
  Request request = RequestOf({}, Layout::kBhtd, DType::kFloat16);
  for (const DType dtype : {DType::kBool, DType::kFloat16, DType::kFloat32}) {
    request.options.mask = TensorSpec{dtype, {}};
    EXPECT_TRUE(request.Make().ok()) << request.Make().status();
  }
  for (const DType dtype : {DType::kBFloat16, DType::kFloat64}) {
    request.options.mask = TensorSpec{dtype, {}};
    EXPECT_THAT(request.Refusal(), IsInvalid("options.mask.dtype", {"BOOL, FLOAT16 or FLOAT32"}));
  }
}

TEST(MakeProblemTest, RefusesTensorsOfDifferentTypes) {
  Request request = RequestOf({});
  request.key.dtype = DType::kFloat64;
  EXPECT_THAT(request.Refusal(), IsInvalid("key.dtype", {"is FLOAT64", "must be FLOAT32"}));
  request = RequestOf({}, Layout::kBhtd, DType::kFloat64);
  request.value.dtype = DType::kFloat32;
  EXPECT_THAT(request.Refusal(), IsInvalid("value.dtype", {"is FLOAT32", "must be FLOAT64"}));
}

TEST(MakeProblemTest, RefusesSizesThatDisagreeWithTheIndexAsSent) {
  for (const Layout layout : kLayouts) {
    const bool head_major = layout == Layout::kBhtd;
    const int heads = head_major ? 1 : 2;
    const int tokens = head_major ? 2 : 1;
    const auto refusal = [&](TensorSpec Request::*tensor, int axis) {
      Request request = RequestOf({}, layout);
      (request.*tensor).shape[axis] = 77;
      return request.Refusal();
    };
    EXPECT_THAT(refusal(&Request::key, 0), IsInvalid("key.shape[0]", {"is 77", "must be 2"}));
    EXPECT_THAT(refusal(&Request::value, 0), IsInvalid("value.shape[0]", {"is 77", "must be 2"}));
    EXPECT_THAT(refusal(&Request::key, 3), IsInvalid("key.shape[3]", {"is 77", "must be 8"}));
    EXPECT_THAT(refusal(&Request::value, heads),
                IsInvalid(At("value", heads), {"is 77", "must be 2"}));
    EXPECT_THAT(refusal(&Request::value, tokens),
                IsInvalid(At("value", tokens), {"is 77", "must be 5"}));
  }
}

TEST(MakeProblemTest, KeyHeadsMustDivideQueryHeads) {
  for (const Layout layout : kLayouts) {
    const int axis = layout == Layout::kBhtd ? 1 : 2;
    for (const int64_t kv_heads : {0, 4, 5, 12}) {
      EXPECT_THAT(
          RequestOf({.heads = 6, .kv_heads = kv_heads}, layout).Refusal(),
          IsInvalid(At("key", axis), {"is " + std::to_string(kv_heads) + ",",
                                      "must divide the query's 6 heads", At("query", axis)}));
    }
    for (const int64_t kv_heads : {1, 2, 3, 6}) {
      EXPECT_TRUE(RequestOf({.heads = 6, .kv_heads = kv_heads}, layout).Make().ok()) << kv_heads;
    }
  }
}

TEST(MakeProblemTest, RefusesAScaleThatIsNotFinite) {
  const std::pair<double, const char*> cases[] = {
      {std::numeric_limits<double>::quiet_NaN(), "is nan"},
      {std::numeric_limits<double>::infinity(), "is inf"},
      {-std::numeric_limits<double>::infinity(), "is -inf"},
  };
  for (const auto& [scale, text] : cases) {
    Request request = RequestOf({});
    request.options.scale = scale;
    EXPECT_THAT(request.Refusal(), IsInvalid("options.scale", {text, "must be finite"}));
  }
}

TEST(MakeProblemTest, AMaskBroadcastsAlongItsMissingAxesAndThoseOfOne) {
  struct Case {
    std::vector<int64_t> shape;
    int64_t strides[4];
  };
  const Case cases[] = {
      {{2, 4, 3, 5}, {60, 15, 5, 1}},
      {{2, 1, 3, 5}, {15, 0, 5, 1}},
      {{1, 4, 1, 5}, {0, 5, 0, 1}},
      {{4, 3, 5}, {0, 15, 5, 1}},
      {{1, 3, 5}, {0, 0, 5, 1}},
      {{3, 5}, {0, 0, 5, 1}},
      {{3, 1}, {0, 0, 1, 0}},
      {{5}, {0, 0, 0, 1}},
      {{1}, {0, 0, 0, 0}},
      {{}, {0, 0, 0, 0}},
      {{2, 1, 1, 1}, {1, 0, 0, 0}},
  };
  for (const Case& c : cases) {
    Request request = RequestOf({.batch = 2, .heads = 4, .queries = 3, .keys = 5});
    request.options.mask = TensorSpec{DType::kFloat32, c.shape};
    const auto problem = request.Make();
    ASSERT_TRUE(problem.ok()) << problem.status();
    const MaskLayout& mask = *problem->mask;
    EXPECT_EQ(mask.dtype, DType::kFloat32);
    EXPECT_THAT(
        std::vector({mask.batch_stride, mask.head_stride, mask.query_stride, mask.key_stride}),
        testing::ElementsAreArray(c.strides));
  }
}

TEST(MakeProblemTest, RefusesAMaskThatDoesNotBroadcast) {
  struct Case {
    std::vector<int64_t> shape;
    const char* field;
    std::vector<std::string> texts;
  };
  const Case cases[] = {
      {{3, 4}, "options.mask.shape[1]", {"is 4", "1 or 5", "the key's tokens"}},
      {{2, 5}, "options.mask.shape[0]", {"is 2", "1 or 3", "the query's tokens"}},
      {{3, 4, 3, 5}, "options.mask.shape[0]", {"is 3", "1 or 2", "the query's batch"}},
      {{2, 2, 3, 5}, "options.mask.shape[1]", {"is 2", "1 or 4", "the query's heads"}},
      {{2, 3, 5}, "options.mask.shape[0]", {"is 2", "1 or 4", "(B, 1, Tq, Tk)"}},
      {{0}, "options.mask.shape[0]", {"is 0", "1 or 5"}},
      {{-1, 5}, "options.mask.shape[0]", {"is -1"}},
      {{1, 1, 1, 3, 5}, "options.mask.shape", {"5 dimensions", "4 or fewer"}},
  };
  for (const Case& c : cases) {
    Request request = RequestOf({.batch = 2, .heads = 4, .queries = 3, .keys = 5});
    request.options.mask = TensorSpec{DType::kBool, c.shape};
    EXPECT_THAT(request.Refusal(), IsInvalid(c.field, c.texts));
  }
}

TEST(MakeProblemTest, RefusesAMaskOfThreeDimensionsThatFitsTwoReadings) {
  Request request = RequestOf({.batch = 4, .heads = 4, .queries = 3, .keys = 5});
  request.options.mask = TensorSpec{DType::kBool, {4, 3, 5}};
  EXPECT_THAT(request.Refusal(), IsInvalid("options.mask.shape", {"(4, 3, 5)", "(B, 1, Tq, Tk)"}));
  for (const auto& shape : {std::vector<int64_t>{1, 4, 3, 5}, {4, 1, 3, 5}, {1, 3, 5}}) {
    request.options.mask->shape = shape;
    EXPECT_TRUE(request.Make().ok()) << request.Make().status();
  }
}

TEST(MakeProblemTest, RefusesAMaskOfAnotherType) {
  for (const DType dtype : {DType::kUnspecified, DType::kFloat64, DType::kFloat16}) {
    Request request = RequestOf({});
    request.options.mask = TensorSpec{dtype, {}};
    EXPECT_THAT(request.Refusal(),
                IsInvalid("options.mask.dtype", {std::string(NameOf(dtype)), "BOOL or FLOAT32"}));
  }
  Request wide = RequestOf({}, Layout::kBhtd, DType::kFloat64);
  wide.options.mask = TensorSpec{DType::kFloat32, {}};
  EXPECT_THAT(wide.Refusal(), IsInvalid("options.mask.dtype", {"FLOAT32", "BOOL or FLOAT64"}));
}

TEST(MakeProblemTest, RefusesAMaskWhoseBytesOverflow) {
  const int64_t huge = std::numeric_limits<int32_t>::max();
  Request request = RequestOf({.batch = 0,
                               .heads = 1,
                               .kv_heads = 1,
                               .queries = huge,
                               .keys = huge,
                               .width = 0,
                               .value_width = 0});
  request.options.mask = TensorSpec{DType::kFloat32, {huge, huge}};
  EXPECT_THAT(request.Refusal(), IsInvalid("options.mask.shape", {"2147483647", "63 bits"}));
}

TEST(MakeProblemTest, TakesWhatSaysWhichKeysAreSeen) {
  Request request = RequestOf({.batch = 2, .keys = 5});
  request.options.causal = Causal::kBottomRight;
  request.options.key_lengths = {0, 5};
  request.options.window = Window{std::numeric_limits<int64_t>::max(), 0};
  const auto problem = request.Make();
  ASSERT_TRUE(problem.ok()) << problem.status();
  EXPECT_EQ(problem->causal, Causal::kBottomRight);
  EXPECT_THAT(problem->key_lengths, testing::ElementsAre(0, 5));
  EXPECT_EQ(problem->VisibleKeys(1, problem->queries - 1), (KeyRange{0, 5}));
  EXPECT_EQ(problem->window.right, 0);
}

TEST(MakeProblemTest, RefusesLengthsThatDoNotFit) {
  const std::tuple<std::vector<int64_t>, const char*, std::vector<std::string>> cases[] = {
      {{5}, "options.key_lengths", {"has 1", "must have 2", "one a batch"}},
      {{5, 5, 5}, "options.key_lengths", {"has 3", "must have 2"}},
      {{-1, 5}, "options.key_lengths[0]", {"is -1", "0 to 5"}},
      {{5, 6}, "options.key_lengths[1]", {"is 6", "0 to 5"}},
  };
  for (const auto& [lengths, field, texts] : cases) {
    Request request = RequestOf({.batch = 2, .keys = 5});
    request.options.key_lengths = lengths;
    EXPECT_THAT(request.Refusal(), IsInvalid(field, texts));
  }
}

TEST(MakeProblemTest, RefusesANegativeSideOfTheWindow) {
  Request request = RequestOf({});
  request.options.window = Window{-1, std::nullopt};
  EXPECT_THAT(request.Refusal(), IsInvalid("options.window.left", {"is -1", "0 or more"}));
  request.options.window = Window{2, std::numeric_limits<int64_t>::min()};
  EXPECT_THAT(request.Refusal(), IsInvalid("options.window.right", {"is -9223372036854775808"}));
}

TEST(MakeProblemTest, TakesWhatChangesScores) {
  Request request = RequestOf({});
  request.options.softcap = 30;
  request.options.alibi_slopes = {1, -1, 0, 0.5};
  request.options.sinks = {0, -3, 1e30, -std::numeric_limits<double>::infinity()};
  const auto problem = request.Make();
  ASSERT_TRUE(problem.ok()) << problem.status();
  EXPECT_EQ(problem->softcap, 30);
  EXPECT_EQ(problem->alibi_slopes, request.options.alibi_slopes);
  EXPECT_EQ(problem->sinks, request.options.sinks);
}

TEST(MakeProblemTest, RefusesWhatCannotChangeScores) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  struct Case {
    const char* field;
    double softcap;
    std::vector<double> slopes;
    std::vector<double> sinks;
    std::vector<std::string> texts;
  };
  const Case cases[] = {
      {"options.softcap", -1, {}, {}, {"is -1", "at least"}},
      {"options.softcap", kNaN, {}, {}, {"is nan", "at least"}},
      {"options.softcap", kInfinity, {}, {}, {"is inf", "finite"}},
      {"options.softcap", 1e-60, {}, {}, {"1e-60", "FLOAT32"}},
      {"options.alibi_slopes", 0, {1}, {}, {"has 1", "must have 4", "one a query head"}},
      {"options.alibi_slopes[2]", 0, {1, 1, 1e39, 1}, {}, {"is 1e+39", "finite in FLOAT32"}},
      {"options.sinks", 0, {}, {1, 2, 3, 4, 5}, {"has 5"}},
      {"options.sinks[1]", 0, {}, {1, kNaN, 3, 4}, {"is nan"}},
      {"options.sinks[3]", 0, {}, {1, 2, 3, kInfinity}, {"is inf", "finite or -inf"}},
  };
  for (const Case& c : cases) {
    Request request = RequestOf({});
    request.options.softcap = c.softcap;
    request.options.alibi_slopes = c.slopes;
    request.options.sinks = c.sinks;
    EXPECT_THAT(request.Refusal(), IsInvalid(c.field, c.texts));
  }
}

TEST(MakeProblemTest, RefusesAScaleThatTheTypeDoesNotHold) {
  Request request = RequestOf({});
  request.options.scale = 1e39;
  EXPECT_THAT(request.Refusal(), IsInvalid("options.scale", {"1e+39", "FLOAT32"}));
  for (const auto tensor : {&Request::query, &Request::key, &Request::value}) {
    (request.*tensor).dtype = DType::kFloat64;
  }
  EXPECT_TRUE(request.Make().ok()) << request.Make().status();
  request.options.scale = 1.7e308;
  EXPECT_THAT(request.Refusal(), IsInvalid("options.scale", {"1.7e+308", "FLOAT64"}));
}

TEST(MakeProblemTest, DefaultScaleIsOneOverTheRootOfTheWidth) {
  for (const int64_t width : {1, 3, 64, 80}) {
    const auto problem = RequestOf({.width = width}).Make();
    ASSERT_TRUE(problem.ok()) << problem.status();
    EXPECT_DOUBLE_EQ(problem->scale, 1 / std::sqrt(static_cast<double>(width)));
    EXPECT_DOUBLE_EQ(problem->ScaleLog2(), problem->scale * std::log2(std::exp(1.0)));
  }
}

TEST(MakeProblemTest, ScaleIsFiniteWhereTheWidthIsZero) {
  const auto problem = RequestOf({.width = 0}).Make();
  ASSERT_TRUE(problem.ok()) << problem.status();
  EXPECT_TRUE(std::isfinite(problem->scale));
}

constexpr int64_t Pow2(int exponent) { return int64_t{1} << exponent; }

TEST(MakeProblemTest, RefusesATensorWhoseBytesOverflow) {
  const std::pair<std::vector<int64_t>, const char*> cases[] = {
      {{Pow2(32), Pow2(32), 1, 1}, "(4294967296, 4294967296, 1, 1)"},
      {{1, 1, Pow2(62), 1}, "4611686018427387904"},
      {{Pow2(16), Pow2(16), Pow2(16), Pow2(16)}, "65536"},
      {{3, 1, 1, std::numeric_limits<int64_t>::max()}, "9223372036854775807"},
  };
  for (const auto& [shape, text] : cases) {
    for (const auto& [name, tensor] : Tensors()) {
      Request request = RequestOf({});
      (request.*tensor).shape = shape;
      EXPECT_THAT(request.Refusal(), IsInvalid(name + ".shape", {text, "overflow 63 bits"}));
    }
  }
}

TEST(CheckTensorTest, CountsBytesNotElements) {
  const auto check = [](DType dtype, int64_t rows, int64_t columns) {
    return CheckTensor("x", {dtype, {rows, columns}}, 2);
  };
  EXPECT_TRUE(check(DType::kFloat32, Pow2(30), Pow2(30)).ok());
  EXPECT_THAT(check(DType::kFloat32, Pow2(31) - 1, Pow2(31) - 1),
              IsInvalid("x.shape", {"2147483647", "63 bits"}));
  EXPECT_TRUE(check(DType::kFloat64, Pow2(30), Pow2(29)).ok());
  EXPECT_THAT(check(DType::kFloat64, Pow2(30), Pow2(30)),
              IsInvalid("x.shape", {"1073741824", "63 bits"}));
}

TEST(CheckTensorTest, RefusesASizeThatLibrariesCannotCount) {
  EXPECT_TRUE(CheckTensor("x", {DType::kFloat32, {Pow2(31) - 1, 0}}, 2).ok());
  EXPECT_THAT(CheckTensor("x", {DType::kFloat32, {1, Pow2(31)}}, 2),
              IsInvalid("x.shape[1]", {"2147483648", "2147483647"}));
}

// Its strides would overflow, though it has no element.
TEST(CheckTensorTest, ASizeOfZeroDoesNotExcuseTheOthers) {
  for (int axis = 0; axis < 3; ++axis) {
    std::vector<int64_t> shape = {Pow2(32), Pow2(32), Pow2(32)};
    shape[axis] = 0;
    EXPECT_THAT(CheckTensor("x", {DType::kFloat32, shape}, 3),
                IsInvalid("x.shape", {"4294967296", "overflow 63 bits"}));
  }
  EXPECT_TRUE(CheckTensor("x", {DType::kFloat32, {0, Pow2(30), Pow2(30)}}, 3).ok());
}

// Each tensor that is sent holds nothing; what they ask for does not fit.
TEST(MakeProblemTest, RefusesAnOutputThatOverflows) {
  for (const Layout layout : kLayouts) {
    const Request request = RequestOf({.batch = 1,
                                       .heads = Pow2(20),
                                       .kv_heads = 1,
                                       .queries = Pow2(30),
                                       .keys = 0,
                                       .width = 0,
                                       .value_width = Pow2(29)},
                                      layout);
    EXPECT_THAT(request.Refusal(),
                IsInvalid("query.shape", {"output", "1048576", "1073741824", "536870912"}));
  }
}

TEST(MakeProblemTest, RefusesScoresThatOverflowWhereTheyAreHeld) {
  Request request = RequestOf({.batch = 1,
                               .heads = 4,
                               .kv_heads = 1,
                               .queries = Pow2(30),
                               .keys = Pow2(29),
                               .width = 0,
                               .value_width = 0});
  request.options.path = Path::kChunked;
  EXPECT_TRUE(request.Make().ok()) << request.Make().status();
  request.options.return_weights = true;
  EXPECT_THAT(request.Refusal(), IsInvalid("query.shape", {"scores", "1073741824", "536870912"}));
  request.options.return_weights = false;
  request.options.path = Path::kExplicit;
  EXPECT_THAT(request.Refusal(), IsInvalid("query.shape", {"scores", "1073741824", "536870912"}));
}

TEST(MakeProblemTest, RefusesKeySumsThatOverflow) {
  const Sizes many_keys{.batch = 2,
                        .heads = Pow2(30),
                        .kv_heads = 1,
                        .queries = 1,
                        .keys = Pow2(30),
                        .width = 0,
                        .value_width = 0};
  EXPECT_THAT(RequestOf(many_keys).Refusal(),
              IsInvalid("query.shape", {"key sums", "1073741824", "63 bits"}));
}

// The view of an output without an element multiplies its sizes too.
TEST(MakeProblemTest, RefusesAnEmptyOutputWhoseStridesOverflow) {
  const Sizes no_batch{.batch = 0,
                       .heads = Pow2(20),
                       .kv_heads = 1,
                       .queries = Pow2(30),
                       .keys = 0,
                       .width = 0,
                       .value_width = Pow2(30)};
  EXPECT_FALSE(RequestOf(no_batch, Layout::kBhtd).Make().ok());
  const Sizes no_heads{.batch = 4,
                       .heads = 0,
                       .kv_heads = 0,
                       .queries = Pow2(30),
                       .keys = 0,
                       .width = 0,
                       .value_width = Pow2(30)};
  EXPECT_FALSE(RequestOf(no_heads, Layout::kBhtd).Make().ok());
  const Sizes no_queries{.batch = 8,
                         .heads = Pow2(30),
                         .kv_heads = 1,
                         .queries = 0,
                         .keys = 0,
                         .width = 0,
                         .value_width = Pow2(30)};
  EXPECT_FALSE(RequestOf(no_queries, Layout::kBthd).Make().ok());
}

TEST(CheckSizeTest, NamesBothNumbersAndTheRule) {
  EXPECT_TRUE(CheckSize("w_q.shape[0]", 4, 4, "the width of x").ok());
  EXPECT_THAT(CheckSize("w_q.shape[0]", 3, 4, "the width of x"),
              IsInvalid("w_q.shape[0]", {"is 3", "must be 4", "the width of x"}));
}

TEST(CheckSameDTypeTest, NamesBothTypesAndTheFirstTensor) {
  EXPECT_TRUE(CheckSameDType("w_q", DType::kFloat32, "x", DType::kFloat32).ok());
  EXPECT_THAT(CheckSameDType("w_q", DType::kFloat32, "x", DType::kFloat64),
              IsInvalid("w_q.dtype", {"is FLOAT32", "must be FLOAT64", "x.dtype"}));
}

TEST(ProblemTest, ConsecutiveHeadsShareAKeyHead) {
  Problem problem;
  problem.heads = 6;
  problem.kv_heads = 2;
  std::vector<int64_t> kv_heads;
  for (int64_t head = 0; head < problem.heads; ++head) kv_heads.push_back(problem.KvHead(head));
  EXPECT_THAT(kv_heads, testing::ElementsAre(0, 0, 0, 1, 1, 1));
}

// Calls check for each small problem of one batch.
void ForEachSmallProblem(const std::function<void(const Problem&)>& check) {
  std::vector<Window> windows;
  for (const int64_t left : {-1, 0, 1, 3}) {
    for (const int64_t right : {-1, 0, 2}) {
      windows.push_back({left < 0 ? std::nullopt : std::optional(left),
                         right < 0 ? std::nullopt : std::optional(right)});
    }
  }
  for (const Causal causal : {Causal::kNone, Causal::kTopLeft, Causal::kBottomRight}) {
    for (const Window& window : windows) {
      for (int64_t queries = 0; queries <= 6; ++queries) {
        for (int64_t keys = 0; keys <= 6; ++keys) {
          Problem problem = ProblemOf(queries, keys, causal);
          problem.window = window;
          for (int64_t length = -1; length <= keys; length += 2) {
            if (length >= 0) problem.key_lengths = {length};
            SCOPED_TRACE(testing::Message()
                         << queries << " queries, " << keys << " keys, length " << length
                         << ", causal " << static_cast<int>(causal) << ", left "
                         << window.left.value_or(-1) << ", right " << window.right.value_or(-1));
            check(problem);
          }
        }
      }
    }
  }
}

TEST(ProblemTest, VisiblePairsAreThoseThatAreVisible) {
  ForEachSmallProblem([](const Problem& problem) {
    int64_t pairs = 0;
    for (int64_t query = 0; query < problem.queries; ++query) {
      for (int64_t key = 0; key < problem.keys; ++key)
        pairs += OracleSees(problem, 0, query, key) ? 1 : 0;
    }
    EXPECT_EQ(problem.VisiblePairs(0), pairs);
  });
}

TEST(ProblemTest, VisibleKeysAreThoseThatTheQuerySees) {
  ForEachSmallProblem([](const Problem& problem) {
    KeyRange before;
    for (int64_t query = 0; query < problem.queries; ++query) {
      const KeyRange seen = problem.VisibleKeys(0, query);
      EXPECT_LE(before.begin, seen.begin) << query;
      EXPECT_LE(before.end, seen.end) << query;
      EXPECT_LE(seen.begin, seen.end) << query;
      for (int64_t key = 0; key < problem.keys; ++key) {
        EXPECT_EQ(seen.begin <= key && key < seen.end, OracleSees(problem, 0, query, key))
            << query << " sees " << key;
      }
      before = seen;
    }
  });
}

TEST(ProblemTest, VisibleKeysOfAnyReachFromTheFirstQuerysToTheLasts) {
  ForEachSmallProblem([](const Problem& problem) {
    for (int64_t first = 0; first < problem.queries; ++first) {
      for (int64_t last = first; last < problem.queries; ++last) {
        EXPECT_EQ(
            problem.VisibleKeysOfAny(0, first, last - first + 1),
            (KeyRange{problem.VisibleKeys(0, first).begin, problem.VisibleKeys(0, last).end}));
      }
    }
  });
}

TEST(ProblemTest, AskTellsNoneFromAllFromMixed) {
  ForEachSmallProblem([](const Problem& problem) {
    for (int64_t first = 0; first < problem.queries; ++first) {
      for (int64_t count = 1; first + count <= problem.queries; ++count) {
        for (KeyRange keys{0, 1}; keys.begin < problem.keys; ++keys.begin) {
          for (keys.end = keys.begin + 1; keys.end <= problem.keys; ++keys.end) {
            int64_t seen = 0;
            for (int64_t query = first; query < first + count; ++query) {
              for (int64_t key = keys.begin; key < keys.end; ++key) {
                seen += OracleSees(problem, 0, query, key) ? 1 : 0;
              }
            }
            const Visibility expected = seen == 0                     ? Visibility::kNone
                                        : seen == count * keys.size() ? Visibility::kAll
                                                                      : Visibility::kMixed;
            EXPECT_EQ(problem.Ask(0, first, count, keys), expected)
                << first << " + " << count << " of " << keys.begin << " .. " << keys.end;
          }
        }
      }
    }
  });
}

TEST(ProblemTest, VisiblePairsSaturate) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(ProblemOf(kMax, kMax, Causal::kNone).VisiblePairs(0), kMax);
  EXPECT_EQ(ProblemOf(kMax, kMax, Causal::kTopLeft).VisiblePairs(0), kMax);
  EXPECT_EQ(ProblemOf(kMax - 1, kMax - 1, Causal::kTopLeft).VisiblePairs(0), kMax);
  EXPECT_EQ(ProblemOf(kMax, 2, Causal::kTopLeft).VisiblePairs(0), kMax);
  // Twice the pairs would overflow; the pairs do not.
  EXPECT_EQ(ProblemOf(Pow2(32) - 1, Pow2(32) - 1, Causal::kTopLeft).VisiblePairs(0),
            (Pow2(32) - 1) * Pow2(31));
}

}  // namespace
}  // namespace attendant::core
