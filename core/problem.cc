#include "core/problem.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "core/checked_math.h"
#include "core/errors.h"

namespace attendant::core {
namespace {

// Where the four axes stand in a shape of the given layout.
struct Axes {
  int batch = 0;
  int heads = 1;
  int tokens = 2;
  int width = 3;
  explicit Axes(Layout layout)
      : heads(layout == Layout::kBhtd ? 1 : 2), tokens(layout == Layout::kBhtd ? 2 : 1) {}
};

std::string At(absl::string_view name, int axis) {
  return absl::StrCat(name, ".shape[", axis, "]");
}

constexpr int64_t kLargestElement = 8;
// Counts of this size fit every library's index, and no tensor of one element a unit is larger.
constexpr int64_t kLargestSize = std::numeric_limits<int32_t>::max();

// Bytes that the strides of a tensor span: a size of 0 counts as 1, since strides are products of
// the other sizes. Nothing where that overflows.
std::optional<int64_t> StridedBytes(absl::Span<const int64_t> sizes, int64_t element_bytes) {
  int64_t bytes = element_bytes;
  for (const int64_t size : sizes) {
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes)) return std::nullopt;
  }
  return bytes;
}

absl::Status CheckHeads(const Problem& problem, int axis) {
  const bool divides =
      problem.kv_heads == 0 ? problem.heads == 0 : problem.heads % problem.kv_heads == 0;
  if (divides) return absl::OkStatus();
  return InvalidField(At("key", axis),
                      absl::StrCat("is ", problem.kv_heads, ", must divide the query's ",
                                   problem.heads, " heads (query.shape[", axis, "])"));
}

// A request that is small itself can ask for a response of any size: an empty query can come with
// values of any width.
absl::Status CheckResponse(const Problem& p) {
  struct Product {
    const char* what;
    std::vector<int64_t> sizes;
    bool needed;
  };
  const Product products[] = {
      {"an output", {p.batch, p.heads, p.queries, p.value_width}, true},
      {"scores",
       {p.batch, p.heads, p.queries, p.keys},
       p.return_weights || p.path == Path::kExplicit},
      {"key sums", {p.batch, p.heads, p.keys}, true},
  };
  for (const Product& product : products) {
    if (!product.needed || StridedBytes(product.sizes, kLargestElement).has_value()) continue;
    return InvalidField("query.shape", absl::StrCat("with the other shapes asks for ", product.what,
                                                    " of (", absl::StrJoin(product.sizes, ", "),
                                                    "), whose bytes overflow 63 bits"));
  }
  return absl::OkStatus();
}

// The paths compute with scale * log2(e) in the problem's type.
bool ScaleFits(double scale, DType dtype) {
  const double scale_log2 = scale * std::numbers::log2e;
  return dtype == DType::kFloat64 ? std::isfinite(scale_log2)
                                  : std::isfinite(static_cast<float>(scale_log2));
}

absl::Status CheckUnsupportedOptions(const AttendOptions& options) {
  const auto refuse = [](absl::string_view field) {
    return UnsupportedField(absl::StrCat("options.", field), "is not served by this version");
  };
  if (options.causal == Causal::kBottomRight) {
    return UnsupportedField("options.causal",
                            "is BOTTOM_RIGHT, which is not served by this version; send NONE or "
                            "TOP_LEFT");
  }
  if (options.mask.has_value()) return refuse("mask");
  if (!options.key_lengths.empty()) return refuse("key_lengths");
  if (options.window.has_value()) return refuse("window");
  if (options.softcap != 0) return refuse("softcap");
  if (!options.alibi_slopes.empty()) return refuse("alibi_slopes");
  if (!options.sinks.empty()) return refuse("sinks");
  return absl::OkStatus();
}

}  // namespace

KeyRange Problem::VisibleKeys(int64_t query) const { return VisibleKeysOfAny(query, 1); }

KeyRange Problem::VisibleKeysOfAny(int64_t first, int64_t count) const {
  if (causal == Causal::kNone) return {0, keys};
  return {0, std::min(keys, first + count)};
}

Visibility Problem::Ask(int64_t first, int64_t count, KeyRange range) const {
  // Visible ranges only grow with the query: the first row sees least, the last most.
  const KeyRange least = VisibleKeys(first);
  const KeyRange most = VisibleKeys(first + count - 1);
  if (range.begin >= most.end || range.end <= least.begin) return Visibility::kNone;
  if (range.begin >= least.begin && range.end <= least.end) return Visibility::kAll;
  return Visibility::kMixed;
}

int64_t Problem::VisiblePairs() const {
  if (causal == Causal::kNone) return SaturatingProduct({queries, keys});
  // Rows 0 .. n-1 see 1 .. n keys, the rows after them all keys.
  const int64_t n = std::min(queries, keys);
  const int64_t triangle =
      n % 2 == 0 ? SaturatingProduct({n / 2, n + 1}) : SaturatingProduct({n, n / 2 + 1});
  return SaturatingSum({triangle, SaturatingProduct({queries - n, keys})});
}

