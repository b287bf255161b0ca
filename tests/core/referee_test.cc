#include "core/referee.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "core/errors.h"
#include "tests/core/flags.h"
#include "tests/core/mistaken.h"
#include "tests/core/random_problems.h"
#include "tests/core/testing.h"

namespace attendant::core {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAreArray;

CheckReport Run(const CheckProblem& problem, const CheckInputs& inputs) {
  static Scheduler* const scheduler = new Scheduler(2);
  CheckReport report;
  Workspace workspace;
  CheckProblem checked = problem;
  EXPECT_EQ(CheckClaims(inputs.claims, checked), absl::OkStatus());
  // Every check of these tests stays within what is said of it.
  const Resources resources{&workspace, scheduler->threads()};
  workspace.SetLimit(CheckWorkspaceBytes(checked, inputs.claims, resources));
  auto stages = CheckStages(checked, inputs, resources, &report);
  EXPECT_EQ(stages.ok() ? scheduler->Run(*std::move(stages)) : stages.status(), absl::OkStatus());
  EXPECT_EQ(workspace.current_bytes(), 0);
  return report;
}

std::vector<int64_t> ShapeOf(const CheckProblem& problem, Part part) {
  const Problem& p = problem.attend;
  if (part == Part::kOutput && problem.head) {
    return problem.x_has_batch ? std::vector<int64_t>{p.batch, p.queries, problem.d_model}
                               : std::vector<int64_t>{p.queries, problem.d_model};
  }
  std::vector<int64_t> shape = {p.batch, p.heads, p.queries, WidthOf(problem, part)};
  if (!problem.head && p.layout == Layout::kBthd) std::swap(shape[1], shape[2]);
  return shape;
}

// The candidate is stored as C.
template <typename S, typename C>
CheckReport CheckOutput(const Problem& p, const Inputs<S>& inputs, const std::vector<C>& output) {
  const CheckProblem problem = MakeCheckProblem(p);
  CheckInputs in;
  in.query = inputs.query.data();
  in.key = inputs.key.data();
  in.value = inputs.value.data();
  in.mask = inputs.mask.data();
  in.claims = {{Part::kOutput, {DTypeOf<C>(), ShapeOf(problem, Part::kOutput)}, output.data()}};
  return Run(problem, in);
}

std::vector<std::string> CodesOf(const CheckReport& report) {
  std::vector<std::string> codes;
  for (const Finding& finding : report.findings) codes.push_back(finding.code);
  return codes;
}

// What somebody's attention over these inputs gives.
template <typename S>
MistakenInputs MistakenInputsOf(const Problem& p, const Inputs<S>& inputs) {
  return {ToDouble(inputs.query), ToDouble(inputs.key), ToDouble(inputs.value),
          MaskNumbers(p, inputs.mask)};
}

// Both NaN, the same infinity, or nearly the same number.
bool SameNumbers(const std::vector<double>& a, const std::vector<double>& b,
                 bool nan_for_zero = false) {
  double largest = 1;
  for (const double x : a) largest = std::isfinite(x) ? std::max(largest, std::abs(x)) : largest;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) && (std::isnan(b[i]) || (nan_for_zero && b[i] == 0))) continue;
    if (a[i] == b[i]) continue;
    if (!(std::abs(a[i] - b[i]) <= 1e-11 * largest)) return false;
  }
  return true;
}

// Mistakes after which a row may see no key at all: whether it is 0 or NaN is then left open.
bool MayEmptyRows(const std::string& code) {
  for (const char* const one :
       {"causal_not_asked_for", "causal_wrong_corner", "causal_edge_one_early", "causal_inverted",
        "causal_mirrored", "mask_inverted"}) {
    if (code.find(one) != std::string::npos) return true;
  }
  return false;
}

Bugs BugsOf(const std::string& code) { return absl::StrSplit(code, '+'); }

// A problem with everything that people plant mistakes into. plant: what the mistakes make of it.
struct Planted {
  std::string name;
  CheckProblem problem;
  std::function<MistakenResult(const Bugs&)> plant;
  std::function<CheckReport(const MistakenResult&)> check;
};

