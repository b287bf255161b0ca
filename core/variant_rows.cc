#include "core/variant_rows.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>

#include "core/checked_math.h"
#include "core/half.h"
#include "core/long_product.h"

namespace attendant::core {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Rows of scores at a time: up to 32, and 1 MiB of them.
constexpr int64_t kMostRows = 32;
constexpr int64_t kMostScores = (int64_t{1} << 20) / static_cast<int64_t>(sizeof(double));

int64_t BlockOf(const Problem& p) {
  return std::clamp<int64_t>(kMostScores / std::max<int64_t>(p.keys, 1), 1, kMostRows);
}

// The largest number of a type, and what is rounded to 0.
struct Range {
  double most;
  double least;
};
Range RangeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return {65519, 0x1p-25};
    case DType::kFloat32:
    case DType::kBFloat16:
      return {double{std::numeric_limits<float>::max()}, 0x1p-150};
    default:
      return {std::numeric_limits<double>::max(), 0};
  }
}

bool AllHidden(const double* row, int64_t keys) {
  return std::all_of(row, row + keys, [](double x) { return x == -kInfinity; });
}

// Beyond this distance below the largest score of a row, a weight is 0 in double too.
constexpr double kNoWeight = 750;

}  // namespace

double Rounded(DType dtype, double x) {
  return WithStored(dtype, [x]<typename S>() {
    const auto wide = static_cast<Wide<S>>(x);
    S stored{};
    Store(&wide, 1, &stored);
    Wide<S> back{};
    return static_cast<double>(WidenRows(MatrixView<const S>{&stored, 1, 1, 1}, &back).data[0]);
  });
}

int64_t WidthOf(const CheckProblem& problem, Part part) {
  const Problem& p = problem.attend;
  switch (part) {
    case Part::kQuery:
    case Part::kKey:
      return p.width;
    case Part::kLogits:
    case Part::kWeights:
      return p.keys;
    case Part::kValue:
    case Part::kContext:
      return p.value_width;
    case Part::kOutput:
      break;
  }
  return problem.head ? problem.d_model : p.value_width;
}

int64_t RowsOf(const CheckProblem& problem, Part part) {
  const Problem& p = problem.attend;
  return part == Part::kOutput && problem.head ? p.queries : p.heads * p.queries;
}

double ScoreBound(const Variant& variant, const CheckSources& sources) {
  const Problem& p = variant.problem;
  const auto largest = [](const std::vector<double>& numbers) {
    double most = 0;
    for (const double x : numbers) most = std::isfinite(x) ? std::max(most, std::abs(x)) : most;
    return most;
  };
  const double raw =
      variant.Has(Mistake::kWkIsWq) ? sources.raw_score_bound_of_queries : sources.raw_score_bound;
  return std::abs(p.scale) * raw + largest(p.sinks) +
         largest(p.alibi_slopes) * static_cast<double>(std::max(p.queries, p.keys));
}

VariantRows::VariantRows(const CheckProblem& problem, const Variant& variant,
                         const CheckSources& sources, DType range, const Checkpoint& checkpoint)
    : problem_(problem),
      variant_(variant),
      sources_(sources),
      range_(range),
      checkpoint_(checkpoint),
      block_(BlockOf(variant.problem)) {
  const Problem& p = variant_.problem;
  const bool same = variant_.Has(Mistake::kWkIsWq);
  query_ = {sources.query, variant_.in, p.heads, p.queries, p.width};
  key_ = {same ? sources.query : sources.key, variant_.in, p.kv_heads, p.keys, p.width};
  value_ = {sources.value, variant_.in, p.kv_heads, p.keys, p.value_width};
  score_bound_ = ScoreBound(variant_, sources_);
}

