#include "server/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/metric_family.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/mutex.h"
#include "server/http_page.h"
#include "server/process_metrics.h"

namespace attendant::server {
namespace {

// In the order of the enumerations.
constexpr std::array kMethodNames = {"Attend", "AttendStream", "Head", "Backward", "Merge",
                                     "Check",  "Estimate",     "Info", "unknown"};
constexpr std::array kPathNames = {"explicit", "chunked", "none"};
constexpr std::array kCancelStageNames = {"receive", "queue", "compute", "send"};
constexpr std::array kShedReasonNames = {"draining", "memory", "queue_full", "queue_wait",
                                         "never_fits"};
static_assert(kMethodNames.size() == static_cast<size_t>(Method::kUnknown) + 1);
static_assert(kPathNames.size() == static_cast<size_t>(PathLabel::kNone) + 1);
static_assert(kCancelStageNames.size() == static_cast<size_t>(CancelStage::kSend) + 1);
static_assert(kShedReasonNames.size() == static_cast<size_t>(ShedReason::kNeverFits) + 1);
constexpr int kCodes = 17;  // OK .. UNAUTHENTICATED
constexpr int kComputePaths = 2;

// Token buckets: 64, 128, .. 2^20, more.
constexpr int kFirstBucketLog2 = 6;
constexpr int kLastBucketLog2 = 20;
constexpr int kTokenBuckets = kLastBucketLog2 - kFirstBucketLog2 + 2;

size_t TokenBucket(int64_t tokens) {
  size_t bucket = 0;
  while (bucket < kTokenBuckets - 1 && tokens > int64_t{1} << (kFirstBucketLog2 + bucket)) ++bucket;
  return bucket;
}

std::string TokenBucketName(size_t bucket) {
  if (bucket == kTokenBuckets - 1) return "more";
  return absl::StrCat(int64_t{1} << (kFirstBucketLog2 + bucket));
}

// From a tenth of a millisecond, a small call, to the minutes of a very long one.
const prometheus::Histogram::BucketBoundaries kSeconds = {
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
    0.1,    0.25,    0.5,    1,     2.5,    5,     10,   30,    120};

double ToDouble(int64_t value) { return static_cast<double>(value); }

// A gauge that is read where its number is, at each scrape. Thread-safe.
class SourcedGauge : public prometheus::Collectable {
 public:
  SourcedGauge(std::string name, std::string help)
      : name_(std::move(name)), help_(std::move(help)) {}

  void SetSource(std::function<int64_t()> source) {
    core::MutexLock lock(mutex_);
    source_ = std::move(source);
  }

  std::vector<prometheus::MetricFamily> Collect() const override {
    prometheus::MetricFamily family;
    family.name = name_;
    family.help = help_;
    family.type = prometheus::MetricType::Gauge;
    family.metric.emplace_back();
    core::MutexLock lock(mutex_);
    family.metric.back().gauge.value = source_ ? ToDouble(source_()) : 0;
    return {family};
  }

 private:
  const std::string name_;
  const std::string help_;
  mutable core::Mutex mutex_;
  std::function<int64_t()> source_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

class Metrics::Series {
 public:
  explicit Series(const BuildInfo& build_info) {
    for (size_t method = 0; method < kMethodNames.size(); ++method) {
      for (size_t path = 0; path < kPathNames.size(); ++path) AddRequests(method, path);
    }
    for (size_t path = 0; path < kComputePaths; ++path) {
      flops[path] = &flops_family_.Add({{"path", kPathNames[path]}});
      for (size_t bucket = 0; bucket < kTokenBuckets; ++bucket) AddCompute(path, bucket);
    }
    for (size_t bucket = 0; bucket < kTokenBuckets; ++bucket) {
      explicit_bytes[bucket] = &explicit_bytes_family_.Add({{"tokens", TokenBucketName(bucket)}});
    }
    for (size_t i = 0; i < cancelled.size(); ++i) {
      cancelled[i] = &cancelled_family_.Add({{"stage", kCancelStageNames[i]}});
    }
    for (size_t i = 0; i < shed.size(); ++i) {
      shed[i] = &shed_family_.Add({{"reason", kShedReasonNames[i]}});
    }
    build_info_family_
        .Add({{"version", build_info.version},
              {"kernel", build_info.kernel},
              {"simd", build_info.simd}})
        .Set(1);
  }

  std::shared_ptr<prometheus::Registry> registry = std::make_shared<prometheus::Registry>();
  std::shared_ptr<ProcessMetrics> process = std::make_shared<ProcessMetrics>();
  SourcedGauge queue_depth{"attendant_queue_depth",
                           "Jobs that wait for their turn to be computed."};
  SourcedGauge memory_reserved{
      "attendant_memory_reserved_bytes",
      "Bytes of requests, workspaces and responses that the calls now here may hold."};
  std::unique_ptr<HttpPage> page;  // of the others