// Every single mistake, then every pair, is found under its own name; besides, only what makes
// exactly the same numbers.
void ExpectEachFound(const Planted& planted, std::set<std::string>* named_alone) {
  SCOPED_TRACE(planted.name);
  std::vector<std::string> singles;
  std::vector<std::string> pairs;
  for (const Mistake mistake : MistakesIn(planted.problem)) {
    singles.push_back(CodeOf(MistakeSet({mistake})));
  }
  for (const MistakeSet& pair : PairsIn(planted.problem)) pairs.push_back(CodeOf(pair));
  const std::vector<double> honest = planted.plant({}).output;
  std::vector<std::vector<double>> of_singles;
  std::vector<std::vector<double>> of_pairs;
  for (const std::string& code : singles) of_singles.push_back(planted.plant({code}).output);
  for (const std::string& code : pairs) of_pairs.push_back(planted.plant(BugsOf(code)).output);
  const auto same_as = [](const std::vector<double>& output, const std::vector<std::string>& codes,
                          const std::vector<std::vector<double>>& outputs) {
    std::vector<std::string> same;
    for (size_t i = 0; i < codes.size(); ++i) {
      if (SameNumbers(output, outputs[i], MayEmptyRows(codes[i]))) same.push_back(codes[i]);
    }
    return same;
  };
  const auto expect_found = [&](const std::string& code, const std::vector<double>& output) {
    SCOPED_TRACE(code);
    const CheckReport report = planted.check(planted.plant(BugsOf(code)));
    if (SameNumbers(output, honest)) {
      EXPECT_EQ(report.verdict, Verdict::kMatch);
      EXPECT_THAT(CodesOf(report), IsEmpty());
      return;
    }
    EXPECT_EQ(report.verdict, Verdict::kMismatch);
    std::vector<std::string> expected = same_as(output, singles, of_singles);
    if (expected.empty()) expected = same_as(output, pairs, of_pairs);
    EXPECT_EQ(CodesOf(report), expected);
    if (expected == std::vector<std::string>{code}) named_alone->insert(code);
  };
  for (size_t i = 0; i < singles.size(); ++i) expect_found(singles[i], of_singles[i]);
  for (size_t i = 0; i < pairs.size(); ++i) expect_found(pairs[i], of_pairs[i]);
}

Planted PlantedAttention(const std::string& name, const Sizes& sizes, const AttendOptions& options,
                         uint32_t seed) {
  const Problem p = ProblemOf<double>(sizes, options);
  auto inputs = std::make_shared<Inputs<double>>(RandomInputs<double>(p, seed));
  if (options.mask.has_value()) inputs->mask = RandomMask(*options.mask, seed);
  const CheckProblem problem = MakeCheckProblem(p);
  return {absl::StrCat(name, ": ", Describe(p), " seed ", seed), problem,
          [=](const Bugs& bugs) {
            return MistakenAttention(p, MistakenInputsOf(p, *inputs), problem.d_model, bugs);
          },
          [=](const MistakenResult& result) { return CheckOutput(p, *inputs, result.output); }};
}

struct HeadArrays {
  HeadProblem head;
  MistakenHead arrays;
};

HeadArrays RandomHead(int64_t batch, int64_t tokens, int64_t d_model, int64_t heads, int64_t d_k,
                      int64_t d_v, const AttendOptions& options, uint32_t seed) {
  HeadSpec spec;
  spec.x = {DType::kFloat64, {batch, tokens, d_model}};
  spec.w_q = spec.w_k = {DType::kFloat64, {d_model, heads * d_k}};
  spec.w_v = {DType::kFloat64, {d_model, heads * d_v}};
  spec.w_o = {DType::kFloat64, {heads * d_v, d_model}};
  spec.heads = heads;
  spec.options = options;
  HeadArrays made;
  made.head = MakeHeadProblem(spec).value();
  std::mt19937 rng(seed);
  made.arrays.x = RandomVector<double>(batch * tokens * d_model, rng);
  made.arrays.w_q = RandomVector<double>(d_model * heads * d_k, rng, 0.5);
  made.arrays.w_k = RandomVector<double>(d_model * heads * d_k, rng, 0.5);
  made.arrays.w_v = RandomVector<double>(d_model * heads * d_v, rng, 0.5);
  made.arrays.w_o = RandomVector<double>(d_model * heads * d_v, rng, 0.5);
  made.arrays.d_model = d_model;
  return made;
}

CheckReport CheckHead(const HeadArrays& head, const MistakenResult& result,
                      const std::vector<Part>& parts) {
  const CheckProblem problem = MakeCheckProblem(head.head);
  CheckInputs in;
  in.x = head.arrays.x.data();
  in.w_q = head.arrays.w_q.data();
  in.w_k = head.arrays.w_k.data();
  in.w_v = head.arrays.w_v.data();
  in.w_o = head.arrays.w_o.data();
  const std::vector<double>* const all[] = {&result.query,  &result.key,     &result.value,
                                            &result.logits, &result.weights, &result.context,
                                            &result.output};
  for (const Part part : parts) {
    in.claims.push_back(
        {part, {DType::kFloat64, ShapeOf(problem, part)}, all[static_cast<size_t>(part)]->data()});
  }
  return Run(problem, in);
}

const std::vector<Part> kAllParts = {Part::kQuery,   Part::kKey,     Part::kValue, Part::kLogits,
                                     Part::kWeights, Part::kContext, Part::kOutput};

Problem InBthd(const HeadArrays& head) { return MakeCheckProblem(head.head).attend; }

Planted PlantedHead(const std::string& name, const HeadArrays& head) {
  return {name, MakeCheckProblem(head.head),
          [=](const Bugs& bugs) { return MistakenHeadOf(InBthd(head), head.arrays, bugs); },
          [=](const MistakenResult& result) { return CheckHead(head, result, {Part::kOutput}); }};
}

constexpr Sizes kSelf{
    .batch = 2, .heads = 4, .kv_heads = 2, .queries = 5, .keys = 5, .width = 3, .value_width = 4};
constexpr Sizes kCross{
    .batch = 2, .heads = 2, .kv_heads = 2, .queries = 4, .keys = 7, .width = 8, .value_width = 3};

