#include "core/widthless.h"

#include <algorithm>

#include "core/checked_math.h"
#include "core/fused_kernel.h"
#include "core/second_sweep.h"

namespace attendant::core {
namespace {

// Of a tile, if each sees another number of keys: some hundred microseconds.
constexpr int64_t kRows = 4096;

// The fused kernel's state of a segment of so many keys, all of score 0: the reference is 32 beyond
// the largest score, each key weighs 2^-32. Exact, and so the kernel's own bits, up to 2^24 keys.
template <typename T>
struct State {
  explicit State(int64_t keys) : sum(static_cast<T>(keys) * T{0x1p-32}) {}
  T reference = 32;
  T sum;
};

template <typename S>
void LogSumExps(const Problem& p, const AttendTensors<S>& tensors, int64_t first, int64_t last) {
  using T = Wide<S>;
  T unused = 0;
  S no_output{};
  int64_t head_before = -1;
  int64_t keys_before = -1;
  for (int64_t row = first; row < last; ++row) {
    const int64_t head = row / p.queries % p.heads;
    const int64_t keys = p.VisibleKeys(row / p.queries / p.heads, row % p.queries).size();
    if (head == head_before && keys == keys_before) {
      tensors.logsumexp[row] = tensors.logsumexp[row - 1];
      continue;
    }
    head_before = head;
    keys_before = keys;
    const State<T> state(keys);
    FusedRowResult<S> to;
    to.problem = &p;
    to.head = head;
    to.total = &unused;
    to.output = &no_output;
    to.logsumexp = tensors.logsumexp + row;
    FusedFinishRow(&state.reference, /*segments=*/1, FusedStateElements(0), to);
  }
}

}  // namespace

bool IsWidthless(const Problem& p) {
  return p.path == Path::kChunked && p.width == 0 && p.value_width == 0 && !p.mask.has_value() &&
         p.alibi_slopes.empty() && p.return_logsumexp && !NeedsSecondSweep(p);
}

template <typename S>
std::vector<Stage> WidthlessStages(const Problem& problem, const AttendTensors<S>& tensors) {
  const int64_t rows = SaturatingProduct({problem.batch, problem.heads, problem.queries});
  return {{"logsumexp", CeilDiv(rows, kRows), [=](const TileContext& context) {
             const int64_t first = context.tile * kRows;
             LogSumExps(problem, tensors, first, std::min(first + kRows, rows));
             return absl::OkStatus();
           }}};
}

template std::vector<Stage> WidthlessStages(const Problem&, const AttendTensors<float>&);
template std::vector<Stage> WidthlessStages(const Problem&, const AttendTensors<double>&);
template std::vector<Stage> WidthlessStages(const Problem&, const AttendTensors<Float16>&);
template std::vector<Stage> WidthlessStages(const Problem&, const AttendTensors<BFloat16>&);

}  // namespace attendant::core