absl::StatusOr<VariantRows> VariantRows::Make(const CheckProblem& problem, const Variant& variant,
                                              const CheckSources& sources, DType range,
                                              const RowsTile& tile) {
  VariantRows rows(problem, variant, sources, range, tile.checkpoint);
  const Problem& p = variant.problem;
  const int64_t scores = SaturatingProduct({rows.block_, p.keys});
  const int64_t contexts = problem.head
                               ? SaturatingProduct({tile.most, problem.attend.heads, p.value_width})
                               : int64_t{0};
  absl::Status status = tile.workspace->AllocateAll<double>(
      {{&rows.scores_, scores},
       {&rows.others_, NeedsOtherHeads(variant.mistakes) ? SaturatingProduct({3, scores}) : 0},
       {&rows.contexts_, contexts}});
  if (!status.ok()) return status;
  return rows;
}

int64_t VariantRows::MostNumbers(const CheckProblem& problem, int64_t most) {
  const Problem& p = problem.attend;
  // A variant may take heads for keys.
  const int64_t keys = std::max(p.keys, p.heads);
  const int64_t scores =
      std::max(keys, std::min(SaturatingProduct({kMostRows, keys}), kMostScores));
  const int64_t contexts =
      problem.head ? SaturatingProduct({most, p.heads, p.value_width}) : int64_t{0};
  return SaturatingSum({SaturatingProduct({4, scores}), contexts});
}

int64_t VariantRows::KvHead(int64_t head) const {
  return variant_.Has(Mistake::kGroupedHeadsTiled) ? head % variant_.problem.kv_heads
                                                   : variant_.problem.KvHead(head);
}

KeyRange VariantRows::SeenKeys(int64_t batch, int64_t query) const {
  const Problem& p = variant_.problem;
  const int64_t length = p.key_lengths.empty() ? p.keys : p.key_lengths[batch];
  const int64_t position = query + p.Offset(batch);
  int64_t begin = p.window.left.has_value() ? position - *p.window.left : 0;
  int64_t end = length;
  if (variant_.Has(Mistake::kCausalInverted)) {
    begin = std::max(begin, position + 1);
  } else if (variant_.Has(Mistake::kCausalMirrored)) {
    begin = std::max(begin, position);
  } else if (p.causal != Causal::kNone) {
    end = position + 1;
    if (variant_.Has(Mistake::kCausalEdgeLate)) end = position + 2;
    if (variant_.Has(Mistake::kCausalEdgeEarly)) end = position;
  } else if (p.window.right.has_value()) {
    end = position + *p.window.right + 1;
  }
  begin = std::clamp<int64_t>(begin, 0, length);
  return {begin, std::clamp<int64_t>(end, begin, length)};
}

int64_t VariantRows::MaskAt(int64_t batch, int64_t head, int64_t query) const {
  const MaskLayout& mask = *variant_.problem.mask;
  return batch * mask.batch_stride + head * mask.head_stride + query * mask.query_stride;
}

double VariantRows::MaskReach(int64_t batch, int64_t head, int64_t query) const {
  const Problem& p = variant_.problem;
  if (!p.AddsMask()) return 0;
  const double* const numbers = sources_.mask_numbers + MaskAt(batch, head, query);
  const KeyRange seen = SeenKeys(batch, query);
  double most = -kInfinity;
  for (int64_t j = seen.begin; j < seen.end; ++j) {
    most = std::max(most, numbers[j * p.mask->key_stride]);
  }
  const double least = most - 2 * score_bound_ - kNoWeight;
  double reach = 0;
  for (int64_t j = seen.begin; j < seen.end; ++j) {
    const double number = numbers[j * p.mask->key_stride];
    if (std::isfinite(number) && number >= least) reach = std::max(reach, std::abs(number));
  }
  return reach;
}

