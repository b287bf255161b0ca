#include "core/cost.h"

#include <algorithm>

#include "core/attend.h"
#include "core/checked_math.h"
#include "core/chunked_path.h"
#include "core/explicit_path.h"

namespace attendant::core {
namespace {

int64_t Pairs(const Problem& p) {
  if (p.key_lengths.empty()) return SaturatingProduct({p.batch, p.heads, p.VisiblePairs(0)});
  int64_t pairs = 0;
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    pairs = SaturatingSum({pairs, p.VisiblePairs(batch)});
  }
  return SaturatingProduct({p.heads, pairs});
}

int64_t Bytes(const Problem& p, std::initializer_list<int64_t> sizes) {
  return SaturatingProduct({SaturatingProduct(sizes), SizeOf(p.dtype)});
}
// Of what is summed and not rounded.
int64_t WideBytes(const Problem& p, std::initializer_list<int64_t> sizes) {
  return SaturatingProduct({SaturatingProduct(sizes), SizeOf(WideOf(p.dtype))});
}

int64_t ProjectionFlops(const HeadProblem& h) {
  const Problem& p = h.attend;
  const int64_t widths = SaturatingSum({p.width, p.width, p.value_width});
  return SaturatingProduct({2, p.batch, p.queries, h.d_model, p.heads, widths});
}

int64_t OutputProjectionFlops(const HeadProblem& h) {
  const Problem& p = h.attend;
  return SaturatingProduct({2, p.batch, p.queries, p.heads, p.value_width, h.d_model});
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
  const int64_t pairs = Pairs(p);
  PathCost cost;
  if (!ReturnsNothing(p)) {
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
  cost.steps.insert(cost.steps.begin(), {"projections", ProjectionFlops(h),
                                         Bytes(p, {p.batch, p.heads, p.queries, projected})});
  cost.steps.push_back(
      {"output_projection", OutputProjectionFlops(h), Bytes(p, {p.batch, p.queries, h.d_model})});
  return cost;
}

int64_t ProductFlops(const Problem& p) {
  return SaturatingProduct({2, Pairs(p), SaturatingSum({p.width, p.value_width})});
}

int64_t ProductFlops(const HeadProblem& h) {
  return SaturatingSum({ProjectionFlops(h), ProductFlops(h.attend), OutputProjectionFlops(h)});
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
  const double linear =
      static_cast<double>(SaturatingSum({ProjectionFlops(h), OutputProjectionFlops(h)}));
  const double quadratic = static_cast<double>(std::max<int64_t>(ProductFlops(h.attend), 1));
  return static_cast<double>(h.attend.queries) * linear / quadratic;
}

}  // namespace attendant::core
