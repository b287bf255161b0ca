#include "core/estimate.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "core/checked_math.h"
#include "core/errors.h"

namespace attendant::core {
namespace {

constexpr int64_t kLargestElement = 8;

absl::Status CheckSizes(const EstimateSpec& spec) {
  const std::pair<const char*, std::optional<int64_t>> sizes[] = {{"batch", spec.batch},
                                                                  {"heads", spec.heads},
                                                                  {"kv_heads", spec.kv_heads},
                                                                  {"queries", spec.queries},
                                                                  {"keys", spec.keys},
                                                                  {"width", spec.width},
                                                                  {"value_width", spec.value_width},
                                                                  {"d_model", spec.d_model}};
  for (const auto& [field, size] : sizes) {
    if (size.value_or(0) < 0) {
      return InvalidField(field, absl::StrCat("is ", *size, ", must be 0 or more"));
    }
    if (size.value_or(0) > kLargestSize) {
      return InvalidField(field, absl::StrCat("is ", *size, ", must be at most ", kLargestSize));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckKvHeads(const Problem& p) {
  const bool divides = p.kv_heads == 0 ? p.heads == 0 : p.heads % p.kv_heads == 0;
  if (divides) return absl::OkStatus();
  return InvalidField("kv_heads",
                      absl::StrCat("is ", p.kv_heads, ", must divide heads, which is ", p.heads));
}

// What Head has no room for.
absl::Status CheckHead(const Problem& p) {
  constexpr char kRule[] = ", where d_model is set: a head attends to its own tokens)";
  if (p.heads == 0) {
    return InvalidField("heads", "is 0, must be 1 or more where d_model is set");
  }
  if (p.keys != p.queries) {
    return InvalidField("keys",
                        absl::StrCat("is ", p.keys, ", must be ", p.queries, " (queries", kRule));
  }
  if (p.kv_heads != p.heads) {
    return InvalidField("kv_heads", absl::StrCat("is ", p.kv_heads, ", must be ", p.heads,
                                                 " (heads), or unset, where d_model is set"));
  }
  for (const auto& [field, width] :
       {std::pair("width", p.width), std::pair("value_width", p.value_width)}) {
    const int64_t columns = SaturatingProduct({p.heads, width});
    if (columns <= kLargestSize) continue;
    return InvalidField(field, absl::StrCat("is ", width, ", with ", p.heads, " heads ", columns,
                                            " columns of a weight, at most ", kLargestSize));
  }
  return absl::OkStatus();
}

// A tensor of the call, of which no size may be left out for being 0, as strides are their
// products.
struct Extent {
  const char* field;
  const char* what;
  std::vector<int64_t> sizes;
};

absl::Status CheckBytes(absl::Span<const Extent> tensors) {
  for (const Extent& tensor : tensors) {
    int64_t bytes = kLargestElement;
    for (const int64_t size : tensor.sizes) {
      bytes = SaturatingProduct({bytes, std::max<int64_t>(size, 1)});
    }
    if (bytes < std::numeric_limits<int64_t>::max()) continue;
    return InvalidField(tensor.field, absl::StrCat("with the other sizes makes ", tensor.what,
                                                   " of (", absl::StrJoin(tensor.sizes, ", "),
                                                   "), whose bytes overflow 63 bits"));
  }
  return absl::OkStatus();
}

absl::Status CheckTensors(const Problem& p, bool return_weights) {
  std::vector<Extent> tensors = {
      {"queries", "a query", {p.batch, p.heads, p.queries, p.width}},
      {"keys", "a key", {p.batch, p.kv_heads, p.keys, p.width}},
      {"keys", "a value", {p.batch, p.kv_heads, p.keys, p.value_width}},
      {"queries", "an output", {p.batch, p.heads, p.queries, p.value_width}},
      {"keys", "key sums", {p.batch, p.heads, p.keys}}};
  if (return_weights) {
    tensors.push_back({"keys", "weights", {p.batch, p.heads, p.queries, p.keys}});
  }
  return CheckBytes(tensors);
}

absl::Status CheckHeadTensors(const HeadProblem& h) {
  const Problem& p = h.attend;
  return CheckBytes({{"d_model", "x", {p.batch, p.queries, h.d_model}},
                     {"d_model", "w_q", {h.d_model, p.heads, p.width}},
                     {"d_model", "w_v", {h.d_model, p.heads, p.value_width}}});
}

// The attention, on the chunked path.
absl::StatusOr<Problem> ProblemOf(const EstimateSpec& spec) {
  if (spec.dtype == DType::kUnspecified || spec.dtype == DType::kBool) {
    return InvalidField("dtype", absl::StrCat("is ", NameOf(spec.dtype),
                                              ", must be FLOAT32, FLOAT64, FLOAT16 or BFLOAT16"));
  }
  if (absl::Status status = CheckSizes(spec); !status.ok()) return status;
  Problem p;
  p.dtype = spec.dtype;
  p.batch = spec.batch;
  p.heads = spec.heads;
  p.kv_heads = spec.kv_heads.value_or(spec.heads);
  p.queries = spec.queries;
  p.keys = spec.keys;
  p.width = spec.width;
  p.value_width = spec.value_width.value_or(spec.width);
  AttendOptions options = spec.options;
  options.path = Path::kChunked;
  if (spec.d_model.has_value()) {
    // As Head does.
    options.layout = Layout::kBhtd;
    options.return_weights = options.return_logsumexp = options.return_key_sums = false;
  }
  absl::Status status = spec.d_model.has_value() ? CheckHead(p) : CheckKvHeads(p);
  if (status.ok()) status = CheckTensors(p, options.return_weights);
  if (status.ok()) status = ApplyOptions(options, p);
  if (!status.ok()) return status;
  return p;
}

// Any: Problem or HeadProblem. path: the problem's own.
template <typename Any>
Estimate EstimateOf(const Any& problem, Path& path, const EstimateBasis& basis) {
  const auto on = [&](Path which) {
    path = which;
    const double factor =
        which == Path::kExplicit ? basis.factors.explicit_path : basis.factors.chunked_path;
    return PathEstimate{CostOf(problem, basis.threads, basis.kernel),
                        factor * SecondsOf(problem, basis.speed)};
  };
  Estimate estimate;
  estimate.explicit_path = on(Path::kExplicit);
  estimate.chunked_path = on(Path::kChunked);
  estimate.request_bytes = RequestBytes(problem);
  estimate.response_bytes = ResponseBytes(problem);
  return estimate;
}

}  // namespace

absl::StatusOr<Estimate> MakeEstimate(const EstimateSpec& spec, const EstimateBasis& basis) {
  auto problem = ProblemOf(spec);
  if (!problem.ok()) return problem.status();
  if (spec.d_model.has_value()) {
    HeadProblem head{*std::move(problem), *spec.d_model, /*x_has_batch=*/true,
                     /*return_intermediates=*/false};
    if (absl::Status status = CheckHeadTensors(head); !status.ok()) return status;
    Estimate estimate = EstimateOf(head, head.attend.path, basis);
    estimate.crossover_tokens = CrossoverTokens(head);
    return estimate;
  }
  return EstimateOf(*problem, problem->path, basis);
}

}  // namespace attendant::core