std::vector<VariantRows::Run> VariantRows::RunsOf(Layout layout, int64_t first,
                                                  int64_t count) const {
  const Problem& p = variant_.problem;
  std::vector<Run> runs;
  if (layout == Layout::kBhtd) {
    for (int64_t row = first; row < first + count;) {
      const int64_t query = row % p.queries;
      const int64_t rows = std::min(p.queries - query, first + count - row);
      runs.push_back({row / p.queries, query, rows, row - first, 1});
      row += rows;
    }
    return runs;
  }
  for (int64_t row = first; row < first + std::min(p.heads, count); ++row) {
    const int64_t rows = CeilDiv(first + count - row, p.heads);
    runs.push_back({row % p.heads, row / p.heads, rows, row - first, p.heads});
  }
  return runs;
}

absl::Status VariantRows::RawScores(int64_t batch, int64_t head, int64_t first, int64_t count,
                                    double* x) {
  const Problem& p = variant_.problem;
  const MatrixView<const double> query = query_.Head(batch, head);
  const MatrixView<const double> key = key_.Head(batch, KvHead(head));
  const MatrixView<double> scores{x, count, p.keys, p.keys};
  const bool transposed = variant_.Has(Mistake::kScoresTransposed);
  absl::Status status = LongGemm((transposed ? key : query).Rows(first, count),
                                 transposed ? query : key, Transpose::kYes, scores,
                                 /*accumulate=*/false, checkpoint_);
  for (int64_t i = 0; i < count * p.keys; ++i) x[i] *= p.scale;
  return status;
}

absl::Status VariantRows::Scores(int64_t batch, int64_t head, int64_t first, int64_t count,
                                 double* x) {
  absl::Status status = RawScores(batch, head, first, count, x);
  if (!status.ok()) return status;
  for (int64_t i = 0; i < count; ++i) {
    FinishScores(batch, head, first + i, x + i * variant_.problem.keys);
  }
  return status;
}

void VariantRows::FinishScores(int64_t batch, int64_t head, int64_t query, double* row) const {
  const Problem& p = variant_.problem;
  const auto cap = [&] {
    for (int64_t j = 0; j < p.keys; ++j) row[j] = p.softcap * std::tanh(row[j] / p.softcap);
  };
  const bool cap_last = variant_.Has(Mistake::kSoftcapAfterMask);
  if (p.softcap != 0 && !cap_last) cap();
  AddBias(batch, head, query, row);
  if (!variant_.Has(Mistake::kMaskAfterSoftmax)) Hide(batch, head, query, -kInfinity, row);
  if (p.softcap != 0 && cap_last) cap();
}

void VariantRows::AddBias(int64_t batch, int64_t head, int64_t query, double* row) const {
  const Problem& p = variant_.problem;
  if (p.AddsMask()) {
    const double* const numbers = sources_.mask_numbers + MaskAt(batch, head, query);
    const double factor = variant_.Has(Mistake::kMaskScaled) ? p.scale : 1;
    for (int64_t j = 0; j < p.keys; ++j) {
      const double number = numbers[j * p.mask->key_stride];
      if (number != -kInfinity) row[j] += factor * number;
    }
  } else if (variant_.mistakes.HasAny({Mistake::kMaskAddedAs01, Mistake::kMaskMultiplied})) {
    const uint8_t* const flags = sources_.mask_flags + MaskAt(batch, head, query);
    for (int64_t j = 0; j < p.keys; ++j) {
      const bool seen = flags[j * p.mask->key_stride] != 0;
      if (variant_.Has(Mistake::kMaskAddedAs01)) {
        row[j] += seen ? 1 : 0;
      } else if (!seen) {
        row[j] = 0;
      }
    }
  }
  if (p.alibi_slopes.empty()) return;
  const int64_t position = query + p.Offset(batch);
  for (int64_t j = 0; j < p.keys; ++j) {
    row[j] -= p.alibi_slopes[head] * std::abs(static_cast<double>(position - j));
  }
}