// Each of these problems has most mistakes to itself; together they have all.
TEST(RefereeTest, EachPlantedMistakeAndEachPairIsNamed) {
  AttendOptions masked = Options(Causal::kNone);
  masked.mask = TensorSpec{DType::kBool, {2, 1, 5, 5}};
  AttendOptions added = Options(Causal::kNone, Layout::kBthd);
  added.mask = TensorSpec{DType::kFloat64, {2, 2, 4, 7}};
  added.scale = 0.5;
  added.softcap = 2;
  AttendOptions padded = Options(Causal::kBottomRight);
  padded.key_lengths = {6, 5};
  padded.window = Window{2, std::nullopt};
  AttendOptions biased = Options(Causal::kTopLeft);
  biased.alibi_slopes = {0.5, 0.25};
  biased.sinks = {0.5, -1};
  biased.softcap = 3;
  const Planted all[] = {
      PlantedAttention("plain", kSelf, Options(Causal::kNone), 1),
      PlantedAttention("plain BTHD", kSelf, Options(Causal::kNone, Layout::kBthd), 2),
      PlantedAttention("causal", kSelf, Options(Causal::kTopLeft), 3),
      PlantedAttention("bool mask", kSelf, masked, 4),
      PlantedAttention("added mask and softcap", kCross, added, 5),
      PlantedAttention("lengths and window", kCross, padded, 6),
      PlantedAttention("ALiBi, sinks and softcap", kCross, biased, 7),
      PlantedHead("head of one", RandomHead(1, 5, 4, 1, 4, 4, {}, 8)),
      PlantedHead("heads", RandomHead(2, 5, 6, 3, 4, 2, Options(Causal::kTopLeft), 9)),
      PlantedHead("wide heads", RandomHead(2, 4, 5, 2, 3, 4, {}, 10)),
  };
  std::set<std::string> named_alone;
  for (const Planted& planted : all) ExpectEachFound(planted, &named_alone);
  for (int i = 0; i < static_cast<int>(Mistake::kCount); ++i) {
    const std::string code = CodeOf(MistakeSet({static_cast<Mistake>(i)}));
    // Its scores have to overflow: the next test's do.
    if (code == "no_max_subtraction") continue;
    EXPECT_TRUE(named_alone.count(code) > 0) << code << " was nowhere the only one";
  }
  // Of the pairs that some of these problems allow and that differ from each single mistake there.
  EXPECT_GT(named_alone.size(), 480u);
}

// Rows whose scores are beyond what exp holds are NaN, the others right.
TEST(RefereeTest, OverflowOfExpIsNamed) {
  const Sizes sizes{.queries = 6, .keys = 6, .width = 4, .value_width = 3};
  for (const double largest : {800.0, 100.0}) {
    SCOPED_TRACE(largest);
    const bool is_double = largest > 709;
    const Problem p = is_double ? ProblemOf<double>(sizes, {}) : ProblemOf<float>(sizes, {});
    std::mt19937 rng(5);
    MistakenInputs in;
    in.query = RandomVector<double>(24, rng);
    in.key = RandomVector<double>(24, rng);
    in.value = RandomVector<double>(18, rng);
    // Query 2 meets key 2 with a score of `largest`, query 4 everything with less than exp holds.
    for (int d = 0; d < 4; ++d) {
      in.query[static_cast<size_t>(8 + d)] = d == 0 ? largest : 0;
      in.key[static_cast<size_t>(8 + d)] = d == 0 ? 2 : 0;
    }
    const auto stored = [&]<typename T>(T) {
      Inputs<T> inputs;
      inputs.query.assign(in.query.begin(), in.query.end());
      inputs.key.assign(in.key.begin(), in.key.end());
      inputs.value.assign(in.value.begin(), in.value.end());
      std::vector<double> numbers = MistakenAttention(p, MistakenInputsOf(p, inputs), 4, {}).output;
      for (size_t d = 6; d < 9; ++d) numbers[d] = std::nan("");
      const std::vector<T> output(numbers.begin(), numbers.end());
      return CheckOutput(p, inputs, output);
    };
    const CheckReport report = is_double ? stored(double{}) : stored(float{});
    EXPECT_EQ(report.verdict, Verdict::kMismatch);
    EXPECT_EQ(report.max_abs_difference, std::numeric_limits<double>::infinity());
    EXPECT_EQ(report.max_ulp_difference, std::numeric_limits<int64_t>::max());
    EXPECT_THAT(report.worst_index, ElementsAre(0, 0, 2, 0));
    EXPECT_THAT(CodesOf(report), ElementsAre("no_max_subtraction"));
  }
}

// Computed by ourselves, on either path.
template <typename S>
void ExpectNoFalseFinding(int64_t problems, uint32_t seed) {
  Scheduler scheduler(2);
  for (int64_t n = 0; n < problems && !testing::Test::HasFailure(); ++n, ++seed) {
    TensorSpec mask;
    const Problem p = RandomProblems(seed).Next<S>(mask);
    SCOPED_TRACE(absl::StrCat(Describe(p), " seed ", seed));
    Inputs<S> inputs = RandomInputs<S>(p, seed);
    inputs.mask = RandomMask(mask, seed);
    Problem on_path = p;
    on_path.path = kBothPaths[n % 2];
    const std::vector<S> output = Compute(on_path, inputs, scheduler).output;
    const CheckReport report = CheckOutput(p, inputs, output);
    EXPECT_EQ(report.verdict, Verdict::kMatch)
        << report.max_abs_difference << " of " << report.tolerance;
    EXPECT_THAT(CodesOf(report), IsEmpty());
    EXPECT_LE(report.max_abs_difference, report.tolerance);
    EXPECT_THAT(report.worst_index, SizeIs(output.empty() ? 0 : 4));
  }
}

