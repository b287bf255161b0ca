// What is measured: attention problems by name.
#ifndef ATTENDANT_BENCH_CASES_H_
#define ATTENDANT_BENCH_CASES_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/gradient.h"
#include "core/problem.h"

namespace attendant::bench {

// A mask of (queries, keys), shared by all heads. kFar: 9 of 10 keys are at -1e30.
enum class Mask { kNone, kBool, kAdded, kFar };

constexpr const char* NameOf(Mask mask) {
  return mask == Mask::kBool    ? "bool"
         : mask == Mask::kAdded ? "added"
         : mask == Mask::kFar   ? "far"
                                : "";
}

// What is computed: attention, or its gradient with the forward pass inside or its results given.
enum class Pass { kForward, kBackward, kBackwardGiven };

constexpr const char* NameOf(Pass pass) {
  return pass == Pass::kForward    ? "forward"
         : pass == Pass::kBackward ? "backward"
                                   : "backward_given";
}

struct Case {
  std::string name;
  Pass pass = Pass::kForward;
  core::DType dtype = core::DType::kFloat32;
  core::Path path = core::Path::kChunked;
  core::Layout layout = core::Layout::kBhtd;
  core::Causal causal = core::Causal::kNone;
  int64_t batch = 1;
  int64_t heads = 8;
  int64_t kv_heads = 8;
  int64_t queries = 0;
  int64_t keys = 0;
  int64_t width = 64;  // of query, key and value
  // Options beside causal; each sees what it says of the keys, or does it to every head's scores.
  std::optional<int64_t> window_left;  // with a window_right of 0
  std::optional<int64_t> key_length;
  double softcap = 0;
  double alibi_slope = 0;
  Mask mask = Mask::kNone;
  // Few queries over keys and values that come from memory, not from a cache: held against the
  // bandwidth of reading them.
  bool decode = false;
};

// Of --mode=kernel and --mode=rpc.
const std::vector<Case>& KernelCases();
const std::vector<Case>& RpcCases();

std::vector<std::string> NamesOf(const std::vector<Case>& cases);

// REQUIRES: one of the cases has this name.
const Case& CaseNamed(const std::vector<Case>& cases, absl::string_view name);

core::Problem ProblemOf(const Case& c);
// REQUIRES: the case is a backward pass.
core::GradientProblem GradientOf(const Case& c);
// Of its matrix products.
double FlopsOf(const Case& c);

// The names that match any of the patterns (names or globs such as "decode*"), in their own order;
// all of them where there is no pattern. Returns INVALID_ARGUMENT naming a pattern without a match.
absl::StatusOr<std::vector<std::string>> Select(const std::vector<std::string>& names,
                                                const std::vector<std::string>& patterns);

}  // namespace attendant::bench

#endif  // ATTENDANT_BENCH_CASES_H_