void VariantRows::Hide(int64_t batch, int64_t head, int64_t query, double with, double* row) const {
  const Problem& p = variant_.problem;
  const KeyRange seen = SeenKeys(batch, query);
  std::fill_n(row, seen.begin, with);
  std::fill(row + seen.end, row + p.keys, with);
  if (!p.mask.has_value() ||
      variant_.mistakes.HasAny({Mistake::kMaskAddedAs01, Mistake::kMaskMultiplied})) {
    return;
  }
  const int64_t at = MaskAt(batch, head, query);
  const bool hidden_flag = variant_.Has(Mistake::kMaskInverted);
  for (int64_t j = seen.begin; j < seen.end; ++j) {
    const int64_t element = at + j * p.mask->key_stride;
    const bool hidden = p.AddsMask() ? sources_.mask_numbers[element] == -kInfinity
                                     : (sources_.mask_flags[element] != 0) == hidden_flag;
    if (hidden) row[j] = with;
  }
}

// e^x in the range of the type that it is held in, which matters where no maximum was subtracted.
double VariantRows::Exp(double x) const {
  const double e = std::exp(x);
  if (!variant_.Has(Mistake::kNoMaxSubtraction)) return e;
  const Range range = RangeOf(range_);
  if (e > range.most) return kInfinity;
  return e < range.least ? 0 : e;
}

// Turns a row of scores, not all hidden, into weights. statistics: of the keys' columns, or null.
void VariantRows::WeighRow(double sink, const double* statistics, double* row) const {
  const int64_t keys = variant_.problem.keys;
  const double* const most_of = statistics;
  const double* const sum_of = statistics == nullptr ? nullptr : statistics + keys;
  double most = sink;
  for (int64_t j = 0; j < keys; ++j) most = std::max(most, row[j]);  // passes over NaN
  const bool raw = variant_.Has(Mistake::kNoMaxSubtraction);
  const bool column_max = variant_.mistakes.HasAny(
      {Mistake::kSoftmaxOverQueries, Mistake::kKeepdimsLost, Mistake::kKeepdimsLostInMax});
  double sum = sink == -kInfinity ? 0 : Exp(sink - (raw ? 0 : most));
  for (int64_t j = 0; j < keys; ++j) {
    const double reference = raw ? 0 : column_max ? most_of[j] : most;
    row[j] = row[j] == -kInfinity && reference == -kInfinity ? 0 : Exp(row[j] - reference);
    sum += row[j];
  }
  if (raw && sum > RangeOf(range_).most) sum = kInfinity;
  const bool column_sum = variant_.mistakes.HasAny(
      {Mistake::kSoftmaxOverQueries, Mistake::kKeepdimsLost, Mistake::kKeepdimsLostInSum});
  for (int64_t j = 0; j < keys; ++j) {
    if (column_sum) {
      // A key that no query sees has no weight to share.
      row[j] = row[j] == 0 && sum_of[j] == 0 ? 0 : row[j] / sum_of[j];
    } else if (!variant_.Has(Mistake::kNotNormalised)) {
      row[j] /= sum;
    }
  }
}

// Joins rows of scores to the maxima and sums of their columns.
void VariantRows::AddColumns(int64_t count, const double* x, double* most, double* sums) const {
  const bool raw = variant_.Has(Mistake::kNoMaxSubtraction);
  for (int64_t i = 0; i < count; ++i) {
    if (x[i] == -kInfinity) continue;
    if (raw) {
      sums[i] += Exp(x[i]);
      if (sums[i] > RangeOf(range_).most) sums[i] = kInfinity;
    } else if (x[i] > most[i]) {
      sums[i] = sums[i] * std::exp(most[i] - x[i]) + 1;
      most[i] = x[i];
    } else {
      sums[i] += std::exp(x[i] - most[i]);
    }
  }
}

