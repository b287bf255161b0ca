#include "core/fused_kernel.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <atomic>
#include <bit>
#include <functional>
#include <memory>
#include <numbers>
#include <vector>

#include "tests/core/fused_reference.h"
#include "tests/core/testing.h"

namespace attendant::core {
namespace {

// Highway's bits of the targets that the promise is about: AVX-512 and AVX2.
constexpr int64_t kAvx3 = int64_t{1} << 8;
constexpr int64_t kAvx2 = int64_t{1} << 9;

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
      FusedForward(group, scratch.get(), stop);
    });
  }

  void ForEachGroup(int64_t group_rows,
                    const std::function<void(const FusedGroup<T>&, int64_t first_row)>& visit) {
    const Problem& p = memory.problem;
    const AttendTensors<T> tensors = memory.Tensors();
    const int64_t most = std::min(group_rows, FusedGroupRows<T>());
    for (int64_t b = 0; b < p.batch; ++b) {
      for (int64_t h = 0; h < p.heads; ++h) {
        for (int64_t first = 0; first < p.queries; first += most) {
          const int64_t count = std::min(most, p.queries - first);
          const int64_t row = (b * p.heads + h) * p.queries + first;
          FusedGroup<T> group;
          group.problem = &p;
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
    std::vector<T> block(kFusedBlock * FusedGroupRows<T>());
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

// The scalar program's rows of a problem of one head.
template <typename T>
std::vector<T> ReferenceOutput(const Problem& p, const Inputs<T>& inputs,
                               const FusedRule& rule = {}) {
  std::vector<T> output;
  for (int64_t i = 0; i < p.queries; ++i) {
    FusedReference<T> row(inputs.query.data() + i * p.width, inputs.key.data(), inputs.value.data(),
                          p.VisibleKeys(i).end, p.width, p.value_width,
                          static_cast<T>(p.ScaleLog2()), rule);
    const FusedRow<T> result = row.Run();
    output.insert(output.end(), result.output.begin(), result.output.end());
  }
  return output;
}

// Kinds of input that meet the rule's branches.
enum class Kind { kNormal, kClimbing, kFalling, kExtreme, kWide };
constexpr Kind kKinds[] = {Kind::kNormal, Kind::kClimbing, Kind::kFalling, Kind::kExtreme,
                           Kind::kWide};

template <typename T>
Inputs<T> MakeInputs(const Problem& p, Kind kind, uint32_t seed) {
  Inputs<T> inputs = RandomInputs<T>(p, seed);
  std::mt19937 rng(seed + 1);
  for (int64_t j = 0; j < p.keys; ++j) {
    for (int64_t d = 0; d < p.width; ++d) {
      T& k = inputs.key[j * p.width + d];
      const T position = static_cast<T>(j) / 4;
      if (kind == Kind::kClimbing) k = k / 4 + position;
      if (kind == Kind::kFalling) k = k / 4 - position;
      if (kind == Kind::kExtreme) k = static_cast<T>(rng() % 2 == 0 ? 100 : -100);
    }
  }
  for (T& q : inputs.query) {
    if (kind == Kind::kClimbing || kind == Kind::kFalling) q = std::abs(q);
    // As wide as it takes to underflow.
    if (kind == Kind::kWide) q *= sizeof(T) == 4 ? 64 : 512;
  }
  // Zeros among the values show what underflows in the others.
  for (T& v : inputs.value) {
    if (rng() % 4 != 0) v = 0;
  }
  return inputs;
}

template <typename T>
class FusedKernelTest : public testing::Test {
 protected:
  // Calls body for each target of the promise that this CPU has; afterwards all are allowed again.
  static void ForEachTarget(const std::function<void()>& body) {
    const int64_t supported = hwy::SupportedTargets() & (kAvx2 | kAvx3);
    if (supported == 0) GTEST_SKIP() << "this CPU has neither AVX2 nor AVX-512";
    for (const int64_t target : {kAvx2, kAvx3}) {
      if ((supported & target) == 0) continue;
      SCOPED_TRACE(target == kAvx2 ? "AVX2" : "AVX-512");
      hwy::SetSupportedTargetsForTest(target);
      body();
      hwy::SetSupportedTargetsForTest(0);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
};

using FloatingTypes = testing::Types<float, double>;
TYPED_TEST_SUITE(FusedKernelTest, FloatingTypes);

TYPED_TEST(FusedKernelTest, GivesTheBitsOfTheScalarReference) {
  using T = TypeParam;
  struct Case {
    int64_t queries, keys, width, value_width;
  };
  constexpr Case kCases[] = {{1, 1, 1, 1},     {2, 3, 3, 5},     {5, 4, 8, 8},    {7, 5, 8, 3},
                             {24, 191, 8, 9},  {25, 192, 16, 4}, {33, 193, 5, 8}, {9, 400, 64, 64},
                             {100, 100, 4, 4}, {3, 4031, 2, 3},  {3, 4032, 2, 3}, {3, 4033, 2, 3},
                             {2, 8500, 3, 2},  {3, 0, 4, 4},     {4, 7, 0, 3}};
  this->ForEachTarget([&] {
    for (const Case& c : kCases) {
      for (const Causal causal : {Causal::kNone, Causal::kTopLeft}) {
        for (const Kind kind : kKinds) {
          AttendOptions options;
          options.causal = causal;
          const Problem problem = ProblemOf<T>({.queries = c.queries,
                                                .keys = c.keys,
                                                .width = c.width,
                                                .value_width = c.value_width},
                                               options);
          SCOPED_TRACE(absl::StrCat(Describe(problem), " kind ", static_cast<int>(kind)));
          const Inputs<T> inputs = MakeInputs<T>(problem, kind, 3);
          const FusedRun<T> run(problem, inputs);
          ASSERT_TRUE(SameBits(run.memory.results.output, ReferenceOutput(problem, inputs)));
        }
      }
    }
  });
}

TYPED_TEST(FusedKernelTest, ARowsBitsDoNotDependOnTheQueriesBesideIt) {
  using T = TypeParam;
  this->ForEachTarget([&] {
    for (const Layout layout : {Layout::kBhtd, Layout::kBthd}) {
      AttendOptions options;
      options.layout = layout;
      options.causal = Causal::kTopLeft;
      const Problem problem = ProblemOf<T>({.batch = 2,
                                            .heads = 4,
                                            .kv_heads = 2,
                                            .queries = 130,
                                            .keys = 230,
                                            .width = 16,
                                            .value_width = 11},
                                           options);
      const Inputs<T> inputs = RandomInputs<T>(problem, 5);
      const FusedRun<T> together(problem, inputs);
      for (const int64_t rows : {1, 4, 32, 33}) {
        const FusedRun<T> apart(problem, inputs, rows);
        EXPECT_TRUE(SameBits(apart.memory.results.output, together.memory.results.output)) << rows;
        EXPECT_TRUE(SameBits(apart.logsumexp, together.logsumexp)) << rows;
      }
    }
  });
}

TYPED_TEST(FusedKernelTest, MatchesTheOracle) {
  using T = TypeParam;
  for (const Causal causal : {Causal::kNone, Causal::kTopLeft}) {
    AttendOptions options;
    options.causal = causal;
    const Problem problem = ProblemOf<T>({.batch = 2,
                                          .heads = 4,
                                          .kv_heads = 2,
                                          .queries = 130,
                                          .keys = 430,
                                          .width = 80,
                                          .value_width = 65},
                                         options);
    const Inputs<T> inputs = RandomInputs<T>(problem, 9);
    FusedRun<T> run(problem, inputs);
    const OracleResult oracle = OracleOf(problem, inputs);
    const Tolerance t = ToleranceOf<T>(problem, MagnitudesOf(problem, inputs));
    EXPECT_TRUE(Near(run.memory.results.output, oracle.output, t.output));
    EXPECT_TRUE(Near(run.logsumexp, oracle.logsumexp, t.logsumexp));
    EXPECT_TRUE(Near(run.Weights(), oracle.weights, t.tiny, t.weight));
  }
}

TEST(FusedKernelFloatTest, OnNormalInputsTheErrorIsBelow1e6) {
  for (const int64_t width : {64, 128}) {
    const Problem problem =
        ProblemOf<float>({.queries = 40, .keys = 1000, .width = width, .value_width = width}, {});
    const Inputs<float> inputs = RandomInputs<float>(problem, 2);
    const FusedRun<float> run(problem, inputs);
    EXPECT_TRUE(Near(run.memory.results.output, OracleOf(problem, inputs).output, 1e-6));
  }
}

TYPED_TEST(FusedKernelTest, ManyEqualScoresSumWithoutDrift) {
  using T = TypeParam;
  const Problem problem = ProblemOf<T>({.keys = kFusedSegment}, {});
  const Inputs<T> inputs{{0}, std::vector<T>(kFusedSegment, 1), std::vector<T>(kFusedSegment, 1)};
  const FusedRun<T> run(problem, inputs);
  EXPECT_NEAR(run.memory.results.output[0], 1, sizeof(T) == 4 ? 3e-7 : 1e-15);
  EXPECT_NEAR(run.logsumexp[0], std::log(static_cast<double>(kFusedSegment)),
              sizeof(T) == 4 ? 1e-6 : 1e-14);
}

TYPED_TEST(FusedKernelTest, ANaNMakesItsRowNaNAndNoOther) {
  using T = TypeParam;
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  const std::vector<Bits> payloads =
      sizeof(T) == 4
          ? std::vector<Bits>{static_cast<Bits>(0x7fc00000), static_cast<Bits>(0x7fc00001),
                              static_cast<Bits>(0xffc12345), static_cast<Bits>(0x7f800001)}
          : std::vector<Bits>{
                static_cast<Bits>(0x7ff8000000000000), static_cast<Bits>(0x7ff8000000000001),
                static_cast<Bits>(0xfff8000012345678), static_cast<Bits>(0x7ff0000000000001)};
  const Problem problem =
      ProblemOf<T>({.queries = 40, .keys = 300, .width = 8, .value_width = 4}, {});
  const Inputs<T> inputs = RandomInputs<T>(problem, 4);
  const FusedRun<T> clean(problem, inputs);
  for (const Bits payload : payloads) {
    Inputs<T> poisoned = inputs;
    poisoned.query[7 * 8 + 3] = std::bit_cast<T>(payload);
    const FusedRun<T> run(problem, poisoned);
    for (int64_t i = 0; i < problem.queries; ++i) {
      for (int64_t x = 0; x < 4; ++x) {
        const T element = run.memory.results.output[i * 4 + x];
        if (i == 7) {
          EXPECT_TRUE(std::isnan(element)) << payload;
        } else {
          EXPECT_EQ(element, clean.memory.results.output[i * 4 + x]) << i;
        }
      }
    }
  }
}

TYPED_TEST(FusedKernelTest, HiddenNaNAndInfinityLeaveEveryBitAsItWas) {
  using T = TypeParam;
  AttendOptions options;
  options.causal = Causal::kTopLeft;
  const Problem problem =
      ProblemOf<T>({.queries = 50, .keys = 60, .width = 8, .value_width = 9}, options);
  const Inputs<T> inputs = RandomInputs<T>(problem, 4);
  const FusedRun<T> clean(problem, inputs);
  for (const T bad : {std::numeric_limits<T>::quiet_NaN(), std::numeric_limits<T>::infinity()}) {
    Inputs<T> poisoned = inputs;
    for (int64_t j = 50; j < 60; ++j) {
      for (int64_t d = 0; d < 8; ++d) poisoned.key[j * 8 + d] = bad;
      for (int64_t x = 0; x < 9; ++x) poisoned.value[j * 9 + x] = bad;
    }
    for (int64_t x = 0; x < 9; ++x) poisoned.value[49 * 9 + x] = bad;  // query 49 alone sees it
    const FusedRun<T> run(problem, poisoned);
    for (int64_t i = 0; i < 49 * 9; ++i) {
      ASSERT_EQ(run.memory.results.output[i], clean.memory.results.output[i]) << i;
    }
    for (int64_t i = 49 * 9; i < 50 * 9; ++i) {
      EXPECT_FALSE(std::isfinite(run.memory.results.output[i])) << i;
    }
  }
}

TYPED_TEST(FusedKernelTest, EachPartOfTheRuleShowsInTheBits) {
  using T = TypeParam;
  const Problem problem =
      ProblemOf<T>({.queries = 30, .keys = 4500, .width = 2, .value_width = 4}, {});
  const auto differs = [&](const FusedRule& mutant) {
    for (const Kind kind : kKinds) {
      for (uint32_t seed = 1; seed <= 6; ++seed) {
        const Inputs<T> inputs = MakeInputs<T>(problem, kind, seed);
        if (!SameBits(ReferenceOutput(problem, inputs), ReferenceOutput(problem, inputs, mutant))) {
          return true;
        }
      }
    }
    return false;
  };
  EXPECT_TRUE(differs({.block = 96}));
  EXPECT_TRUE(differs({.segment = 192 * 20}));
  EXPECT_TRUE(differs({.threshold = 31}));
}

// Four keys, then four whose scores are so much larger that what the first sum is scaled to a
// denormal number; eight at a time it would be 0. The values of the larger ones are 0.
TYPED_TEST(FusedKernelTest, TheReferenceIsDecidedForFourKeysAtATime) {
  using T = TypeParam;
  AttendOptions options;
  options.scale = std::numbers::ln2;
  const Problem problem = ProblemOf<T>({.keys = 8}, options);
  const T larger = sizeof(T) == 4 ? T{105} : T{1005};
  const Inputs<T> inputs{
      {1}, {0, 0, 0, 0, larger, larger, larger, larger}, {1, 1, 1, 1, 0, 0, 0, 0}};
  const FusedRun<T> run(problem, inputs);
  EXPECT_GT(run.memory.results.output[0], 0);
  EXPECT_TRUE(SameBits(run.memory.results.output, ReferenceOutput(problem, inputs)));
  EXPECT_EQ(ReferenceOutput(problem, inputs, {.decision = 8})[0], 0);
}

TEST(FusedKernelStopTest, AStoppedCallWritesNothing) {
  const Problem problem =
      ProblemOf<float>({.queries = 4, .keys = 10, .width = 4, .value_width = 4}, {});
  FusedRun<float> run(problem, RandomInputs<float>(problem, 1));
  std::fill(run.memory.results.output.begin(), run.memory.results.output.end(), -1.0f);
  const auto scratch = AlignedScratch<float>(FusedScratchElements<float>(problem));
  run.stop = true;
  run.ForEachGroup(4, [&](const FusedGroup<float>& group, int64_t) {
    FusedForward(group, scratch.get(), run.stop);
  });
  EXPECT_THAT(run.memory.results.output, testing::Each(-1.0f));
}

}  // namespace
}  // namespace attendant::core
