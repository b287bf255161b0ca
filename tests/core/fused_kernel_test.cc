#include "core/fused_kernel.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <bit>
#include <functional>
#include <memory>
#include <numbers>
#include <vector>

#include "tests/core/fused_testing.h"
#include "tests/core/testing.h"

namespace attendant::core {
namespace {

struct FreeAligned {
  void operator()(void* memory) const { ::operator delete (memory, std::align_val_t{64}); }
};

template <typename T>
std::unique_ptr<T[], FreeAligned> AlignedScratch(int64_t elements) {
  void* const memory =
      ::operator new (static_cast<size_t>(elements) * sizeof(T), std::align_val_t{64});
  return std::unique_ptr<T[], FreeAligned>(static_cast<T*>(memory));
}

// Every row of a problem through the kernel, in groups of at most `group_rows` queries.
template <typename T>
struct FusedRun {
  FusedRun(const Problem& problem, const Inputs<T>& inputs, int64_t group_rows = 1 << 20)
      : memory(problem, inputs) {
    const int64_t rows = problem.batch * problem.heads * problem.queries;
    reference = Unwritten<T>(rows);
    inverse_sum = Unwritten<T>(rows);
    logsumexp = Unwritten<T>(rows);
    const auto scratch = AlignedScratch<T>(FusedScratchElements<T>(problem));
    ForEachGroup(group_rows, [&](const FusedGroup<T>& group, int64_t) {
      FusedForward(group, scratch.get(), {stop, nullptr});
    });
  }

  // The same by the kernel for few queries, each segment apart, at most `most_rows` rows at a time.
  void AgainByRows(int64_t most_rows = kFusedMostRows) {
    const Problem& p = memory.problem;
    for (std::vector<T>* results : {&memory.results.output, &reference, &inverse_sum, &logsumexp}) {
      results->assign(results->size(), T{kUnwritten});
    }
    const AttendTensors<T> tensors = memory.Tensors();
    const auto scratch = AlignedScratch<T>(FusedScratchElements<T>(p));
    const int64_t segments = std::max<int64_t>((p.keys + kFusedSegment - 1) / kFusedSegment, 1);
    const int64_t size = FusedStateElements(p.value_width);
    const int64_t rows = p.batch * p.heads * p.queries;
    const int64_t sharing = p.heads / p.kv_heads * p.queries;
    for (int64_t row = 0; row < rows;) {
      FusedRows<T> group;
      group.problem = &p;
      const int64_t head = row / p.queries;
      group.key = tensors.key.Head(head / p.heads, p.KvHead(head % p.heads));
      group.value = tensors.value.Head(head / p.heads, p.KvHead(head % p.heads));
      group.batch = head / p.heads;
      group.count = std::min({most_rows, kFusedMostRows, sharing - row % sharing});
      for (int64_t i = 0; i < group.count; ++i) {
        const int64_t h = (row + i) / p.queries;
        group.head[i] = h % p.heads;
        group.index[i] = (row + i) % p.queries;
        group.query[i] = tensors.query.Head(h / p.heads, h % p.heads).Row(group.index[i]);
      }
      std::vector<T> states(segments * group.count * size, T{kUnwritten});
      for (int64_t s = 0; s < segments; ++s) {
        FusedRowsSegment(group, s * kFusedSegment, scratch.get(), {stop, nullptr},
                         states.data() + s * group.count * size);
      }
      for (int64_t i = 0; i < group.count; ++i) {
        const int64_t h = (row + i) / p.queries;
        std::vector<T> total(static_cast<size_t>(p.value_width));
        FusedRowResult<T> to;
        to.total = total.data();
        to.output = tensors.output.Head(h / p.heads, h % p.heads).Row(group.index[i]);
        to.problem = &p;
        to.head = h % p.heads;
        to.reference = reference.data() + row + i;
        to.inverse_sum = inverse_sum.data() + row + i;
        to.logsumexp = logsumexp.data() + row + i;
        FusedFinishRow(states.data() + i * size, segments, group.count * size, to);
      }
      row += group.count;
    }
  }