absl::Status CheckTensor(absl::string_view name, const TensorSpec& spec, int64_t rank) {
  if (spec.dtype == DType::kUnspecified || spec.dtype == DType::kBool) {
    return InvalidField(absl::StrCat(name, ".dtype"),
                        absl::StrCat("is ", NameOf(spec.dtype), ", must be FLOAT32 or FLOAT64"));
  }
  const auto shape = [&] { return absl::StrCat("(", absl::StrJoin(spec.shape, ", "), ")"); };
  if (static_cast<int64_t>(spec.shape.size()) != rank) {
    // A caller's shape can be as long as a message: it is not repeated when it is.
    return InvalidField(absl::StrCat(name, ".shape"),
                        absl::StrCat("has ", spec.shape.size(), " dimensions",
                                     spec.shape.size() <= 8 ? absl::StrCat(" ", shape()) : "",
                                     ", must have ", rank));
  }
  for (int64_t axis = 0; axis < rank; ++axis) {
    if (spec.shape[axis] < 0) {
      return InvalidField(At(name, static_cast<int>(axis)),
                          absl::StrCat("is ", spec.shape[axis], ", must be 0 or more"));
    }
  }
  if (!StridedBytes(spec.shape, SizeOf(spec.dtype)).has_value()) {
    return InvalidField(absl::StrCat(name, ".shape"),
                        absl::StrCat("is ", shape(), ", whose bytes overflow 63 bits"));
  }
  for (int64_t axis = 0; axis < rank; ++axis) {
    if (spec.shape[axis] > kLargestSize) {
      return InvalidField(
          At(name, static_cast<int>(axis)),
          absl::StrCat("is ", spec.shape[axis], ", must be at most ", kLargestSize));
    }
  }
  if (spec.dtype == DType::kFloat16 || spec.dtype == DType::kBFloat16) {
    return UnsupportedField(
        absl::StrCat(name, ".dtype"),
        absl::StrCat(NameOf(spec.dtype),
                     " is not served by this version; send FLOAT32 or FLOAT64"));
  }
  return absl::OkStatus();
}

absl::Status CheckSize(absl::string_view field, int64_t actual, int64_t expected,
                       absl::string_view what) {
  if (actual == expected) return absl::OkStatus();
  return InvalidField(field, absl::StrCat("is ", actual, ", must be ", expected, " (", what, ")"));
}

absl::Status CheckSameDType(absl::string_view name, DType actual, absl::string_view first,
                            DType expected) {
  if (actual == expected) return absl::OkStatus();
  return InvalidField(
      absl::StrCat(name, ".dtype"),
      absl::StrCat("is ", NameOf(actual), ", must be ", NameOf(expected), " (", first, ".dtype)"));
}

absl::Status ApplyOptions(const AttendOptions& options, Problem& problem) {
  if (options.scale.has_value() && !std::isfinite(*options.scale)) {
    return InvalidField("options.scale", absl::StrCat("is ", *options.scale, ", must be finite"));
  }
  if (options.scale.has_value() && !ScaleFits(*options.scale, problem.dtype)) {
    return InvalidField("options.scale",
                        absl::StrCat("is ", *options.scale, ", must fit ", NameOf(problem.dtype),
                                     " with room to spare"));
  }
  if (absl::Status status = CheckUnsupportedOptions(options); !status.ok()) return status;
  problem.path = options.path;
  problem.layout = options.layout;
  // Where D is 0 every score is an empty sum, and any finite scale gives uniform weights.
  const double width = static_cast<double>(std::max<int64_t>(problem.width, 1));
  problem.scale = options.scale.value_or(1 / std::sqrt(width));
  problem.causal = options.causal;
  problem.return_weights = options.return_weights;
  problem.return_logsumexp = options.return_logsumexp;
  problem.return_key_sums = options.return_key_sums;
  return CheckResponse(problem);
}

absl::StatusOr<Problem> MakeProblem(const TensorSpec& query, const TensorSpec& key,
                                    const TensorSpec& value, const AttendOptions& options) {
  const Axes axes(options.layout);
  for (const auto& [name, spec] :
       {std::pair("query", &query), std::pair("key", &key), std::pair("value", &value)}) {
    if (absl::Status status = CheckTensor(name, *spec, 4); !status.ok()) return status;
  }
  Problem problem;
  problem.dtype = query.dtype;
  problem.batch = query.shape[axes.batch];
  problem.heads = query.shape[axes.heads];
  problem.queries = query.shape[axes.tokens];
  problem.width = query.shape[axes.width];
  problem.kv_heads = key.shape[axes.heads];
  problem.keys = key.shape[axes.tokens];
  problem.value_width = value.shape[axes.width];
  for (absl::Status status : {
           CheckSameDType("key", key.dtype, "query", query.dtype),
           CheckSameDType("value", value.dtype, "query", query.dtype),
           CheckSize(At("key", axes.batch), key.shape[axes.batch], problem.batch,
                     "the query's batch"),
           CheckSize(At("value", axes.batch), value.shape[axes.batch], problem.batch,
                     "the query's batch"),
           CheckSize(At("key", axes.width), key.shape[axes.width], problem.width,
                     "the query's width"),
           CheckSize(At("value", axes.heads), value.shape[axes.heads], problem.kv_heads,
                     "the key's heads"),
           CheckSize(At("value", axes.tokens), value.shape[axes.tokens], problem.keys,
                     "the key's tokens"),
           CheckHeads(problem, axes.heads),
       }) {
    if (!status.ok()) return status;
  }
  if (absl::Status status = ApplyOptions(options, problem); !status.ok()) return status;
  return problem;
}

}  // namespace attendant::core
