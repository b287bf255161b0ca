#include "core/speed.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "core/attend.h"
#include "core/checked_math.h"
#include "core/cost.h"
#include "core/explicit_path.h"
#include "core/fused_kernel.h"
#include "core/half.h"
#include "core/machine.h"
#include "core/second_sweep.h"
#include "core/widthless.h"
#include "core/workspace.h"

namespace attendant::core {
namespace {

// What is measured has a batch for each thread and two heads a batch, so that any number of threads
// is busy for as long. 256 tokens of width 64 are half a millisecond in float32, some twenty times
// what starting a job takes.
constexpr int64_t kHeads = 2;
constexpr int64_t kTokens = 256;
constexpr int64_t kNarrow = 32;
constexpr int64_t kWide = 128;
constexpr int64_t kModelWidth = 256;  // of the head whose projections are timed
// The best of a few turns, as a machine that is busy at the start would show less; what is compared
// takes turns, so that both meet the same disturbances.
constexpr int kTurns = 4;

// One query against 4032 keys, by one and by several heads that share them. A batch's keys and
// values of width 64 are 2 MiB: they come from a cache the second time.
constexpr int64_t kCachedKeys = 4032;
constexpr int64_t kCachedWidth = 64;
constexpr int64_t kSharing = 8;
// Keys and values, and scores, of more bytes than caches hold, and more than are kept in the
// process when they are freed. 1024 x 1024 scores of 10 heads are 40 MiB.
constexpr int64_t kUncachedBytes = int64_t{40} << 20;
static_assert(kUncachedBytes > kLargestKeptBytes);
constexpr int64_t kUncachedTokens = 1024;
// So narrow that its products are nothing beside what is done for each score.
constexpr int64_t kNarrowest = 8;

double ToDouble(int64_t value) { return static_cast<double>(value); }

Problem Square(DType dtype, Path path, int64_t batch, int64_t heads, int64_t tokens,
               int64_t width) {
  Problem p;
  p.dtype = dtype;
  p.path = path;
  p.batch = batch;
  p.heads = p.kv_heads = heads;
  p.queries = p.keys = tokens;
  p.width = p.value_width = width;
  p.scale = 1 / std::sqrt(static_cast<double>(width));
  return p;
}

Problem On(Path path, Problem problem) {
  problem.path = path;
  return problem;
}

// One query of `sharing` heads.
Problem OneQuery(DType dtype, int64_t batch, int64_t sharing, int64_t keys) {
  Problem p = Square(dtype, Path::kChunked, batch, sharing, keys, kCachedWidth);
  p.kv_heads = 1;
  p.queries = 1;
  return p;
}

double KeyValueBytes(const Problem& p) {
  return ToDouble(p.batch) * ToDouble(p.kv_heads) * ToDouble(p.keys) *
         ToDouble(p.width + p.value_width) * ToDouble(SizeOf(p.dtype));
}

// Computes problems on numbers of its own.
template <typename S>
class Probe {
 public:
  // elements: of the largest tensor, or of keys and values together.
  static absl::StatusOr<Probe> Make(Scheduler& scheduler, Kernel kernel, int64_t elements) {
    auto numbers = Workspace::Process().Allocate<S>(elements);
    if (!numbers.ok()) return numbers.status();
    auto output = Workspace::Process().Allocate<S>(elements);
    if (!output.ok()) return output.status();
    Probe probe(scheduler, kernel, *std::move(numbers), *std::move(output));
    if (absl::Status status = probe.Draw(); !status.ok()) return status;
    return probe;
  }

  // Seconds that each problem took in its best turn; infinity where one failed.
  std::vector<double> Times(const std::vector<Problem>& problems, int turns = kTurns) {
    std::vector<double> best(problems.size(), std::numeric_limits<double>::infinity());
    for (int turn = 0; turn < turns; ++turn) {
      for (size_t i = 0; i < problems.size(); ++i) best[i] = std::min(best[i], Time(problems[i]));
    }
    return best;
  }

  double Time(const Problem& p) {
    AttendTensors<S> t;
    t.query = {numbers_.data(), p.layout, p.heads, p.queries, p.width};
    t.key = {numbers_.data(), p.layout, p.kv_heads, p.keys, p.width};
    t.value = {numbers_.data() + numbers_.size() / 2, p.layout, p.kv_heads, p.keys, p.value_width};
    t.output = {output_.data(), p.layout, p.heads, p.queries, p.value_width};
    return SecondsOfJob([&](const Resources& resources) { return AttendStages(p, t, resources); });
  }
  double Time(const HeadProblem& h) {
    HeadTensors<S> t;
    t.x = t.w_q = t.w_k = t.w_v = t.w_o = numbers_.data();
    t.output = output_.data();
    return SecondsOfJob([&](const Resources& resources) { return HeadStages(h, t, resources); });
  }