absl::Status VariantRows::ComputeStatistics(int64_t batch, int64_t head, double* out) {
  const Problem& p = variant_.problem;
  double* const most = out;
  double* const sums = out + p.keys;
  std::fill_n(most, p.keys, -kInfinity);
  std::fill_n(sums, p.keys, 0.0);
  const bool of_columns = variant_.Has(Mistake::kSoftmaxOverQueries);
  const bool raw = variant_.Has(Mistake::kNoMaxSubtraction);
  const auto each_block = [&](const auto& use) {
    for (int64_t first = 0; first < p.queries; first += block_) {
      const int64_t count = std::min(block_, p.queries - first);
      absl::Status status = Scores(batch, head, first, count, scores_.data());
      if (!status.ok()) return status;
      for (int64_t i = 0; i < count; ++i) use(first + i, scores_.data() + i * p.keys);
    }
    return absl::OkStatus();
  };
  absl::Status status = each_block([&](int64_t i, const double* row) {
    if (of_columns) {
      AddColumns(p.keys, row, most, sums);
      return;
    }
    // Of a square problem: what belongs to row i is at i.
    most[i] = *std::max_element(row, row + p.keys);
    const double reference = raw ? 0 : most[i];
    for (int64_t j = 0; j < p.keys; ++j) {
      sums[i] += row[j] == -kInfinity ? 0 : Exp(row[j] - reference);
    }
  });
  if (!status.ok() || !variant_.Has(Mistake::kKeepdimsLost) || raw) return status;
  // The sums are of what the misaligned maxima left.
  std::fill_n(sums, p.keys, 0.0);
  return each_block([&](int64_t i, const double* row) {
    for (int64_t j = 0; j < p.keys; ++j) {
      if (row[j] != -kInfinity || most[j] != -kInfinity) sums[i] += std::exp(row[j] - most[j]);
    }
  });
}

// The softmax over the heads or batches that stand beside this one.
absl::Status VariantRows::WeighOverOthers(int64_t batch, int64_t head, int64_t first, int64_t count,
                                          double* weights) {
  const Problem& p = variant_.problem;
  const int64_t n = count * p.keys;
  double* const x = others_.data();
  double* const most = x + block_ * p.keys;
  double* const sums = most + block_ * p.keys;
  std::fill_n(most, n, -kInfinity);
  std::fill_n(sums, n, 0.0);
  const bool over_heads = variant_.Has(Mistake::kSoftmaxOverHeads);
  for (int64_t other = 0; other < (over_heads ? p.heads : p.batch); ++other) {
    absl::Status status =
        Scores(over_heads ? batch : other, over_heads ? other : head, first, count, x);
    if (!status.ok()) return status;
    AddColumns(n, x, most, sums);
  }
  const bool raw = variant_.Has(Mistake::kNoMaxSubtraction);
  for (int64_t i = 0; i < n; ++i) {
    weights[i] = weights[i] == -kInfinity ? 0 : Exp(weights[i] - (raw ? 0 : most[i])) / sums[i];
  }
  return absl::OkStatus();
}

double VariantRows::WeightOfEmptyRow() const {
  if (variant_.Has(Mistake::kFullyMaskedRowsNan)) return kNan;
  const bool averaged = variant_.Has(Mistake::kFullyMaskedRowsAveraged);
  return averaged ? 1 / static_cast<double>(variant_.problem.keys) : 0;
}

absl::Status VariantRows::Weights(int64_t batch, int64_t head, int64_t first, int64_t count,
                                  const Statistics& statistics, double* weights, RowFacts* facts) {
  const Problem& p = variant_.problem;
  const double* of_head = nullptr;
  if (NeedsStatistics(variant_.mistakes)) {
    const absl::StatusOr<const double*> made = statistics(batch, head);
    if (!made.ok()) return made.status();
    of_head = *made;
  }
  absl::Status status = Scores(batch, head, first, count, weights);
  if (!status.ok()) return status;
  for (int64_t i = 0; i < count; ++i) {
    facts[i] = {};
    facts[i].empty = AllHidden(weights + i * p.keys, p.keys);
    facts[i].mask_reach = MaskReach(batch, head, first + i);
  }
  const bool over_others = NeedsOtherHeads(variant_.mistakes);
  if (over_others) {
    status = WeighOverOthers(batch, head, first, count, weights);
    if (!status.ok()) return status;
  }
  const double sink = p.sinks.empty() ? -kInfinity : p.sinks[head];
  for (int64_t i = 0; i < count; ++i) {
    double* const row = weights + i * p.keys;
    if (facts[i].empty) {
      std::fill_n(row, p.keys, WeightOfEmptyRow());
    } else if (!over_others) {
      WeighRow(sink, of_head, row);
    }
    if (variant_.Has(Mistake::kMaskAfterSoftmax)) Hide(batch, head, first + i, 0, row);
    facts[i].weight_sum = std::transform_reduce(row, row + p.keys, 0.0, std::plus<>(),
                                                [](double weight) { return std::abs(weight); });
  }
  return absl::OkStatus();
}

