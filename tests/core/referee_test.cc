#include "core/referee.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <vector>

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
using ::testing::UnorderedElementsAre;

CheckReport Run(const CheckProblem& problem, const CheckInputs& inputs) {
  static Scheduler* const scheduler = new Scheduler(2);
  CheckReport report;
  Workspace workspace;
  CheckProblem checked = problem;
  EXPECT_EQ(CheckClaims(inputs.claims, checked), absl::OkStatus());
  auto stages = CheckStages(checked, inputs, {&workspace, scheduler->threads()}, &report);
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
void ExpectEachFound(const Planted& planted, int64_t* singles_found, int64_t* pairs_found) {
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
  const auto expect_found = [&](const std::string& code, const std::vector<double>& output,
                                int64_t* found) {
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
    if (expected.size() == 1 && expected[0] == code) ++*found;
  };
  for (size_t i = 0; i < singles.size(); ++i)
    expect_found(singles[i], of_singles[i], singles_found);
  for (size_t i = 0; i < pairs.size(); ++i) expect_found(pairs[i], of_pairs[i], pairs_found);
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
  int64_t singles = 0;
  int64_t pairs = 0;
  for (const Planted& planted : all) ExpectEachFound(planted, &singles, &pairs);
  // The rest change nothing there, or the same as others do.
  std::printf("%lld single mistakes and %lld pairs were named and nothing else\n",
              static_cast<long long>(singles), static_cast<long long>(pairs));
  EXPECT_GT(singles, 0);
}

}  // namespace
}  // namespace attendant::core