 private:
  Probe(Scheduler& scheduler, Kernel kernel, Buffer<S> numbers, Buffer<S> output)
      : scheduler_(&scheduler),
        kernel_(kernel),
        numbers_(std::move(numbers)),
        output_(std::move(output)) {}

  // Few numbers are drawn, and repeated by all threads.
  absl::Status Draw() {
    constexpr int64_t kDrawn = 8191;  // a prime number: no row is another's
    std::minstd_rand generator(1);
    std::normal_distribution<Wide<S>> normal;
    std::vector<Wide<S>> drawn(kDrawn);
    for (Wide<S>& number : drawn) number = normal(generator);
    const int64_t tiles = CeilDiv(numbers_.size(), kDrawn);
    return scheduler_->Run({{"draw", tiles, [&](const TileContext& context) {
                               const int64_t first = context.tile * kDrawn;
                               Store(drawn.data(), std::min(kDrawn, numbers_.size() - first),
                                     numbers_.data() + first);
                               return absl::OkStatus();
                             }}});
  }

  // From the first tile's start to the last one's end; infinity where it failed.
  template <typename MakeStages>
  double SecondsOfJob(const MakeStages& make_stages) {
    Workspace workspace;
    auto stages = make_stages({&workspace, scheduler_->threads(), kernel_});
    JobTimes times;
    if (!stages.ok() || !scheduler_->Run(*std::move(stages), &times).ok()) {
      return std::numeric_limits<double>::infinity();
    }
    return std::chrono::duration<double>(times.end - times.first_tile).count();
  }

