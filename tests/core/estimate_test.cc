#include "core/estimate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>

#include "core/errors.h"

namespace attendant::core {
namespace {

using ::testing::AnyOf;
using ::testing::Eq;
using ::testing::HasSubstr;

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();

// B = 2, H = 4, Tq = 3, Tk = 5, D = 8.
EstimateSpec Small() {
  EstimateSpec spec;
  spec.batch = 2;
  spec.heads = 4;
  spec.queries = 3;
  spec.keys = 5;
  spec.width = 8;
  return spec;
}

// The lesson's head: five words, d_model 8, width 4, float64.
EstimateSpec Lesson() {
  EstimateSpec spec;
  spec.dtype = DType::kFloat64;
  spec.batch = spec.heads = 1;
  spec.queries = spec.keys = 5;
  spec.width = 4;
  spec.d_model = 8;
  return spec;
}

Estimate Of(const EstimateSpec& spec, int threads = 2) {
  const auto estimate = MakeEstimate(spec, {threads, Kernel::kFused, {}, {}});
  EXPECT_TRUE(estimate.ok()) << estimate.status();
  return estimate.value_or(Estimate());
}

struct Row {
  std::string name;
  int64_t flops;
  int64_t bytes;
  bool operator==(const Row&) const = default;
};
void PrintTo(const Row& row, std::ostream* out) {
  *out << row.name << ' ' << row.flops << ' ' << row.bytes;
}

std::vector<Row> TableOf(const PathEstimate& path) {
  std::vector<Row> rows;
  for (const StepCost& step : path.cost.steps) rows.push_back({step.name, step.flops, step.bytes});
  return rows;
}

TEST(EstimateTest, TheLessonsTable) {
  const Estimate estimate = Of(Lesson());
  // 6 T d_model d_k, 2 T^2 d_k, 5 T^2, 2 T^2 d_v, 2 T d_v d_model; 3 T d_k, T^2, T^2, T d_v and
  // T d_model elements.
  EXPECT_THAT(
      TableOf(estimate.explicit_path),
      testing::ElementsAre(Row{"projections", 6 * 5 * 8 * 4, 8 * 3 * 5 * 4},
                           Row{"scores", 2 * 25 * 4, 8 * 25}, Row{"softmax", 5 * 25, 8 * 25},
                           Row{"values", 2 * 25 * 4, 8 * 5 * 4},
                           Row{"output_projection", 2 * 5 * 4 * 8, 8 * 5 * 8}));
  for (size_t step = 0; step < 5; ++step) {
    EXPECT_EQ(estimate.chunked_path.cost.steps[step].flops,
              estimate.explicit_path.cost.steps[step].flops);
  }
  EXPECT_EQ(estimate.crossover_tokens, 16);
  // Queries, keys, values and contexts, and the scores.
  EXPECT_EQ(estimate.explicit_path.cost.workspace_bytes, 8 * (4 * 5 * 4 + 25));
  EXPECT_EQ(estimate.request_bytes, 8 * (5 * 8 + 4 * 8 * 4));
  EXPECT_EQ(estimate.response_bytes, 8 * 5 * 8);
}

TEST(EstimateTest, AttentionAloneHasThreeStepsAndNoCrossover) {
  EstimateSpec spec = Small();
  spec.kv_heads = 2;
  spec.value_width = 6;
  const Estimate estimate = Of(spec);
  EXPECT_THAT(TableOf(estimate.explicit_path),
              testing::ElementsAre(Row{"scores", 2 * (2 * 4 * 15) * 8, 4 * (2 * 4 * 15)},
                                   Row{"softmax", 5 * (2 * 4 * 15), 4 * (2 * 4 * 15)},
                                   Row{"values", 2 * (2 * 4 * 15) * 6, 4 * (2 * 4 * 3 * 6)}));
  EXPECT_EQ(estimate.crossover_tokens, 0);
  EXPECT_EQ(estimate.request_bytes, 4 * (2 * 4 * 3 * 8 + 2 * 2 * 5 * (8 + 6)));
  EXPECT_EQ(estimate.response_bytes, 4 * (2 * 4 * 3 * 6));
}

TEST(EstimateTest, WhatIsUnsetIsTakenFromItsNeighbour) {
  EstimateSpec spec = Small();
  spec.kv_heads = 4;
  spec.value_width = 8;
  EXPECT_EQ(Of(spec).request_bytes, Of(Small()).request_bytes);
  EXPECT_EQ(Of(spec).response_bytes, Of(Small()).response_bytes);
}

TEST(EstimateTest, AMaskIsPartOfTheRequest) {
  EstimateSpec spec = Small();
  const int64_t plain = Of(spec).request_bytes;
  spec.options.mask = TensorSpec{DType::kBool, {2, 1, 3, 5}};
  EXPECT_EQ(Of(spec).request_bytes, plain + 2 * 3 * 5);
  spec.options.mask = TensorSpec{DType::kFloat32, {5}};
  EXPECT_EQ(Of(spec).request_bytes, plain + 4 * 5);
}

TEST(EstimateTest, ThePathThatIsAskedForIsLeftAside) {
  EstimateSpec spec = Small();
  const Estimate chunked = Of(spec);
  spec.options.path = Path::kExplicit;
  const Estimate asked = Of(spec);
  EXPECT_EQ(TableOf(asked.chunked_path), TableOf(chunked.chunked_path));
  EXPECT_EQ(TableOf(asked.explicit_path), TableOf(chunked.explicit_path));
  EXPECT_EQ(asked.explicit_path.cost.workspace_bytes, 4 * (2 * 4 * 15));
}

TEST(EstimateTest, AHeadReturnsItsOutputAlone) {
  EstimateSpec spec = Lesson();
  const Estimate plain = Of(spec);
  spec.options.layout = Layout::kBthd;
  spec.options.return_weights = spec.options.return_key_sums = true;
  spec.options.return_logsumexp = true;
  const Estimate asked = Of(spec);
  EXPECT_EQ(asked.response_bytes, plain.response_bytes);
  EXPECT_EQ(asked.chunked_path.cost.workspace_bytes, plain.chunked_path.cost.workspace_bytes);
}

TEST(EstimateTest, SecondsAreThoseOfTheBasis) {
  EstimateBasis basis;
  for (DTypeSpeed& of : basis.speed.of) {
    of.explicit_path = of.explicit_few = {0.5, 1e-9};
    of.chunked_path = of.chunked_few = {0.25, 1e-9};
  }
  const auto estimate = MakeEstimate(Small(), basis);
  ASSERT_TRUE(estimate.ok());
  EXPECT_NEAR(estimate->explicit_path.seconds, 0.5, 1e-3);
  EXPECT_NEAR(estimate->chunked_path.seconds, 0.25, 1e-3);
  basis.factors = {2, 3};
  const auto corrected = MakeEstimate(Small(), basis);
  ASSERT_TRUE(corrected.ok());
  EXPECT_DOUBLE_EQ(corrected->explicit_path.seconds, 2 * estimate->explicit_path.seconds);
  EXPECT_DOUBLE_EQ(corrected->chunked_path.seconds, 3 * estimate->chunked_path.seconds);
  EXPECT_EQ(Of(Small()).chunked_path.seconds, 0);
}

// What is wrong, and what is said.
struct Wrong {
  const char* field;
  const char* message;
  void (*make)(EstimateSpec&);
};

TEST(EstimateTest, WhatIsWrongIsNamed) {
  const Wrong wrongs[] = {
      {"batch", "is -1, must be 0 or more", [](EstimateSpec& s) { s.batch = -1; }},
      {"heads", "is -2, must be 0 or more", [](EstimateSpec& s) { s.heads = -2; }},
      {"kv_heads", "is -3, must be 0 or more", [](EstimateSpec& s) { s.kv_heads = -3; }},
      {"queries", "is -4, must be 0 or more", [](EstimateSpec& s) { s.queries = -4; }},
      {"keys", "is -5, must be 0 or more", [](EstimateSpec& s) { s.keys = -5; }},
      {"width", "is -6, must be 0 or more", [](EstimateSpec& s) { s.width = -6; }},
      {"value_width", "is -7, must be 0", [](EstimateSpec& s) { s.value_width = -7; }},
      {"d_model", "is -8, must be 0 or more", [](EstimateSpec& s) { s.d_model = -8; }},
      {"keys", "is 2147483648, must be at most 2147483647",
       [](EstimateSpec& s) { s.keys = int64_t{1} << 31; }},
      {"d_model", "must be at most 2147483647", [](EstimateSpec& s) { s.d_model = kMax; }},
      {"kv_heads", "is 3, must divide heads, which is 4", [](EstimateSpec& s) { s.kv_heads = 3; }},
      {"kv_heads", "is 0, must divide heads", [](EstimateSpec& s) { s.kv_heads = 0; }},
      {"dtype", "is BOOL, must be FLOAT32", [](EstimateSpec& s) { s.dtype = DType::kBool; }},
      {"keys", "is 5, must be 3 (queries, where d_model is set",
       [](EstimateSpec& s) { s.d_model = 8; }},
      {"kv_heads", "is 2, must be 4 (heads), or unset",
       [](EstimateSpec& s) {
         s.d_model = 8;
         s.keys = 3;
         s.kv_heads = 2;
       }},
      {"heads", "is 0, must be 1 or more where d_model is set",
       [](EstimateSpec& s) {
         s.d_model = 8;
         s.heads = 0;
       }},
      {"width", "with 4 heads 8589934588 columns of a weight",
       [](EstimateSpec& s) {
         s.d_model = 8;
         s.keys = 3;
         s.width = kLargest;
       }},
      {"queries", "a query of (2, 2147483647, 2147483647, 8), whose bytes overflow 63 bits",
       [](EstimateSpec& s) { s.heads = s.queries = kLargest; }},
      {"keys", "a value of (2, 4, 2147483647, 2147483647)",
       [](EstimateSpec& s) { s.keys = s.value_width.emplace(kLargest); }},
      {"queries", "an output of (2, 4, 2147483647, 2147483647)",
       [](EstimateSpec& s) { s.queries = s.value_width.emplace(kLargest); }},
      {"keys", "weights of (2, 4, 2147483647, 2147483647)",
       [](EstimateSpec& s) {
         s.queries = s.keys = kLargest;
         s.width = 1;
         s.options.return_weights = true;
       }},
      {"d_model", "x of (2147483647, 3, 2147483647)",
       [](EstimateSpec& s) {
         s.keys = 3;
         s.d_model = s.batch = kLargest;
       }},
      {"options.mask.shape[3]", "is 4, must be 1 or 5 (the key's tokens)",
       [](EstimateSpec& s) {
         s.options.mask = {DType::kBool, {2, 4, 3, 4}};
       }},
      {"options.mask.dtype", "is FLOAT64, must be BOOL or FLOAT32",
       [](EstimateSpec& s) {
         s.options.mask = {DType::kFloat64, {3, 5}};
       }},
      {"options.key_lengths[1]", "is 6, must be 0 to 5",
       [](EstimateSpec& s) {
         s.options.key_lengths = {5, 6};
       }},
      {"options.window.left", "is -1, must be 0 or more",
       [](EstimateSpec& s) {
         s.options.window = {-1, 0};
       }},
      {"options.sinks", "has 3 entries, must have 4",
       [](EstimateSpec& s) {
         s.options.sinks = {0, 0, 0};
       }},
  };
  for (const Wrong& wrong : wrongs) {
    EstimateSpec spec = Small();
    wrong.make(spec);
    const absl::Status status = MakeEstimate(spec, {}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << wrong.field;
    EXPECT_EQ(FieldOf(status), wrong.field) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(wrong.message));
  }
}

TEST(EstimateTest, WhatIsBeyondAllNumbersSaturates) {
  EstimateSpec spec;
  spec.batch = spec.width = 1;
  spec.heads = 1 << 20;
  spec.queries = spec.keys = kLargest;
  const Estimate estimate = Of(spec);
  for (const StepCost& step : estimate.explicit_path.cost.steps) EXPECT_EQ(step.flops, kMax);
  EXPECT_EQ(estimate.explicit_path.cost.flops(), kMax);
  EXPECT_EQ(estimate.explicit_path.cost.workspace_bytes, kMax);
  EXPECT_LT(estimate.chunked_path.cost.workspace_bytes, 1 << 30);
}

// A number of either side of which nothing is exact.
void ExpectSaturated(int64_t actual, long double exact, const std::string& what) {
  const auto most = static_cast<long double>(kMax);
  EXPECT_NEAR(static_cast<long double>(actual) / std::max(std::min(exact, most), 1.0L),
              exact > 0 ? 1 : 0, 1e-9)
      << what;
}

// Every size from nothing to the largest, in all combinations that chance finds.
TEST(EstimateTest, NoSizesWrap) {
  constexpr uint32_t kSeed = 11;
  SCOPED_TRACE(kSeed);
  std::mt19937 generator(kSeed);
  const auto size = [&] {
    constexpr int64_t kSizes[] = {0, 1, 7, 300, 1 << 16, 1 << 24, kLargest - 1, kLargest};
    return kSizes[generator() % 8];
  };
  int answered = 0;
  for (int i = 0; i < 20'000; ++i) {
    EstimateSpec spec;
    spec.dtype = generator() % 2 == 0 ? DType::kFloat64 : DType::kFloat16;
    spec.batch = size();
    spec.heads = size();
    spec.queries = size();
    spec.keys = generator() % 2 == 0 ? spec.queries : size();
    spec.width = size();
    if (generator() % 2 == 0) spec.value_width = size();
    if (generator() % 2 == 0) spec.d_model = size();
    spec.options.return_key_sums = generator() % 2 == 0;
    const auto estimate = MakeEstimate(spec, {64, Kernel::kFused, {}, {}});
    if (!estimate.ok()) {
      EXPECT_EQ(estimate.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(FieldOf(estimate.status()).value_or(""),
                  AnyOf(Eq("heads"), Eq("queries"), Eq("keys"), Eq("width"), Eq("value_width"),
                        Eq("d_model")));
      continue;
    }
    ++answered;
    const long double heads = static_cast<long double>(spec.batch) * spec.heads;
    const long double pairs = heads * spec.queries * spec.keys;
    for (const PathEstimate& path : {estimate->explicit_path, estimate->chunked_path}) {
      for (const StepCost& step : path.cost.steps) {
        EXPECT_GE(step.bytes, 0);
        if (step.name == "scores") ExpectSaturated(step.flops, 2 * pairs * spec.width, step.name);
        if (step.name == "softmax") ExpectSaturated(step.flops, 5 * pairs, step.name);
      }
      EXPECT_GE(path.cost.flops(), 0);
      EXPECT_GE(path.cost.workspace_bytes, 0);
    }
    if (spec.dtype == DType::kFloat64 && spec.value_width.value_or(spec.width) > 0) {
      EXPECT_GE(static_cast<long double>(estimate->explicit_path.cost.workspace_bytes),
                std::min(8 * pairs, 9.2e18L));
    }
    EXPECT_GE(estimate->request_bytes, 0);
    EXPECT_GE(estimate->response_bytes, 0);
    EXPECT_GE(estimate->crossover_tokens, 0);
  }
  EXPECT_GT(answered, 1000);
}

}  // namespace
}  // namespace attendant::core
