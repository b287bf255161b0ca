// How soon a tile learns that its job is to stop, on every path: what is counted is how often it
// asks, not how long it takes.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <latch>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/gemm.h"
#include "core/gradient.h"
#include "core/head.h"
#include "core/long_product.h"
#include "core/referee.h"
#include "tests/core/gradient_testing.h"
#include "tests/core/testing.h"

namespace attendant::core {
namespace {

// Counts how often a tile asks, and tells it to stop when it has asked `stop_at` times.
class Asked final : public Checkpoint::Host {
 public:
  explicit Asked(int64_t stop_at) : stop_at_(stop_at) {}
  void GiveWay() override {
    if (++times_ >= stop_at_) stop_ = true;
  }
  int64_t times() const { return times_; }
  TileContext Context(int64_t tile) { return {tile, 0, &stop_, this}; }

 private:
  const int64_t stop_at_;
  int64_t times_ = 0;
  std::atomic<bool> stop_ = false;
};

// Runs the stages on this thread, the first tile of each twice: once told to stop when it first
// asks, and once to its end. Expects it to return then, and in the second run to ask as often as
// is said of the stages that are named.
void ExpectAsks(const std::vector<Stage>& stages, const std::map<std::string, int64_t>& least) {
  PrepareThreadForGemm();
  // Loops within loops each ask once more, on the way out.
  constexpr int64_t kOnTheWayOut = 3;
  std::map<std::string, int64_t> found;
  for (const Stage& stage : stages) {
    SCOPED_TRACE(stage.name);
    for (int64_t tile = 0; tile < stage.tiles; ++tile) {
      if (tile == 0) {
        Asked stopped(1);
        stage.run(stopped.Context(tile)).IgnoreError();
        EXPECT_LE(stopped.times(), 1 + kOnTheWayOut);
      }
      Asked asked(INT64_MAX);
      ASSERT_EQ(stage.run(asked.Context(tile)), absl::OkStatus());
      if (tile == 0) found[stage.name] = std::max(found[stage.name], asked.times());
    }
  }
  for (const auto& [name, times] : least) {
    ASSERT_TRUE(found.contains(name)) << name;
    EXPECT_GE(found[name], times) << name;
  }
}

constexpr int64_t kQueries = 1024;
constexpr int64_t kKeys = 4096;
constexpr int64_t kWidth = 64;

template <typename S>
class StopTest : public testing::Test {};
using Types = testing::Types<float, double, BFloat16>;
TYPED_TEST_SUITE(StopTest, Types);

template <typename S>
void ExpectAttendAsks(Path path, Kernel kernel, int64_t queries,
                      const std::map<std::string, int64_t>& least) {
  AttendOptions options;
  options.path = path;
  options.return_weights = options.return_key_sums = true;
  const Problem p = ProblemOf<S>({1, 1, 1, queries, kKeys, kWidth, kWidth}, options);
  Memory<S> memory(p, RandomInputs<S>(p, 1));
  Workspace workspace;
  auto stages = AttendStages<S>(p, memory.Tensors(), {&workspace, 1, kernel});
  ASSERT_EQ(stages.status(), absl::OkStatus());
  ExpectAsks(*stages, least);
}

TYPED_TEST(StopTest, TheFusedPathAsksAtEachBlockOfKeys) {
  // Blocks of 192 keys; groups of 192 queries or fewer.
  ExpectAttendAsks<TypeParam>(Path::kChunked, Kernel::kFused, kQueries,
                              {{"forward", kKeys / 192}, {"weights", kQueries / 192}});
}

TYPED_TEST(StopTest, FewQueriesAskAtEachRunOfKeys) {
  ExpectAttendAsks<TypeParam>(Path::kChunked, Kernel::kFused, 1, {{"forward", 2}});
}

TYPED_TEST(StopTest, TilesOfTheLibraryAskAtEachBlockOfKeys) {
  ExpectAttendAsks<TypeParam>(Path::kChunked, Kernel::kOneDnn, kQueries,
                              {{"forward", kKeys / 256}, {"weights", kQueries / 128}});
}

TYPED_TEST(StopTest, TheExplicitPathAsksAtEachPartOfAProduct) {
  ExpectAttendAsks<TypeParam>(Path::kExplicit, Kernel::kFused, kQueries,
                              {{"scores", kKeys / 2048},
                               {"softmax", 64 * kKeys / (1 << 14)},
                               {"values", kKeys / 2048},
                               {"key_sums", kQueries * 512 / (1 << 14)}});
}

template <typename S>
void ExpectGradientAsks(Path path, const std::map<std::string, int64_t>& least) {
  AttendOptions options;
  options.path = path;
  options.sinks = {0.5};
  options.mask = TensorSpec{DTypeOf<Wide<S>>(), {1, 1, 1, kKeys}};
  const Problem attend = ProblemOf<S>({1, 1, 1, kQueries, kKeys, kWidth, kWidth}, options);
  const GradientProblem problem{attend, /*given=*/false, /*return_d_mask=*/true};
  const Inputs<S> inputs = RandomInputs<S>(attend, 1);
  const std::vector<S> d_output = RandomDOutput<S>(attend, 1);
  const std::vector<Wide<S>> mask(kKeys, Wide<S>{0});
  std::vector<S> d_query(kQueries * kWidth);
  std::vector<S> d_key(kKeys * kWidth);
  std::vector<S> d_value(kKeys * kWidth);
  std::vector<Wide<S>> d_mask(kKeys);
  double d_sinks = 0;
  GradientTensors<S> tensors;
  const auto view = [](auto* data, int64_t tokens) {
    return TensorView<std::remove_pointer_t<decltype(data)>>(data, Layout::kBhtd, 1, tokens,
                                                             kWidth);
  };
  tensors.query = view(inputs.query.data(), kQueries);
  tensors.key = view(inputs.key.data(), kKeys);
  tensors.value = view(inputs.value.data(), kKeys);
  tensors.mask = mask.data();
  tensors.d_output = Dense(attend, d_output);
  tensors.d_query = view(d_query.data(), kQueries);
  tensors.d_key = view(d_key.data(), kKeys);
  tensors.d_value = view(d_value.data(), kKeys);
  tensors.d_mask = d_mask.data();
  tensors.d_sinks = &d_sinks;
  Workspace workspace;
  auto stages = GradientStages<S>(problem, tensors, {&workspace, 1, {}});
  ASSERT_EQ(stages.status(), absl::OkStatus());
  ExpectAsks(*stages, least);
}

TYPED_TEST(StopTest, TheFusedGradientAsksAtEachBlock) {
  std::map<std::string, int64_t> least = {
      {"forward", kKeys / 192}, {"d_mask", kQueries / 192}, {"d_sinks", 1}};
  if (kIsHalf<TypeParam>) {
    least["d_query"] = kKeys / 384;
    least["d_key"] = kQueries / 384;
  } else {
    least["gradient"] = 2;
  }
  ExpectGradientAsks<TypeParam>(Path::kChunked, least);
}

TYPED_TEST(StopTest, TheExplicitGradientAsksAtEachPartOfAProduct) {
  ExpectGradientAsks<TypeParam>(Path::kExplicit, {{"scores", kKeys / 2048},
                                                  {"d_weights", kKeys / 2048},
                                                  {"softmax", 64 * kKeys / (1 << 14)},
                                                  {"d_value", kQueries / 512},
                                                  {"d_mask", kQueries / 192},
                                                  {"chain", 64 * kKeys / (1 << 14)},
                                                  {"d_query", kKeys / 2048},
                                                  {"d_key", kQueries / 512},
                                                  {"d_sinks", 1}});
}

TYPED_TEST(StopTest, AHeadsProjectionsAskAtEachPartOfAProduct) {
  using S = TypeParam;
  constexpr int64_t kTokens = 128;
  constexpr int64_t kModel = 1024;
  HeadProblem problem;
  problem.attend = ProblemOf<S>({1, 1, 1, kTokens, kTokens, kModel, kModel}, {});
  problem.d_model = kModel;
  problem.x_has_batch = true;
  const std::vector<S> numbers(kModel * kModel);
  std::vector<S> output(kTokens * kModel);
  HeadTensors<S> tensors;
  tensors.x = tensors.w_q = tensors.w_k = tensors.w_v = tensors.w_o = numbers.data();
  tensors.output = output.data();
  Workspace workspace;
  auto stages = HeadStages<S>(problem, tensors, {&workspace, 1});
  ASSERT_EQ(stages.status(), absl::OkStatus());
  constexpr int64_t kParts = kTokens * kModel * kModel / kPartOfProduct;
  ExpectAsks(*stages, {{"projections", kParts}, {"output_projection", kParts}});
}

TEST(StopTest, ACheckAsksAtEachBlock) {
  constexpr int64_t kTokens = 700;
  const Problem p = ProblemOf<float>({1, 2, 2, kTokens, kTokens, kWidth, kWidth}, {});
  const Inputs<float> inputs = RandomInputs<float>(p, 1);
  const std::vector<float> candidate(2 * kTokens * kWidth, 0.5f);
  const CheckProblem problem = MakeCheckProblem(p);
  CheckInputs in;
  in.query = inputs.query.data();
  in.key = inputs.key.data();
  in.value = inputs.value.data();
  in.claims = {{Part::kOutput, {DType::kFloat32, {1, 2, kTokens, kWidth}}, candidate.data()}};
  CheckReport report;
  Workspace workspace;
  auto stages = CheckStages(problem, in, {&workspace, 1}, &report);
  ASSERT_EQ(stages.status(), absl::OkStatus());
  ExpectAsks(*stages, {{"forward", kTokens / 192}, {"mistakes: a few rows", kTokens / 32}});
  EXPECT_EQ(report.verdict, Verdict::kMismatch);
}

TEST(LongGemmTest, PartsMakeTheWholeProduct) {
  PrepareThreadForGemm();
  // More columns than a part has, and a depth that is cut as well.
  for (const auto& [rows, depth, columns] : {std::tuple<int64_t, int64_t, int64_t>{3, 5, 7},
                                             {64, 64, 5000},
                                             {128, 5000, 70},
                                             {100, 0, 10},
                                             {0, 10, 10},
                                             {10, 10, 0}}) {
    SCOPED_TRACE(testing::Message() << rows << " " << depth << " " << columns);
    std::mt19937 rng(1);
    const auto a = RandomVector<double>(rows * depth, rng);
    const auto b = RandomVector<double>(depth * columns, rng);
    for (const Transpose transpose : {Transpose::kNo, Transpose::kYes}) {
      for (const bool accumulate : {false, true}) {
        std::vector<double> whole(rows * columns, 0.25);
        std::vector<double> parts = whole;
        const MatrixView<const double> left{a.data(), rows, depth, depth};
        const MatrixView<const double> right =
            transpose == Transpose::kNo
                ? MatrixView<const double>{b.data(), depth, columns, columns}
                : MatrixView<const double>{b.data(), columns, depth, depth};
        ASSERT_EQ(Gemm(left, right, transpose, {whole.data(), rows, columns, columns}, accumulate),
                  absl::OkStatus());
        Asked asked(INT64_MAX);
        ASSERT_EQ(LongGemm<double>(left, right, transpose, {parts.data(), rows, columns, columns},
                                   accumulate, asked.Context(0).checkpoint()),
                  absl::OkStatus());
        EXPECT_TRUE(Near(parts, whole, 1e-11));
        EXPECT_GE(asked.times(), rows * depth * columns / kPartOfProduct);
      }
    }
  }
}

// On a scheduler: tiles that were not started are not started any more.
TEST(StopTest, ALongJobEndsWithTheTilesAtHand) {
  constexpr int kThreads = 2;
  const Problem p = ProblemOf<float>({1, 1, 1, 1 << 17, 1 << 17, 16, 16}, {});
  const std::vector<float> numbers(p.keys * p.width);
  std::vector<float> output(numbers.size());
  AttendTensors<float> tensors;
  tensors.query = tensors.key = tensors.value = {numbers.data(), p.layout, 1, p.keys, p.width};
  tensors.output = {output.data(), p.layout, 1, p.queries, p.value_width};
  Workspace workspace;
  auto stages = AttendStages<float>(p, tensors, {&workspace, kThreads});
  ASSERT_EQ(stages.status(), absl::OkStatus());
  std::atomic<int> started = 0;
  std::latch running(1);
  std::latch done(1);
  absl::Status end;
  for (Stage& stage : *stages) {
    stage.run = [&, run = stage.run](const TileContext& context) {
      if (++started == 1) running.count_down();
      return run(context);
    };
  }
  Scheduler scheduler(kThreads);
  const auto job =
      std::make_shared<Job>(*std::move(stages), [&](const absl::Status& status, const JobTimes&) {
        end = status;
        done.count_down();
      });
  ASSERT_EQ(scheduler.Submit(job), absl::OkStatus());
  running.wait();
  job->Stop(absl::CancelledError("enough"));
  const int at_stop = started;
  done.wait();
  EXPECT_EQ(end, absl::CancelledError("enough"));
  EXPECT_LE(started, at_stop + kThreads);
}

}  // namespace
}  // namespace attendant::core