TEST(RefereeTest, NoFalseFindingInAThousandHonestProblems) {
  const int64_t problems = std::max<int64_t>(TheFlags().problems * 5 / 12, 1);  // of each type
  ExpectNoFalseFinding<float>(problems, TheFlags().seed);
  ExpectNoFalseFinding<double>(problems, TheFlags().seed + 1'000'000);
  ExpectNoFalseFinding<Float16>(problems, TheFlags().seed + 2'000'000);
  ExpectNoFalseFinding<BFloat16>(problems, TheFlags().seed + 3'000'000);
}

const Sizes kPlain{
    .batch = 2, .heads = 2, .kv_heads = 2, .queries = 12, .keys = 12, .width = 8, .value_width = 8};

// What arithmetic for numbers of S makes of inputs of T.
template <typename S, typename T>
std::vector<S> ComputedAs(const Problem& p, const Inputs<T>& inputs) {
  Scheduler scheduler(2);
  Problem narrow = p;
  narrow.dtype = DTypeOf<S>();
  const auto cast = [](const std::vector<T>& numbers) {
    const std::vector<double> wide = ToDouble(numbers);
    return Stored<S>(std::vector<Wide<S>>(wide.begin(), wide.end()));
  };
  return Compute<S>(narrow, {cast(inputs.query), cast(inputs.key), cast(inputs.value)}, scheduler)
      .output;
}

TEST(RefereeTest, NarrowerArithmeticIsRoundingOnly) {
  const Problem p = ProblemOf<double>(kPlain, Options(Causal::kTopLeft));
  const Inputs<double> inputs = RandomInputs<double>(p, 3);
  const auto expect = [&](const CheckReport& report, const std::string& code) {
    SCOPED_TRACE(code);
    EXPECT_EQ(report.verdict, Verdict::kRoundingOnly);
    EXPECT_THAT(CodesOf(report), ElementsAre(code));
    EXPECT_LE(report.max_abs_difference, report.tolerance);
    ASSERT_THAT(report.findings, SizeIs(1));
    EXPECT_LE(report.findings[0].residual, report.tolerance);
    EXPECT_THAT(report.findings[0].message, HasSubstr("float64"));
  };
  // As they are stored, and as somebody widened them again.
  const auto single = ComputedAs<float>(p, inputs);
  const auto half = ComputedAs<Float16>(p, inputs);
  const auto brain = ComputedAs<BFloat16>(p, inputs);
  expect(CheckOutput(p, inputs, single), "float32_arithmetic");
  expect(CheckOutput(p, inputs, ToDouble(single)), "float32_arithmetic");
  expect(CheckOutput(p, inputs, half), "float16_arithmetic");
  expect(CheckOutput(p, inputs, ToDouble(half)), "float16_arithmetic");
  expect(CheckOutput(p, inputs, brain), "bfloat16_arithmetic");
  expect(CheckOutput(p, inputs, ToDouble(brain)), "bfloat16_arithmetic");
}

// A candidate whose type is narrower than the request's was rounded, whatever else it is.
template <typename S>
void ExpectNamedByItsType() {
  Scheduler scheduler(2);
  for (uint32_t seed = 1; seed <= 100 && !testing::Test::HasFailure(); ++seed) {
    TensorSpec mask;
    const Problem p = RandomProblems(seed).Next<float>(mask);
    SCOPED_TRACE(absl::StrCat(Describe(p), " seed ", seed));
    Inputs<float> inputs = RandomInputs<float>(p, seed);
    inputs.mask = RandomMask(mask, seed);
    const CheckReport report =
        CheckOutput(p, inputs, Stored<S>(Compute(p, inputs, scheduler).output));
    if (report.verdict == Verdict::kMatch) continue;
    EXPECT_EQ(report.verdict, Verdict::kRoundingOnly);
    EXPECT_THAT(CodesOf(report), ElementsAre(absl::StrCat(
                                     absl::AsciiStrToLower(NameOf(DTypeOf<S>())), "_arithmetic")));
  }
}

TEST(RefereeTest, ANarrowerTypeIsNamedInEveryProblem) {
  ExpectNamedByItsType<Float16>();
  ExpectNamedByItsType<BFloat16>();
}

