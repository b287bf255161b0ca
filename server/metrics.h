// What Prometheus sees. The only file pair that knows prometheus-cpp.
//
// Labels come from fixed lists, never from a shape, a peer or a caller's string, and every series
// exists from the start, at zero.
#ifndef ATTENDANT_SERVER_METRICS_H_
#define ATTENDANT_SERVER_METRICS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/machine.h"
#include "core/problem.h"

namespace attendant::server {

// The rpcs that are served; kUnknown is what nobody serves.
enum class Method {
  kAttend,
  kAttendStream,
  kHead,
  kBackward,
  kMerge,
  kCheck,
  kEstimate,
  kInfo,
  kUnknown
};

// Path as a label: kNone before one is known.
enum class PathLabel { kExplicit, kChunked, kNone };

constexpr PathLabel LabelOf(core::Path path) {
  return path == core::Path::kExplicit ? PathLabel::kExplicit : PathLabel::kChunked;
}

// Where a call was when it was cancelled. Only streams are seen while they are received or sent.
enum class CancelStage { kReceive, kQueue, kCompute, kSend };

// Why a call was turned away. kMemory: there is none now; kNeverFits: the call is too large for
// this server, or computes for too long, however idle it is.
enum class ShedReason { kDraining, kMemory, kQueueFull, kQueueWait, kNeverFits };

// What a completed job took.
struct ComputeRecord {
  core::Path path = core::Path::kChunked;
  int64_t tokens = 0;  // max(Tq, Tk)
  double queue_seconds = 0;
  double compute_seconds = 0;
  int64_t flops = 0;
  int64_t peak_workspace_bytes = 0;
  int64_t explicit_bytes = 0;  // of workspace, had the call been explicit
};

// How busy the server is.
struct Activity {
  int64_t started = 0;  // requests since the start
  int64_t running = 0;  // of them not answered yet
};

// Thread-safe.
class Metrics {
 public:
  struct BuildInfo {
    std::string version;
    std::string kernel;
    std::string simd;
  };

  explicit Metrics(const BuildInfo& build_info);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // Serves /metrics over HTTP on "host:port" until destruction; port 0 picks a free one. Returns
  // the port, or UNAVAILABLE naming the address where it cannot be listened on.
  absl::StatusOr<int> Listen(const std::string& address);

  void RequestStarted();
  // Once for each started request.
  void RequestEnded(Method method, PathLabel path, absl::StatusCode code, double seconds);

  // In pairs, around a job.
  void JobStarted(int64_t flops);
  void JobEnded(int64_t flops);
  void JobCompleted(const ComputeRecord& record);
  void JobCancelled(CancelStage stage);

  void Shed(ShedReason reason);
  void SetMemoryBudget(int64_t bytes);
  void SetMachinePeak(const core::PeakFlops& peak);

  // Where the number of jobs that wait, and what is reserved of the budget, are read at each
  // scrape; null: nowhere any more, from when this returns.
  void SetQueueDepthSource(std::function<int64_t()> source);
  void SetMemoryReservedSource(std::function<int64_t()> source);

  Activity activity() const;

  // The page as text, as a scrape would get it.
  std::string Text() const;

 private:
  class Series;
  std::unique_ptr<Series> series_;
};

}  // namespace attendant::server

#endif  // ATTENDANT_SERVER_METRICS_H_
