#include "core/gradient.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/checked_math.h"
#include "core/clear_rows.h"
#include "core/cost.h"
#include "core/errors.h"
#include "core/explicit_gradient.h"
#include "core/fused_gradient.h"
#include "core/mask_gradient.h"

namespace attendant::core {
namespace {

constexpr absl::string_view kOfOutput = "as Attend's output has, in options.layout";

absl::Status CheckShape(absl::string_view name, const TensorSpec& actual,
                        const std::vector<int64_t>& expected, absl::string_view what) {
  if (absl::Status status = CheckTensor(name, actual, static_cast<int64_t>(expected.size()));
      !status.ok()) {
    return status;
  }
  for (size_t axis = 0; axis < expected.size(); ++axis) {
    absl::Status status = CheckSize(absl::StrCat(name, ".shape[", axis, "]"), actual.shape[axis],
                                    expected[axis], what);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

std::vector<int64_t> OutputShape(const Problem& p) {
  std::vector<int64_t> shape = {p.batch, p.heads, p.queries, p.value_width};
  if (p.layout == Layout::kBthd) std::swap(shape[1], shape[2]);
  return shape;
}

absl::Status CheckGiven(const GradientSpec& spec, const Problem& p) {
  if (spec.output.has_value() != spec.logsumexp.has_value()) {
    return spec.output.has_value()
               ? InvalidField("logsumexp",
                              "is not set, must be where output is; leave both out to "
                              "have the forward pass run")
               : InvalidField("output",
                              "is not set, must be where logsumexp is; leave both out to "
                              "have the forward pass run");
  }
  if (!spec.output.has_value()) return absl::OkStatus();
  const DType wide = WideOf(p.dtype);
  if (spec.logsumexp->dtype != wide) {
    return InvalidField("logsumexp.dtype",
                        absl::StrCat("is ", NameOf(spec.logsumexp->dtype), ", must be ",
                                     NameOf(wide), " (for a query of ", NameOf(p.dtype), ")"));
  }
  for (absl::Status status :
       {CheckSameDType("output", spec.output->dtype, "query", p.dtype),
        CheckShape("output", *spec.output, OutputShape(p), kOfOutput),
        CheckShape("logsumexp", *spec.logsumexp, {p.batch, p.heads, p.queries},
                   "the query's batch, heads and tokens, in this order")}) {
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

int64_t Bytes(const Problem& p, int64_t heads, int64_t tokens, int64_t width) {
  return SaturatingProduct({p.batch, heads, tokens, width, SizeOf(p.dtype)});
}

// Without a value's width no score has a gradient: the answer is 0, however many pairs there are.
template <typename S>
std::vector<Stage> ZeroStages(const GradientProblem& problem, const GradientTensors<S>& tensors) {
  const Problem& p = problem.attend;
  const bool wide = p.width > 0 && p.heads > 0;
  std::vector<Stage> stages;
  stages.push_back({"clear", wide ? p.batch : 0, [p, tensors](const TileContext& context) {
                      for (int64_t head = 0; head < p.heads; ++head) {
                        ClearRows(tensors.d_query.Head(context.tile, head));
                      }
                      for (int64_t head = 0; head < p.kv_heads; ++head) {
                        ClearRows(tensors.d_key.Head(context.tile, head));
                      }
                      return absl::OkStatus();
                    }});
  stages.push_back({"clear", 1, [problem, tensors](const TileContext&) {
                      if (problem.return_d_mask) ClearMaskGradient(problem.attend, tensors.d_mask);
                      std::fill_n(tensors.d_sinks, problem.attend.sinks.size(), 0.0);
                      return absl::OkStatus();
                    }});
  return stages;
}

}  // namespace

absl::StatusOr<GradientProblem> MakeGradientProblem(const GradientSpec& spec) {
  AttendOptions options = spec.options;
  options.return_weights = false;
  options.return_logsumexp = false;
  options.return_key_sums = false;
  auto attend = MakeProblem(spec.query, spec.key, spec.value, options);
  if (!attend.ok()) return attend.status();
  for (absl::Status status :
       {CheckSameDType("d_output", spec.d_output.dtype, "query", attend->dtype),
        CheckShape("d_output", spec.d_output, OutputShape(*attend), kOfOutput),
        CheckGiven(spec, *attend)}) {
    if (!status.ok()) return status;
  }
  GradientProblem problem;
  problem.given = spec.output.has_value();
  problem.return_d_mask = spec.return_d_mask && attend->AddsMask();
  problem.attend = *std::move(attend);
  return problem;
}

template <typename S>
absl::StatusOr<std::vector<Stage>> GradientStages(const GradientProblem& problem,
                                                  const GradientTensors<S>& tensors,
                                                  const Resources& resources) {
  if (ResponseBytes(problem) == 0) return std::vector<Stage>();
  if (problem.attend.value_width == 0) return ZeroStages(problem, tensors);
  switch (problem.attend.path) {
    case Path::kExplicit:
      return ExplicitGradientStages(problem, tensors, resources);
    case Path::kChunked:
      break;
  }
  return FusedGradientStages(problem, tensors, resources);
}

template absl::StatusOr<std::vector<Stage>> GradientStages(const GradientProblem&,
                                                           const GradientTensors<float>&,
                                                           const Resources&);
template absl::StatusOr<std::vector<Stage>> GradientStages(const GradientProblem&,
                                                           const GradientTensors<double>&,
                                                           const Resources&);
template absl::StatusOr<std::vector<Stage>> GradientStages(const GradientProblem&,
                                                           const GradientTensors<Float16>&,
                                                           const Resources&);
template absl::StatusOr<std::vector<Stage>> GradientStages(const GradientProblem&,
                                                           const GradientTensors<BFloat16>&,
                                                           const Resources&);

int64_t GradientWorkspaceBytes(const GradientProblem& problem, int threads) {
  if (ResponseBytes(problem) == 0 || problem.attend.value_width == 0) return 0;
  return problem.attend.path == Path::kExplicit ? ExplicitGradientWorkspaceBytes(problem, threads)
                                                : FusedGradientWorkspaceBytes(problem, threads);
}

int64_t ProductFlops(const GradientProblem& g) {
  const Problem& p = g.attend;
  Problem once = p;  // one product of width 1
  once.width = 1;
  once.value_width = 0;
  const bool forward = !g.given && p.path == Path::kChunked;
  const int64_t widths = SaturatingSum({SaturatingProduct({forward ? 4 : 3, p.width}),
                                        SaturatingProduct({forward ? 3 : 2, p.value_width})});
  return SaturatingProduct({ProductFlops(once), widths});
}

int64_t RequestBytes(const GradientProblem& g) {
  const Problem& p = g.attend;
  const int64_t of_output = Bytes(p, p.heads, p.queries, p.value_width);
  const int64_t logsumexp =
      SaturatingProduct({p.batch, p.heads, p.queries, SizeOf(WideOf(p.dtype))});
  return SaturatingSum(
      {RequestBytes(p), of_output, g.given ? SaturatingSum({of_output, logsumexp}) : 0});
}

int64_t ResponseBytes(const GradientProblem& g) {
  const Problem& p = g.attend;
  return SaturatingSum({Bytes(p, p.heads, p.queries, p.width),
                        Bytes(p, p.kv_heads, p.keys, p.width),
                        Bytes(p, p.kv_heads, p.keys, p.value_width),
                        g.return_d_mask ? p.mask->elements * SizeOf(p.mask->dtype) : 0,
                        SaturatingProduct({8, static_cast<int64_t>(p.sinks.size())})});
}

}  // namespace attendant::core
