#include "core/referee.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "core/checked_math.h"
#include "core/comparison.h"
#include "core/cost.h"
#include "core/errors.h"
#include "core/long_product.h"
#include "core/mutex.h"
#include "core/tolerance.h"

namespace attendant::core {
namespace {

// Elements that one tile widens: a fraction of a millisecond.
constexpr int64_t kElementsOfTile = int64_t{1} << 16;
// Elements whose squares one tile sums, where they come from memory: about a millisecond.
constexpr int64_t kMeasuredOfTile = int64_t{1} << 20;
// Rows that one tile projects or compares, and multiply-adds up to which it does: a few
// milliseconds, or one row.
constexpr int64_t kMostRowsOfTile = 64;
constexpr int64_t kMostOfTile = int64_t{1} << 24;
// Rows of a part that a mistake must reproduce before all are tried, beside the worst.
constexpr int64_t kSamples = 7;
// Rows that narrower arithmetic is simulated on.
constexpr size_t kSimulated = 3;
// What the suspects of a round may hold, or eight of the largest where that is more: hundreds of
// pairs survive the first look at times, and each holds numbers for every key of every head.
constexpr int64_t kSuspectBytes = int64_t{64} << 20;
constexpr int64_t kFewestSuspects = 8;
// A mistake explains a difference where it leaves this part of it or less.
constexpr double kLeft = 1.0 / 8;
// Numbers that a narrower type holds though ours are not, and that need half of its bits or more:
// fewer may be chance, and 0 or 0.5 show nothing.
constexpr int64_t kTelling = 8;

int64_t CountOf(const TensorSpec& spec) {
  int64_t count = 1;
  for (const int64_t size : spec.shape) count = SaturatingProduct({count, size});
  return count;
}

// Elements of the mask up to the last that is read.
int64_t MaskElements(const Problem& p) {
  if (CheckedProduct({p.batch, p.heads, p.queries, p.keys}) == 0) return 0;
  const MaskLayout& mask = *p.mask;
  return 1 + mask.batch_stride * (p.batch - 1) + mask.head_stride * (p.heads - 1) +
         mask.query_stride * (p.queries - 1) + mask.key_stride * (p.keys - 1);
}

// Numbers of the statistics of all heads.
int64_t StatisticsOf(const Problem& p) {
  return SaturatingProduct({p.batch, p.heads, VariantRows::StatisticsOfHead(p)});
}

int64_t BytesOf(int64_t doubles) {
  return SaturatingProduct({doubles, static_cast<int64_t>(sizeof(double))});
}

// An upper bound of what one suspect holds, and all of a round.
int64_t BytesOfSuspect(const Problem& p, bool has_statistics) {
  return SaturatingSum({static_cast<int64_t>(sizeof(Variant)), OptionBytes(p),
                        has_statistics ? BytesOf(StatisticsOf(p)) : int64_t{0}});
}
int64_t BytesOfSuspects(const Problem& p) {
  return std::max(kSuspectBytes,
                  SaturatingProduct({kFewestSuspects, BytesOfSuspect(p, /*has_statistics=*/true)}));
}

// Bounds of what a check computes from.
struct Norms {
  double query = 0;  // of a row
  double key = 0;
  double value = 0;  // of an element
  double x = 0;      // of a row
  double w_q = 0;    // of a column
  double w_k = 0;
  double w_v = 0;
  double w_o = 0;
};

// A variant that reproduced what was tried of it so far.
struct Suspect {
  Variant variant;
  size_t index = 0;  // among those that were tried
  // How many of the claims it reproduces, in their order.
  std::atomic<size_t> reproduced = 0;
  double residual = 0;        // of the claim that departs first
  Buffer<double> statistics;  // of each head of each batch
};

// What survived the first look.
struct Screened {
  size_t index = 0;  // as of Suspect
  size_t reproduced = 0;
};

// One round of trying: single mistakes, or pairs.
struct Round {
  std::vector<MistakeSet> sets;
  std::vector<Screened> screened;
  std::vector<std::unique_ptr<Suspect>> suspects;
};

// Scratch of one tile that compares.
struct RowScratch {
  Buffer<double> ours;
  Buffer<double> theirs;
  std::vector<RowFacts> facts;
};

class Referee : public std::enable_shared_from_this<Referee> {
 public:
  Referee(const CheckProblem& problem, const CheckInputs& inputs, const Resources& resources,
          CheckReport* report)
      : problem_(problem),
        inputs_(inputs),
        workspace_(*resources.workspace),
        report_(report),
        honest_(VariantOf(problem_, MistakeSet())),
        comparisons_(inputs.claims.size()),
        samples_(inputs.claims.size()),
        level_(inputs.claims.size()) {}

  absl::StatusOr<std::vector<Stage>> Stages(const Resources& resources);

 private:
  // Part of a tensor that is widened by one tile.
  struct Piece {
    DType dtype;
    const void* from;
    int64_t first;
    int64_t count;
    double* to;
  };
  // Rows of a tensor whose norm one tile finds.
  struct RowsToMeasure {
    const double* rows;
    int64_t count;
    int64_t width;
    double* norm;
  };

  // Some columns of a weight.
  struct ColumnsToMeasure {
    MatrixView<const double> matrix;
    double* norm;
  };

  const Problem& attend() const { return problem_.attend; }
  size_t claims() const { return inputs_.claims.size(); }
  const Claim& claim(size_t index) const { return inputs_.claims[index]; }
  int64_t WidthOf(size_t index) const { return core::WidthOf(problem_, claim(index).part); }
  int64_t RowsOf(size_t index) const { return core::RowsOf(problem_, claim(index).part); }
  int64_t TilesOfRows() const;

  absl::Status Allocate();
  absl::Status Widened(const void* from, DType dtype, int64_t count, const double** to);
  absl::Status Room(int64_t count, double** to);
  void Measure(const double* rows, int64_t count, int64_t width, double* norm);
  void MeasureColumns(const double* matrix, int64_t rows, int64_t columns, double* norm);
  absl::Status MeasurePart(int64_t part);
  void BoundScores();
  AttendTensors<double> HonestTensors() const;
  absl::Status Project(const TileContext& context);

  Allowed AllowedOf(const Level& level, const Variant& variant, Part part,
                    double score_bound) const;
  absl::StatusOr<RowScratch> Scratch(size_t index, int64_t rows);

  absl::Status Compare(const TileContext& context);
  absl::Status OurRows(VariantRows& rows, size_t index, int64_t batch, int64_t first, int64_t count,
                       double* out, RowFacts* facts);
  void CompareRow(size_t index, int64_t row, const double* ours, const double* theirs,
                  const RowFacts& facts, double score_bound, Comparison& result) const;
  void NoteTypes(size_t index, const double* ours, const double* theirs, bool departs,
                 Comparison& result) const;