// A last step in double leaves numbers that float does not hold: they are as far away as float's.
TEST(RefereeTest, FloatInsideDoubleIsRoundingOnly) {
  const Problem p = ProblemOf<double>(kPlain, {});
  const Inputs<double> inputs = RandomInputs<double>(p, 4);
  std::vector<double> output = ToDouble(ComputedAs<float>(p, inputs));
  for (double& x : output) x *= 1 + 1e-12;
  const CheckReport report = CheckOutput(p, inputs, output);
  EXPECT_EQ(report.verdict, Verdict::kRoundingOnly);
  EXPECT_THAT(CodesOf(report), ElementsAre("float32_arithmetic"));
  // Far nearer than float32, and further than float64: rounding of some kind, not named.
  std::vector<double> near = MistakenAttention(p, MistakenInputsOf(p, inputs), 16, {}).output;
  for (double& x : near) x *= 1 + 1e-11;
  const CheckReport unnamed = CheckOutput(p, inputs, near);
  EXPECT_EQ(unnamed.verdict, Verdict::kRoundingOnly);
  EXPECT_THAT(CodesOf(unnamed), IsEmpty());
}

// Every step in bfloat16, as a library without float32 sums does it.
TEST(RefereeTest, RoundingEachStepIsRoundingOnly) {
  AttendOptions options;
  options.scale = 1.5;  // of larger scores the rounding shows
  const Problem p = ProblemOf<BFloat16>(kPlain, options);
  const Inputs<BFloat16> inputs = RandomInputs<BFloat16>(p, 5);
  const auto round = [](double x) { return Rounded(DType::kBFloat16, x); };
  const MistakenInputs in = MistakenInputsOf(p, inputs);
  std::vector<double> output(inputs.query.size());
  for (int64_t head = 0; head < 4; ++head) {
    for (int64_t i = 0; i < 12; ++i) {
      double weights[12];
      double sum = 0;
      for (int64_t j = 0; j < 12; ++j) {
        double dot = 0;
        for (int64_t d = 0; d < 8; ++d) {
          dot += in.query[(head * 12 + i) * 8 + d] * in.key[(head * 12 + j) * 8 + d];
        }
        weights[j] = round(std::exp(round(round(dot) * p.scale)));
        sum += weights[j];
      }
      for (int64_t d = 0; d < 8; ++d) {
        double mean = 0;
        for (int64_t j = 0; j < 12; ++j) {
          mean += round(weights[j] / round(sum)) * in.value[(head * 12 + j) * 8 + d];
        }
        output[(head * 12 + i) * 8 + d] = mean;
      }
    }
  }
  const CheckReport report =
      CheckOutput(p, inputs, Stored<BFloat16>({output.begin(), output.end()}));
  EXPECT_EQ(report.verdict, Verdict::kRoundingOnly);
  EXPECT_THAT(CodesOf(report), ElementsAre("bfloat16_arithmetic"));
  EXPECT_THAT(report.findings.at(0).message, HasSubstr("each step was rounded"));
}

template <typename S>
void ExpectNamedWhenStored() {
  Problem p = ProblemOf<S>(kSelf, Options(Causal::kTopLeft));
  const Inputs<S> inputs = RandomInputs<S>(p, 6);
  const CheckProblem problem = MakeCheckProblem(p);
  for (const Mistake mistake : MistakesIn(problem)) {
    const std::string code = CodeOf(MistakeSet({mistake}));
    SCOPED_TRACE(absl::StrCat(NameOf(p.dtype), " ", code));
    const MistakenInputs in = MistakenInputsOf(p, inputs);
    const std::vector<double> honest = MistakenAttention(p, in, problem.d_model, {}).output;
    const std::vector<double> output = MistakenAttention(p, in, problem.d_model, {code}).output;
    const CheckReport report = CheckOutput(p, inputs, Stored<S>({output.begin(), output.end()}));
    if (SameNumbers(honest, output)) {
      EXPECT_EQ(report.verdict, Verdict::kMatch);
      continue;
    }
    EXPECT_EQ(report.verdict, Verdict::kMismatch);
    EXPECT_THAT(CodesOf(report), testing::Contains(code));
    EXPECT_LE(report.findings.size(), 2u) << absl::StrJoin(CodesOf(report), " ");
  }
}

TEST(RefereeTest, MistakesAreNamedInEveryType) {
  ExpectNamedWhenStored<float>();
  ExpectNamedWhenStored<Float16>();
  ExpectNamedWhenStored<BFloat16>();
}

// Float numbers of a mistake, sent as doubles to a question in double.
TEST(RefereeTest, AMistakeInNarrowerArithmeticIsNamed) {
  const Problem p = ProblemOf<double>(kPlain, {});
  const Inputs<double> inputs = RandomInputs<double>(p, 7);
  Problem unscaled = p;
  unscaled.scale = 1;
  const CheckReport report = CheckOutput(p, inputs, ToDouble(ComputedAs<float>(unscaled, inputs)));
  EXPECT_EQ(report.verdict, Verdict::kMismatch);
  EXPECT_THAT(CodesOf(report), ElementsAre("scale_missing"));
}

// What each of these codes would have made is the same: nobody can tell them apart.
void ExpectCoincide(const Problem& p, const Inputs<double>& inputs,
                    const std::vector<std::string>& codes) {
  const MistakenInputs in = MistakenInputsOf(p, inputs);
  for (const std::string& code : codes) {
    SCOPED_TRACE(code);
    const int64_t d_model = p.heads * p.width;
    const CheckReport report =
        CheckOutput(p, inputs, MistakenAttention(p, in, d_model, {code}).output);
    EXPECT_EQ(report.verdict, Verdict::kMismatch);
    EXPECT_THAT(CodesOf(report), UnorderedElementsAreArray(codes));
  }
}

