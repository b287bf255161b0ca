// From shapes and options to a checked problem. Pure: no tensor data, no allocation of its size.
//
// Axis letters: B batch, H query heads, Hkv key and value heads, Tq query tokens, Tk key tokens,
// D width of query and key, Dv width of value.
#ifndef ATTENDANT_CORE_PROBLEM_H_
#define ATTENDANT_CORE_PROBLEM_H_

#include <cstdint>
#include <limits>
#include <numbers>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/tensor_view.h"

namespace attendant::core {

enum class Path { kExplicit, kChunked };
enum class Causal { kNone, kTopLeft, kBottomRight };

// "explicit", "chunked".
constexpr absl::string_view NameOf(Path path) {
  return path == Path::kExplicit ? "explicit" : "chunked";
}

// Of an axis. Counts of this size fit every library's index, and no tensor of one element a unit is
// larger.
inline constexpr int64_t kLargestSize = std::numeric_limits<int32_t>::max();

// What a tensor claims to be.
struct TensorSpec {
  DType dtype = DType::kUnspecified;
  std::vector<int64_t> shape;
};

struct Window {
  std::optional<int64_t> left;
  std::optional<int64_t> right;
};

// A mask in memory: element (b, h, i, j) of (B, H, Tq, Tk) is at the sum of index times stride, in
// elements. A stride of 0 broadcasts.
struct MaskLayout {
  DType dtype = DType::kBool;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t query_stride = 0;
  int64_t key_stride = 0;  // 0 or 1
  int64_t elements = 0;
};

// The options of the contract, unchecked. path: AUTO is kChunked.
struct AttendOptions {
  Path path = Path::kChunked;
  Layout layout = Layout::kBhtd;
  std::optional<double> scale;
  Causal causal = Causal::kNone;
  std::optional<TensorSpec> mask;
  std::vector<int64_t> key_lengths;
  std::optional<Window> window;
  double softcap = 0;
  std::vector<double> alibi_slopes;
  std::vector<double> sinks;
  bool return_weights = false;
  bool return_logsumexp = false;
  bool return_key_sums = false;
};

// Keys begin <= j < end.
struct KeyRange {
  int64_t begin = 0;
  int64_t end = 0;
  bool operator==(const KeyRange&) const = default;
  int64_t size() const { return end - begin; }
};

// What a block of queries of one batch sees of a block of keys.
enum class Visibility { kNone, kAll, kMixed };

// A checked problem: every size is 0 or more, every tensor's element count fits int64_t.
struct Problem {
  DType dtype = DType::kFloat32;
  Path path = Path::kChunked;
  Layout layout = Layout::kBhtd;
  int64_t batch = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t queries = 0;
  int64_t keys = 0;
  int64_t width = 0;
  int64_t value_width = 0;
  double scale = 1;
  Causal causal = Causal::kNone;
  std::vector<int64_t> key_lengths;  // one a batch, or none
  Window window;
  std::optional<MaskLayout> mask;
  double softcap = 0;                // 0: none
  std::vector<double> alibi_slopes;  // one a head, or none
  std::vector<double> sinks;         // one a head, or none
  bool return_weights = false;
  bool return_logsumexp = false;
  bool return_key_sums = false;

  // The key head that query head `head` reads. REQUIRES: heads > 0.
  int64_t KvHead(int64_t head) const { return head / (heads / kv_heads); }

  // Query i stands at key i + Offset(batch_index).
  int64_t Offset(int64_t batch_index) const;
  // The keys that query `query` sees as far as no mask hides them; an empty range has begin == end.
  // Both ends only grow with the query. REQUIRES: 0 <= query < queries.
  KeyRange VisibleKeys(int64_t batch_index, int64_t query) const;
  // The keys between the first and the last that any of the queries first .. first + count - 1
  // sees. REQUIRES: count > 0.
  KeyRange VisibleKeysOfAny(int64_t batch_index, int64_t first, int64_t count) const;
  // The one question a tile asks, a mask left aside. REQUIRES: count > 0.
  Visibility Ask(int64_t batch_index, int64_t first, int64_t count, KeyRange keys) const;
  // Whether a mask's numbers are added to the scores.
  bool AddsMask() const { return mask.has_value() && mask->dtype != DType::kBool; }
  // The factor of a raw score in the exponent of 2: e^(scale * s) = 2^(ScaleLog2() * s).
  double ScaleLog2() const { return scale * std::numbers::log2e; }
  // The other options in the same units: 0 where there is no softcap or slope, -infinity where
  // there is no sink.
  double SoftcapLog2() const { return softcap * std::numbers::log2e; }
  double SlopeLog2(int64_t head) const {
    return alibi_slopes.empty() ? 0 : alibi_slopes[head] * std::numbers::log2e;
  }
  // shift: what is subtracted from the head's scores, in base e.
  double SinkLog2(int64_t head, double shift = 0) const {
    return sinks.empty() ? -std::numeric_limits<double>::infinity()
                         : (sinks[head] - shift) * std::numbers::log2e;
  }
  // (query, key) pairs visible in one head of a batch, a mask left aside; saturates at 2^63 - 1.
  int64_t VisiblePairs(int64_t batch_index) const;
};

// Checks one tensor's sizes. Returns INVALID_ARGUMENT naming `name`.shape[i] where a size is
// negative, `name`.shape where the rank is not `rank` or the bytes overflow int64_t, `name`.dtype
// where it is not a floating type.
absl::Status CheckTensor(absl::string_view name, const TensorSpec& spec, int64_t rank);

// Returns INVALID_ARGUMENT naming `field` where `actual` is not `expected`. what: the rule, such as
// "the query's width".
absl::Status CheckSize(absl::string_view field, int64_t actual, int64_t expected,
                       absl::string_view what);

// Returns INVALID_ARGUMENT naming `name`.dtype where it is not the first tensor's.
absl::Status CheckSameDType(absl::string_view name, DType actual, absl::string_view first,
                            DType expected);

// Checks the options alone, and puts them into `problem`, whose sizes are set. Returns
// INVALID_ARGUMENT naming options.*.
absl::Status ApplyOptions(const AttendOptions& options, Problem& problem);

// query (B, H, Tq, D), key (B, Hkv, Tk, D), value (B, Hkv, Tk, Dv), each in options.layout.
// Returns INVALID_ARGUMENT naming the field, with what it holds and what would be right.
absl::StatusOr<Problem> MakeProblem(const TensorSpec& query, const TensorSpec& key,
                                    const TensorSpec& value, const AttendOptions& options);

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_PROBLEM_H_