  void Judge();
  size_t NarrowestHeld() const;
  std::vector<int64_t> SampleRows(size_t index) const;

  bool PairsAreTried() const { return undecided_ && Found(singles_, claims()).empty(); }
  std::vector<const Suspect*> Found(const Round& round, size_t reproduced) const;
  absl::Status Screen(Round& round, const TileContext& context);
  absl::Status Select(Round& round, const TileContext& context);
  absl::Status ComputeStatistics(Round& round, const TileContext& context);
  absl::Status Confirm(Round& round, const TileContext& context);
  absl::StatusOr<bool> Reproduces(VariantRows& rows, const Variant& variant, size_t index,
                                  int64_t row, int64_t count, const Statistics& statistics,
                                  RowScratch& scratch, double& residual) const;
  bool MayBeEmpty(const Variant& variant) const;
  size_t LevelOfMistakes(size_t index) const;
  bool LeavesLittle(double residual) const;

  absl::Status Conclude(const Checkpoint& checkpoint);
  absl::StatusOr<bool> ConcludeNarrower(const Checkpoint& checkpoint);
  absl::StatusOr<bool> IsArithmetic(size_t level, bool declared, const Checkpoint& checkpoint,
                                    double* residual);
  void ReportArithmetic(size_t level, double residual);
  void Report(Verdict verdict, size_t index, size_t level);
  void ReportFindings();
  std::vector<Stage> StagesOf(Round& round, const char* name, const std::function<bool()>& wanted);

  const CheckProblem problem_;
  const CheckInputs inputs_;
  Workspace& workspace_;
  CheckReport* const report_;
  const Variant honest_;

  std::vector<Buffer<double>> owned_;
  std::vector<Piece> pieces_;
  std::vector<RowsToMeasure> to_measure_;
  std::vector<ColumnsToMeasure> columns_to_measure_;
  const double* x_ = nullptr;
  const double* weights_[3] = {};  // W_q, W_k, W_v
  double* projected_[3] = {};      // (B, T, H * width)
  double* context_ = nullptr;      // what attention gives, in the problem's layout
  CheckSources sources_;
  Norms norms_;