  void ForEachGroup(int64_t group_rows,
                    const std::function<void(const FusedGroup<T>&, int64_t first_row)>& visit) {
    const Problem& p = memory.problem;
    const AttendTensors<T> tensors = memory.Tensors();
    const int64_t most = std::min(group_rows, FusedGroupRows<T>(memory.problem));
    for (int64_t b = 0; b < p.batch; ++b) {
      for (int64_t h = 0; h < p.heads; ++h) {
        for (int64_t first = 0; first < p.queries; first += most) {
          const int64_t count = std::min(most, p.queries - first);
          const int64_t row = (b * p.heads + h) * p.queries + first;
          FusedGroup<T> group;
          group.problem = &p;
          group.batch = b;
          group.head = h;
          group.first_query = first;
          group.query = tensors.query.Head(b, h).Rows(first, count);
          group.key = tensors.key.Head(b, p.KvHead(h));
          group.value = tensors.value.Head(b, p.KvHead(h));
          group.output = tensors.output.Head(b, h).Rows(first, count);
          group.reference = reference.data() + row;
          group.inverse_sum = inverse_sum.data() + row;
          group.logsumexp = logsumexp.data() + row;
          visit(group, row);
        }
      }
    }
  }

  // (B, H, Tq, Tk), from a second sweep.
  std::vector<T> Weights() {
    const Problem& p = memory.problem;
    std::vector<T> weights(p.batch * p.heads * p.queries * p.keys, T{kUnwritten});
    const auto scratch = AlignedScratch<T>(FusedScratchElements<T>(p));
    std::vector<T> block(kFusedBlock * FusedGroupRows<T>(p));
    ForEachGroup(1 << 20, [&](const FusedGroup<T>& group, int64_t row) {
      const int64_t count = group.query.rows;
      for (int64_t first = 0; first < p.keys; first += kFusedBlock) {
        const KeyRange keys{first, std::min(first + kFusedBlock, p.keys)};
        FusedWeights(group, keys, scratch.get(), block.data(), count);
        for (int64_t j = 0; j < keys.size(); ++j) {
          for (int64_t i = 0; i < count; ++i) {
            weights[(row + i) * p.keys + first + j] = block[j * count + i];
          }
        }
      }
    });
    return weights;
  }