  Scheduler* scheduler_;
  Kernel kernel_;
  Buffer<S> numbers_;  // the lower half queries and keys, the upper half values
  Buffer<S> output_;
};

// What is done once for each (query, key): the explicit path goes over hidden scores as well.
double PairsOf(const Problem& p) {
  return p.path == Path::kExplicit
             ? ToDouble(SaturatingProduct({p.batch, p.heads, p.queries, p.keys}))
             : ToDouble(VisiblePairs(p));
}

// Queries that see the keys of a block in part.
double EdgesOf(const Problem& p) {
  const bool cut =
      p.path == Path::kChunked &&
      (p.causal != Causal::kNone || p.window.left.has_value() || p.window.right.has_value());
  return cut ? ToDouble(SaturatingProduct({p.batch, p.heads, p.queries})) : 0;
}

double SecondsAt(const Rate& rate, const Problem& p) {
  return rate.start_seconds + ToDouble(ProductFlops(p)) * rate.flop_seconds +
         PairsOf(p) * rate.pair_seconds + EdgesOf(p) * rate.edge_seconds;
}

bool AreFinite(const std::vector<double>& numbers) {
  return std::all_of(numbers.begin(), numbers.end(), [](double x) { return std::isfinite(x); });
}

// Of many queries on one path.
template <typename S>
Rate MeasureSquares(Probe<S>& probe, Path path, int64_t batch) {
  const auto square = [&](int64_t tokens, int64_t width) {
    return Square(DTypeOf<S>(), path, batch, kHeads, tokens, width);
  };
  const Problem narrow = square(kTokens, kNarrow);
  const Problem wide = square(kTokens, kWide);
  Problem causal = wide;
  causal.causal = Causal::kTopLeft;
  const std::vector<double> times = probe.Times({square(1, kNarrow), narrow, wide, causal});
  if (!AreFinite(times)) return {};
  Rate rate;
  rate.start_seconds = times[0];
  const double for_narrow = times[1] - times[0];
  const double for_wide = times[2] - times[0];
  // Two equations for what an operation and a pair take.
  const double narrow_flops = ToDouble(ProductFlops(narrow));
  const double wide_flops = ToDouble(ProductFlops(wide));
  rate.flop_seconds = std::max((for_wide - for_narrow) / (wide_flops - narrow_flops), 0.0);
  rate.pair_seconds = (for_narrow - rate.flop_seconds * narrow_flops) / PairsOf(narrow);
  if (rate.pair_seconds < 0) {
    rate.pair_seconds = 0;
    rate.flop_seconds = for_wide / wide_flops;
  }
  const double edges = EdgesOf(causal);
  if (edges > 0) rate.edge_seconds = std::max(times[3] - SecondsAt(rate, causal), 0.0) / edges;
  return rate;
}

// Of one query on each path. What keys' and values' bytes take is the same for one head of the
// chunked path and for several that share them; the explicit path reads them for each head anew.
template <typename S>
void MeasureFewQueries(Probe<S>& probe, int64_t batch, DTypeSpeed& of) {
  const Problem first = OneQuery(DTypeOf<S>(), batch, 1, 1);
  const Problem alone = OneQuery(DTypeOf<S>(), batch, 1, kCachedKeys);
  const Problem shared = OneQuery(DTypeOf<S>(), batch, kSharing, kCachedKeys);
  const std::vector<double> times =
      probe.Times({first, alone, shared, On(Path::kExplicit, first), On(Path::kExplicit, alone)});
  if (!AreFinite(times)) return;
  const auto rate = [](double start, double seconds, int64_t flops) {
    return Rate{start, seconds / ToDouble(flops)};
  };
  const double difference = times[2] - times[1];
  of.chunked_few = difference > 0
                       ? rate(times[0], difference, ProductFlops(shared) - ProductFlops(alone))
                       : rate(times[0], times[2], ProductFlops(shared));
  of.explicit_few = rate(times[3], times[4], ProductFlops(alone));
}

// Of a head's four projections: what is left of its time without the attention inside.
template <typename S>
double MeasureProjections(Probe<S>& probe, int64_t batch, const Speed& speed) {
  HeadProblem head;
  head.attend = Square(DTypeOf<S>(), Path::kChunked, batch, kHeads, kTokens, kCachedWidth);
  head.d_model = kModelWidth;
  head.x_has_batch = true;
  Problem inner = head.attend;
  inner.dtype = WideOf(inner.dtype);
  double best = std::numeric_limits<double>::infinity();
  for (int turn = 0; turn < kTurns; ++turn) best = std::min(best, probe.Time(head));
  if (!std::isfinite(best)) return 0;
  const double attention = SecondsOf(inner, speed);
  return (best > attention ? best - attention : best) / ToDouble(ProjectionFlops(head));
}

template <typename S>
void MeasureDType(Scheduler& scheduler, Kernel kernel, Speed& speed) {
  const int64_t batch = scheduler.threads();
  const int64_t elements =
      batch *
      std::max({kHeads * kTokens * kWide, 2 * kCachedKeys * kCachedWidth, kTokens * kModelWidth});
  auto probe = Probe<S>::Make(scheduler, kernel, elements);
  if (!probe.ok()) return;
  DTypeSpeed& of = speed.of[static_cast<size_t>(DTypeOf<S>())];
  of.chunked_path = MeasureSquares(*probe, Path::kChunked, batch);
  MeasureFewQueries(*probe, batch, of);
  // Late, as the library that multiplies here prepares itself on its first calls.
  of.explicit_path = MeasureSquares(*probe, Path::kExplicit, batch);
  of.projection_flop_seconds = MeasureProjections(*probe, batch, speed);
}

// Of bytes that no cache holds, for every type.
void MeasureMemory(Scheduler& scheduler, Kernel kernel, Speed& speed) {
  const DType dtype = DType::kFloat32;
  const int64_t threads = scheduler.threads();
  const int64_t floats = kUncachedBytes / SizeOf(dtype);
  auto probe = Probe<float>::Make(scheduler, kernel, floats);
  if (!probe.ok()) return;
  const DTypeSpeed& of = speed.of[static_cast<size_t>(dtype)];
  const Problem decode = OneQuery(dtype, threads, 1, floats / (2 * kCachedWidth * threads));
  const Problem many =
      Square(dtype, Path::kExplicit, 1, floats / (kUncachedTokens * kUncachedTokens),
             kUncachedTokens, kNarrowest);
  const Problem few = Square(dtype, Path::kExplicit, threads, kHeads, kTokens, kNarrowest);
  // Long enough to be no matter of luck, and too long to be repeated.
  const std::vector<double> times = probe->Times({few, decode, many}, /*turns=*/1);
  if (!AreFinite(times)) return;
  speed.read_byte_seconds =
      std::max(times[1] - SecondsAt(of.chunked_few, decode), 0.0) / KeyValueBytes(decode);
  const double start = of.explicit_path.start_seconds;
  const double fresh = (times[2] - start) / PairsOf(many) - (times[0] - start) / PairsOf(few);
  speed.fresh_byte_seconds = std::max(fresh, 0.0) / ToDouble(SizeOf(dtype));
}

bool HasFewQueries(const Problem& p) {
  return WithStored(p.dtype, [&]<typename S>() { return FusedFewQueries<Wide<S>>(p); });
}

// What a path's rate does not tell.
double MoreSeconds(const Problem& p, const Speed& speed) {
  double seconds = HasFewQueries(p) ? speed.read_byte_seconds * KeyValueBytes(p) : 0;
  if (p.path == Path::kExplicit) {
    const int64_t scores = ExplicitWorkspaceBytes(p, /*threads=*/0);
    if (scores >= kLargestKeptBytes) seconds += speed.fresh_byte_seconds * ToDouble(scores);
  } else if (NeedsSecondSweep(p)) {
    // Scores are computed again, without values.
    Problem scores = p;
    scores.value_width = 0;
    seconds += SecondsAt(speed.of[static_cast<size_t>(p.dtype)].chunked_path, scores);
  }
  return seconds;
}

const Rate& RateFor(const Problem& p, const Speed& speed) {
  const DTypeSpeed& of = speed.of[static_cast<size_t>(p.dtype)];
  if (HasFewQueries(p)) return p.path == Path::kExplicit ? of.explicit_few : of.chunked_few;
  return p.path == Path::kExplicit ? of.explicit_path : of.chunked_path;
}

}  // namespace

Speed MeasureSpeed(Scheduler& scheduler, Kernel kernel) {
  Speed speed;
  // Threads that were just started take some milliseconds to have a CPU each, at its full clock.
  constexpr double kWarmUpSeconds = 0.01;
  MeasurePeakFlops(scheduler, DType::kFloat32, kWarmUpSeconds);
  MeasureDType<float>(scheduler, kernel, speed);
  MeasureDType<double>(scheduler, kernel, speed);
  MeasureDType<Float16>(scheduler, kernel, speed);
  MeasureDType<BFloat16>(scheduler, kernel, speed);
  MeasureMemory(scheduler, kernel, speed);
  return speed;
}

Speed NominalSpeed(int threads) {
  // AVX2 at 1.2 GHz: two fused multiply-adds of 8 floats a cycle are 38 GFLOP/s. Products reach
  // three quarters of that; with few queries each number that is loaded is used once, of which
  // there are a quarter as many. An exponential and its share of a maximum and a sum are some 16
  // operations of a vector: 16 / 8 / 1.2 GHz.
  const double flop_seconds = 1 / (30e9 * threads);
  const double pair_seconds = 1.7e-9 / threads;
  // A core reads 5 GB/s. A fresh page is written by the kernel first, and read and written again.
  constexpr double kReadByteSeconds = 2e-10;
  Speed speed;
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16}) {
    // Half as many doubles fit a vector; half precision is computed in floats.
    const double as_floats = dtype == DType::kFloat64 ? 2 : 1;
    Rate many;
    many.flop_seconds = as_floats * flop_seconds;
    many.pair_seconds = as_floats * pair_seconds;
    Rate few;
    few.flop_seconds = 4 * many.flop_seconds;
    speed.of[static_cast<size_t>(dtype)] = {many, many, few, few, many.flop_seconds};
  }
  speed.read_byte_seconds = kReadByteSeconds / threads;
  speed.fresh_byte_seconds = 4 * kReadByteSeconds / threads;
  return speed;
}