  Mutex mutex_;
  std::vector<Comparison> comparisons_;
  std::vector<std::vector<int64_t>> samples_;  // rows of all batches
  std::vector<size_t> level_;                  // that a claim's numbers are judged by
  size_t first_ = 0;                           // the claim that departs first
  bool undecided_ = false;
  Round singles_;
  Round pairs_;
};

absl::Status Referee::Room(int64_t count, double** to) {
  auto buffer = workspace_.Allocate<double>(count);
  if (!buffer.ok()) return buffer.status();
  *to = buffer->data();
  owned_.push_back(*std::move(buffer));
  return absl::OkStatus();
}

absl::Status Referee::Widened(const void* from, DType dtype, int64_t count, const double** to) {
  if (dtype == DType::kFloat64) {
    *to = static_cast<const double*>(from);
    return absl::OkStatus();
  }
  double* wide = nullptr;
  if (absl::Status status = Room(count, &wide); !status.ok()) return status;
  for (int64_t first = 0; first < count; first += kElementsOfTile) {
    const int64_t n = std::min(kElementsOfTile, count - first);
    pieces_.push_back({dtype, from, first, n, wide + first});
  }
  *to = wide;
  return absl::OkStatus();
}

// width: 1 for the largest |element|.
void Referee::Measure(const double* rows, int64_t count, int64_t width, double* norm) {
  const int64_t of_tile = std::max<int64_t>(kElementsOfTile / std::max<int64_t>(width, 1), 1);
  for (int64_t first = 0; width > 0 && first < count; first += of_tile) {
    to_measure_.push_back({rows + first * width, std::min(of_tile, count - first), width, norm});
  }
}

absl::Status Referee::Allocate() {
  const Problem& p = attend();
  // Without a width there may be any number of heads.
  const auto elements = [&](int64_t heads, int64_t tokens, int64_t width) {
    return SaturatingProduct({p.batch, heads, tokens, width});
  };
  const int64_t queries = elements(p.heads, p.queries, p.width);
  const int64_t keys = elements(p.kv_heads, p.keys, p.width);
  const int64_t values = elements(p.kv_heads, p.keys, p.value_width);
  if (!problem_.head) {
    for (const auto& [from, count, to] : {std::tuple(inputs_.query, queries, &sources_.query),
                                          std::tuple(inputs_.key, keys, &sources_.key),
                                          std::tuple(inputs_.value, values, &sources_.value)}) {
      if (absl::Status status = Widened(from, p.dtype, count, to); !status.ok()) return status;
    }
  } else {
    const int64_t widths[] = {p.heads * p.width, p.heads * p.width, p.heads * p.value_width};
    const void* const weights[] = {inputs_.w_q, inputs_.w_k, inputs_.w_v};
    const double** const sources[] = {&sources_.query, &sources_.key, &sources_.value};
    const int64_t tokens = p.batch * p.queries;
    absl::Status status = Widened(inputs_.x, p.dtype, tokens * problem_.d_model, &x_);
    for (int i = 0; i < 3 && status.ok(); ++i) {
      status = Widened(weights[i], p.dtype, problem_.d_model * widths[i], &weights_[i]);
      if (status.ok()) status = Room(SaturatingProduct({tokens, widths[i]}), &projected_[i]);
      *sources[i] = projected_[i];
    }
    if (status.ok()) {
      status = Widened(inputs_.w_o, p.dtype, widths[2] * problem_.d_model, &sources_.w_o);
    }
    if (!status.ok()) return status;
    Measure(x_, tokens, problem_.d_model, &norms_.x);
    MeasureColumns(weights_[0], problem_.d_model, widths[0], &norms_.w_q);
    MeasureColumns(weights_[1], problem_.d_model, widths[1], &norms_.w_k);
    MeasureColumns(weights_[2], problem_.d_model, widths[2], &norms_.w_v);
    MeasureColumns(sources_.w_o, widths[2], problem_.d_model, &norms_.w_o);
  }
  const int64_t width = std::max<int64_t>(p.width, 1);
  Measure(sources_.query, queries / width, width, &norms_.query);
  Measure(sources_.key, keys / width, width, &norms_.key);
  Measure(sources_.value, values, 1, &norms_.value);
  if (p.mask.has_value() && !p.AddsMask()) {
    sources_.mask_flags = static_cast<const uint8_t*>(inputs_.mask);
  } else if (p.AddsMask()) {
    absl::Status status =
        Widened(inputs_.mask, p.mask->dtype, MaskElements(p), &sources_.mask_numbers);
    if (!status.ok()) return status;
  }
  return Room(elements(p.heads, p.queries, p.value_width), &context_);
}

// The attention that is right, as the paths compute it.
Problem HonestProblem(Problem p) {
  p.dtype = DType::kFloat64;
  p.path = Path::kChunked;
  if (p.AddsMask()) p.mask->dtype = DType::kFloat64;
  p.return_weights = p.return_logsumexp = p.return_key_sums = false;
  return p;
}

absl::Status Referee::Project(const TileContext& context) {
  const int64_t tile = context.tile;
  const Problem& p = attend();
  const int64_t tokens = p.batch * p.queries;
  const int64_t width = p.heads * (tile % 3 == 2 ? p.value_width : p.width);
  const int64_t first = tile / 3 * kMostRowsOfTile;
  const int64_t count = std::min(kMostRowsOfTile, tokens - first);
  return LongGemm(
      MatrixView<const double>{x_, tokens, problem_.d_model, problem_.d_model}.Rows(first, count),
      MatrixView<const double>{weights_[tile % 3], problem_.d_model, width, width}, Transpose::kNo,
      MatrixView<double>{projected_[tile % 3], tokens, width, width}.Rows(first, count),
      /*accumulate=*/false, context.checkpoint());
}

void Referee::MeasureColumns(const double* matrix, int64_t rows, int64_t columns, double* norm) {
  // A cache line of each row at least.
  constexpr int64_t kLeast = 64 / static_cast<int64_t>(sizeof(double));
  const int64_t of_tile = std::max(kMeasuredOfTile / std::max<int64_t>(rows, 1), kLeast);
  for (int64_t first = 0; rows > 0 && first < columns; first += of_tile) {
    columns_to_measure_.push_back(
        {{matrix + first, rows, std::min(of_tile, columns - first), columns}, norm});
  }
}

absl::Status Referee::MeasurePart(int64_t part) {
  const auto rows = static_cast<int64_t>(to_measure_.size());
  double norm = 0;
  double* to = nullptr;
  if (part < rows) {
    const RowsToMeasure& of = to_measure_[static_cast<size_t>(part)];
    norm = NormOfRows(of.rows, of.count, of.width);
    to = of.norm;
  } else {
    const ColumnsToMeasure& of = columns_to_measure_[static_cast<size_t>(part - rows)];
    norm = NormOfColumns(of.matrix);
    to = of.norm;
  }
  MutexLock lock(mutex_);
  *to = std::max(*to, norm);
  return absl::OkStatus();
}

void Referee::BoundScores() {
  sources_.raw_score_bound = norms_.query * norms_.key;
  sources_.raw_score_bound_of_queries = norms_.query * norms_.query;
}

// docs/exactness.md has the formula, docs/check.md what the projections of a head add to it.
Allowed Referee::AllowedOf(const Level& level, const Variant& variant, Part part,
                           double score_bound) const {
  const Problem& p = variant.problem;
  const double u = UnitRoundoff(level.dtype);
  const double stored = StoringError(level.dtype);
  const double between = level.steps ? stored : 0;
  const double projected = problem_.head ? SumError(problem_.d_model, u) * norms_.x : 0;
  const double root = std::sqrt(static_cast<double>(p.width));
  const double of_scores = std::abs(p.scale) * root * projected *
                               (norms_.w_q * std::max(norms_.key, norms_.query) +
                                std::max(norms_.w_k, norms_.w_q) * norms_.query) +
                           4 * between * score_bound;
  const Magnitudes magnitudes{.score = score_bound,
                              .value = norms_.value,
                              .score_error = of_scores,
                              .value_error = projected * norms_.w_v + 2 * between * norms_.value};
  const Tolerance tolerance = ToleranceOf(level.dtype, p, magnitudes);
  // No weights that sum to 1 can be further apart.
  const double context = std::min(2 * norms_.value, tolerance.output);
  const double least = HalfLeastNumber(level.dtype);
  switch (part) {
    case Part::kQuery:
      return {projected * norms_.w_q + least, stored};
    case Part::kKey:
      return {projected * std::max(norms_.w_k, norms_.w_q) + least, stored};
    case Part::kValue:
      return {projected * norms_.w_v + least, stored};
    case Part::kLogits:
      return {of_scores + (SumError(p.width, u) + 4 * u) * score_bound + least, stored};
    case Part::kWeights:
      return {tolerance.tiny, tolerance.weight};
    case Part::kContext:
      return {context, 0};
    case Part::kOutput:
      break;
  }
  if (!problem_.head || variant.Has(Mistake::kWoMissing)) return {context, 0};
  const auto joined = static_cast<double>(attend().heads * attend().value_width);
  return {std::sqrt(joined) * norms_.w_o *
                  (context +
                   (SumError(attend().heads * attend().value_width, u) + between) * norms_.value) +
              least,
          stored};
}

absl::StatusOr<RowScratch> Referee::Scratch(size_t index, int64_t rows) {
  RowScratch scratch;
  const int64_t count = SaturatingProduct({rows, WidthOf(index)});
  absl::Status status =
      workspace_.AllocateAll<double>({{&scratch.ours, count}, {&scratch.theirs, count}});
  if (!status.ok()) return status;
  scratch.facts.resize(static_cast<size_t>(rows));
  return scratch;
}

int64_t RowsOfTile(const CheckProblem& problem) {
  const Problem& p = problem.attend;
  const int64_t of_row = SaturatingProduct(
      {p.keys, SaturatingSum({p.width, p.value_width}), problem.head ? p.heads : int64_t{1}});
  return std::clamp<int64_t>(kMostOfTile / std::max<int64_t>(of_row, 1), 1, kMostRowsOfTile);
}

// Of a part without elements there are none, however many rows that has.
int64_t TilesOf(const CheckProblem& problem, Part part) {
  if (WidthOf(problem, part) == 0) return 0;
  return SaturatingProduct(
      {problem.attend.batch, CeilDiv(RowsOf(problem, part), RowsOfTile(problem))});
}

// Which rows of which claim a tile has.
struct RowTile {
  size_t claim = 0;
  int64_t batch = 0;
  int64_t first = 0;
  int64_t count = 0;
};

RowTile RowTileOf(const CheckProblem& problem, const std::vector<Claim>& claims, int64_t tile) {
  size_t index = 0;
  for (; tile >= TilesOf(problem, claims[index].part); ++index) {
    tile -= TilesOf(problem, claims[index].part);
  }
  const int64_t rows = RowsOf(problem, claims[index].part);
  const int64_t blocks = CeilDiv(rows, RowsOfTile(problem));
  const int64_t first = tile % blocks * RowsOfTile(problem);
  return {index, tile / blocks, first, std::min(RowsOfTile(problem), rows - first)};
}

int64_t Referee::TilesOfRows() const {
  int64_t tiles = 0;
  for (const Claim& one : inputs_.claims) {
    tiles = SaturatingSum({tiles, TilesOf(problem_, one.part)});
  }
  return tiles;
}

absl::Status Referee::OurRows(VariantRows& rows, size_t index, int64_t batch, int64_t first,
                              int64_t count, double* out, RowFacts* facts) {
  const Problem& p = attend();
  const Part part = claim(index).part;
  if (part < Part::kContext) {
    return rows.Compute(part, batch, first, count, nullptr, out, facts);
  }
  const auto reach_of = [&](Layout layout, int64_t row) {
    return layout == Layout::kBhtd ? rows.MaskReach(batch, row / p.queries, row % p.queries)
                                   : rows.MaskReach(batch, row % p.heads, row / p.heads);
  };
  if (part == Part::kOutput && problem_.head) {
    const int64_t width = p.heads * p.value_width;
    for (int64_t row = 0; row < count; ++row) {
      facts[row] = {};
      for (int64_t head = 0; p.AddsMask() && width > 0 && head < p.heads; ++head) {
        facts[row].mask_reach =
            std::max(facts[row].mask_reach, rows.MaskReach(batch, head, first + row));
      }
    }
    return LongGemm(
        MatrixView<const double>{context_ + (batch * p.queries + first) * width, count, width,
                                 width},
        MatrixView<const double>{sources_.w_o, width, problem_.d_model, problem_.d_model},
        Transpose::kNo, MatrixView<double>{out, count, problem_.d_model, problem_.d_model},
        /*accumulate=*/false, rows.checkpoint());
  }
  const Layout layout = part == Part::kContext ? Layout::kBhtd : p.layout;
  const TensorView<const double> context(context_, p.layout, p.heads, p.queries, p.value_width);
  for (int64_t row = first; row < first + count; ++row) {
    const int64_t head = layout == Layout::kBhtd ? row / p.queries : row % p.heads;
    const int64_t query = layout == Layout::kBhtd ? row % p.queries : row / p.heads;
    std::copy_n(context.Head(batch, head).Row(query), p.value_width,
                out + (row - first) * p.value_width);
    facts[row - first] = {};
    if (p.AddsMask()) facts[row - first].mask_reach = reach_of(layout, row);
  }
  return absl::OkStatus();
}

// Whether the numbers are all held by a narrower type than the claim's, though ours are not.
void Referee::NoteTypes(size_t index, const double* ours, const double* theirs, bool departs,
                        Comparison& result) const {
  for (size_t level = LevelOf(claim(index).spec.dtype) + 1; level <= LevelOf(DType::kBFloat16);
       ++level) {
    const DType dtype = kLevels[level].dtype;
    for (int64_t i = 0; result.held[level] && i < WidthOf(index); ++i) {
      if (!std::isfinite(theirs[i])) continue;
      if (Rounded(dtype, theirs[i]) != theirs[i]) {
        result.held[level] = false;
      } else if (departs && std::isfinite(ours[i]) && Rounded(dtype, ours[i]) != ours[i] &&
                 BitsOf(theirs[i]) >= PrecisionOf(dtype) / 2) {
        ++result.telling[level];
      }
    }
  }
}

// row: among those of all batches.
void Referee::CompareRow(size_t index, int64_t row, const double* ours, const double* theirs,
                         const RowFacts& facts, double score_bound, Comparison& result) const {
  const DType dtype = claim(index).spec.dtype;
  const int64_t width = WidthOf(index);
  const double bound = score_bound + facts.mask_reach;
  const size_t requested = LevelOf(attend().dtype);
  const Allowed allowed = AllowedOf(kLevels[requested], honest_, claim(index).part, bound);
  bool departs = false;
  for (int64_t i = 0; i < width; ++i) {
    const double apart = Apart(theirs[i], ours[i]);
    if (apart > result.worst.apart) {
      result.worst = {apart, row * width + i, ours[i], facts.mask_reach};
    }
    if (theirs[i] != ours[i]) {
      result.ulps = std::max(result.ulps, UlpsApart(dtype, theirs[i], ours[i]));
    }
    result.any_finite = result.any_finite || std::isfinite(theirs[i]);
    departs = departs || !(apart <= allowed.Of(ours[i]));
  }
  NoteTypes(index, ours, theirs, departs, result);
  if (!departs) return;
  for (size_t level = 0; level < kLevelCount; ++level) {
    const Allowed other = AllowedOf(kLevels[level], honest_, claim(index).part, bound);
    for (int64_t i = 0; result.within[level] && i < width; ++i) {
      result.within[level] = Apart(theirs[i], ours[i]) <= other.Of(ours[i]);
    }
  }
}

absl::Status Referee::Compare(const TileContext& context) {
  const RowTile tile = RowTileOf(problem_, inputs_.claims, context.tile);
  auto rows = VariantRows::Make(problem_, honest_, sources_, attend().dtype,
                                {tile.count, &workspace_, context.checkpoint()});
  if (!rows.ok()) return rows.status();
  auto scratch = Scratch(tile.claim, tile.count);
  if (!scratch.ok()) return scratch.status();
  const int64_t width = WidthOf(tile.claim);
  absl::Status status = OurRows(*rows, tile.claim, tile.batch, tile.first, tile.count,
                                scratch->ours.data(), scratch->facts.data());
  if (!status.ok()) return status;
  const int64_t row = tile.batch * RowsOf(tile.claim) + tile.first;
  const Claim& theirs = claim(tile.claim);
  ToDouble(theirs.spec.dtype, theirs.data, row * width, tile.count * width, scratch->theirs.data());
  Comparison result;
  for (int64_t i = 0; i < tile.count; ++i) {
    CompareRow(tile.claim, row + i, scratch->ours.data() + i * width,
               scratch->theirs.data() + i * width, scratch->facts[static_cast<size_t>(i)],
               rows->score_bound(), result);
  }
  MutexLock lock(mutex_);
  comparisons_[tile.claim].Merge(result);
  return absl::OkStatus();
}

// The level of the narrowest type that holds all numbers though their own is wider; that of float64
// where there is none.
size_t Referee::NarrowestHeld() const {
  for (size_t level = LevelOf(DType::kBFloat16); level > 0; --level) {
    bool held = true;
    int64_t telling = 0;
    for (size_t index = 0; index < claims(); ++index) {
      if (LevelOf(claim(index).spec.dtype) >= level) continue;
      held = held && comparisons_[index].held[level];
      telling += comparisons_[index].telling[level];
    }
    if (held && telling >= kTelling) return level;
  }
  return 0;
}

std::vector<int64_t> Referee::SampleRows(size_t index) const {
  std::vector<int64_t> samples;
  // A part without elements may have any number of rows.
  if (TilesOf(problem_, claim(index).part) == 0) return samples;
  const int64_t rows = attend().batch * RowsOf(index);
  samples.push_back(comparisons_[index].worst.element / WidthOf(index));
  for (int64_t i = 0; i < kSamples; ++i) {
    const auto row = static_cast<int64_t>(static_cast<double>(rows - 1) * static_cast<double>(i) /
                                          static_cast<double>(kSamples - 1));
    if (std::find(samples.begin(), samples.end(), row) == samples.end()) samples.push_back(row);
  }
  return samples;
}

// Once every claim was compared: whether it is near enough, or a mistake is to be looked for.
void Referee::Judge() {
  const size_t requested = LevelOf(attend().dtype);
  const size_t held = NarrowestHeld();
  bool all_match = true;
  std::optional<size_t> departs;
  for (size_t index = 0; index < claims(); ++index) {
    level_[index] = std::max({requested, held, LevelOf(claim(index).spec.dtype)});
    samples_[index] = SampleRows(index);
    all_match = all_match && comparisons_[index].within[requested];
    if (!departs.has_value() && !comparisons_[index].within[level_[index]]) departs = index;
  }
  first_ = departs.value_or(claims() - 1);
  undecided_ = departs.has_value();
  if (undecided_) return;
  if (!all_match) {
    // Whose difference is to be shown.
    for (first_ = 0; comparisons_[first_].within[requested];) ++first_;
  }
  Report(all_match ? Verdict::kMatch : Verdict::kRoundingOnly, first_,
         all_match ? requested : level_[first_]);
}

// Whether a row that sees no key does so by the mistake, so that its author may have made it NaN.
bool Referee::MayBeEmpty(const Variant& variant) const {
  return variant.mistakes.HasAny({Mistake::kCausalAdded, Mistake::kCausalWrongCorner,
                                  Mistake::kCausalEdgeEarly, Mistake::kCausalInverted,
                                  Mistake::kCausalMirrored, Mistake::kMaskInverted});
}

// row: among those of all batches; its count rows are of one batch.
absl::StatusOr<bool> Referee::Reproduces(VariantRows& rows, const Variant& variant, size_t index,
                                         int64_t row, int64_t count, const Statistics& statistics,
                                         RowScratch& scratch, double& residual) const {
  const int64_t width = WidthOf(index);
  const Claim& theirs = claim(index);
  absl::Status status = rows.Compute(theirs.part, row / RowsOf(index), row % RowsOf(index), count,
                                     statistics, scratch.ours.data(), scratch.facts.data());
  if (!status.ok()) return status;
  ToDouble(theirs.spec.dtype, theirs.data, row * width, count * width, scratch.theirs.data());
  const bool may_be_empty = MayBeEmpty(variant);
  for (int64_t i = 0; i < count; ++i) {
    const RowFacts& facts = scratch.facts[static_cast<size_t>(i)];
    Allowed allowed = AllowedOf(kLevels[LevelOfMistakes(index)], variant, theirs.part,
                                rows.score_bound() + facts.mask_reach);
    if (std::isfinite(facts.weight_sum)) allowed.absolute *= std::max(1.0, facts.weight_sum);
    for (int64_t element = i * width; element < (i + 1) * width; ++element) {
      const double number = scratch.theirs.data()[element];
      if (may_be_empty && facts.empty && std::isnan(number)) continue;
      const double ours = scratch.ours.data()[element];
      const double apart = Apart(number, ours);
      if (!(apart <= allowed.Of(ours))) return false;
      residual = std::max(residual, apart);
    }
  }
  return true;
}

// Who made a mistake in half precision may have rounded every step as well.
size_t Referee::LevelOfMistakes(size_t index) const {
  const size_t level = level_[index];
  return IsHalf(kLevels[level].dtype) ? level + kLevelCount - kSteps : level;
}

bool Referee::LeavesLittle(double residual) const {
  return residual <= kLeft * comparisons_[first_].worst.apart;
}

// Tries a few rows of each claim.
absl::Status Referee::Screen(Round& round, const TileContext& context) {
  const auto index = static_cast<size_t>(context.tile);
  const MistakeSet& set = round.sets[index];
  // Where nothing is finite, two mistakes that leave NaN everywhere cannot be told apart.
  if (set.list().size() > 1 && !comparisons_[first_].any_finite) return absl::OkStatus();
  const Variant variant = VariantOf(problem_, set);
  auto rows = VariantRows::Make(problem_, variant, sources_, kLevels[level_[first_]].dtype,
                                {1, &workspace_, context.checkpoint()});
  if (!rows.ok()) return rows.status();
  std::map<std::pair<int64_t, int64_t>, Buffer<double>> made;
  const Statistics statistics = [&](int64_t batch, int64_t head) -> absl::StatusOr<const double*> {
    Buffer<double>& buffer = made[{batch, head}];
    if (buffer.data() != nullptr) return buffer.data();
    auto allocated = workspace_.Allocate<double>(VariantRows::StatisticsOfHead(variant.problem));
    if (!allocated.ok()) return allocated.status();
    buffer = *std::move(allocated);
    absl::Status status = rows->ComputeStatistics(batch, head, buffer.data());
    if (!status.ok()) return status;
    return buffer.data();
  };
  size_t reproduced = 0;
  double residual = 0;
  for (; reproduced < claims(); ++reproduced) {
    auto scratch = Scratch(reproduced, 1);
    if (!scratch.ok()) return scratch.status();
    double of_claim = 0;
    bool same = true;
    for (const int64_t row : samples_[reproduced]) {
      if (context.stopped()) return absl::OkStatus();
      const auto fits =
          Reproduces(*rows, variant, reproduced, row, 1, statistics, *scratch, of_claim);
      if (!fits.ok()) return fits.status();
      same = *fits;
      if (!same) break;
    }
    if (!same) break;
    if (reproduced == first_) residual = of_claim;
  }
  if (reproduced <= first_ || !LeavesLittle(residual)) return absl::OkStatus();
  MutexLock lock(mutex_);
  round.screened.push_back({index, reproduced});
  return absl::OkStatus();
}

// Makes suspects of what survived, in order, as far as there is room for them.
absl::Status Referee::Select(Round& round, const TileContext&) {
  std::sort(round.screened.begin(), round.screened.end(),
            [](const Screened& a, const Screened& b) { return a.index < b.index; });
  int64_t room = BytesOfSuspects(attend());
  for (const Screened& screened : round.screened) {
    const MistakeSet& set = round.sets[screened.index];
    const bool has_statistics = NeedsStatistics(set);
    const int64_t bytes = BytesOfSuspect(attend(), has_statistics);
    if (bytes > room) continue;
    room -= bytes;
    auto suspect = std::make_unique<Suspect>();
    suspect->variant = VariantOf(problem_, set);
    suspect->index = screened.index;
    suspect->reproduced = screened.reproduced;
    if (has_statistics) {
      auto buffer = workspace_.Allocate<double>(StatisticsOf(suspect->variant.problem));
      if (!buffer.ok()) return buffer.status();
      suspect->statistics = *std::move(buffer);
    }
    round.suspects.push_back(std::move(suspect));
  }
  return absl::OkStatus();
}

// What the suspects' softmax needs of whole heads; a tile takes every tiles-th of them.
absl::Status Referee::ComputeStatistics(Round& round, const TileContext& context) {
  for (const auto& suspect : round.suspects) {
    if (!NeedsStatistics(suspect->variant.mistakes)) continue;
    const Problem& p = suspect->variant.problem;
    auto rows =
        VariantRows::Make(problem_, suspect->variant, sources_, kLevels[level_[first_]].dtype,
                          {0, &workspace_, context.checkpoint()});
    if (!rows.ok()) return rows.status();
    const int64_t of_head = VariantRows::StatisticsOfHead(p);
    for (int64_t head = context.tile; head < p.batch * p.heads;
         head += attend().batch * attend().heads) {
      if (context.stopped()) return absl::OkStatus();
      absl::Status status = rows->ComputeStatistics(head / p.heads, head % p.heads,
                                                    suspect->statistics.data() + head * of_head);
      if (!status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

// Tries some rows, all of them tile by tile, with each suspect that is left.
absl::Status Referee::Confirm(Round& round, const TileContext& context) {
  if (round.suspects.empty()) return absl::OkStatus();
  const RowTile tile = RowTileOf(problem_, inputs_.claims, context.tile);
  auto scratch = Scratch(tile.claim, tile.count);
  if (!scratch.ok()) return scratch.status();
  for (const auto& suspect : round.suspects) {
    if (context.stopped()) return absl::OkStatus();
    if (suspect->reproduced.load(std::memory_order_relaxed) <= tile.claim) continue;
    const Variant& variant = suspect->variant;
    auto rows = VariantRows::Make(problem_, variant, sources_, kLevels[level_[first_]].dtype,
                                  {tile.count, &workspace_, context.checkpoint()});
    if (!rows.ok()) return rows.status();
    const int64_t of_head = VariantRows::StatisticsOfHead(variant.problem);
    const Statistics statistics = [&](int64_t batch,
                                      int64_t head) -> absl::StatusOr<const double*> {
      return suspect->statistics.data() + (batch * variant.problem.heads + head) * of_head;
    };
    double residual = 0;
    const auto fits =
        Reproduces(*rows, variant, tile.claim, tile.batch * RowsOf(tile.claim) + tile.first,
                   tile.count, statistics, *scratch, residual);
    if (!fits.ok()) return fits.status();
    MutexLock lock(mutex_);
    if (!*fits) suspect->reproduced = std::min(suspect->reproduced.load(), tile.claim);
    if (tile.claim == first_) suspect->residual = std::max(suspect->residual, residual);
  }
  return absl::OkStatus();
}

// The suspects that reproduce that many claims and leave little of the difference, in order.
std::vector<const Suspect*> Referee::Found(const Round& round, size_t reproduced) const {
  std::vector<const Suspect*> found;
  for (const auto& suspect : round.suspects) {
    if (suspect->reproduced >= reproduced && LeavesLittle(suspect->residual)) {
      found.push_back(suspect.get());
    }
  }
  std::sort(found.begin(), found.end(),
            [](const Suspect* a, const Suspect* b) { return a->index < b->index; });
  return found;
}

// Mistakes that explain all that was sent, the fewer the better; else those that explain it up to
// and with what departs first.
void Referee::ReportFindings() {
  std::vector<const Suspect*> found;
  for (const size_t reproduced : {claims(), first_ + 1}) {
    for (const Round* const round : {&singles_, &pairs_}) {
      if (found.empty()) found = Found(*round, reproduced);
    }
  }
  for (const Suspect* const suspect : found) {
    const MistakeSet& mistakes = suspect->variant.mistakes;
    report_->findings.push_back({CodeOf(mistakes), MessageOf(mistakes),
                                 FieldOf(mistakes, problem_.head), suspect->residual});
  }
}

// index: of the claim whose difference is shown. level: that the verdict was taken by.
void Referee::Report(Verdict verdict, size_t index, size_t level) {
  const Claim& of = claim(index);
  const Comparison& comparison = comparisons_[index];
  report_->verdict = verdict;
  report_->max_abs_difference = std::max(comparison.worst.apart, 0.0);
  report_->max_ulp_difference = comparison.ulps;
  const double bound = ScoreBound(honest_, sources_) + comparison.worst.mask_reach;
  report_->tolerance = AllowedOf(kLevels[level], honest_, of.part, bound).Of(comparison.worst.ours);
  if (CountOf(of.spec) > 0) {
    int64_t element = comparison.worst.element;
    report_->worst_index.assign(of.spec.shape.size(), 0);
    for (size_t axis = of.spec.shape.size(); axis-- > 0;) {
      report_->worst_index[axis] = element % of.spec.shape[axis];
      element /= of.spec.shape[axis];
    }
  }
  if (problem_.head && verdict != Verdict::kMatch) {
    report_->first_departure = std::string(NameOf(of.part));
  }
}

// Compares with our own computation in that arithmetic, on a few rows. declared: the numbers' type
// shows that they were rounded. Else they must be as far from the answer as the simulated ones;
// and where nothing else speaks for half precision, off in the same places.
absl::StatusOr<bool> Referee::IsArithmetic(size_t level, bool declared,
                                           const Checkpoint& checkpoint, double* residual) {
  const Part part = claim(first_).part;
  if (part < Part::kContext || attend().value_width == 0) {
    *residual = comparisons_[first_].worst.apart;
    return declared;
  }
  auto rows =
      VariantRows::Make(problem_, honest_, sources_, attend().dtype, {1, &workspace_, checkpoint});
  if (!rows.ok()) return rows.status();
  auto scratch = Scratch(first_, 1);
  if (!scratch.ok()) return scratch.status();
  const int64_t width = WidthOf(first_);
  auto simulated = workspace_.Allocate<double>(width);
  if (!simulated.ok()) return simulated.status();
  Likeness likeness;
  for (size_t i = 0; i < samples_[first_].size() && i < kSimulated; ++i) {
    const int64_t row = samples_[first_][i];
    const int64_t batch = row / RowsOf(first_);
    const int64_t in_batch = row % RowsOf(first_);
    double* const ours = scratch->ours.data();
    double* const theirs = scratch->theirs.data();
    absl::Status status = OurRows(*rows, first_, batch, in_batch, 1, ours, scratch->facts.data());
    if (status.ok()) {
      status = rows->Simulate(kLevels[level].dtype, part, batch, in_batch, simulated->data());
    }
    if (!status.ok()) return status;
    ToDouble(claim(first_).spec.dtype, claim(first_).data, row * width, width, theirs);
    const Allowed allowed = AllowedOf(kLevels[level], honest_, part,
                                      rows->score_bound() + scratch->facts[0].mask_reach);
    for (int64_t d = 0; d < width; ++d) {
      const double other = simulated->data()[d];
      if (!declared && !(Apart(theirs[d], other) <= allowed.Of(ours[d]))) return false;
      likeness.Add(theirs[d], other, ours[d]);
    }
  }
  *residual = likeness.residual();
  if (declared) return true;
  const bool known_half = kLevels[level_[first_]].dtype == kLevels[level].dtype;
  return likeness.SameSize() &&
         (known_half || !IsHalf(kLevels[level].dtype) || likeness.SameNumbers());
}

void Referee::ReportArithmetic(size_t level, double residual) {
  const Level& used = kLevels[level];
  const std::string requested = absl::AsciiStrToLower(NameOf(attend().dtype));
  Finding finding;
  finding.code = used.code;
  finding.message =
      used.name == requested
          ? absl::StrCat("each step was rounded to ", used.name,
                         "; sums, softmax and weights are float32, and the result is rounded once")
          : absl::StrCat("the numbers are those of ", used.name, " arithmetic; the request's are ",
                         requested, ", which is to be computed with throughout");
  finding.field = problem_.head ? std::string(NameOf(claim(first_).part)) : "candidate";
  finding.residual = residual;
  report_->findings.push_back(std::move(finding));
}

// Where no mistake was found: whether narrower arithmetic is as far away as this.
absl::StatusOr<bool> Referee::ConcludeNarrower(const Checkpoint& checkpoint) {
  for (const size_t level : {LevelOf(DType::kFloat32), kSteps, kSteps + 1}) {
    const bool finer = LevelOf(kLevels[level].dtype) < LevelOf(kLevels[level_[first_]].dtype);
    bool within = level > level_[first_] && !finer;
    for (size_t index = 0; index < claims(); ++index) {
      within = within && comparisons_[index].within[std::max(level, level_[index])];
    }
    if (!within) continue;
    double residual = 0;
    const auto alike = IsArithmetic(level, /*declared=*/false, checkpoint, &residual);
    if (!alike.ok()) return alike.status();
    // Half precision allows so much that being within it shows nothing by itself.
    if (!*alike && IsHalf(kLevels[level].dtype)) continue;
    if (*alike) ReportArithmetic(level, residual);
    Report(Verdict::kRoundingOnly, first_, level);
    return true;
  }
  return false;
}

absl::Status Referee::Conclude(const Checkpoint& checkpoint) {
  if (!undecided_) {
    if (report_->verdict == Verdict::kMatch) return absl::OkStatus();
    double residual = 0;
    const auto same = IsArithmetic(level_[first_], /*declared=*/true, checkpoint, &residual);
    if (!same.ok()) return same.status();
    if (*same) ReportArithmetic(level_[first_], residual);
    return absl::OkStatus();
  }
  ReportFindings();
  if (report_->findings.empty()) {
    const auto concluded = ConcludeNarrower(checkpoint);
    if (!concluded.ok()) return concluded.status();
    if (*concluded) return absl::OkStatus();
  }
  Report(Verdict::kMismatch, first_, level_[first_]);
  return absl::OkStatus();
}

std::vector<Stage> Referee::StagesOf(Round& round, const char* name,
                                     const std::function<bool()>& wanted) {
  if (round.sets.empty()) return {};
  const auto self = shared_from_this();
  const auto stage = [&](const char* what, int64_t tiles,
                         absl::Status (Referee::*run)(Round&, const TileContext&)) {
    return Stage{absl::StrCat(name, what), tiles,
                 [self, run, wanted, &round](const TileContext& context) {
                   return wanted() ? (self.get()->*run)(round, context) : absl::OkStatus();
                 }};
  };
  return {stage(": a few rows", static_cast<int64_t>(round.sets.size()), &Referee::Screen),
          stage(": select", 1, &Referee::Select),
          stage(": statistics", attend().batch * attend().heads, &Referee::ComputeStatistics),
          stage(": all rows", TilesOfRows(), &Referee::Confirm)};
}

absl::StatusOr<std::vector<Stage>> Referee::Stages(const Resources& resources) {
  // Nothing to compare: a match, as the report begins.
  if (TilesOfRows() == 0) return std::vector<Stage>();
  if (absl::Status status = Allocate(); !status.ok()) return status;
  // A head without a value has the output 0, whatever is done before.
  if (attend().value_width > 0 || claim(0).part < Part::kContext) {
    for (const Mistake mistake : MistakesIn(problem_)) {
      singles_.sets.push_back(MistakeSet({mistake}));
    }
    pairs_.sets = PairsIn(problem_);
  }
  const auto self = shared_from_this();
  std::vector<Stage> stages;
  const auto add = [&](const char* name, int64_t tiles, auto run) {
    stages.push_back({name, tiles, [self, run](const TileContext& context) -> absl::Status {
                        return run(*self, context);
                      }});
  };
  const auto count = [](const auto& list) { return static_cast<int64_t>(list.size()); };
  add("widen", count(pieces_), [](Referee& r, const TileContext& context) {
    const Piece& piece = r.pieces_[static_cast<size_t>(context.tile)];
    ToDouble(piece.dtype, piece.from, piece.first, piece.count, piece.to);
    return absl::OkStatus();
  });
  if (problem_.head) {
    const int64_t blocks = CeilDiv(attend().batch * attend().queries, kMostRowsOfTile);
    add("projections", 3 * blocks,
        [](Referee& r, const TileContext& context) { return r.Project(context); });
  }
  add("norms", count(to_measure_) + count(columns_to_measure_),
      [](Referee& r, const TileContext& context) { return r.MeasurePart(context.tile); });
  add("bounds", 1, [](Referee& r, const TileContext&) {
    r.BoundScores();
    return absl::OkStatus();
  });
  auto attention = AttendStages<double>(HonestProblem(attend()), HonestTensors(), resources);
  if (!attention.ok()) return attention.status();
  std::move(attention->begin(), attention->end(), std::back_inserter(stages));
  add("compare", TilesOfRows(),
      [](Referee& r, const TileContext& context) { return r.Compare(context); });
  add("judge", 1, [](Referee& r, const TileContext&) {
    r.Judge();
    return absl::OkStatus();
  });
  for (auto& [round, name, wanted] :
       {std::tuple(&singles_, "mistakes", std::function<bool()>([this] { return undecided_; })),
        std::tuple(&pairs_, "pairs", std::function<bool()>([this] { return PairsAreTried(); }))}) {
    std::vector<Stage> of_round = StagesOf(*round, name, wanted);
    std::move(of_round.begin(), of_round.end(), std::back_inserter(stages));
  }
  add("conclude", 1,
      [](Referee& r, const TileContext& context) { return r.Conclude(context.checkpoint()); });
  return stages;
}

AttendTensors<double> Referee::HonestTensors() const {
  const Problem& p = attend();
  AttendTensors<double> t;
  t.query = {sources_.query, p.layout, p.heads, p.queries, p.width};
  t.key = {sources_.key, p.layout, p.kv_heads, p.keys, p.width};
  t.value = {sources_.value, p.layout, p.kv_heads, p.keys, p.value_width};
  if (p.mask.has_value()) {
    t.mask = p.AddsMask() ? static_cast<const void*>(sources_.mask_numbers) : sources_.mask_flags;
  }
  t.output = {context_, p.layout, p.heads, p.queries, p.value_width};
  return t;
}

// The sizes of a part, each with what it is to agree with.
struct Axis {
  int64_t size;
  const char* what;
};

std::vector<Axis> AxesOf(const CheckProblem& problem, Part part) {
  const Problem& p = problem.attend;
  const Axis batch{p.batch, problem.head ? "the batch of x" : "the query's batch"};
  const Axis heads{p.heads, problem.head ? "heads" : "the query's heads"};
  const Axis tokens{p.queries, problem.head ? "the tokens of x" : "the query's tokens"};
  if (part == Part::kOutput && problem.head) {
    const Axis width{problem.d_model, "the width of x"};
    return problem.x_has_batch ? std::vector<Axis>{batch, tokens, width}
                               : std::vector<Axis>{tokens, width};
  }
  const char* const what = part <= Part::kKey       ? "the columns of w_q, of one head"
                           : part == Part::kLogits  ? "the tokens of x"
                           : part == Part::kWeights ? "the tokens of x"
                           : problem.head           ? "the columns of w_v, of one head"
                                                    : "the value's width";
  const Axis width{WidthOf(problem, part), what};
  if (!problem.head && p.layout == Layout::kBthd) return {batch, tokens, heads, width};
  return {batch, heads, tokens, width};
}

// Numbers that a check holds from its start to its end, those of attention left aside.
int64_t HeldNumbers(const CheckProblem& problem) {
  const Problem& p = problem.attend;
  const bool widened = p.dtype != DType::kFloat64;
  const int64_t joined = SaturatingProduct({p.heads, p.value_width});
  const int64_t tokens = SaturatingProduct({p.batch, p.queries});
  const int64_t keys = SaturatingProduct({p.batch, p.kv_heads, p.keys});
  int64_t numbers = SaturatingProduct({tokens, joined});  // the output
  const auto add = [&numbers](bool held, int64_t rows, int64_t columns) {
    if (held) numbers = SaturatingSum({numbers, SaturatingProduct({rows, columns})});
  };
  if (p.AddsMask()) add(p.mask->dtype != DType::kFloat64, 1, MaskElements(p));
  if (!problem.head) {
    add(widened, SaturatingProduct({tokens, p.heads}), p.width);
    add(widened, keys, SaturatingSum({p.width, p.value_width}));
    return numbers;
  }
  const int64_t columns = SaturatingSum({SaturatingProduct({2, p.heads, p.width}), joined});
  add(true, tokens, columns);
  add(widened, SaturatingSum({tokens, columns, joined}), problem.d_model);
  return numbers;
}

// An upper bound of what one tile holds.
int64_t NumbersOfTile(const CheckProblem& problem, const std::vector<Claim>& claims) {
  int64_t widest = problem.attend.value_width;
  for (const Claim& one : claims) widest = std::max(widest, WidthOf(problem, one.part));
  const int64_t rows = RowsOfTile(problem);
  // Ours, theirs and simulated; what a first look finds of the other rows.
  return SaturatingSum({VariantRows::MostNumbers(problem, rows),
                        SaturatingProduct({3, rows, widest}), StatisticsOf(problem.attend)});
}

}  // namespace

absl::string_view NameOf(Part part) {
  constexpr absl::string_view kNames[] = {"query",   "key",     "value", "logits",
                                          "weights", "context", "output"};
  return kNames[static_cast<size_t>(part)];
}

CheckProblem MakeCheckProblem(const Problem& problem) {
  CheckProblem check;
  check.attend = problem;
  check.d_model = SaturatingProduct({problem.heads, problem.width});
  return check;
}

CheckProblem MakeCheckProblem(const HeadProblem& problem) {
  CheckProblem check;
  check.attend = problem.attend;
  check.attend.layout = Layout::kBthd;
  check.head = true;
  check.x_has_batch = problem.x_has_batch;
  check.d_model = problem.d_model;
  return check;
}

absl::Status CheckClaims(const std::vector<Claim>& claims, CheckProblem& problem) {
  if (claims.empty()) {
    return InvalidField("head_candidate",
                        "is empty, must have the output, or any of query, key, value, logits, "
                        "weights and context");
  }
  problem.output_only = claims.size() == 1 && claims[0].part == Part::kOutput;
  for (const Claim& claim : claims) {
    const std::string name =
        problem.head ? absl::StrCat("head_candidate.", NameOf(claim.part)) : "candidate";
    const std::vector<Axis> axes = AxesOf(problem, claim.part);
    const auto rank = static_cast<int64_t>(axes.size());
    if (absl::Status status = CheckTensor(name, claim.spec, rank); !status.ok()) return status;
    for (size_t axis = 0; axis < axes.size(); ++axis) {
      absl::Status status = CheckSize(absl::StrCat(name, ".shape[", axis, "]"),
                                      claim.spec.shape[axis], axes[axis].size, axes[axis].what);
      if (!status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

int64_t RequestBytes(const CheckProblem& problem, const std::vector<Claim>& claims) {
  int64_t bytes =
      problem.head ? RequestBytes(HeadProblem{problem.attend, problem.d_model, problem.x_has_batch,
                                              /*return_intermediates=*/false})
                   : RequestBytes(problem.attend);
  for (const Claim& claim : claims) {
    bytes =
        SaturatingSum({bytes, SaturatingProduct({CountOf(claim.spec), SizeOf(claim.spec.dtype)})});
  }
  return bytes;
}

int64_t CheckWorkspaceBytes(const CheckProblem& problem, const std::vector<Claim>& claims,
                            const Resources& resources) {
  const Problem& p = problem.attend;
  const Problem honest = HonestProblem(p);
  const int64_t searches = SaturatingProduct({2, BytesOfSuspects(p)});
  const int64_t tile = SaturatingSum(
      {BytesOf(NumbersOfTile(problem, claims)), SaturatingProduct({2, OptionBytes(p)})});
  return SaturatingSum({BytesOf(HeldNumbers(problem)),
                        CostOf(honest, resources.threads, resources.kernel).workspace_bytes,
                        CopyBytes(honest, resources.threads, resources.kernel),
                        SaturatingProduct({resources.threads, tile}), searches});
}

absl::StatusOr<std::vector<Stage>> CheckStages(const CheckProblem& problem,
                                               const CheckInputs& inputs,
                                               const Resources& resources, CheckReport* report) {
  return std::make_shared<Referee>(problem, inputs, resources, report)->Stages(resources);
}

}  // namespace attendant::core