  Memory<T> memory;
  std::vector<T> reference;
  std::vector<T> inverse_sum;
  std::vector<T> logsumexp;
  std::atomic<bool> stop = false;
};

// Calls check(run) with what the panels give, and, where queries are few, with what the rows do.
template <typename T, typename Check>
void ForEachWay(const Problem& problem, const Inputs<T>& inputs, const Check& check) {
  FusedRun<T> run(problem, inputs);
  {
    SCOPED_TRACE(absl::StrCat(Describe(problem), ", panels"));
    check(run);
  }
  if (!FusedFewQueries<T>(problem)) return;
  SCOPED_TRACE(absl::StrCat(Describe(problem), ", rows"));
  run.AgainByRows();
  check(run);
}

template <typename Param>
class FusedKernelTest : public TargetTest<Param> {};
TYPED_TEST_SUITE(FusedKernelTest, PromisedTargets, NameOnTarget);

// What holds without FMA too.
template <typename Param>
class FusedAccuracyTest : public TargetTest<Param> {};
TYPED_TEST_SUITE(FusedAccuracyTest, AllTargets, NameOnTarget);

template <typename T>
void ExpectReference(const Problem& problem, const Inputs<T>& inputs) {
  const ReferenceAnswer<T> expected = ReferenceOf(problem, inputs);
  ForEachWay<T>(problem, inputs, [&](const FusedRun<T>& run) {
    ASSERT_TRUE(SameBits(run.memory.results.output, expected.output));
    ASSERT_TRUE(SameBits(run.reference, expected.references));
    ASSERT_TRUE(SameBits(run.inverse_sum, expected.inverse_sums));
  });
}

TYPED_TEST(FusedKernelTest, GivesTheBitsOfTheScalarReference) {
  using T = typename TestFixture::Real;
  struct Case {
    int64_t queries, keys, width, value_width;
  };
  constexpr Case kCases[] = {{1, 1, 1, 1},     {2, 3, 3, 5},     {5, 4, 8, 8},    {7, 5, 8, 3},
                             {24, 191, 8, 9},  {25, 192, 16, 4}, {33, 193, 5, 8}, {9, 400, 64, 64},
                             {100, 100, 4, 4}, {3, 4031, 2, 3},  {3, 4032, 2, 3}, {3, 4033, 2, 3},
                             {2, 8500, 3, 2},  {3, 0, 4, 4},     {4, 7, 0, 3}};
  for (const Case& c : kCases) {
    for (const Causal causal : kBothCausal) {
      for (const Kind kind : kKinds) {
        SCOPED_TRACE(absl::StrCat("kind ", static_cast<int>(kind)));
        const Problem problem = ProblemOf<T>(
            {.queries = c.queries, .keys = c.keys, .width = c.width, .value_width = c.value_width},
            Options(causal));
        ExpectReference(problem, MakeInputs<T>(problem, kind, 3));
      }
    }
  }
}

// Scores in base 2, by key. One dimension, one query after the other a little larger.
TYPED_TEST(FusedKernelTest, ExtremeScoresGiveTheBitsOfTheReferenceAndStayFinite) {
  using T = typename TestFixture::Real;
  constexpr int64_t kKeys = kFusedSegment + 70;
  const std::function<double(int64_t)> scores[] = {
      [](int64_t j) { return 40.0 * (j / kFusedBlock); },        // every block climbs
      [](int64_t j) { return -40.0 * (j / kFusedBlock); },       // every block falls
      [](int64_t j) { return 33.0 * (j / 4); },                  // every decision climbs
      [](int64_t j) { return -33.0 * (j / 4); },                 // every decision falls
      [](int64_t j) { return j % 2 == 0 ? 1e4 : -1e4; },         // the range from key to key
      [](int64_t j) { return j < kFusedBlock ? -1e4 : 0.0; },    // the first block is far below
      [](int64_t j) { return j < kFusedBlock ? 1e4 : 0.0; },     // and far above
      [](int64_t j) { return j < kFusedSegment ? -1e4 : 0.0; },  // so the first segment
      [](int64_t j) { return j < kFusedSegment ? 1e4 : 0.0; },
  };
  AttendOptions options;
  options.scale = std::numbers::ln2;
  for (const int64_t queries : {3, 20}) {
    const Problem problem =
        ProblemOf<T>({.queries = queries, .keys = kKeys, .value_width = 2}, options);
    for (size_t i = 0; i < std::size(scores); ++i) {
      SCOPED_TRACE(absl::StrCat("scores ", i));
      Inputs<T> inputs = RandomInputs<T>(problem, 6);
      for (int64_t j = 0; j < kKeys; ++j) inputs.key[j] = static_cast<T>(scores[i](j));
      for (int64_t q = 0; q < queries; ++q) inputs.query[q] = 1 + static_cast<T>(q) / 64;
      ExpectReference(problem, inputs);
      ForEachWay<T>(problem, inputs, [](const FusedRun<T>& run) {
        for (const T x : run.memory.results.output) ASSERT_TRUE(std::isfinite(x));
        for (const T x : run.logsumexp) ASSERT_TRUE(std::isfinite(x));
      });
    }
  }
}

TYPED_TEST(FusedKernelTest, ARowsBitsDoNotDependOnTheQueriesBesideIt) {
  using T = typename TestFixture::Real;
  Sizes sizes{.batch = 2, .heads = 4, .kv_heads = 2, .keys = 230, .width = 16, .value_width = 11};
  for (const Layout layout : kBothLayouts) {
    sizes.queries = 130;
    const Problem problem = ProblemOf<T>(sizes, Options(Causal::kTopLeft, layout));
    const Inputs<T> inputs = RandomInputs<T>(problem, 5);
    const FusedRun<T> together(problem, inputs);
    for (const int64_t rows : {1, 4, 32, 33}) {
      const FusedRun<T> apart(problem, inputs, rows);
      EXPECT_TRUE(SameBits(apart.memory.results.output, together.memory.results.output)) << rows;
      EXPECT_TRUE(SameBits(apart.logsumexp, together.logsumexp)) << rows;
    }
    sizes.queries = 3;
    const Problem few = ProblemOf<T>(sizes, Options(Causal::kTopLeft, layout));
    FusedRun<T> run(few, RandomInputs<T>(few, 5));
    const std::vector<T> output = run.memory.results.output;
    const std::vector<T> logsumexp = run.logsumexp;
    for (const int64_t rows : {1, 2, 5, 16}) {
      run.AgainByRows(rows);
      EXPECT_TRUE(SameBits(run.memory.results.output, output)) << rows;
      EXPECT_TRUE(SameBits(run.logsumexp, logsumexp)) << rows;
    }
  }
}

// Every size beside every width, or nearly, with heads, layouts and masks in turn.
TYPED_TEST(FusedAccuracyTest, MatchesTheOracleOverTheEdges) {
  using T = typename TestFixture::Real;
  constexpr int64_t kLengths[] = {0,  1,  3,  4,  5,  7,  8,  9,  15,  16,  17,  23, 24,
                                  25, 31, 32, 33, 47, 49, 95, 97, 191, 192, 193, 385};
  constexpr int64_t kWidths[] = {0, 1, 3, 4, 5, 7, 8, 9, 15, 17, 63, 64, 65, 127, 128, 129, 1024};
  constexpr int64_t kHeads[][2] = {{1, 1}, {4, 2}, {3, 1}, {2, 2}};
  constexpr int kLengthCount = std::size(kLengths);
  constexpr int kWidthCount = std::size(kWidths);
  constexpr int64_t kMostProducts = 3'000'000;  // of a problem: some are left out
  for (int i = 0; i < kLengthCount * kWidthCount; ++i) {
    const auto [heads, kv_heads] = kHeads[i % std::size(kHeads)];
    const Sizes sizes{.batch = 1 + i / 7 % 2,
                      .heads = heads,
                      .kv_heads = kv_heads,
                      .queries = kLengths[i % kLengthCount],
                      .keys = kLengths[(7 * i + i / kLengthCount) % kLengthCount],
                      .width = kWidths[i % kWidthCount],
                      .value_width = kWidths[(5 * i + i / kWidthCount) % kWidthCount]};
    if (sizes.batch * heads * sizes.queries * sizes.keys * (sizes.width + sizes.value_width) >
        kMostProducts) {
      continue;
    }
    const Problem problem =
        ProblemOf<T>(sizes, Options(kBothCausal[i / 3 % 2], kBothLayouts[i / 5 % 2]));
    const Inputs<T> inputs = RandomInputs<T>(problem, i);
    const OracleResult oracle = OracleOf(problem, inputs);
    const Tolerance t = ToleranceOf<T>(problem, MagnitudesOf(problem, inputs));
    ForEachWay<T>(problem, inputs, [&](FusedRun<T>& run) {
      ASSERT_TRUE(Near(run.memory.results.output, oracle.output, t.output));
      ASSERT_TRUE(Near(run.logsumexp, oracle.logsumexp, t.logsumexp));
      ASSERT_TRUE(Near(run.Weights(), oracle.weights, t.tiny, t.weight));
    });
    if (this->HasFailure()) return;
  }
}

TYPED_TEST(FusedAccuracyTest, OnNormalInputsTheErrorIsBelow1e6) {
  using T = typename TestFixture::Real;
  for (const int64_t width : {1, 16, 64, 128}) {
    for (const int64_t queries : {1, 40}) {
      const Problem problem = ProblemOf<T>(
          {.queries = queries, .keys = 1000, .width = width, .value_width = width}, {});
      const Inputs<T> inputs = RandomInputs<T>(problem, 2);
      const std::vector<double> expected = OracleOf(problem, inputs).output;
      ForEachWay<T>(problem, inputs, [&](const FusedRun<T>& run) {
        EXPECT_TRUE(Near(run.memory.results.output, expected, sizeof(T) == 4 ? 1e-6 : 1e-14));
      });
    }
  }
}

// The weights of keys with these scores, which are in base 2, where the reference is 0 and so is
// the logarithm of the sum.
template <typename T>
std::vector<T> WeightsOf(const std::vector<T>& scores) {
  AttendOptions options;
  options.scale = std::numbers::ln2;
  const int64_t keys = static_cast<int64_t>(scores.size());
  const Problem problem = ProblemOf<T>({.keys = keys}, options);
  EXPECT_EQ(static_cast<T>(problem.ScaleLog2()), 1);
  FusedRun<T> run(problem, {{1}, scores, std::vector<T>(keys)});
  run.reference = {0};
  run.inverse_sum = {1};
  return run.Weights();
}

template <typename T>
constexpr T kLowestScore = sizeof(T) == 4 ? T{-125.5} : T{-1021.5};  // whose weight is 0

template <typename T>
using BitsOf = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;

TYPED_TEST(FusedAccuracyTest, WeightsHaveTheErrorOfThePolynomial) {
  using T = typename TestFixture::Real;
  using Bits = BitsOf<T>;
  // So many numbers of each power of 2, down to where 2^x is 1 + x.
  constexpr Bits kStride = ((Bits{1} << (std::numeric_limits<T>::digits - 1)) / 8000) | 1;
  std::vector<T> scores = {0};
  for (const T end : {T{32}, std::nextafter(kLowestScore<T>, T{0})}) {
    for (Bits bits = std::bit_cast<Bits>(end);; bits -= kStride) {
      const T score = std::bit_cast<T>(bits);
      if (std::abs(score) < std::numeric_limits<T>::epsilon() / 4) break;
      scores.push_back(score);
    }
  }
  const std::vector<T> weights = WeightsOf(scores);
  long double worst = 0;
  T where = 0;
  for (size_t i = 0; i < scores.size(); ++i) {
    const long double expected = std::exp2(static_cast<long double>(scores[i]));
    const long double error = std::abs(static_cast<long double>(weights[i]) / expected - 1);
    if (error <= worst) continue;
    worst = error;  // a NaN is the worst
    where = scores[i];
  }
  EXPECT_LE(worst, sizeof(T) == 4 ? 3e-7L : 5e-16L) << "2^" << where;
}

TYPED_TEST(FusedAccuracyTest, WeightsBelowTheNormalNumbersAreZero) {
  using T = typename TestFixture::Real;
  constexpr T kInfinity = std::numeric_limits<T>::infinity();
  const T cut = kLowestScore<T>;
  for (const T weight : WeightsOf<T>({cut, std::nextafter(cut, -kInfinity), cut - 1, T{-1e4},
                                      T{-1e30}, std::numeric_limits<T>::lowest(), -kInfinity})) {
    EXPECT_EQ(std::bit_cast<BitsOf<T>>(weight), BitsOf<T>{0}) << weight;
  }
  EXPECT_GT(WeightsOf<T>({std::nextafter(cut, T{0})})[0], 0);
}

TYPED_TEST(FusedAccuracyTest, ManyEqualScoresSumWithoutDrift) {
  using T = typename TestFixture::Real;
  const Problem problem = ProblemOf<T>({.keys = kFusedSegment}, {});
  const Inputs<T> inputs{{0}, std::vector<T>(kFusedSegment, 1), std::vector<T>(kFusedSegment, 1)};
  ForEachWay<T>(problem, inputs, [](const FusedRun<T>& run) {
    EXPECT_NEAR(run.memory.results.output[0], 1, sizeof(T) == 4 ? 3e-7 : 1e-15);
    EXPECT_NEAR(run.logsumexp[0], std::log(static_cast<double>(kFusedSegment)),
                sizeof(T) == 4 ? 1e-6 : 1e-14);
  });
}

// A score of +infinity too: its difference from the maximum is NaN.
TYPED_TEST(FusedAccuracyTest, ANaNMakesItsRowNaNAndNoOther) {
  using T = typename TestFixture::Real;
  std::vector<T> poisons = {std::numeric_limits<T>::infinity()};
  if constexpr (sizeof(T) == 4) {
    for (const uint32_t bits : {0x7fc00000u, 0x7fc00001u, 0xffc12345u, 0x7f800001u}) {
      poisons.push_back(std::bit_cast<float>(bits));
    }
  } else {
    for (const uint64_t bits :
         {0x7ff8000000000000u, 0x7ff8000000000001u, 0xfff8000012345678u, 0x7ff0000000000001u}) {
      poisons.push_back(std::bit_cast<double>(bits));
    }
  }
  constexpr std::pair<int64_t, int64_t> kLengths[] = {
      {1, 300}, {3, 300}, {40, 300}, {3, 4100}, {20, 4100}};
  for (const auto& [queries, keys] : kLengths) {
    const Problem problem =
        ProblemOf<T>({.queries = queries, .keys = keys, .width = 8, .value_width = 4}, {});
    const Inputs<T> inputs = RandomInputs<T>(problem, 4);
    const FusedRun<T> clean(problem, inputs);
    const int64_t bad = queries / 2;
    for (const T poison : poisons) {
      Inputs<T> poisoned = inputs;
      poisoned.query[bad * 8 + 3] = poison;
      ForEachWay<T>(problem, poisoned, [&](const FusedRun<T>& run) {
        EXPECT_TRUE(std::isnan(run.logsumexp[bad])) << poison;
        std::vector<T> output = run.memory.results.output;
        for (int64_t x = bad * 4; x < bad * 4 + 4; ++x) {
          EXPECT_TRUE(std::isnan(output[x])) << poison;
          output[x] = clean.memory.results.output[x];
        }
        EXPECT_TRUE(SameBits(output, clean.memory.results.output)) << poison;
      });
    }
  }
}

TYPED_TEST(FusedAccuracyTest, HiddenNaNAndInfinityLeaveEveryBitAsItWas) {
  using T = typename TestFixture::Real;
  for (const int64_t queries : {3, 50}) {
    const Problem problem =
        ProblemOf<T>({.queries = queries, .keys = queries + 10, .width = 8, .value_width = 9},
                     Options(Causal::kTopLeft));
    const Inputs<T> inputs = RandomInputs<T>(problem, 4);
    const std::vector<T> clean = FusedRun<T>(problem, inputs).memory.results.output;
    for (const T bad : {std::numeric_limits<T>::quiet_NaN(), std::numeric_limits<T>::infinity()}) {
      Inputs<T> poisoned = inputs;
      std::fill(poisoned.key.begin() + queries * 8, poisoned.key.end(), bad);
      // The last query alone sees the first of these values.
      std::fill(poisoned.value.begin() + (queries - 1) * 9, poisoned.value.end(), bad);
      ForEachWay<T>(problem, poisoned, [&](const FusedRun<T>& run) {
        std::vector<T> output = run.memory.results.output;
        for (int64_t x = (queries - 1) * 9; x < queries * 9; ++x) {
          EXPECT_FALSE(std::isfinite(output[x])) << x;
          output[x] = clean[x];
        }
        EXPECT_TRUE(SameBits(output, clean)) << bad;
      });
    }
  }
}

// Tests of the scalar reference alone: that a kernel with another rule would be caught.
template <typename T>
class FusedRuleTest : public testing::Test {};
using FloatingTypes = testing::Types<float, double>;
TYPED_TEST_SUITE(FusedRuleTest, FloatingTypes);

TYPED_TEST(FusedRuleTest, EachPartOfTheRuleShowsInTheBits) {
  using T = TypeParam;
  const Problem problem =
      ProblemOf<T>({.queries = 30, .keys = 4500, .width = 2, .value_width = 4}, {});
  const auto differs = [&](FusedRule mutant, bool neighbours_move_along = false) {
    for (const Kind kind : kKinds) {
      for (uint32_t seed = 1; seed <= 6; ++seed) {
        const Inputs<T> inputs = MakeInputs<T>(problem, kind, seed);
        const ReferenceAnswer<T> expected = ReferenceOf(problem, inputs);
        if (neighbours_move_along) mutant.moves = &expected.moves;
        if (!SameBits(ReferenceOf(problem, inputs, mutant).output, expected.output)) return true;
      }
    }
    return false;
  };
  EXPECT_TRUE(differs({.block = 96}));
  EXPECT_TRUE(differs({.segment = 192 * 20}));
  EXPECT_TRUE(differs({.threshold = 31}));
  EXPECT_TRUE(differs({}, /*neighbours_move_along=*/true));
}

// Four keys, then four whose scores are so much larger that what the first sum is scaled to a
// denormal number; eight at a time it would be 0. The values of the larger ones are 0.
TYPED_TEST(FusedKernelTest, TheReferenceIsDecidedForFourKeysAtATime) {
  using T = typename TestFixture::Real;
  AttendOptions options;
  options.scale = std::numbers::ln2;
  const Problem problem = ProblemOf<T>({.keys = 8}, options);
  const T larger = sizeof(T) == 4 ? T{105} : T{1005};
  const Inputs<T> inputs{
      {1}, {0, 0, 0, 0, larger, larger, larger, larger}, {1, 1, 1, 1, 0, 0, 0, 0}};
  const FusedRun<T> run(problem, inputs);
  EXPECT_GT(run.memory.results.output[0], 0);
  ExpectReference(problem, inputs);
  EXPECT_EQ(ReferenceOf(problem, inputs, {.decision = 8}).output[0], 0);
}

TEST(FusedKernelStopTest, AStoppedCallWritesNothing) {
  const Problem problem =
      ProblemOf<float>({.queries = 4, .keys = 10, .width = 4, .value_width = 4}, {});
  FusedRun<float> run(problem, RandomInputs<float>(problem, 1));
  std::fill(run.memory.results.output.begin(), run.memory.results.output.end(), -1.0f);
  const auto scratch = AlignedScratch<float>(FusedScratchElements<float>(problem));
  run.stop = true;
  run.ForEachGroup(4, [&](const FusedGroup<float>& group, int64_t) {
    FusedForward(group, scratch.get(), {run.stop, nullptr});
  });
  EXPECT_THAT(run.memory.results.output, testing::Each(-1.0f));
}

}  // namespace
}  // namespace attendant::core