  std::array<std::array<std::array<prometheus::Counter*, kCodes>, kPathNames.size()>,
             kMethodNames.size()>
      requests{};
  std::array<std::array<prometheus::Histogram*, kPathNames.size()>, kMethodNames.size()>
      request_seconds{};
  std::array<std::array<prometheus::Histogram*, kTokenBuckets>, kComputePaths> compute_seconds{};
  std::array<std::array<prometheus::Gauge*, kTokenBuckets>, kComputePaths> peak_workspace{};
  std::array<prometheus::Counter*, kComputePaths> flops{};
  std::array<prometheus::Counter*, kTokenBuckets> explicit_bytes{};
  std::array<prometheus::Counter*, kCancelStageNames.size()> cancelled{};
  std::array<prometheus::Counter*, kShedReasonNames.size()> shed{};
  prometheus::Histogram& queue_seconds =
      prometheus::BuildHistogram()
          .Name("attendant_queue_duration_seconds")
          .Help("From a request's arrival to the start of its first tile.")
          .Register(*registry)
          .Add({}, kSeconds);
  prometheus::Gauge& inflight = prometheus::BuildGauge()
                                    .Name("attendant_inflight_requests")
                                    .Help("Requests received and not yet answered.")
                                    .Register(*registry)
                                    .Add({});
  prometheus::Gauge& inflight_flops =
      prometheus::BuildGauge()
          .Name("attendant_inflight_flops")
          .Help("Floating-point operations of the jobs submitted and not yet complete.")
          .Register(*registry)
          .Add({});
  prometheus::Gauge& memory_budget = prometheus::BuildGauge()
                                         .Name("attendant_memory_budget_bytes")
                                         .Help("Bytes that all calls together may hold.")
                                         .Register(*registry)
                                         .Add({});
  prometheus::Family<prometheus::Gauge>& machine_peak =
      prometheus::BuildGauge()
          .Name("attendant_machine_peak_flops")
          .Help(
              "Measured fused-multiply-add peak of all compute threads, in FLOP/s; 0 where it was "
              "not measured.")
          .Register(*registry);
  prometheus::Gauge& peak_float32 = machine_peak.Add({{"dtype", "float32"}});
  prometheus::Gauge& peak_float64 = machine_peak.Add({{"dtype", "float64"}});

  std::atomic<int64_t> started = 0;  // requests
  core::Mutex peak_mutex;            // makes reading and raising a peak_workspace gauge one step

 private:
  void AddRequests(size_t method, size_t path) {
    const prometheus::Labels labels = {{"method", kMethodNames[method]},
                                       {"path", kPathNames[path]}};
    request_seconds[method][path] = &request_seconds_family_.Add(labels, kSeconds);
    for (int code = 0; code < kCodes; ++code) {
      prometheus::Labels with_code = labels;
      with_code["code"] = absl::StatusCodeToString(static_cast<absl::StatusCode>(code));
      requests[method][path][code] = &requests_family_.Add(with_code);
    }
  }

  void AddCompute(size_t path, size_t bucket) {
    const prometheus::Labels labels = {{"path", kPathNames[path]},
                                       {"tokens", TokenBucketName(bucket)}};
    compute_seconds[path][bucket] = &compute_seconds_family_.Add(labels, kSeconds);
    peak_workspace[path][bucket] = &peak_workspace_family_.Add(labels);
  }

