#include "bench/cases.h"

#include <fnmatch.h>

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "core/cost.h"

namespace attendant::bench {
namespace {

using core::Causal;
using core::DType;
using core::Layout;
using core::Path;

// Self-attention: one sequence of 8 heads unless changed.
Case Square(std::string name, int64_t tokens, int64_t width) {
  Case c;
  c.name = std::move(name);
  c.queries = tokens;
  c.keys = tokens;
  c.width = width;
  return c;
}

Case Decode(std::string name, int64_t queries, int64_t keys, int64_t width) {
  Case c = Square(std::move(name), keys, width);
  c.queries = queries;
  c.decode = true;
  return c;
}

Case WithHeads(Case c, int64_t batch, int64_t heads, int64_t kv_heads) {
  c.batch = batch;
  c.heads = heads;
  c.kv_heads = kv_heads;
  return c;
}

// `base` under another name with one field changed.
template <typename Value>
Case With(Case base, const char* name, Value Case::*field, Value value) {
  base.name = name;
  base.*field = value;
  return base;
}

std::vector<Case> MakeKernelCases() {
  const Case t512 = Square("t512_d64", 512, 64);
  const Case t1024 = Square("t1024_d64", 1024, 64);
  const Case t2048 = Square("t2048_d64", 2048, 64);
  const Case t2048_d128 = Square("t2048_d128", 2048, 128);
  std::vector<Case> cases = {
      Square("t128_d64", 128, 64),
      WithHeads(Square("b8_t128_d64", 128, 64), 8, 8, 8),
      t512,
      t2048,
      Square("t8192_d64", 8192, 64),
      Square("t16384_d64", 16384, 64),
      With(t2048, "t2048_d64_causal", &Case::causal, Causal::kTopLeft),
      t2048_d128,
      Square("t2048_d256", 2048, 256),
      With(t2048, "f64_t2048_d64", &Case::dtype, DType::kFloat64),
      With(t2048_d128, "f64_t2048_d128", &Case::dtype, DType::kFloat64),
      With(t2048, "bf16_t2048_d64", &Case::dtype, DType::kBFloat16),
      With(t2048_d128, "bf16_t2048_d128", &Case::dtype, DType::kBFloat16),
      With(t2048, "f16_t2048_d64", &Case::dtype, DType::kFloat16),
      With(t2048_d128, "f16_t2048_d128", &Case::dtype, DType::kFloat16),
      With(t512, "bthd_t512_d64", &Case::layout, Layout::kBthd),
      With(t2048, "bthd_t2048_d64", &Case::layout, Layout::kBthd),
      With(t1024, "explicit_t1024_d64", &Case::path, Path::kExplicit),
      With(t2048, "explicit_t2048_d64", &Case::path, Path::kExplicit),
      WithHeads(Decode("decode_h32_t4096_d128", 1, 4096, 128), 1, 32, 32),
      WithHeads(Decode("decode_b8_h8_t2048_d64", 1, 2048, 64), 8, 8, 8),
      WithHeads(Decode("decode_h32_kv8_t4096_d128", 1, 4096, 128), 1, 32, 8),
      Decode("decode_h8_t65536_d64", 1, 65536, 64),
      With(WithHeads(Decode("", 1, 4096, 128), 1, 32, 32), "decode_bf16_h32_t4096_d128",
           &Case::dtype, DType::kBFloat16),
      With(WithHeads(Decode("", 1, 4096, 128), 1, 32, 32), "decode_f16_h32_t4096_d128",
           &Case::dtype, DType::kFloat16),
  };
  const Case t8192 = Square("", 8192, 64);
  const Case t512_h4_d32 = WithHeads(Square("option_t512_h4_d32", 512, 32), 1, 4, 4);
  for (Case c : {
           With(t8192, "option_t8192_d64_window", &Case::window_left, std::optional<int64_t>(256)),
           With(t2048, "option_t2048_d64_length", &Case::key_length, std::optional<int64_t>(1024)),
           With(t2048, "option_t2048_d64_softcap", &Case::softcap, 30.0),
           With(t2048, "option_t2048_d64_alibi", &Case::alibi_slope, 0.01),
           With(t2048, "option_t2048_d64_bool_mask", &Case::mask, Mask::kBool),
           With(t2048, "option_t2048_d64_added_mask", &Case::mask, Mask::kAdded),
           With(t2048, "option_t2048_d64_far_mask", &Case::mask, Mask::kFar),
           t512_h4_d32,
           With(t512_h4_d32, "option_t512_h4_d32_added_mask", &Case::mask, Mask::kAdded),
       }) {
    cases.push_back(std::move(c));
  }
  const Case causal = With(t2048, "", &Case::causal, Causal::kTopLeft);
  for (const Pass pass : {Pass::kBackwardGiven, Pass::kBackward}) {
    const std::string name = NameOf(pass);
    for (const auto& [suffix, base] : {std::pair("_t512_d64", t512),
                                       {"_t2048_d64", t2048},
                                       {"_t2048_d128", t2048_d128},
                                       {"_t2048_d64_causal", causal},
                                       {"_t8192_d64", t8192}}) {
      cases.push_back(With(base, (name + suffix).c_str(), &Case::pass, pass));
    }
    cases.push_back(With(With(t2048, "", &Case::dtype, DType::kFloat64),
                         ("f64_" + name + "_t2048_d64").c_str(), &Case::pass, pass));
    cases.push_back(With(With(t2048, "", &Case::dtype, DType::kBFloat16),
                         ("bf16_" + name + "_t2048_d64").c_str(), &Case::pass, pass));
  }
  for (const int64_t queries : {2, 4, 8, 16}) {
    cases.push_back(WithHeads(
        Decode(absl::StrCat("decode_q", queries, "_h32_kv8_t4096_d128"), queries, 4096, 128), 1, 32,
        8));
  }
  return cases;
}

}  // namespace

const std::vector<Case>& KernelCases() {
  static const auto* const cases = new std::vector<Case>(MakeKernelCases());
  return *cases;
}

const std::vector<Case>& RpcCases() {
  static const auto* const cases = new std::vector<Case>{
      Square("t128_d64", 128, 64),
      Square("t512_d64", 512, 64),
      Square("t1024_d64", 1024, 64),
      Square("t2048_d64", 2048, 64),
  };
  return *cases;
}

std::vector<std::string> NamesOf(const std::vector<Case>& cases) {
  std::vector<std::string> names;
  names.reserve(cases.size());
  for (const Case& c : cases) names.push_back(c.name);
  return names;
}

const Case& CaseNamed(const std::vector<Case>& cases, absl::string_view name) {
  return *std::find_if(cases.begin(), cases.end(), [&](const Case& c) { return c.name == name; });
}

core::Problem ProblemOf(const Case& c) {
  const auto spec = [&](int64_t heads, int64_t tokens) {
    return c.layout == Layout::kBhtd ? core::TensorSpec{c.dtype, {c.batch, heads, tokens, c.width}}
                                     : core::TensorSpec{c.dtype, {c.batch, tokens, heads, c.width}};
  };
  core::AttendOptions options;
  options.path = c.path;
  options.layout = c.layout;
  options.causal = c.causal;
  if (c.window_left.has_value()) options.window = core::Window{c.window_left, 0};
  if (c.key_length.has_value()) options.key_lengths.assign(c.batch, *c.key_length);
  options.softcap = c.softcap;
  if (c.mask != Mask::kNone) {
    const DType dtype = c.mask == Mask::kBool ? DType::kBool : c.dtype;
    options.mask = core::TensorSpec{dtype, {c.queries, c.keys}};
  }
  if (c.alibi_slope != 0) options.alibi_slopes.assign(c.heads, c.alibi_slope);
  const core::TensorSpec keys = spec(c.kv_heads, c.keys);
  return *core::MakeProblem(spec(c.heads, c.queries), keys, keys, options);
}

core::GradientProblem GradientOf(const Case& c) {
  core::GradientProblem gradient;
  gradient.attend = ProblemOf(c);
  gradient.given = c.pass == Pass::kBackwardGiven;
  return gradient;
}

double FlopsOf(const Case& c) {
  return static_cast<double>(c.pass == Pass::kForward ? core::ProductFlops(ProblemOf(c))
                                                      : core::ProductFlops(GradientOf(c)));
}

absl::StatusOr<std::vector<std::string>> Select(const std::vector<std::string>& names,
                                                const std::vector<std::string>& patterns) {
  if (patterns.empty()) return names;
  const auto matches = [](const std::string& pattern, const std::string& name) {
    return fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
  };
  for (const std::string& pattern : patterns) {
    if (std::none_of(names.begin(), names.end(),
                     [&](const std::string& name) { return matches(pattern, name); })) {
      return absl::InvalidArgumentError(
          absl::StrCat("--cases: '", pattern, "' matches no case of this mode; see --list"));
    }
  }
  std::vector<std::string> selected;
  for (const std::string& name : names) {
    if (std::any_of(patterns.begin(), patterns.end(),
                    [&](const std::string& pattern) { return matches(pattern, name); })) {
      selected.push_back(name);
    }
  }
  return selected;
}

}  // namespace attendant::bench