TEST(RefereeTest, MistakesThatCoincideAreAllReported) {
  // One token that misses its own key, or sees those after it alone, sees nothing.
  const Problem one = ProblemOf<double>({.width = 4, .value_width = 2}, Options(Causal::kTopLeft));
  ExpectCoincide(one, RandomInputs<double>(one, 8), {"causal_edge_one_early", "causal_inverted"});
  // Where d_model = D^2, twice the scale is that of d_model.
  const Problem square =
      ProblemOf<double>({.heads = 3, .kv_heads = 3, .queries = 4, .keys = 4, .width = 3}, {});
  ExpectCoincide(square, RandomInputs<double>(square, 9), {"scale_by_d_model", "scale_twice"});
  // Symmetric scores whose diagonal is constant and their maximum: rows are columns, and all
  // maxima are equal.
  const Problem p = ProblemOf<double>({.queries = 4, .keys = 4, .width = 4, .value_width = 2}, {});
  Inputs<double> symmetric = RandomInputs<double>(p, 10);
  for (size_t row = 0; row < 16; row += 4) {
    double squares = 0;
    for (size_t d = row; d < row + 4; ++d) squares += symmetric.query[d] * symmetric.query[d];
    for (size_t d = row; d < row + 4; ++d) symmetric.query[d] *= 2 / std::sqrt(squares);
  }
  symmetric.key = symmetric.query;
  ExpectCoincide(p, symmetric, {"softmax_over_queries", "keepdims_lost", "keepdims_lost_in_sum"});
}

TEST(RefereeTest, OneTokenOfOneHeadMatchesWhateverTheScale) {
  const Problem p = ProblemOf<double>({.width = 4, .value_width = 2}, {});
  const Inputs<double> inputs = RandomInputs<double>(p, 11);
  EXPECT_EQ(CheckOutput(p, inputs, inputs.value).verdict, Verdict::kMatch);
}

TEST(RefereeTest, AnUnknownMistakeIsNotGuessed) {
  const Problem p = ProblemOf<double>(kPlain, Options(Causal::kTopLeft));
  const Inputs<double> inputs = RandomInputs<double>(p, 12);
  std::vector<double> output =
      MistakenAttention(p, MistakenInputsOf(p, inputs), 16, {"scale_missing"}).output;
  // One number that no known mistake explains, among all others that one does.
  output[77] += 1e-3;
  const CheckReport report = CheckOutput(p, inputs, output);
  EXPECT_EQ(report.verdict, Verdict::kMismatch);
  EXPECT_THAT(CodesOf(report), IsEmpty());
  EXPECT_EQ(report.first_departure, "");
}

// Half precision would be further away than that, but not in one place.
TEST(RefereeTest, OneWrongNumberIsNoRounding) {
  const Problem p = ProblemOf<double>(kPlain, {});
  const Inputs<double> inputs = RandomInputs<double>(p, 17);
  const std::vector<double> honest =
      MistakenAttention(p, MistakenInputsOf(p, inputs), 16, {}).output;
  for (const double by : {1e-2, 1e-3, 1e-4}) {
    SCOPED_TRACE(by);
    std::vector<double> output = honest;
    output[100] += by;
    CheckReport report = CheckOutput(p, inputs, output);
    EXPECT_EQ(report.verdict, Verdict::kMismatch);
    EXPECT_THAT(CodesOf(report), IsEmpty());
    EXPECT_THAT(report.worst_index, ElementsAre(0, 1, 0, 4));
    // Nor where all are off by a little of themselves.
    output = honest;
    for (double& x : output) x *= 1 + by;
    report = CheckOutput(p, inputs, output);
    EXPECT_EQ(report.verdict, Verdict::kMismatch);
    EXPECT_THAT(CodesOf(report), IsEmpty());
  }
}

// NaN beside NaN and an infinity beside itself are equal; sizes of differences are in the
// candidate's own units.
TEST(RefereeTest, DifferencesAreMeasured) {
  const Problem p = ProblemOf<float>({.queries = 2, .keys = 1, .width = 1, .value_width = 2}, {});
  Inputs<float> inputs = RandomInputs<float>(p, 13);
  inputs.value = {1, std::numeric_limits<float>::infinity()};
  constexpr float kInf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(CheckOutput(p, inputs, std::vector<float>{1, kInf, 1, kInf}).verdict, Verdict::kMatch);
  const CheckReport report = CheckOutput(p, inputs, std::vector<float>{1, kInf, 1.5f, kInf});
  EXPECT_EQ(report.max_abs_difference, 0.5);
  EXPECT_EQ(report.max_ulp_difference, 1 << 22);
  EXPECT_THAT(report.worst_index, ElementsAre(0, 0, 1, 0));
  EXPECT_EQ(CheckOutput(p, inputs, std::vector<float>{1, kInf, 1, -kInf}).max_abs_difference, kInf);
  inputs.query = {1, std::nanf("")};
  EXPECT_EQ(
      CheckOutput(p, inputs, std::vector<float>{1, kInf, std::nanf(""), std::nanf("")}).verdict,
      Verdict::kMatch);
}

