#include "core/cost.h"

#include <algorithm>

#include "core/attend.h"
#include "core/checked_math.h"
#include "core/chunked_path.h"
#include "core/explicit_path.h"
#include "core/widthless.h"

namespace attendant::core {
namespace {

int64_t Bytes(const Problem& p, std::initializer_list<int64_t> sizes) {
  return SaturatingProduct({SaturatingProduct(sizes), SizeOf(p.dtype)});
}
// Of what is summed and not rounded.
int64_t WideBytes(const Problem& p, std::initializer_list<int64_t> sizes) {
  return SaturatingProduct({SaturatingProduct(sizes), SizeOf(WideOf(p.dtype))});
}

int64_t InputProjectionFlops(const HeadProblem& h) {
  const Problem& p = h.attend;
  const int64_t widths = SaturatingSum({p.width, p.width, p.value_width});
  return SaturatingProduct({2, p.batch, p.queries, h.d_model, p.heads, widths});
}

int64_t OutputProjectionFlops(const HeadProblem& h) {
  const Problem& p = h.attend;
  return SaturatingProduct({2, p.batch, p.queries, p.heads, p.value_width, h.d_model});
}

int64_t MaskBytes(const Problem& p) {
  return p.mask.has_value() ? SaturatingProduct({p.mask->elements, SizeOf(p.mask->dtype)}) : 0;
}

// Queries, keys, values and contexts of a head problem.
int64_t HeadTensorBytes(const HeadProblem& h) {
  const Problem& p = h.attend;
  const int64_t widths = SaturatingSum({p.width, p.width, p.value_width, p.value_width});
  return Bytes(p, {p.batch, p.heads, p.queries, widths});
}

}  // namespace

int64_t PathCost::flops() const {
  int64_t sum = 0;
  for (const StepCost& step : steps) sum = SaturatingSum({sum, step.flops});
  return sum;
}

PathCost CostOf(const Problem& p, int threads, Kernel kernel) {
  const int64_t pairs = VisiblePairs(p);
  PathCost cost;
  if (!ReturnsNothing(p) && !IsWidthless(p)) {
    cost.workspace_bytes = p.path == Path::kExplicit ? ExplicitWorkspaceBytes(p, threads)
                                                     : ChunkedWorkspaceBytes(p, threads, kernel);
  }
  const int64_t score_bytes = p.path == Path::kExplicit
                                  ? WideBytes(p, {p.batch, p.heads, p.queries, p.keys})
                                  : cost.workspace_bytes;
  cost.steps = {
      {"scores", SaturatingProduct({2, pairs, p.width}), score_bytes},
      {"softmax", SaturatingProduct({kSoftmaxFlops, pairs}), score_bytes},
      {"values", SaturatingProduct({2, pairs, p.value_width}),
       Bytes(p, {p.batch, p.heads, p.queries, p.value_width})},
  };
  return cost;
}

PathCost CostOf(const HeadProblem& h, int threads, Kernel kernel) {
  const Problem& p = h.attend;
  Problem inner = p;
  inner.dtype = WideOf(p.dtype);
  PathCost cost = CostOf(inner, threads, kernel);
  cost.workspace_bytes = SaturatingSum({cost.workspace_bytes, HeadWorkspaceBytes(h, threads)});
  const int64_t projected = SaturatingSum({p.width, p.width, p.value_width});
  cost.steps.insert(cost.steps.begin(), {"projections", InputProjectionFlops(h),
                                         Bytes(p, {p.batch, p.heads, p.queries, projected})});
  cost.steps.push_back(
      {"output_projection", OutputProjectionFlops(h), Bytes(p, {p.batch, p.queries, h.d_model})});
  return cost;
}

int64_t CopyBytes(const Problem& p, int threads, Kernel kernel) {
  const bool by_products = p.path == Path::kExplicit || kernel != Kernel::kFused;
  const bool hides = p.mask.has_value() || !p.key_lengths.empty() || p.causal != Causal::kNone ||
                     p.window.left.has_value() || p.window.right.has_value();
  if (!by_products || !hides) return 0;
  return WideBytes(p, {threads, std::max(p.queries, p.keys), std::max(p.width, p.value_width)});
}

int64_t VisiblePairs(const Problem& p) {
  if (p.key_lengths.empty()) return SaturatingProduct({p.batch, p.heads, p.VisiblePairs(0)});
  int64_t pairs = 0;
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    pairs = SaturatingSum({pairs, p.VisiblePairs(batch)});
  }
  return SaturatingProduct({p.heads, pairs});
}

