#include "core/merge.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "core/checked_math.h"
#include "core/errors.h"
#include "core/half.h"

namespace attendant::core {
namespace {

// Elements that a tile reads: some hundred microseconds where they come from memory.
constexpr int64_t kTileElements = 1 << 18;
// Elements of a row that are summed at a time, on the stack.
constexpr int64_t kColumns = 512;

constexpr double kEmpty = -std::numeric_limits<double>::infinity();

template <typename S>
struct MergeJob {
  using T = Wide<S>;

  MergeProblem problem;
  MergeTensors<S> tensors;

  int64_t RowsOfTile() const {
    const int64_t row = SaturatingProduct({problem.parts, problem.value_width + 1});
    return std::max<int64_t>(1, kTileElements / row);
  }

  void MergeRows(int64_t first, int64_t last) const {
    std::vector<double> weights(static_cast<size_t>(problem.parts));
    std::vector<T> shares(weights.size());
    for (int64_t row = first; row < last; ++row) {
      tensors.logsumexp[row] = static_cast<T>(FindShares(row, weights, shares));
      for (int64_t column = 0; column < problem.value_width; column += kColumns) {
        MergeColumns(row, column, std::min(kColumns, problem.value_width - column), shares);
      }
    }
  }

  // Each part's weight and share of the row, and the row's logsumexp.
  double FindShares(int64_t row, std::vector<double>& weights, std::vector<T>& shares) const {
    double largest = kEmpty;
    for (const auto& part : tensors.parts) {
      largest = std::max(largest, static_cast<double>(part.logsumexp[row]));  // passes over NaN
    }
    double sum = 0;
    for (size_t p = 0; p < weights.size(); ++p) {
      const double logsumexp = static_cast<double>(tensors.parts[p].logsumexp[row]);
      weights[p] = logsumexp == kEmpty ? 0 : std::exp(logsumexp - largest);
      sum += weights[p];
    }
    std::transform(weights.begin(), weights.end(), shares.begin(), [&](double weight) {
      return weight == 0 ? T{0} : static_cast<T>(weight / sum);
    });
    return sum == 0 ? kEmpty : largest + std::log(sum);
  }

  void MergeColumns(int64_t row, int64_t column, int64_t count,
                    const std::vector<T>& shares) const {
    T sums[kColumns] = {};
    T wide[kColumns];
    const int64_t at = row * problem.value_width + column;
    for (size_t p = 0; p < shares.size(); ++p) {
      const bool empty = static_cast<double>(tensors.parts[p].logsumexp[row]) == kEmpty;
      if (empty) continue;
      const MatrixView<const S> stored{tensors.parts[p].output + at, 1, count, count};
      const T* const output = WidenRows(stored, wide).data;
      for (int64_t i = 0; i < count; ++i) sums[i] += shares[p] * output[i];
    }
    Store(sums, count, tensors.output + at);
  }
};

absl::Status CheckPart(int64_t index, const MergePartSpec& part, const MergePartSpec& first) {
  const std::string output = absl::StrCat("parts[", index, "].output");
  const std::string logsumexp = absl::StrCat("parts[", index, "].logsumexp");
  if (absl::Status status = CheckTensor(output, part.output, 4); !status.ok()) return status;
  if (absl::Status status = CheckTensor(logsumexp, part.logsumexp, 3); !status.ok()) return status;
  absl::Status status =
      CheckSameDType(output, part.output.dtype, "parts[0].output", first.output.dtype);
  if (!status.ok()) return status;
  if (part.logsumexp.dtype != WideOf(first.output.dtype)) {
    return InvalidField(absl::StrCat(logsumexp, ".dtype"),
                        absl::StrCat("is ", NameOf(part.logsumexp.dtype), ", must be ",
                                     NameOf(WideOf(first.output.dtype)), " (for outputs of ",
                                     NameOf(first.output.dtype), ")"));
  }
  for (const auto& [name, spec] :
       {std::pair(&output, &part.output), std::pair(&logsumexp, &part.logsumexp)}) {
    for (size_t axis = 0; axis < spec->shape.size(); ++axis) {
      status = CheckSize(absl::StrCat(*name, ".shape[", axis, "]"), spec->shape[axis],
                         first.output.shape[axis], "as in parts[0].output");
      if (!status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<MergeProblem> MakeMergeProblem(const std::vector<MergePartSpec>& parts) {
  if (parts.empty()) return InvalidField("parts", "has no entry, must have one or more");
  for (size_t index = 0; index < parts.size(); ++index) {
    absl::Status status = CheckPart(static_cast<int64_t>(index), parts[index], parts[0]);
    if (!status.ok()) return status;
  }
  const std::vector<int64_t>& shape = parts[0].output.shape;
  return MergeProblem{.dtype = parts[0].output.dtype,
                      .parts = static_cast<int64_t>(parts.size()),
                      .batch = shape[0],
                      .heads = shape[1],
                      .queries = shape[2],
                      .value_width = shape[3]};
}

template <typename S>
std::vector<Stage> MergeStages(const MergeProblem& problem, MergeTensors<S> tensors) {
  auto job = std::make_shared<MergeJob<S>>(MergeJob<S>{problem, std::move(tensors)});
  const int64_t rows = problem.rows();
  const int64_t block = job->RowsOfTile();
  const auto run = [job, rows, block](const TileContext& context) {
    const int64_t first = context.tile * block;
    job->MergeRows(first, std::min(rows, first + block));
    return absl::OkStatus();
  };
  return {{"merge", CeilDiv(rows, block), run}};
}

int64_t MergeFlops(const MergeProblem& problem) {
  return SaturatingProduct({2, problem.parts, problem.rows(), problem.value_width});
}

int64_t RequestBytes(const MergeProblem& problem) {
  // Each part is as the whole.
  return SaturatingProduct({problem.parts, ResponseBytes(problem)});
}

int64_t ResponseBytes(const MergeProblem& problem) {
  return SaturatingSum(
      {SaturatingProduct({problem.rows(), problem.value_width, SizeOf(problem.dtype)}),
       SaturatingProduct({problem.rows(), SizeOf(WideOf(problem.dtype))})});
}

template std::vector<Stage> MergeStages(const MergeProblem&, MergeTensors<float>);
template std::vector<Stage> MergeStages(const MergeProblem&, MergeTensors<double>);
template std::vector<Stage> MergeStages(const MergeProblem&, MergeTensors<Float16>);
template std::vector<Stage> MergeStages(const MergeProblem&, MergeTensors<BFloat16>);

}  // namespace attendant::core