  prometheus::Family<prometheus::Counter>& requests_family_ =
      prometheus::BuildCounter()
          .Name("attendant_requests_total")
          .Help("Requests answered, by method, path and status code.")
          .Register(*registry);
  prometheus::Family<prometheus::Histogram>& request_seconds_family_ =
      prometheus::BuildHistogram()
          .Name("attendant_request_duration_seconds")
          .Help("From a request's arrival to its answer.")
          .Register(*registry);
  prometheus::Family<prometheus::Histogram>& compute_seconds_family_ =
      prometheus::BuildHistogram()
          .Name("attendant_compute_duration_seconds")
          .Help(
              "From the first tile's start to the last tile's end, of completed jobs; tokens is "
              "the larger of query and key tokens, rounded up.")
          .Register(*registry);
  prometheus::Family<prometheus::Gauge>& peak_workspace_family_ =
      prometheus::BuildGauge()
          .Name("attendant_peak_workspace_bytes")
          .Help("Most workspace that one call held, the largest since the start.")
          .Register(*registry);
  prometheus::Family<prometheus::Counter>& flops_family_ =
      prometheus::BuildCounter()
          .Name("attendant_flops_total")
          .Help("Floating-point operations of the matrix products of completed jobs.")
          .Register(*registry);
  prometheus::Family<prometheus::Counter>& explicit_bytes_family_ =
      prometheus::BuildCounter()
          .Name("attendant_explicit_equivalent_bytes_total")
          .Help("Workspace that the explicit path would have needed for the completed jobs.")
          .Register(*registry);
  prometheus::Family<prometheus::Counter>& cancelled_family_ =
      prometheus::BuildCounter()
          .Name("attendant_cancelled_total")
          .Help(
              "Jobs stopped by their caller, their deadline, the time they may compute or a "
              "shutdown, by how far they had come.")
          .Register(*registry);
  prometheus::Family<prometheus::Counter>& shed_family_ =
      prometheus::BuildCounter()
          .Name("attendant_shed_total")
          .Help("Requests turned away because of load, by reason.")
          .Register(*registry);
  prometheus::Family<prometheus::Gauge>& build_info_family_ =
      prometheus::BuildGauge()
          .Name("attendant_build_info")
          .Help("1, with the version and what it computes with as labels.")
          .Register(*registry);
};

Metrics::Metrics(const BuildInfo& build_info) : series_(std::make_unique<Series>(build_info)) {}

Metrics::~Metrics() { series_->page.reset(); }

absl::StatusOr<int> Metrics::Listen(const std::string& address) {
  auto page = HttpPage::Serve(
      address, {"/metrics", "text/plain; version=0.0.4; charset=utf-8", [this] { return Text(); }});
  if (!page.ok()) {
    return absl::UnavailableError(absl::StrCat("cannot serve metrics on --metrics_listen=", address,
                                               ": the port is taken, or the address is "
                                               "not this machine's"));
  }
  series_->page = *std::move(page);
  return series_->page->port();
}

void Metrics::RequestStarted() {
  series_->started.fetch_add(1, std::memory_order_relaxed);
  series_->inflight.Increment();
}

void Metrics::RequestEnded(Method method, PathLabel path, absl::StatusCode code, double seconds) {
  const auto m = static_cast<size_t>(method);
  const auto p = static_cast<size_t>(path);
  const int c = static_cast<int>(code);
  series_->requests[m][p][c >= 0 && c < kCodes ? c : static_cast<int>(absl::StatusCode::kUnknown)]
      ->Increment();
  series_->request_seconds[m][p]->Observe(seconds);
  series_->inflight.Decrement();
}

void Metrics::JobStarted(int64_t flops) { series_->inflight_flops.Increment(ToDouble(flops)); }

void Metrics::JobEnded(int64_t flops) { series_->inflight_flops.Decrement(ToDouble(flops)); }

void Metrics::JobCompleted(const ComputeRecord& record) {
  const auto path = static_cast<size_t>(LabelOf(record.path));
  const size_t bucket = TokenBucket(record.tokens);
  series_->queue_seconds.Observe(record.queue_seconds);
  series_->compute_seconds[path][bucket]->Observe(record.compute_seconds);
  series_->flops[path]->Increment(ToDouble(record.flops));
  series_->explicit_bytes[bucket]->Increment(ToDouble(record.explicit_bytes));
  core::MutexLock lock(series_->peak_mutex);
  prometheus::Gauge& peak = *series_->peak_workspace[path][bucket];
  peak.Set(std::max(peak.Value(), ToDouble(record.peak_workspace_bytes)));
}

void Metrics::JobCancelled(CancelStage stage) {
  series_->cancelled[static_cast<size_t>(stage)]->Increment();
}

void Metrics::Shed(ShedReason reason) { series_->shed[static_cast<size_t>(reason)]->Increment(); }

void Metrics::SetMemoryBudget(int64_t bytes) { series_->memory_budget.Set(ToDouble(bytes)); }

void Metrics::SetMachinePeak(const core::PeakFlops& peak) {
  series_->peak_float32.Set(peak.float32);
  series_->peak_float64.Set(peak.float64);
}

void Metrics::SetQueueDepthSource(std::function<int64_t()> source) {
  series_->queue_depth.SetSource(std::move(source));
}

void Metrics::SetMemoryReservedSource(std::function<int64_t()> source) {
  series_->memory_reserved.SetSource(std::move(source));
}

Activity Metrics::activity() const {
  return {series_->started.load(std::memory_order_relaxed),
          static_cast<int64_t>(series_->inflight.Value())};
}

std::string Metrics::Text() const {
  std::vector<prometheus::MetricFamily> families = series_->registry->Collect();
  for (const auto& more : {series_->process->Collect(), series_->queue_depth.Collect(),
                           series_->memory_reserved.Collect()}) {
    families.insert(families.end(), more.begin(), more.end());
  }
  return prometheus::TextSerializer().Serialize(families);
}

}  // namespace attendant::server