int64_t ProjectionFlops(const HeadProblem& h) {
  return SaturatingSum({InputProjectionFlops(h), OutputProjectionFlops(h)});
}

int64_t ProductFlops(const Problem& p) {
  return SaturatingProduct({2, VisiblePairs(p), SaturatingSum({p.width, p.value_width})});
}

int64_t ProductFlops(const HeadProblem& h) {
  return SaturatingSum({ProjectionFlops(h), ProductFlops(h.attend)});
}

int64_t RequestBytes(const Problem& p) {
  const int64_t widths = SaturatingSum({p.width, p.value_width});
  return SaturatingSum({Bytes(p, {p.batch, p.heads, p.queries, p.width}),
                        Bytes(p, {p.batch, p.kv_heads, p.keys, widths}), MaskBytes(p)});
}

int64_t RequestBytes(const HeadProblem& h) {
  const Problem& p = h.attend;
  const int64_t columns =
      SaturatingProduct({p.heads, SaturatingSum({p.width, p.width, p.value_width, p.value_width})});
  return SaturatingSum(
      {Bytes(p, {p.batch, p.queries, h.d_model}), Bytes(p, {h.d_model, columns}), MaskBytes(p)});
}

int64_t OptionBytes(const Problem& p) {
  return static_cast<int64_t>(p.key_lengths.size() * sizeof(p.key_lengths[0]) +
                              p.alibi_slopes.size() * sizeof(p.alibi_slopes[0]) +
                              p.sinks.size() * sizeof(p.sinks[0]));
}

int64_t ResponseBytes(const Problem& p) {
  int64_t bytes = Bytes(p, {p.batch, p.heads, p.queries, p.value_width});
  const auto add = [&](bool wanted, int64_t more) {
    if (wanted) bytes = SaturatingSum({bytes, more});
  };
  add(p.return_weights, Bytes(p, {p.batch, p.heads, p.queries, p.keys}));
  add(p.return_logsumexp, WideBytes(p, {p.batch, p.heads, p.queries}));
  add(p.return_key_sums, WideBytes(p, {p.batch, p.heads, p.keys}));
  return bytes;
}

int64_t ResponseBytes(const HeadProblem& h) {
  const Problem& p = h.attend;
  const int64_t output = Bytes(p, {p.batch, p.queries, h.d_model});
  if (!h.return_intermediates) return output;
  return SaturatingSum(
      {output, HeadTensorBytes(h), Bytes(p, {2, p.batch, p.heads, p.queries, p.keys})});
}

double CrossoverTokens(const HeadProblem& h) {
  // Of one head: 2 T d_model (2 d_k + 2 d_v) flops against 2 pairs (d_k + d_v).
  Problem p = h.attend;
  const bool sees_all =
      p.causal == Causal::kNone && !p.window.left.has_value() && !p.window.right.has_value();
  if (sees_all) return 2 * static_cast<double>(h.d_model);
  p.key_lengths.clear();
  const auto overtakes = [&](int64_t tokens) {
    p.queries = p.keys = tokens;
    return p.VisiblePairs(0) >= SaturatingProduct({2, h.d_model, tokens});
  };
  // The pairs of a query only grow with the tokens. Halves what lies between too few and enough.
  int64_t few = 0;
  int64_t enough = kLargestSize;
  if (!overtakes(enough)) return 0;
  while (enough - few > 1) {
    const int64_t middle = few + (enough - few) / 2;
    (overtakes(middle) ? enough : few) = middle;
  }
  return static_cast<double>(enough);
}

}  // namespace attendant::core
