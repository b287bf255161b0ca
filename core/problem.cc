#include "core/problem.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "absl/numeric/int128.h"
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

// The paths compute with factors times log2(e) in the problem's type.
double InBase2(double factor, DType dtype) {
  const double in_base_2 = factor * std::numbers::log2e;
  return dtype == DType::kFloat64 ? in_base_2 : static_cast<float>(in_base_2);
}
bool ScaleFits(double scale, DType dtype) { return std::isfinite(InBase2(scale, dtype)); }

// Larger sides of a window show no more keys, and would overflow a position.
constexpr int64_t kWidestSide = int64_t{1} << 40;

absl::Status CheckSide(absl::string_view name, const std::optional<int64_t>& side) {
  if (!side.has_value() || *side >= 0) return absl::OkStatus();
  return InvalidField(absl::StrCat("options.window.", name),
                      absl::StrCat("is ", *side, ", must be 0 or more"));
}

// Which keys a query sees.
absl::Status ApplyVisibility(const AttendOptions& options, Problem& problem) {
  const Window window = options.window.value_or(Window{});
  for (absl::Status status : {CheckSide("left", window.left), CheckSide("right", window.right)}) {
    if (!status.ok()) return status;
  }
  const auto narrowed = [](std::optional<int64_t> side) {
    return side.has_value() ? std::optional(std::min(*side, kWidestSide)) : side;
  };
  const auto lengths = static_cast<int64_t>(options.key_lengths.size());
  if (lengths != 0 && lengths != problem.batch) {
    return InvalidField("options.key_lengths", absl::StrCat("has ", lengths, " entries, must have ",
                                                            problem.batch, " (one a batch)"));
  }
  for (int64_t batch = 0; batch < lengths; ++batch) {
    const int64_t length = options.key_lengths[batch];
    if (length >= 0 && length <= problem.keys) continue;
    return InvalidField(
        absl::StrCat("options.key_lengths[", batch, "]"),
        absl::StrCat("is ", length, ", must be 0 to ", problem.keys, " (the key's tokens)"));
  }
  problem.window = {narrowed(window.left), narrowed(window.right)};
  problem.key_lengths = options.key_lengths;
  problem.causal = options.causal;
  return absl::OkStatus();
}

// Keys of a batch that are there at all.
int64_t KeysOf(const Problem& problem, int64_t batch) {
  return problem.key_lengths.empty() ? problem.keys : problem.key_lengths[batch];
}

// How many keys after its own a query sees.
std::optional<int64_t> RightOf(const Problem& problem) {
  return problem.causal == Causal::kNone ? problem.window.right : 0;
}

// The sum of min(max(i + c, 0), limit) over 0 <= i < n: 0, then one more at a time, then the limit.
absl::int128 SumOfClamped(int64_t c, int64_t limit, int64_t n) {
  const int64_t grows = std::clamp<int64_t>(-c, 0, n);
  const int64_t flat = std::clamp<int64_t>(limit - c, grows, n);
  const absl::int128 first = absl::int128{grows} + c;
  const absl::int128 last = absl::int128{flat} - 1 + c;
  return (first + last) * (flat - grows) / 2 + absl::int128{n - flat} * limit;
}

// Values of a repeated option, one a head. fits: whether one can be computed with.
absl::Status CheckPerHead(absl::string_view name, const std::vector<double>& values,
                          const Problem& problem, bool (*fits)(double), absl::string_view rule) {
  const auto count = static_cast<int64_t>(values.size());
  if (count != 0 && count != problem.heads) {
    return InvalidField(
        absl::StrCat("options.", name),
        absl::StrCat("has ", count, " entries, must have ", problem.heads, " (one a query head)"));
  }
  for (int64_t head = 0; head < count; ++head) {
    if (fits(InBase2(values[head], problem.dtype))) continue;
    return InvalidField(
        absl::StrCat("options.", name, "[", head, "]"),
        absl::StrCat("is ", values[head], ", must be ", rule, " in ", NameOf(problem.dtype)));
  }
  return absl::OkStatus();
}