absl::Status VariantRows::AddValues(int64_t batch, int64_t head, const double* weights,
                                    double* out) const {
  const Problem& p = variant_.problem;
  const MatrixView<const double> values = value_.Head(batch, KvHead(head));
  std::fill_n(out, p.value_width, 0.0);
  for (int64_t j = 0; j < p.keys; ++j) {
    if (IsDue(j, p.value_width) && checkpoint_.ToStop()) return StoppedError();
    const double weight = weights[j];
    if (weight == 0) continue;  // hidden: a NaN there does not reach the row
    const double* const value = values.Row(j);
    for (int64_t d = 0; d < p.value_width; ++d) out[d] += weight * value[d];
  }
  return absl::OkStatus();
}

absl::Status VariantRows::PartOfRuns(Part part, int64_t batch, const std::vector<Run>& runs,
                                     const Statistics& statistics, double* out, RowFacts* facts) {
  const int64_t width =
      part == Part::kOutput ? variant_.problem.value_width : WidthOf(problem_, part);
  const TensorView<const double>& view = part == Part::kQuery ? query_
                                         : part == Part::kKey ? key_
                                                              : value_;
  for (const Run& run : runs) {
    for (int64_t done = 0; done < run.count; done += block_) {
      const int64_t count = std::min(block_, run.count - done);
      const int64_t first = run.first + done;
      RowFacts block_facts[kMostRows];
      absl::Status status;
      if (part == Part::kLogits) {
        status = RawScores(batch, run.head, first, count, scores_.data());
      } else if (part >= Part::kWeights) {
        status = Weights(batch, run.head, first, count, statistics, scores_.data(), block_facts);
      }
      if (!status.ok()) return status;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = run.offset + (done + i) * run.stride;
        double* const to = out + row * width;
        const double* const scores = scores_.data() + i * variant_.problem.keys;
        facts[row] = block_facts[i];
        if (part >= Part::kContext) {
          status = AddValues(batch, run.head, scores, to);
          if (!status.ok()) return status;
        } else {
          std::copy_n(part >= Part::kLogits ? scores : view.Head(batch, run.head).Row(first + i),
                      width, to);
        }
      }
    }
  }
  return absl::OkStatus();
}

absl::Status VariantRows::Project(const double* contexts, int64_t count, double* out) const {
  const int64_t width = problem_.attend.heads * problem_.attend.value_width;
  if (variant_.Has(Mistake::kWoMissing)) {
    std::copy_n(contexts, count * width, out);
    return absl::OkStatus();
  }
  const int64_t d_model = problem_.d_model;
  return LongGemm(MatrixView<const double>{contexts, count, width, width},
                  MatrixView<const double>{sources_.w_o, width, d_model, d_model}, Transpose::kNo,
                  MatrixView<double>{out, count, d_model, d_model}, /*accumulate=*/false,
                  checkpoint_);
}