// Masks of -1e9 are numbers: they do not make every answer right.
TEST(RefereeTest, FarMaskNumbersDoNotWidenTheTolerance) {
  AttendOptions options;
  options.mask = TensorSpec{DType::kFloat32, {12, 12}};
  const Problem p = ProblemOf<float>(kPlain, options);
  Inputs<float> inputs = RandomInputs<float>(p, 14);
  std::vector<double> numbers(144);
  for (int64_t i = 0; i < 12; ++i) {
    for (int64_t j = i + 1; j < 12; ++j) numbers[static_cast<size_t>(i * 12 + j)] = -1e9;
  }
  inputs.mask = MaskOf(DType::kFloat32, numbers);
  Scheduler scheduler(2);
  const CheckReport match = CheckOutput(p, inputs, Compute(p, inputs, scheduler).output);
  EXPECT_EQ(match.verdict, Verdict::kMatch);
  EXPECT_LT(match.tolerance, 1e-4);
  const std::vector<double> ignored =
      MistakenAttention(p, MistakenInputsOf(p, inputs), 16, {"mask_ignored"}).output;
  EXPECT_THAT(CodesOf(CheckOutput(p, inputs, std::vector<float>(ignored.begin(), ignored.end()))),
              ElementsAre("mask_ignored"));
}

// Rows of many tiles, of which a few are tried first: all of them count.
TEST(RefereeTest, EveryRowOfALongProblemCounts) {
  for (const Layout layout : kBothLayouts) {
    AttendOptions options = Options(Causal::kTopLeft, layout);
    const Problem p = ProblemOf<double>({.batch = 2,
                                         .heads = 4,
                                         .kv_heads = 2,
                                         .queries = 80,
                                         .keys = 80,
                                         .width = 8,
                                         .value_width = 3},
                                        options);
    SCOPED_TRACE(Describe(p));
    const Inputs<double> inputs = RandomInputs<double>(p, 18);
    const MistakenInputs in = MistakenInputsOf(p, inputs);
    for (const char* const code :
         {"softmax_over_queries", "softmax_over_heads", "softmax_over_batch", "scale_missing",
          "scores_transposed", "keepdims_lost", "causal_edge_one_late", "mask_after_softmax",
          "grouped_heads_tiled", "heads_split_without_transpose", "heads_and_tokens_swapped",
          "softmax_over_queries+scale_twice", "scale_missing+causal_ignored"}) {
      SCOPED_TRACE(code);
      std::vector<double> output = MistakenAttention(p, in, 32, BugsOf(code)).output;
      EXPECT_THAT(CodesOf(CheckOutput(p, inputs, output)), ElementsAre(code));
      output[1234] += 1e-6;
      const CheckReport report = CheckOutput(p, inputs, output);
      EXPECT_EQ(report.verdict, Verdict::kMismatch);
      EXPECT_THAT(CodesOf(report), IsEmpty());
    }
  }
}

// Sizes of 0 leave room for any number elsewhere: nothing may be done for each of them.
TEST(RefereeTest, NothingMatchesNothing) {
  constexpr int64_t kMany = std::numeric_limits<int32_t>::max();
  for (const Sizes& sizes :
       {Sizes{.batch = 0}, Sizes{.queries = 0}, Sizes{.value_width = 0},
        Sizes{.batch = 0, .heads = kMany, .kv_heads = kMany, .queries = 4, .keys = 2},
        Sizes{.batch = kMany, .heads = 16, .kv_heads = 16, .queries = 0, .keys = 0}}) {
    const Problem p = ProblemOf<float>(sizes, Options(Causal::kBottomRight));
    const CheckReport report = CheckOutput(p, Inputs<float>{}, std::vector<float>{});
    EXPECT_EQ(report.verdict, Verdict::kMatch);
    EXPECT_EQ(report.max_abs_difference, 0);
    EXPECT_THAT(report.worst_index, IsEmpty());
  }
  // Without keys every row is 0.
  const Problem p = ProblemOf<float>({.queries = 2, .keys = 0, .width = 2}, {});
  Inputs<float> inputs = RandomInputs<float>(p, 1);
  EXPECT_EQ(CheckOutput(p, inputs, std::vector<float>{0, 0}).verdict, Verdict::kMatch);
  EXPECT_EQ(CheckOutput(p, inputs, std::vector<float>{0, 1}).verdict, Verdict::kMismatch);
  // As many heads as divide no column; of their output nothing is left but 0.
  HeadArrays head = RandomHead(2, 3, 4, kMany, 0, 0, Options(Causal::kTopLeft), 1);
  MistakenResult result;
  result.output.assign(24, 0);
  EXPECT_EQ(CheckHead(head, result, {Part::kOutput}).verdict, Verdict::kMatch);
  result.output[7] = 1e-9;
  const CheckReport report = CheckHead(head, result, {Part::kOutput});
  EXPECT_EQ(report.verdict, Verdict::kMismatch);
  EXPECT_THAT(report.worst_index, ElementsAre(0, 1, 3));
}

