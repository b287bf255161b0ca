#include "core/cost.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "core/chunked_path.h"
#include "core/explicit_path.h"
#include "core/gradient.h"
#include "core/referee.h"

namespace attendant::core {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

struct HeadSizes {
  int64_t batch = 1;
  int64_t tokens = 0;
  int64_t d_model = 0;
  int64_t heads = 1;
  int64_t d_k = 0;
  int64_t d_v = 0;
};

HeadProblem HeadProblemOf(const HeadSizes& s, const AttendOptions& options = {},
                          bool return_intermediates = false) {
  HeadSpec spec;
  spec.x = {DType::kFloat32, {s.batch, s.tokens, s.d_model}};
  spec.w_q = {DType::kFloat32, {s.d_model, s.heads * s.d_k}};
  spec.w_k = spec.w_q;
  spec.w_v = {DType::kFloat32, {s.d_model, s.heads * s.d_v}};
  spec.w_o = {DType::kFloat32, {s.heads * s.d_v, s.d_model}};
  spec.heads = s.heads;
  spec.options = options;
  spec.return_intermediates = return_intermediates;
  const auto problem = MakeHeadProblem(spec);
  EXPECT_TRUE(problem.ok()) << problem.status();
  return problem.value_or(HeadProblem());
}

// B = 2, H = 4, Tq = 3, Tk = 5, D = 8, Dv = 6.
Problem SmallProblem(Path path = Path::kChunked) {
  Problem problem;
  problem.path = path;
  problem.batch = 2;
  problem.heads = 4;
  problem.kv_heads = 2;
  problem.queries = 3;
  problem.keys = 5;
  problem.width = 8;
  problem.value_width = 6;
  return problem;
}

Problem SquareProblem(Path path, int64_t tokens) {
  Problem problem = SmallProblem(path);
  problem.queries = problem.keys = tokens;
  return problem;
}

std::vector<std::string> NamesOf(const PathCost& cost) {
  std::vector<std::string> names;
  for (const StepCost& step : cost.steps) names.push_back(step.name);
  return names;
}

int64_t FlopsOf(const PathCost& cost, const std::string& name) {
  for (const StepCost& step : cost.steps) {
    if (step.name == name) return step.flops;
  }
  ADD_FAILURE() << "no step " << name;
  return -1;
}

TEST(CostTest, StepsStandInTheOrderTheyRun) {
  EXPECT_THAT(NamesOf(CostOf(SmallProblem(), 1)), ElementsAre("scores", "softmax", "values"));
  EXPECT_THAT(NamesOf(CostOf(HeadProblemOf({.tokens = 2, .d_model = 2, .d_k = 2, .d_v = 2}), 1)),
              ElementsAre("projections", "scores", "softmax", "values", "output_projection"));
}

TEST(CostTest, OneHeadCostsWhatTheLessonSays) {
  for (const int64_t t : {1, 6, 128, 4096}) {
    for (const int64_t d_model : {8, 512}) {
      for (const int64_t d_k : {1, 4, 64}) {
        const PathCost cost =
            CostOf(HeadProblemOf({.tokens = t, .d_model = d_model, .d_k = d_k, .d_v = d_k}), 2);
        EXPECT_EQ(FlopsOf(cost, "projections"), 6 * t * d_model * d_k);
        EXPECT_EQ(FlopsOf(cost, "scores"), 2 * t * t * d_k);
        EXPECT_EQ(FlopsOf(cost, "softmax"), kSoftmaxFlops * t * t);
        EXPECT_EQ(FlopsOf(cost, "values"), 2 * t * t * d_k);
        EXPECT_EQ(FlopsOf(cost, "output_projection"), 2 * t * d_k * d_model);
      }
    }
  }
}

TEST(CostTest, ManyHeadsOfUnequalWidths) {
  const HeadProblem problem =
      HeadProblemOf({.batch = 3, .tokens = 10, .d_model = 7, .heads = 2, .d_k = 4, .d_v = 5});
  const PathCost cost = CostOf(problem, 1);
  EXPECT_EQ(FlopsOf(cost, "projections"), 2 * 3 * 10 * 7 * 2 * (4 + 4 + 5));
  EXPECT_EQ(FlopsOf(cost, "scores"), 2 * 3 * 2 * 100 * 4);
  EXPECT_EQ(FlopsOf(cost, "values"), 2 * 3 * 2 * 100 * 5);
  EXPECT_EQ(FlopsOf(cost, "output_projection"), 2 * 3 * 10 * 2 * 5 * 7);
}

TEST(CostTest, FlopsAreTheSumOfTheSteps) {
  const PathCost cost = CostOf(HeadProblemOf({.tokens = 6, .d_model = 8, .d_k = 4, .d_v = 3}), 1);
  int64_t sum = 0;
  for (const StepCost& step : cost.steps) sum += step.flops;
  EXPECT_GT(sum, 0);
  EXPECT_EQ(cost.flops(), sum);
}

TEST(CostTest, ProductFlopsLeaveOutTheSoftmax) {
  const Problem problem = SmallProblem();
  const PathCost cost = CostOf(problem, 1);
  EXPECT_EQ(ProductFlops(problem), cost.flops() - FlopsOf(cost, "softmax"));
  const HeadProblem head =
      HeadProblemOf({.tokens = 6, .d_model = 8, .heads = 2, .d_k = 4, .d_v = 3});
  const PathCost head_cost = CostOf(head, 1);
  EXPECT_EQ(ProductFlops(head), head_cost.flops() - FlopsOf(head_cost, "softmax"));
}

TEST(CostTest, BothPathsComputeTheSame) {
  for (const char* step : {"scores", "softmax", "values"}) {
    EXPECT_EQ(FlopsOf(CostOf(SmallProblem(Path::kExplicit), 1), step),
              FlopsOf(CostOf(SmallProblem(Path::kChunked), 1), step));
  }
}

TEST(CostTest, HiddenPositionsAreNotCounted) {
  Problem problem = SmallProblem();
  problem.causal = Causal::kTopLeft;
  // 1 + 2 + 3 of 3 x 5 pairs in each of 2 * 4 heads.
  EXPECT_EQ(FlopsOf(CostOf(problem, 1), "scores"), 2 * (2 * 4 * 6) * 8);
  EXPECT_EQ(FlopsOf(CostOf(problem, 1), "softmax"), kSoftmaxFlops * (2 * 4 * 6));
  EXPECT_EQ(FlopsOf(CostOf(problem, 1), "values"), 2 * (2 * 4 * 6) * 6);
  problem.queries = 9;  // 1 + 2 + 3 + 4 + 5 + 4 * 5
  EXPECT_EQ(FlopsOf(CostOf(problem, 1), "scores"), 2 * (2 * 4 * 35) * 8);
}

TEST(CostTest, BytesAreOfWhatAStepMakes) {
  const PathCost cost = CostOf(SmallProblem(Path::kExplicit), 1);
  ASSERT_THAT(NamesOf(cost), ElementsAre("scores", "softmax", "values"));
  EXPECT_EQ(cost.steps[0].bytes, 4 * (2 * 4 * 3 * 5));
  EXPECT_EQ(cost.steps[1].bytes, 4 * (2 * 4 * 3 * 5));
  EXPECT_EQ(cost.steps[2].bytes, 4 * (2 * 4 * 3 * 6));
  const PathCost head = CostOf(
      HeadProblemOf({.batch = 2, .tokens = 3, .d_model = 7, .heads = 4, .d_k = 5, .d_v = 6}), 1);
  EXPECT_EQ(head.steps.front().bytes, 4 * (2 * 4 * 3 * (5 + 5 + 6)));
  EXPECT_EQ(head.steps.back().bytes, 4 * (2 * 3 * 7));
}

TEST(CostTest, CrossoverIsTwiceTheModelWidth) {
  for (const int64_t d_model : {1, 16, 512, 12288}) {
    for (const int64_t heads : {1, 2, 16}) {
      for (const int64_t d_k : {1, 64}) {
        for (const int64_t d_v : {1, 128}) {
          for (const int64_t tokens : {1, 100, 100'000}) {
            const HeadProblem problem = HeadProblemOf({.batch = 2,
                                                       .tokens = tokens,
                                                       .d_model = d_model,
                                                       .heads = heads,
                                                       .d_k = d_k,
                                                       .d_v = d_v});
            EXPECT_DOUBLE_EQ(CrossoverTokens(problem), 2.0 * static_cast<double>(d_model));
          }
        }
      }
    }
  }
}

TEST(CostTest, AtTheCrossoverProjectionsCostWhatAttentionDoes) {
  const HeadProblem problem =
      HeadProblemOf({.tokens = 2 * 24, .d_model = 24, .heads = 3, .d_k = 8, .d_v = 5});
  const PathCost cost = CostOf(problem, 1);
  EXPECT_EQ(FlopsOf(cost, "projections") + FlopsOf(cost, "output_projection"),
            FlopsOf(cost, "scores") + FlopsOf(cost, "values"));
}

// The first T whose attention costs at least as much as its projections, by their costs.
double FirstThatOvertakes(const AttendOptions& options, int64_t d_model, int64_t most) {
  for (int64_t tokens = 1; tokens <= most; ++tokens) {
    const HeadProblem problem = HeadProblemOf(
        {.tokens = tokens, .d_model = d_model, .heads = 2, .d_k = 4, .d_v = 3}, options);
    if (ProductFlops(problem.attend) >= ProjectionFlops(problem))
      return static_cast<double>(tokens);
  }
  return 0;
}

TEST(CostTest, ACausalMaskDelaysTheCrossover) {
  AttendOptions options;
  for (const Causal causal : {Causal::kTopLeft, Causal::kBottomRight}) {
    options.causal = causal;
    const HeadProblem problem =
        HeadProblemOf({.tokens = 1000, .d_model = 16, .d_k = 4, .d_v = 4}, options);
    // T (T + 1) / 2 pairs instead of T^2.
    EXPECT_EQ(CrossoverTokens(problem), 4 * 16 - 1);
    EXPECT_EQ(FirstThatOvertakes(options, 16, 1000), 4 * 16 - 1);
  }
}

TEST(CostTest, AWindowDelaysTheCrossoverOrPreventsIt) {
  const auto crossover = [](const AttendOptions& options) {
    return CrossoverTokens(
        HeadProblemOf({.tokens = 10, .d_model = 16, .d_k = 4, .d_v = 4}, options));
  };
  for (const int64_t side : {0, 15, 16, 17, 20, 40}) {
    AttendOptions options;
    options.window = Window{side, side};
    // A query in the middle sees 2 * side + 1 keys; more than 2 * d_model are needed.
    EXPECT_EQ(crossover(options) > 0, 2 * side + 1 > 2 * 16) << side;
    EXPECT_EQ(crossover(options), FirstThatOvertakes(options, 16, 2000)) << side;
    options.window->right.reset();
    EXPECT_EQ(crossover(options), FirstThatOvertakes(options, 16, 200)) << side;
  }
}

TEST(CostTest, LengthsLeaveTheCrossoverWhereItIs) {
  AttendOptions options;
  options.causal = Causal::kTopLeft;
  options.key_lengths = {3};
  EXPECT_EQ(
      CrossoverTokens(HeadProblemOf({.tokens = 10, .d_model = 16, .d_k = 4, .d_v = 4}, options)),
      4 * 16 - 1);
}

TEST(CostTest, ACrossoverBeyondTheLargestSizeIsNone) {
  HeadProblem problem = HeadProblemOf({.tokens = 10, .d_model = 16, .d_k = 4, .d_v = 4});
  problem.d_model = int64_t{1} << 30;
  EXPECT_EQ(CrossoverTokens(problem), 0x1p31);
  problem.attend.causal = Causal::kTopLeft;
  EXPECT_EQ(CrossoverTokens(problem), 0);
}

TEST(CostTest, RequestBytesAreThoseOfItsTensors) {
  Problem problem = SmallProblem();
  const int64_t plain = 4 * (2 * 4 * 3 * 8 + 2 * 2 * 5 * 8 + 2 * 2 * 5 * 6);
  EXPECT_EQ(RequestBytes(problem), plain);
  problem.mask.emplace().elements = 15;
  problem.mask->dtype = DType::kFloat32;
  EXPECT_EQ(RequestBytes(problem), plain + 4 * 15);
  GradientProblem gradient;
  gradient.attend = problem;
  const int64_t output = 4 * (2 * 4 * 3 * 6);
  EXPECT_EQ(RequestBytes(gradient), plain + 4 * 15 + output);
  gradient.given = true;
  EXPECT_EQ(RequestBytes(gradient), plain + 4 * 15 + 2 * output + 4 * (2 * 4 * 3));
  const Claim claim{Part::kOutput, {DType::kFloat64, {2, 4, 3, 6}}, nullptr};
  EXPECT_EQ(RequestBytes(MakeCheckProblem(problem), {claim}), plain + 4 * 15 + 2 * output);
  const HeadProblem head =
      HeadProblemOf({.batch = 2, .tokens = 3, .d_model = 7, .heads = 4, .d_k = 5, .d_v = 6});
  EXPECT_EQ(RequestBytes(head), 4 * (2 * 3 * 7 + 2 * (7 * 4 * 5) + 2 * (7 * 4 * 6)));
}

TEST(CostTest, OptionBytesAreThoseOfEachBatchAndHead) {
  Problem problem = SmallProblem();
  EXPECT_EQ(OptionBytes(problem), 0);
  problem.key_lengths = {5, 4};
  problem.alibi_slopes = {1, 2, 3, 4};
  problem.sinks = {0, 0, 0, 0};
  EXPECT_EQ(OptionBytes(problem), 8 * (2 + 4 + 4));
}

TEST(CostTest, EverythingSaturates) {
  const int64_t huge = int64_t{1} << 40;
  for (const Path path : {Path::kExplicit, Path::kChunked}) {
    for (const Causal causal : {Causal::kNone, Causal::kTopLeft}) {
      HeadProblem head;
      head.attend = {.path = path,
                     .batch = huge,
                     .heads = huge,
                     .kv_heads = huge,
                     .queries = huge,
                     .keys = huge,
                     .width = huge,
                     .value_width = kMax,
                     .causal = causal,
                     .key_lengths = {},
                     .window = {},
                     .mask = {},
                     .softcap = 0,
                     .alibi_slopes = {},
                     .sinks = {},
                     .return_logsumexp = true,
                     .return_key_sums = true};
      head.d_model = huge;
      for (const PathCost& cost : {CostOf(head.attend, 64), CostOf(head, 64)}) {
        for (const StepCost& step : cost.steps) {
          EXPECT_EQ(step.flops, kMax) << step.name;
          EXPECT_EQ(step.bytes, kMax) << step.name;
        }
        EXPECT_EQ(cost.flops(), kMax);
        EXPECT_EQ(cost.workspace_bytes, kMax);
      }
      EXPECT_EQ(ProductFlops(head.attend), kMax);
      EXPECT_EQ(ProductFlops(head), kMax);
      EXPECT_EQ(ResponseBytes(head.attend), kMax);
      EXPECT_EQ(ResponseBytes(head), kMax);
      EXPECT_GE(CrossoverTokens(head), 0);
      EXPECT_EQ(RequestBytes(head), kMax);
      EXPECT_EQ(RequestBytes(head.attend), kMax);
    }
  }
}

TEST(CostTest, NothingCostsNothing) {
  Problem problem = SmallProblem(Path::kExplicit);
  problem.batch = 0;
  problem.queries = problem.keys = kMax;
  const PathCost cost = CostOf(problem, 1);
  EXPECT_EQ(cost.flops(), 0);
  EXPECT_EQ(cost.workspace_bytes, 0);
  EXPECT_EQ(ResponseBytes(problem), 0);
}

TEST(CostTest, ResponseBytesCountWhatIsReturned) {
  Problem problem = SmallProblem();
  const int64_t output = 4 * (2 * 4 * 3 * 6);
  EXPECT_EQ(ResponseBytes(problem), output);
  const int64_t weights = 4 * (2 * 4 * 3 * 5);
  const int64_t logsumexp = 4 * (2 * 4 * 3);
  const int64_t key_sums = 4 * (2 * 4 * 5);
  problem.return_weights = true;
  EXPECT_EQ(ResponseBytes(problem), output + weights);
  problem.return_weights = false;
  problem.return_logsumexp = true;
  EXPECT_EQ(ResponseBytes(problem), output + logsumexp);
  problem.return_logsumexp = false;
  problem.return_key_sums = true;
  EXPECT_EQ(ResponseBytes(problem), output + key_sums);
  problem.return_weights = problem.return_logsumexp = true;
  EXPECT_EQ(ResponseBytes(problem), output + weights + logsumexp + key_sums);
  problem.dtype = DType::kFloat64;
  EXPECT_EQ(ResponseBytes(problem), 2 * (output + weights + logsumexp + key_sums));
}

TEST(CostTest, ResponseBytesOfAHeadCountIntermediates) {
  const HeadSizes sizes{.batch = 2, .tokens = 3, .d_model = 7, .heads = 4, .d_k = 5, .d_v = 6};
  const int64_t output = 4 * (2 * 3 * 7);
  EXPECT_EQ(ResponseBytes(HeadProblemOf(sizes)), output);
  // Queries, keys, values, contexts; logits, weights.
  EXPECT_EQ(ResponseBytes(HeadProblemOf(sizes, {}, /*return_intermediates=*/true)),
            output + 4 * (2 * 4 * 3 * (5 + 5 + 6 + 6)) + 2 * 4 * (2 * 4 * 3 * 3));
}

TEST(CostTest, ExplicitWorkspaceQuadruplesWithTheTokens) {
  for (const int64_t tokens : {1, 100, 4096}) {
    const int64_t once = CostOf(SquareProblem(Path::kExplicit, tokens), 2).workspace_bytes;
    EXPECT_EQ(once, 4 * (2 * 4 * tokens * tokens));
    EXPECT_EQ(CostOf(SquareProblem(Path::kExplicit, 2 * tokens), 2).workspace_bytes, 4 * once);
  }
}

TEST(CostTest, ExplicitWorkspaceIsTheResponseWhereWeightsAreReturned) {
  Problem problem = SquareProblem(Path::kExplicit, 100);
  problem.return_weights = true;
  EXPECT_EQ(CostOf(problem, 2).workspace_bytes, 0);
}

TEST(CostTest, ChunkedWorkspaceDoesNotGrowWithTheTokens) {
  const auto bytes = [](int64_t tokens) {
    return CostOf(SquareProblem(Path::kChunked, tokens), 2).workspace_bytes;
  };
  for (const int64_t tokens : {512, 1024, 1'000'000}) EXPECT_EQ(bytes(tokens), bytes(256));
  // Less than a block of tokens takes less.
  EXPECT_GT(bytes(1), 0);
  EXPECT_LT(bytes(1), bytes(64));
  EXPECT_LT(bytes(64), bytes(256));
}

TEST(CostTest, ChunkedWorkspaceGrowsWithTheThreads) {
  const Problem problem = SquareProblem(Path::kChunked, 1000);
  const int64_t one = CostOf(problem, 1).workspace_bytes;
  EXPECT_EQ(CostOf(problem, 5).workspace_bytes, 5 * one);
}

// A mask is read where it lies: what a thread packs of it depends neither on the tokens nor on the
// heads that share it.
TEST(CostTest, AMaskIsNotCopied) {
  const auto masked = [](int64_t tokens, int64_t heads) {
    Problem problem = SquareProblem(Path::kChunked, tokens);
    problem.heads = heads;
    problem.mask = MaskLayout{.dtype = DType::kFloat32, .query_stride = tokens, .key_stride = 1};
    const int64_t with = CostOf(problem, 2).workspace_bytes;
    problem.mask.reset();
    return with - CostOf(problem, 2).workspace_bytes;
  };
  const int64_t packed = masked(512, 4);
  EXPECT_GT(packed, 0);
  EXPECT_LT(packed, 512 * 512 * 4);
  EXPECT_EQ(masked(512, 8), packed);
  EXPECT_EQ(masked(4096, 4), packed);
}

TEST(CostTest, ASecondSweepHoldsTwoNumbersARow) {
  Problem problem = SquareProblem(Path::kChunked, 1000);
  const int64_t one_sweep = CostOf(problem, 3, Kernel::kOneDnn).workspace_bytes;
  problem.return_key_sums = true;
  EXPECT_EQ(CostOf(problem, 3, Kernel::kOneDnn).workspace_bytes,
            one_sweep + 2 * 4 * (2 * 4 * 1000));
  problem.return_weights = true;
  EXPECT_EQ(CostOf(problem, 3, Kernel::kOneDnn).workspace_bytes,
            one_sweep + 2 * 4 * (2 * 4 * 1000));
}

TEST(CostTest, AHeadHoldsItsProjectionsUnlessTheyAreReturned) {
  const HeadSizes sizes{.batch = 2, .tokens = 3, .d_model = 7, .heads = 4, .d_k = 5, .d_v = 6};
  const HeadProblem held = HeadProblemOf(sizes);
  EXPECT_EQ(CostOf(held, 2).workspace_bytes,
            CostOf(held.attend, 2).workspace_bytes + 4 * (2 * 4 * 3 * (5 + 5 + 6 + 6)));
  const HeadProblem returned = HeadProblemOf(sizes, {}, /*return_intermediates=*/true);
  EXPECT_EQ(CostOf(returned, 2).workspace_bytes, CostOf(returned.attend, 2).workspace_bytes);
}

TEST(CostTest, WorkspaceIsWhatThePathsSay) {
  EXPECT_EQ(CostOf(SmallProblem(Path::kExplicit), 3).workspace_bytes,
            ExplicitWorkspaceBytes(SmallProblem(Path::kExplicit), 3));
  // Few queries, and many; within one segment of keys, and beyond.
  for (const int64_t queries : {3, 300}) {
    for (const int64_t keys : {5, 10'000}) {
      Problem problem = SmallProblem(Path::kChunked);
      problem.queries = queries;
      problem.keys = keys;
      for (const Kernel kernel : {Kernel::kFused, Kernel::kOneDnn}) {
        EXPECT_EQ(CostOf(problem, 3, kernel).workspace_bytes,
                  ChunkedWorkspaceBytes(problem, 3, kernel));
      }
    }
  }
}

TEST(CostTest, WorkspaceOfFewQueriesSaturates) {
  const int64_t huge = int64_t{1} << 40;
  const auto bytes = [](const Problem& problem) { return CostOf(problem, 64).workspace_bytes; };
  Problem problem = SmallProblem();
  problem.queries = 1;
  problem.keys = huge;
  EXPECT_LT(bytes(problem), kMax);
  for (int64_t Problem::*size : {&Problem::batch, &Problem::heads, &Problem::value_width}) {
    Problem larger = problem;
    larger.*size = huge;
    EXPECT_EQ(bytes(larger), kMax);
  }
  problem.width = kMax;
  EXPECT_EQ(bytes(problem), kMax);
}

}  // namespace
}  // namespace attendant::core