absl::Status VariantRows::Compute(Part part, int64_t batch, int64_t first, int64_t count,
                                  const Statistics& statistics, double* out, RowFacts* facts) {
  if (part != Part::kOutput) {
    return PartOfRuns(part, batch, RunsOf(Layout::kBhtd, first, count), statistics, out, facts);
  }
  if (!problem_.head) {
    return PartOfRuns(part, batch, RunsOf(variant_.out, first, count), statistics, out, facts);
  }
  const int64_t heads = problem_.attend.heads;
  std::vector<RowFacts> of_heads(static_cast<size_t>(count * heads));
  absl::Status status = PartOfRuns(part, batch, RunsOf(variant_.out, first * heads, count * heads),
                                   statistics, contexts_.data(), of_heads.data());
  if (!status.ok()) return status;
  for (int64_t row = 0; row < count; ++row) {
    facts[row] = of_heads[static_cast<size_t>(row * heads)];
    for (int64_t head = 1; head < heads; ++head) {
      const RowFacts& other = of_heads[static_cast<size_t>(row * heads + head)];
      facts[row].weight_sum = std::max(facts[row].weight_sum, other.weight_sum);
      facts[row].mask_reach = std::max(facts[row].mask_reach, other.mask_reach);
      facts[row].empty = facts[row].empty || other.empty;
    }
  }
  return Project(contexts_.data(), count, out);
}

absl::Status VariantRows::SimulateContext(DType dtype, int64_t batch, int64_t head, int64_t query,
                                          double* out) {
  const Problem& p = variant_.problem;
  const auto round = [dtype](double x) { return Rounded(dtype, x); };
  const double* const numbers = query_.Head(batch, head).Row(query);
  std::vector<double> q(static_cast<size_t>(p.width));
  std::transform(numbers, numbers + p.width, q.begin(), round);
  const MatrixView<const double> keys = key_.Head(batch, KvHead(head));
  const MatrixView<const double> values = value_.Head(batch, KvHead(head));
  double* const row = scores_.data();
  for (int64_t j = 0; j < p.keys; ++j) {
    if (IsDue(j, p.width) && checkpoint_.ToStop()) return StoppedError();
    double dot = 0;
    for (int64_t d = 0; d < p.width; ++d) dot += q[static_cast<size_t>(d)] * round(keys.Row(j)[d]);
    row[j] = round(p.scale * round(dot));
  }
  FinishScores(batch, head, query, row);
  for (int64_t j = 0; j < p.keys; ++j) row[j] = round(row[j]);
  if (AllHidden(row, p.keys)) {
    std::fill_n(row, p.keys, 0.0);
  } else {
    WeighRow(p.sinks.empty() ? -kInfinity : p.sinks[head], nullptr, row);
  }
  std::fill_n(out, p.value_width, 0.0);
  for (int64_t j = 0; j < p.keys; ++j) {
    if (IsDue(j, p.value_width) && checkpoint_.ToStop()) return StoppedError();
    const double weight = round(row[j]);
    for (int64_t d = 0; weight != 0 && d < p.value_width; ++d) {
      out[d] += weight * round(values.Row(j)[d]);
    }
  }
  for (int64_t d = 0; d < p.value_width; ++d) out[d] = round(out[d]);
  return absl::OkStatus();
}

absl::Status VariantRows::Simulate(DType dtype, Part part, int64_t batch, int64_t row,
                                   double* out) {
  const int64_t heads = problem_.attend.heads;
  const int64_t width = problem_.attend.value_width;
  if (part == Part::kContext || !problem_.head) {
    const Layout layout = part == Part::kContext ? Layout::kBhtd : variant_.out;
    const Run run = RunsOf(layout, row, 1).front();
    return SimulateContext(dtype, batch, run.head, run.first, out);
  }
  for (const Run& run : RunsOf(variant_.out, row * heads, heads)) {
    for (int64_t i = 0; i < run.count; ++i) {
      absl::Status status =
          SimulateContext(dtype, batch, run.head, run.first + i,
                          contexts_.data() + (run.offset + i * run.stride) * width);
      if (!status.ok()) return status;
    }
  }
  absl::Status status = Project(contexts_.data(), 1, out);
  for (int64_t i = 0; i < problem_.d_model; ++i) out[i] = Rounded(dtype, out[i]);
  return status;
}

}  // namespace attendant::core