// What is done to a score after scale * q * k, and what the softmax holds beside the scores.
absl::Status ApplyScoreOptions(const AttendOptions& options, Problem& problem) {
  const double cap = InBase2(options.softcap, problem.dtype);
  // A smaller one has no inverse.
  const double least = problem.dtype == DType::kFloat64 ? std::numeric_limits<double>::min()
                                                        : double{std::numeric_limits<float>::min()};
  if (options.softcap != 0 && !(cap >= least && std::isfinite(cap))) {
    return InvalidField("options.softcap",
                        absl::StrCat("is ", options.softcap, ", must be 0 (none), or at least ",
                                     least, " and finite in ", NameOf(problem.dtype)));
  }
  for (absl::Status status : {
           CheckPerHead(
               "alibi_slopes", options.alibi_slopes, problem,
               [](double slope) { return std::isfinite(slope); }, "finite"),
           CheckPerHead(
               "sinks", options.sinks, problem,
               [](double sink) { return sink < std::numeric_limits<double>::infinity(); },
               "finite or -inf"),
       }) {
    if (!status.ok()) return status;
  }
  problem.softcap = options.softcap;
  problem.alibi_slopes = options.alibi_slopes;
  problem.sinks = options.sinks;
  return absl::OkStatus();
}

// The axes that a mask is aligned with, at the right.
struct MaskAxis {
  const char* what;
  int64_t size;
};

absl::Status CheckMaskShape(const TensorSpec& mask, const MaskAxis (&axes)[4]) {
  constexpr absl::string_view kName = "options.mask";
  const size_t rank = mask.shape.size();
  if (rank > 4) {
    return InvalidField(absl::StrCat(kName, ".shape"),
                        absl::StrCat("has ", rank, " dimensions, must have 4 or fewer"));
  }
  // Three dimensions may be meant as (B, Tq, Tk): where that fits as well, nobody can tell.
  const bool of_batch = rank == 3 && mask.shape[0] > 1 && mask.shape[0] == axes[0].size;
  const char* const hint = of_batch ? "; a mask of each batch has the shape (B, 1, Tq, Tk)" : "";
  for (size_t axis = 0; axis < rank; ++axis) {
    const int64_t size = mask.shape[axis];
    const MaskAxis& of = axes[4 - rank + axis];
    if (size == of.size || size == 1) continue;
    return InvalidField(
        At(kName, static_cast<int>(axis)),
        absl::StrCat("is ", size, ", must be ", of.size == 1 ? "1" : absl::StrCat("1 or ", of.size),
                     " (", of.what, ")", axis == 0 ? hint : ""));
  }
  if (of_batch && axes[1].size == axes[0].size) {
    return InvalidField(
        absl::StrCat(kName, ".shape"),
        absl::StrCat("is (", absl::StrJoin(mask.shape, ", "),
                     "), which may be of each head or of each batch; send (1, H, Tq, Tk) or "
                     "(B, 1, Tq, Tk)"));
  }
  return absl::OkStatus();
}

absl::Status CheckMaskDType(DType mask, DType query) {
  const DType wide = query == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  if (mask == DType::kBool || mask == query || mask == wide) return absl::OkStatus();
  return InvalidField("options.mask.dtype",
                      absl::StrCat("is ", NameOf(mask), ", must be BOOL",
                                   query == wide ? "" : absl::StrCat(", ", NameOf(query)), " or ",
                                   NameOf(wide), " (for queries of ", NameOf(query), ")"));
}