double SecondsOf(const Problem& p, const Speed& speed) {
  const Rate& rate = RateFor(p, speed);
  const bool measured = rate.flop_seconds + rate.pair_seconds > 0;
  if (!measured || ReturnsNothing(p)) return 0;
  if (p.width > 0 || p.value_width > 0) return SecondsAt(rate, p) + MoreSeconds(p, speed);
  // No products: what is left takes an operation at least of each pair, or of each row where only
  // pairs are counted.
  const double all =
      IsWidthless(p) ? ToDouble(SaturatingProduct({p.batch, p.heads, p.queries})) : PairsOf(p);
  return rate.start_seconds + all * std::max(rate.pair_seconds, rate.flop_seconds);
}

double SecondsOf(const HeadProblem& h, const Speed& speed) {
  const double projection = speed.of[static_cast<size_t>(h.attend.dtype)].projection_flop_seconds;
  Problem inner = h.attend;
  inner.dtype = WideOf(inner.dtype);
  const double attention = SecondsOf(inner, speed);
  if (projection == 0 || attention == 0) return 0;
  return attention + ToDouble(ProjectionFlops(h)) * projection;
}

double SecondsOf(const GradientProblem& g, const Speed& speed) {
  const int64_t forward_flops = ProductFlops(g.attend);
  if (forward_flops == 0) return 0;
  return SecondsOf(g.attend, speed) * ToDouble(ProductFlops(g)) / ToDouble(forward_flops);
}

double SecondsOf(const MergeProblem& m, const Speed& speed) {
  return ToDouble(SaturatingSum({RequestBytes(m), ResponseBytes(m)})) * speed.read_byte_seconds;
}

void SpeedCorrection::Observe(Path path, double expected, double measured) {
  // Waking threads and filling caches take up to a millisecond.
  constexpr double kLeastSeconds = 5e-3;
  constexpr double kDown = 1.0 / 4;
  constexpr double kUp = 1.0 / 16;
  if (!(expected >= kLeastSeconds && measured >= kLeastSeconds)) return;
  MutexLock lock(mutex_);
  double& factor = path == Path::kExplicit ? explicit_path_ : chunked_path_;
  const double further = std::log(measured / expected) - factor;
  factor += further * (further < 0 ? kDown : kUp);
}

PathFactors SpeedCorrection::factors() const {
  MutexLock lock(mutex_);
  return {std::exp(explicit_path_), std::exp(chunked_path_)};
}

}  // namespace attendant::core
