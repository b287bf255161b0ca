#include "core/fused_path.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <memory>
#include <numbers>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/attend.h"
#include "core/cost.h"
#include "core/fused_kernel.h"
#include "core/scheduler.h"
#include "tests/core/fused_testing.h"
#include "tests/core/testing.h"

namespace attendant::core {
namespace {

// Whole jobs, on any number of threads.
template <typename Param>
class FusedPathTest : public TargetTest<Param> {
 protected:
  using Real = typename Param::Real;

  // Calls run(scheduler) on 1, 2 and 8 threads.
  template <typename Run>
  void ForEachScheduler(const Run& run) {
    for (const auto& scheduler : schedulers_) {
      SCOPED_TRACE(testing::Message() << scheduler->threads() << " threads");
      run(*scheduler);
    }
  }
  Scheduler& one_thread() { return *schedulers_[0]; }

 private:
  const std::unique_ptr<Scheduler> schedulers_[3] = {std::make_unique<Scheduler>(1),
                                                     std::make_unique<Scheduler>(2),
                                                     std::make_unique<Scheduler>(8)};
};
TYPED_TEST_SUITE(FusedPathTest, PromisedTargets, NameOnTarget);

// A tensor whose every head holds rows of `pool`, one after the other, and then the first again:
// head n of all begins with row n * step.
template <typename T>
std::vector<T> FromPool(const std::vector<T>& pool, int64_t width, Layout layout, const Sizes& s,
                        int64_t heads, int64_t tokens, int64_t step) {
  std::vector<T> tensor(s.batch * heads * tokens * width);
  const TensorView<T> view(tensor.data(), layout, heads, tokens, width);
  const int64_t rows = static_cast<int64_t>(pool.size()) / width;
  for (int64_t head = 0; head < s.batch * heads; ++head) {
    for (int64_t i = 0; i < tokens; ++i) {
      const auto from = pool.begin() + (head * step + i) % rows * width;
      std::copy_n(from, width, view.Head(head / heads, head % heads).Row(i));
    }
  }
  return tensor;
}

// Queries that are a pool, keys and values: each query is computed alone, and in problems of many
// shapes. One of fewer queries than SIMD lanes takes another way than one of many.
TYPED_TEST(FusedPathTest, ARowHasTheBitsOfTheReferenceInAnyCompany) {
  using T = typename TestFixture::Real;
  constexpr int64_t kStep = 7;
  struct Case {
    Kind kind;
    Sizes pool;
    std::vector<int64_t> queries;
  };
  const Case cases[] = {
      {Kind::kNormal,
       {.queries = 768, .keys = 230, .width = 16, .value_width = 11},
       {1, 4, 32, 33, 192, 768}},
      {Kind::kWide, {.queries = 40, .keys = 230, .width = 16, .value_width = 11}, {2, 33}},
      {Kind::kWide, {.queries = 33, .keys = 4100, .width = 3, .value_width = 2}, {1, 4, 33}},
      {Kind::kClimbing, {.queries = 33, .keys = 8500, .width = 2, .value_width = 3}, {1, 4, 33}},
  };
  AttendOptions options;
  options.return_logsumexp = true;
  for (const Case& c : cases) {
    const Problem pool = ProblemOf<T>(c.pool, {});
    const Inputs<T> inputs = MakeInputs<T>(pool, c.kind, 3);
    Results<T> alone;
    for (int64_t i = 0; i < pool.queries; ++i) {
      Sizes sizes = c.pool;
      sizes.queries = 1;
      const auto query = inputs.query.begin() + i * pool.width;
      const Results<T> row =
          Compute<T>(ProblemOf<T>(sizes, options),
                     {{query, query + pool.width}, inputs.key, inputs.value}, this->one_thread());
      alone.output.insert(alone.output.end(), row.output.begin(), row.output.end());
      alone.logsumexp.push_back(row.logsumexp[0]);
    }
    ASSERT_TRUE(SameBits(alone.output, ReferenceOf(pool, inputs).output)) << Describe(pool);
    for (const int64_t queries : c.queries) {
      for (const int64_t batch : {1, 8}) {
        for (const Layout layout : kBothLayouts) {
          Sizes sizes = c.pool;
          sizes.batch = batch;
          sizes.heads = 2;
          sizes.queries = queries;
          options.layout = layout;
          const Problem problem = ProblemOf<T>(sizes, options);
          SCOPED_TRACE(Describe(problem));
          const Inputs<T> company{
              FromPool(inputs.query, pool.width, layout, sizes, 2, queries, kStep),
              FromPool(inputs.key, pool.width, layout, sizes, 1, pool.keys, 0),
              FromPool(inputs.value, pool.value_width, layout, sizes, 1, pool.keys, 0)};
          Results<T> expected;
          expected.output =
              FromPool(alone.output, pool.value_width, layout, sizes, 2, queries, kStep);
          expected.logsumexp =
              FromPool(alone.logsumexp, 1, Layout::kBhtd, sizes, 2, queries, kStep);
          this->ForEachScheduler([&](Scheduler& scheduler) {
            ExpectSameBits(Compute(problem, company, scheduler), expected);
          });
          if (this->HasFailure()) return;
        }
      }
    }
  }
}

TYPED_TEST(FusedPathTest, CausalRowsHaveTheBitsOfTheReference) {
  using T = typename TestFixture::Real;
  const Sizes all[] = {
      {.batch = 2,
       .heads = 4,
       .kv_heads = 2,
       .queries = 3,
       .keys = 70,
       .width = 8,
       .value_width = 5},
      {.batch = 2,
       .heads = 4,
       .kv_heads = 2,
       .queries = 210,
       .keys = 200,
       .width = 8,
       .value_width = 5},
      {.queries = 4090, .keys = 4050},
  };
  for (const Sizes& sizes : all) {
    for (const Layout layout : kBothLayouts) {
      const Problem problem = ProblemOf<T>(sizes, Options(Causal::kTopLeft, layout));
      SCOPED_TRACE(Describe(problem));
      const Inputs<T> inputs = MakeInputs<T>(problem, Kind::kWide, 4);
      const std::vector<T> expected = ReferenceOf(problem, inputs).output;
      this->ForEachScheduler([&](Scheduler& scheduler) {
        EXPECT_TRUE(SameBits(Compute(problem, inputs, scheduler).output, expected));
      });
      if (sizes.heads == 1) break;  // the layouts are the same
    }
  }
}

// Windows, lengths and offsets: where the keys a row sees begin within a block, a segment or a
// group of four keys, and where rows see none; and what changes scores.
TYPED_TEST(FusedPathTest, EveryOptionHasTheBitsOfTheReference) {
  using T = typename TestFixture::Real;
  struct Case {
    Sizes sizes;
    AttendOptions options;
  };
  std::vector<Case> cases;
  const auto add = [&](const Sizes& sizes, Causal causal, Window window,
                       std::vector<int64_t> lengths) {
    AttendOptions options = Options(causal);
    options.window = window;
    options.key_lengths = std::move(lengths);
    options.return_logsumexp = true;
    cases.push_back({sizes, options});
  };
  for (const int64_t queries : {2, 45, 250}) {
    const Sizes sizes{.batch = 2,
                      .heads = 4,
                      .kv_heads = 2,
                      .queries = queries,
                      .keys = 430,
                      .width = 5,
                      .value_width = 6};
    add(sizes, Causal::kBottomRight, {}, {});
    add(sizes, Causal::kBottomRight, {}, {31, 400});
    add(sizes, Causal::kBottomRight, {7, std::nullopt}, {217, 5});
    add(sizes, Causal::kTopLeft, {30, 9}, {});
    add(sizes, Causal::kNone, {0, 0}, {430, 0});
    add(sizes, Causal::kNone, {std::nullopt, 200}, {});
    add(sizes, Causal::kNone, {}, {193, 2});
  }
  for (const bool sinks : {false, true}) {
    AttendOptions options = Options(Causal::kBottomRight);
    options.softcap = sinks ? 0 : 2.5;
    options.alibi_slopes = {0.3, -0.01, 0, 0.02};
    if (sinks) options.sinks = {1, -50, 90, -std::numeric_limits<double>::infinity()};
    options.return_logsumexp = true;
    for (const int64_t queries : {2, 45, 250}) {
      for (const int64_t keys : {0, 430, 4100}) {
        if (queries * keys > 200'000) continue;
        cases.push_back({{.batch = 2,
                          .heads = 4,
                          .kv_heads = 2,
                          .queries = queries,
                          .keys = keys,
                          .width = 5,
                          .value_width = 6},
                         options});
      }
    }
  }
  add({.queries = 60, .keys = 8300, .width = 2, .value_width = 3}, Causal::kBottomRight,
      {300, std::nullopt}, {});
  add({.queries = 1, .keys = 8300, .width = 2, .value_width = 3}, Causal::kBottomRight,
      {4000, std::nullopt}, {8200});
  add({.queries = 40, .keys = 20, .width = 2, .value_width = 3}, Causal::kBottomRight, {}, {});
  // Masks of each kind and a few shapes, alone and with the rest.
  for (const int64_t queries : {2, 45, 200}) {
    for (const DType dtype : {DType::kBool, DTypeOf<T>()}) {
      for (const std::vector<int64_t>& shape :
           {std::vector<int64_t>{queries, 230}, {4, queries, 230}, {1, 1, 230}, {4, queries, 1}}) {
        for (const bool more : {false, true}) {
          AttendOptions options = Options(more ? Causal::kBottomRight : Causal::kNone);
          options.mask = TensorSpec{dtype, shape};
          options.return_logsumexp = true;
          if (more) {
            options.softcap = 2.5;
            options.alibi_slopes = {0.3, -0.01, 0, 0.02};
            options.sinks = {1, -50, 90, -std::numeric_limits<double>::infinity()};
          }
          cases.push_back({{.heads = 4,
                            .kv_heads = 2,
                            .queries = queries,
                            .keys = 230,
                            .width = 5,
                            .value_width = 6},
                           options});
        }
      }
    }
  }
  for (const int64_t queries : {1, 40}) {
    AttendOptions options = Options(Causal::kBottomRight);
    options.mask = TensorSpec{DTypeOf<T>(), {queries, 4100}};
    options.return_logsumexp = true;
    cases.push_back({{.queries = queries, .keys = 4100, .width = 2, .value_width = 3}, options});
  }
  for (const Case& c : cases) {
    const Problem problem = ProblemOf<T>(c.sizes, c.options);
    SCOPED_TRACE(Describe(problem));
    Inputs<T> inputs = MakeInputs<T>(problem, Kind::kWide, 4);
    if (problem.mask.has_value()) inputs.mask = RandomMask(*c.options.mask, 6);
    const std::vector<T> expected = ReferenceOf(problem, inputs).output;
    AttendOptions weighed = c.options;
    weighed.return_weights = weighed.return_key_sums = true;
    this->ForEachScheduler([&](Scheduler& scheduler) {
      const Results<T> results = Compute(problem, inputs, scheduler);
      EXPECT_TRUE(SameBits(results.output, expected));
      const Results<T> all = Compute(ProblemOf<T>(c.sizes, weighed), inputs, scheduler);
      EXPECT_TRUE(SameBits(all.output, expected));
      EXPECT_TRUE(SameBits(all.logsumexp, results.logsumexp));
      EXPECT_TRUE(HiddenWeightsAreZero(problem, all.weights, inputs.mask));
    });
    if (this->HasFailure()) return;
  }
}

// Rows whose mask holds ordinary numbers, far ones, or both, beside each other: a shift is each
// row's own.
TYPED_TEST(FusedPathTest, ShiftedRowsHaveTheBitsOfTheReference) {
  using T = typename TestFixture::Real;
  constexpr double kHidden = -std::numeric_limits<double>::infinity();
  const double lowest = static_cast<double>(std::numeric_limits<T>::lowest());
  const double far = static_cast<double>(kFar<T>);
  const double kinds[][2] = {
      {0, -1},          {lowest, lowest},   {lowest, lowest / 2}, {-2 * far, -far},
      {0, lowest},      {kHidden, lowest},  {kHidden, kHidden},   {-lowest, 0},
      {far, 1.5 * far}, {-0.9 * far, -far}, {-lowest, lowest}};
  for (const bool sinks : {false, true}) {
    for (const int64_t queries : {3, 30, 200}) {
      for (const int64_t keys : {70, 4100}) {
        if (queries * keys > 200'000) continue;
        AttendOptions options = ReturningAll();
        options.mask = TensorSpec{DTypeOf<T>(), {queries, keys}};
        if (sinks) options.sinks = {2, 3 * lowest / 4};
        const Problem problem = ProblemOf<T>(
            {.heads = 2, .queries = queries, .keys = keys, .width = 3, .value_width = 5}, options);
        SCOPED_TRACE(Describe(problem));
        Inputs<T> inputs = MakeInputs<T>(problem, Kind::kWide, 4);
        std::vector<double> mask;
        std::mt19937 rng(7);
        for (int64_t i = 0; i < queries; ++i) {
          for (int64_t j = 0; j < keys; ++j) {
            mask.push_back(kinds[i % std::size(kinds)][rng() % 2]);
          }
        }
        inputs.mask = MaskOf(DTypeOf<T>(), mask);
        const ReferenceAnswer<T> expected = ReferenceOf(problem, inputs);
        EXPECT_GT(expected.shifted_rows, 0);
        this->ForEachScheduler([&](Scheduler& scheduler) {
          const Results<T> results = Compute(problem, inputs, scheduler);
          EXPECT_TRUE(SameBits(results.output, expected.output));
          EXPECT_TRUE(HiddenWeightsAreZero(problem, results.weights, inputs.mask));
          for (int64_t row = 0; row < problem.heads * queries; ++row) {
            double sum = 0;
            for (int64_t j = 0; j < keys; ++j) {
              sum += static_cast<double>(results.weights[row * keys + j]);
            }
            if (sinks) continue;
            EXPECT_NEAR(sum, expected.inverse_sums[row] == 0 ? 0 : 1, 1e-5) << "row " << row;
          }
        });
        if (this->HasFailure()) return;
      }
    }
  }
}

// From (B, H, T, D) to (B, T, H, D).
template <typename T>
std::vector<T> TokensFirst(std::vector<T> tensor, int64_t heads, int64_t tokens, int64_t width) {
  std::vector<T> result;
  const int64_t rows = width == 0 ? 0 : static_cast<int64_t>(tensor.size()) / width;
  const TensorView<T> view(tensor.data(), Layout::kBhtd, heads, tokens, width);
  for (int64_t row = 0; row < rows; ++row) {
    const T* const from = view.Head(row / heads / tokens, row % heads).Row(row / heads % tokens);
    result.insert(result.end(), from, from + width);
  }
  return result;
}

template <typename T>
std::vector<T> Slice(const std::vector<T>& numbers, int64_t index, int64_t count) {
  return {numbers.begin() + index * count, numbers.begin() + (index + 1) * count};
}

// Every head of a problem as a problem of its own, on one thread.
template <typename T>
Results<T> HeadByHead(const Problem& p, const Inputs<T>& inputs, Scheduler& scheduler) {
  const Problem head = ProblemOf<T>(
      {.queries = p.queries, .keys = p.keys, .width = p.width, .value_width = p.value_width},
      ReturningAll(p.causal));
  Results<T> all;
  for (int64_t h = 0; h < p.batch * p.heads; ++h) {
    const int64_t kv_head = h / (p.heads / p.kv_heads);
    const Results<T> one = Compute<T>(
        head,
        {Slice(inputs.query, h, p.queries * p.width), Slice(inputs.key, kv_head, p.keys * p.width),
         Slice(inputs.value, kv_head, p.keys * p.value_width)},
        scheduler);
    for (std::vector<T> Results<T>::*tensor : {&Results<T>::output, &Results<T>::weights,
                                               &Results<T>::logsumexp, &Results<T>::key_sums}) {
      (all.*tensor).insert((all.*tensor).end(), (one.*tensor).begin(), (one.*tensor).end());
    }
  }
  return all;
}

// Also where the heads that share keys have more rows than one task takes, and where segments of
// keys are computed apart.
TYPED_TEST(FusedPathTest, GroupedHeadsAreTheSameHeadsOneByOne) {
  using T = typename TestFixture::Real;
  std::vector<Sizes> all = {
      {.heads = 24, .queries = 3, .keys = 70, .width = 8, .value_width = 5},
      {.batch = 2,
       .heads = 6,
       .kv_heads = 2,
       .queries = 2,
       .keys = 4100,
       .width = 3,
       .value_width = 2},
      {.heads = 34, .queries = 1, .keys = 8500, .width = 1, .value_width = 1},
      {.heads = 4, .kv_heads = 2, .queries = 70, .keys = 300, .width = 8, .value_width = 5},
      // Enough groups for a copy of keys and values of (batch, tokens, heads, width).
      {.batch = 2,
       .heads = 6,
       .kv_heads = 2,
       .queries = 400,
       .keys = 70,
       .width = 8,
       .value_width = 5},
  };
  ASSERT_GT(all[0].heads * all[0].queries, kFusedMostRows);
  for (int64_t queries = 1; queries <= 5; ++queries) {
    all.push_back({.batch = 2,
                   .heads = 8,
                   .kv_heads = 2,
                   .queries = queries,
                   .keys = 50,
                   .width = 9,
                   .value_width = 12});
  }
  for (const Sizes& sizes : all) {
    for (const Causal causal : kBothCausal) {
      const Problem problem = ProblemOf<T>(sizes, ReturningAll(causal));
      SCOPED_TRACE(Describe(problem));
      const Inputs<T> inputs = MakeInputs<T>(problem, Kind::kNormal, 5);
      Results<T> expected = HeadByHead(problem, inputs, this->one_thread());
      this->ForEachScheduler([&](Scheduler& scheduler) {
        ExpectSameBits(Compute(problem, inputs, scheduler), expected);
      });
      const auto [batch, heads, kv_heads, queries, keys, width, value_width] = sizes;
      expected.output = TokensFirst(expected.output, heads, queries, value_width);
      const Inputs<T> tokens_first{TokensFirst(inputs.query, heads, queries, width),
                                   TokensFirst(inputs.key, kv_heads, keys, width),
                                   TokensFirst(inputs.value, kv_heads, keys, value_width)};
      SCOPED_TRACE("BTHD");
      this->ForEachScheduler([&](Scheduler& scheduler) {
        ExpectSameBits(Compute(ProblemOf<T>(sizes, ReturningAll(causal, Layout::kBthd)),
                               tokens_first, scheduler),
                       expected);
      });
    }
  }
}

TYPED_TEST(FusedPathTest, WorkspaceIsWhatTheCostSays) {
  using T = typename TestFixture::Real;
  for (const int64_t queries : {1, 3, 40, 400}) {
    for (const int64_t keys : {7, 270, 4033}) {
      if (queries * keys > 1'000'000) continue;
      for (int asked = 0; asked < 4; ++asked) {
        AttendOptions options = Options(Causal::kNone, kBothLayouts[queries % 3 == 1 ? 1 : 0]);
        options.return_weights = (asked & 1) != 0;
        options.return_key_sums = (asked & 2) != 0;
        const Problem problem = ProblemOf<T>({.batch = 2,
                                              .heads = 6,
                                              .kv_heads = 2,
                                              .queries = queries,
                                              .keys = keys,
                                              .width = 3,
                                              .value_width = 5},
                                             options);
        SCOPED_TRACE(Describe(problem));
        const Inputs<T> inputs = RandomInputs<T>(problem, 16);
        this->ForEachScheduler([&](Scheduler& scheduler) {
          const int64_t peak = Compute(problem, inputs, scheduler).peak_workspace_bytes;
          const int64_t stated =
              CostOf(problem, scheduler.threads(), Kernel::kFused).workspace_bytes;
          EXPECT_EQ(peak, stated);
          EXPECT_GT(peak, 0);
        });
      }
    }
  }
}

// An output of -0 is 0: which of them a hidden key leaves depends on the company.
TYPED_TEST(FusedPathTest, TheSignOfAZeroDoesNotDependOnTheCompany) {
  using T = typename TestFixture::Real;
  constexpr int64_t kKeys = kFusedSegment + 3 * kFusedBlock;
  AttendOptions options = Options(Causal::kTopLeft);
  options.scale = 1 / std::numbers::log2e;
  const Problem problem = ProblemOf<T>({.queries = kKeys, .keys = kKeys}, options);
  Inputs<T> inputs{std::vector<T>(kKeys, 1), {}, {}};
  for (int64_t j = 0; j < kKeys; ++j) {
    const int64_t late = j - kFusedSegment;
    inputs.key.push_back(static_cast<T>((late < 0             ? 0
                                         : late < kFusedBlock ? 400
                                                              : 800) *
                                        (sizeof(T) == 4 ? 1 : 8)));
    inputs.value.push_back(late < kFusedBlock        ? T{-1}
                           : late < kFusedBlock + 50 ? -std::numeric_limits<T>::denorm_min()
                                                     : T{1});
  }
  const std::vector<T> expected = ReferenceOf(problem, inputs).output;
  ASSERT_TRUE(std::any_of(expected.begin(), expected.end(), [](T x) { return x == 0; }));
  this->ForEachScheduler([&](Scheduler& scheduler) {
    EXPECT_TRUE(SameBits(Compute(problem, inputs, scheduler).output, expected));
  });
}

// Of many NaNs it depends on the company which one a sum keeps: there is but one.
TYPED_TEST(FusedPathTest, NaNsOfAnyPayloadGiveTheSameBits) {
  using T = typename TestFixture::Real;
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  const Sizes sizes{.queries = 33, .keys = 300, .width = 3, .value_width = 2};
  const Problem problem = ProblemOf<T>(sizes, ReturningAll());
  Inputs<T> inputs = MakeInputs<T>(problem, Kind::kNormal, 6);
  for (int64_t j = 0; j < problem.keys; j += 7) {
    const Bits payload = static_cast<Bits>(j + 1);
    inputs.key[j * 3 + j % 3] = std::bit_cast<T>(
        static_cast<Bits>(std::bit_cast<Bits>(std::numeric_limits<T>::quiet_NaN()) | payload |
                          (j % 2 == 0 ? Bits{1} << (8 * sizeof(T) - 1) : 0)));
  }
  const Results<T> together = Compute(problem, inputs, this->one_thread());
  for (int64_t i = 0; i < problem.queries; ++i) {
    Sizes one = sizes;
    one.queries = 1;
    const Results<T> alone =
        Compute<T>(ProblemOf<T>(one, ReturningAll()),
                   {Slice(inputs.query, i, 3), inputs.key, inputs.value}, this->one_thread());
    EXPECT_TRUE(SameBits(alone.output, Slice(together.output, i, 2)));
    EXPECT_TRUE(SameBits(alone.logsumexp, Slice(together.logsumexp, i, 1)));
    EXPECT_TRUE(SameBits(alone.weights, Slice(together.weights, i, 300)));
    EXPECT_TRUE(SameBits(alone.key_sums, Slice(together.weights, i, 300)));
  }
}

TYPED_TEST(FusedPathTest, KeysAreCopiedWhereManyGroupsReadThem) {
  using T = typename TestFixture::Real;
  Causal causal = Causal::kNone;
  const auto workspace = [&](int64_t heads, int64_t queries, int64_t keys, Layout layout) {
    const Problem problem = ProblemOf<T>({.batch = 2,
                                          .heads = heads,
                                          .kv_heads = 2,
                                          .queries = queries,
                                          .keys = keys,
                                          .width = 8,
                                          .value_width = 5},
                                         Options(causal, layout));
    return CostOf(problem, 1, Kernel::kFused).workspace_bytes;
  };
  constexpr int64_t kBlockCopy = kFusedBlock * 8 * sizeof(T);
  const auto copied = [&](int64_t heads, int64_t queries, int64_t keys) {
    return workspace(heads, queries, keys, Layout::kBthd) -
           workspace(heads, queries, keys, Layout::kBhtd) - kBlockCopy;
  };
  constexpr int64_t kRow = 2 * 2 * (8 + 5) * sizeof(T);  // bytes of a token
  EXPECT_EQ(copied(6, 400, 70), 70 * kRow);
  EXPECT_EQ(copied(2, 1, 70), 0);
  EXPECT_EQ(copied(6, 400, (int64_t{64} << 20) / kRow + 1), 0);
  // What nobody sees is not copied.
  causal = Causal::kTopLeft;
  EXPECT_EQ(copied(6, 400, 5000), 400 * kRow);
}

}  // namespace
}  // namespace attendant::core