TEST(RefereeTest, AHeadsIntermediatesSayWhereItDeparts) {
  const HeadArrays head = RandomHead(2, 5, 6, 3, 4, 2, Options(Causal::kTopLeft), 15);
  const auto plant = [&](const Bugs& bugs) {
    return MistakenHeadOf(InBthd(head), head.arrays, bugs);
  };
  EXPECT_EQ(CheckHead(head, plant({}), kAllParts).verdict, Verdict::kMatch);
  const std::pair<const char*, const char*> mistakes[] = {
      {"heads_split_without_transpose", "query"},
      {"w_k_is_w_q", "key"},
      {"scale_by_d_model", "logits"},
      {"softmax_over_queries", "weights"},
      {"causal_ignored", "weights"},
      {"heads_merged_without_transpose", "output"},
      {"w_o_missing", "output"}};
  for (const auto& [code, departure] : mistakes) {
    SCOPED_TRACE(code);
    const CheckReport report = CheckHead(head, plant({code}), kAllParts);
    EXPECT_EQ(report.verdict, Verdict::kMismatch);
    EXPECT_EQ(report.first_departure, departure);
    EXPECT_THAT(CodesOf(report), ElementsAre(code));
  }
  const CheckReport pair = CheckHead(head, plant({"scale_by_d_model", "w_o_missing"}), kAllParts);
  EXPECT_EQ(pair.first_departure, "logits");
  EXPECT_THAT(CodesOf(pair), ElementsAre("scale_by_d_model+w_o_missing"));
}

// Where something unknown follows, what departs first is still explained.
TEST(RefereeTest, TheFirstDepartureIsExplainedThoughTheRestIsNot) {
  const HeadArrays head = RandomHead(1, 5, 6, 3, 4, 2, {}, 16);
  MistakenResult result = MistakenHeadOf(InBthd(head), head.arrays, {"scale_twice"});
  for (double& x : result.output) x = -x;
  const CheckReport report = CheckHead(head, result, kAllParts);
  EXPECT_EQ(report.first_departure, "logits");
  EXPECT_THAT(CodesOf(report), ElementsAre("scale_twice"));
  // And nothing where that is unknown too.
  for (double& x : result.logits) x += 1;
  const CheckReport unknown = CheckHead(head, result, kAllParts);
  EXPECT_EQ(unknown.first_departure, "logits");
  EXPECT_THAT(CodesOf(unknown), IsEmpty());
}

TEST(RefereeTest, FindingsNameTheFieldsOfTheRequest) {
  const MistakeSet pair({Mistake::kScaleByModelWidth, Mistake::kWoMissing});
  EXPECT_EQ(CodeOf(pair), "scale_by_d_model+w_o_missing");
  EXPECT_EQ(FieldOf(pair, /*head=*/true), "head.options.scale, head.w_o");
  EXPECT_EQ(FieldOf(MistakeSet({Mistake::kScaleByModelWidth}), /*head=*/false), "options.scale");
  EXPECT_THAT(MessageOf(pair), HasSubstr("two mistakes at once: the scores were divided by sqrt"));
  EXPECT_THAT(MessageOf(pair), HasSubstr("; and: the output is the heads' contexts"));
}

TEST(CheckClaimsTest, NamesWhatIsWrong) {
  CheckProblem problem =
      MakeCheckProblem(ProblemOf<float>(kCross, Options(Causal::kNone, Layout::kBthd)));
  const auto error_of = [&](const std::vector<Claim>& claims) {
    return std::string(CheckClaims(claims, problem).message());
  };
  EXPECT_EQ(error_of({{Part::kOutput, {DType::kFloat32, {2, 4, 2, 3}}}}), "");
  EXPECT_EQ(error_of({{Part::kOutput, {DType::kFloat16, {2, 2, 4, 3}}}}),
            "candidate.shape[1]: is 2, must be 4 (the query's tokens)");
  EXPECT_EQ(error_of({{Part::kOutput, {DType::kFloat32, {2, 4, 2, 8}}}}),
            "candidate.shape[3]: is 8, must be 3 (the value's width)");
  EXPECT_THAT(error_of({{Part::kOutput, {DType::kBool, {2, 4, 2, 3}}}}),
              HasSubstr("candidate.dtype: is BOOL"));
  EXPECT_THAT(error_of({{Part::kOutput, {DType::kFloat32, {2, 4, 3}}}}),
              HasSubstr("candidate.shape: has 3 dimensions (2, 4, 3), must have 4"));
  problem = MakeCheckProblem(RandomHead(1, 5, 6, 3, 4, 2, {}, 1).head);
  EXPECT_EQ(error_of({{Part::kLogits, {DType::kFloat32, {1, 2, 5, 5}}}}),
            "head_candidate.logits.shape[1]: is 2, must be 3 (heads)");
  EXPECT_EQ(error_of({{Part::kOutput, {DType::kFloat32, {1, 5, 5}}}}),
            "head_candidate.output.shape[2]: is 5, must be 6 (the width of x)");
  EXPECT_THAT(error_of({}), HasSubstr("head_candidate: is empty, must have the output, or any"));
  EXPECT_EQ(FieldOf(CheckClaims({}, problem)), "head_candidate");
}

}  // namespace
}  // namespace attendant::core
