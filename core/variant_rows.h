// Rows of attention as a Variant understands it, in double: what the referee compares a caller's
// numbers with.
//
// Computed a few rows at a time, so that what is wrong is given up after the first of them and
// nothing of the size Tq * Tk is ever held.
#ifndef ATTENDANT_CORE_VARIANT_ROWS_H_
#define ATTENDANT_CORE_VARIANT_ROWS_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/checkpoint.h"
#include "core/mistakes.h"
#include "core/problem.h"
#include "core/tensor_view.h"
#include "core/workspace.h"

namespace attendant::core {

// What can be checked, in the order in which it is computed. All but the output of a head alone.
enum class Part : uint8_t { kQuery, kKey, kValue, kLogits, kWeights, kContext, kOutput };

// What is computed from. Thread-compatible; does not own data.
struct CheckSources {
  // As CheckProblem::attend says.
  const double* query = nullptr;
  const double* key = nullptr;
  const double* value = nullptr;
  // The problem's mask: a byte a key where it is BOOL, else numbers; null without elements.
  const uint8_t* mask_flags = nullptr;
  const double* mask_numbers = nullptr;
  const double* w_o = nullptr;  // of a head: (H * Dv, d_model)
  // Bounds of |score| without a mask's numbers, for the scale 1, ALiBi and sinks left aside.
  double raw_score_bound = 0;
  double raw_score_bound_of_queries = 0;  // the same of queries with queries
};

// x as numbers of `dtype` hold it.
double Rounded(DType dtype, double x);

// How many numbers a row of a part has, and how many rows one batch has. A row of the output is one
// of the caller's tensor as it lies in memory: of one head without a head, else of all of them.
int64_t WidthOf(const CheckProblem& problem, Part part);
int64_t RowsOf(const CheckProblem& problem, Part part);

// A bound of the variant's |score|, a mask's numbers left aside.
double ScoreBound(const Variant& variant, const CheckSources& sources);

// What else there is to know of a row.
struct RowFacts {
  double weight_sum = 1;  // sum of |weight|, of the head where that is the largest
  double mask_reach = 0;  // the largest |mask number| that can decide a weight
  bool empty = false;     // it sees no key: whether it is 0 or NaN is the author's choice
};

// statistics(batch, head): what ComputeStatistics made for it.
using Statistics = std::function<absl::StatusOr<const double*>(int64_t batch, int64_t head)>;

// What a tile that computes rows has.
struct RowsTile {
  int64_t most = 0;  // rows of a part that are asked for at one time
  Workspace* workspace = nullptr;
  Checkpoint checkpoint;
};

// Thread-compatible; of one tile. The sources must outlive it. What takes long returns CANCELLED
// once the tile's checkpoint says so.
class VariantRows {
 public:
  // range: the type whose exp may overflow where the maximum is not subtracted. Returns
  // RESOURCE_EXHAUSTED where the workspace does not suffice.
  static absl::StatusOr<VariantRows> Make(const CheckProblem& problem, const Variant& variant,
                                          const CheckSources& sources, DType range,
                                          const RowsTile& tile);

  // An upper bound of the numbers that any variant's rows hold.
  static int64_t MostNumbers(const CheckProblem& problem, int64_t most);

  // Rows first .. first + count - 1 of a batch: `out` gets count * WidthOf(part) numbers, `facts`
  // count. statistics: where NeedsStatistics; may call ComputeStatistics of these very rows.
  absl::Status Compute(Part part, int64_t batch, int64_t first, int64_t count,
                       const Statistics& statistics, double* out, RowFacts* facts);

  // Numbers that ComputeStatistics writes for a head.
  static int64_t StatisticsOfHead(const Problem& problem) { return 2 * problem.keys; }
  // What the weights of a head need of its other rows.
  absl::Status ComputeStatistics(int64_t batch, int64_t head, double* out);

  // The row of the context or output as arithmetic in `dtype` may have made it: inputs, scores,
  // weights and results are rounded to it. Of the variant without mistakes.
  absl::Status Simulate(DType dtype, Part part, int64_t batch, int64_t row, double* out);

  // The largest |number| of the mask that the query sees and that can decide a weight: others are
  // so far below the row's largest that their keys have none.
  double MaskReach(int64_t batch, int64_t head, int64_t query) const;
  // ScoreBound.
  double score_bound() const { return score_bound_; }
  const Checkpoint& checkpoint() const { return checkpoint_; }

 private:
  // Heads and queries of an output or intermediate, in the order of its rows.
  struct Run {
    int64_t head;
    int64_t first;
    int64_t count;
    int64_t offset;  // of its first row, in rows
    int64_t stride;  // rows from one to the next
  };

  VariantRows(const CheckProblem& problem, const Variant& variant, const CheckSources& sources,
              DType range, const Checkpoint& checkpoint);

  int64_t KvHead(int64_t head) const;
  KeyRange SeenKeys(int64_t batch, int64_t query) const;
  // Of the mask's first element for a row.
  int64_t MaskAt(int64_t batch, int64_t head, int64_t query) const;
  std::vector<Run> RunsOf(Layout layout, int64_t first, int64_t count) const;

  absl::Status RawScores(int64_t batch, int64_t head, int64_t first, int64_t count, double* x);
  absl::Status Scores(int64_t batch, int64_t head, int64_t first, int64_t count, double* x);
  void FinishScores(int64_t batch, int64_t head, int64_t query, double* row) const;
  void AddBias(int64_t batch, int64_t head, int64_t query, double* row) const;
  void Hide(int64_t batch, int64_t head, int64_t query, double with, double* row) const;
  double Exp(double x) const;

  double WeightOfEmptyRow() const;
  absl::Status Weights(int64_t batch, int64_t head, int64_t first, int64_t count,
                       const Statistics& statistics, double* weights, RowFacts* facts);
  void WeighRow(double sink, const double* statistics, double* row) const;
  absl::Status WeighOverOthers(int64_t batch, int64_t head, int64_t first, int64_t count,
                               double* weights);
  void AddColumns(int64_t count, const double* x, double* most, double* sums) const;
  absl::Status AddValues(int64_t batch, int64_t head, const double* weights, double* out) const;
  absl::Status Contexts(int64_t batch, const std::vector<Run>& runs, const Statistics& statistics,
                        double* out, RowFacts* facts);
  absl::Status PartOfRuns(Part part, int64_t batch, const std::vector<Run>& runs,
                          const Statistics& statistics, double* out, RowFacts* facts);
  absl::Status Project(const double* contexts, int64_t count, double* out) const;
  absl::Status SimulateContext(DType dtype, int64_t batch, int64_t head, int64_t query,
                               double* out);

  const CheckProblem& problem_;
  const Variant variant_;
  const CheckSources& sources_;
  const DType range_;
  const Checkpoint checkpoint_;
  double score_bound_ = 0;
  int64_t block_ = 1;  // rows of scores at a time
  TensorView<const double> query_;
  TensorView<const double> key_;
  TensorView<const double> value_;
  Buffer<double> scores_;    // (block, Tk)
  Buffer<double> others_;    // (3, block, Tk): scores, maxima and sums over other heads
  Buffer<double> contexts_;  // of a head: (most, H * Dv)
};

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_VARIANT_ROWS_H_