absl::Status ApplyMask(const AttendOptions& options, Problem& problem) {
  if (!options.mask.has_value()) return absl::OkStatus();
  const TensorSpec& mask = *options.mask;
  const MaskAxis axes[] = {{"the query's batch", problem.batch},
                           {"the query's heads", problem.heads},
                           {"the query's tokens", problem.queries},
                           {"the key's tokens", problem.keys}};
  if (absl::Status status = CheckMaskDType(mask.dtype, problem.dtype); !status.ok()) return status;
  if (absl::Status status = CheckMaskShape(mask, axes); !status.ok()) return status;
  if (!StridedBytes(mask.shape, SizeOf(mask.dtype)).has_value()) {
    return InvalidField("options.mask.shape", absl::StrCat("is (", absl::StrJoin(mask.shape, ", "),
                                                           "), whose bytes overflow 63 bits"));
  }
  MaskLayout layout;
  layout.dtype = mask.dtype;
  int64_t* const strides[] = {&layout.batch_stride, &layout.head_stride, &layout.query_stride,
                              &layout.key_stride};
  int64_t stride = 1;
  for (size_t axis = mask.shape.size(); axis-- > 0;) {
    const int64_t size = mask.shape[axis];
    if (size > 1) *strides[4 - mask.shape.size() + axis] = stride;
    stride *= std::max<int64_t>(size, 1);
  }
  layout.elements = 1;
  for (const int64_t size : mask.shape) layout.elements *= size;
  problem.mask = layout;
  return absl::OkStatus();
}

}  // namespace

int64_t Problem::Offset(int64_t batch_index) const {
  return causal == Causal::kBottomRight ? KeysOf(*this, batch_index) - queries : 0;
}

KeyRange Problem::VisibleKeys(int64_t batch_index, int64_t query) const {
  const int64_t seen = KeysOf(*this, batch_index);
  const int64_t position = query + Offset(batch_index);
  const std::optional<int64_t> left = window.left;
  const std::optional<int64_t> right = RightOf(*this);
  return {left.has_value() ? std::clamp<int64_t>(position - *left, 0, seen) : 0,
          right.has_value() ? std::clamp<int64_t>(position + *right + 1, 0, seen) : seen};
}

KeyRange Problem::VisibleKeysOfAny(int64_t batch_index, int64_t first, int64_t count) const {
  return {VisibleKeys(batch_index, first).begin, VisibleKeys(batch_index, first + count - 1).end};
}

Visibility Problem::Ask(int64_t batch_index, int64_t first, int64_t count, KeyRange range) const {
  // The first row sees the first keys, the last row the last.
  const KeyRange low = VisibleKeys(batch_index, first);
  const KeyRange high = VisibleKeys(batch_index, first + count - 1);
  if (std::max(range.begin, low.begin) >= std::min(range.end, high.end)) return Visibility::kNone;
  if (range.begin >= high.begin && range.end <= low.end) return Visibility::kAll;
  return Visibility::kMixed;
}

int64_t Problem::VisiblePairs(int64_t batch_index) const {
  const int64_t seen = KeysOf(*this, batch_index);
  const int64_t offset = Offset(batch_index);
  const std::optional<int64_t> left = window.left;
  const std::optional<int64_t> right = RightOf(*this);
  const absl::int128 ends = right.has_value() ? SumOfClamped(offset + *right + 1, seen, queries)
                                              : absl::int128{queries} * seen;
  const absl::int128 begins = left.has_value() ? SumOfClamped(offset - *left, seen, queries) : 0;
  return static_cast<int64_t>(
      std::min<absl::int128>(ends - begins, std::numeric_limits<int64_t>::max()));
}

absl::Status CheckTensor(absl::string_view name, const TensorSpec& spec, int64_t rank) {
  if (spec.dtype == DType::kUnspecified || spec.dtype == DType::kBool) {
    return InvalidField(
        absl::StrCat(name, ".dtype"),
        absl::StrCat("is ", NameOf(spec.dtype), ", must be FLOAT32, FLOAT64, FLOAT16 or BFLOAT16"));
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
  if (absl::Status status = ApplyVisibility(options, problem); !status.ok()) return status;
  if (absl::Status status = ApplyScoreOptions(options, problem); !status.ok()) return status;
  if (absl::Status status = ApplyMask(options, problem); !status.ok()) return status;
  problem.path = options.path;
  problem.layout = options.layout;
  // Where D is 0 every score is an empty sum, and any finite scale gives uniform weights.
  const double width = static_cast<double>(std::max<int64_t>(problem.width, 1));
  problem.scale = options.scale.value_or(1 / std::sqrt(width));
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
