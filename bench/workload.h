// A case's tensors in memory, and running it on them.
#ifndef ATTENDANT_BENCH_WORKLOAD_H_
#define ATTENDANT_BENCH_WORKLOAD_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/cases.h"
#include "core/attend.h"
#include "core/gradient.h"
#include "core/kernel.h"
#include "core/problem.h"
#include "core/scheduler.h"
#include "core/workspace.h"

namespace attendant::bench {

// How many copies of a case's keys and values exceed the last-level cache four times over, so that
// none is left of a copy when its turn comes again; 1.5 GiB at most. 1 for a case that is no
// decode.
int64_t CopiesOf(const Case& c);

// Numbers stored as S. Thread-compatible.
template <typename S>
class Workload {
 public:
  struct KeyValue {
    core::Buffer<S> key;
    core::Buffer<S> value;
  };

  // Normal random values, 64-byte aligned. Returns RESOURCE_EXHAUSTED where memory is short.
  static absl::StatusOr<Workload> Make(const Case& c, int64_t copies);

  // Attention over the next copy, or its gradient.
  absl::Status Run(core::Scheduler& scheduler, core::Kernel kernel);
  // The copy after that of the last call, of this or of Run.
  const KeyValue& Next();

  const core::Problem& problem() const { return problem_; }
  const core::Buffer<S>& query() const { return query_; }
  // Most scratch of any run.
  int64_t workspace_bytes() const { return workspace_bytes_; }

 private:
  explicit Workload(const Case& c) : problem_(ProblemOf(c)) {
    if (c.pass != Pass::kForward) gradient_ = GradientOf(c);
  }
  absl::Status MakeMask(Mask mask);
  core::AttendTensors<S> Tensors(const KeyValue& copy);
  absl::Status RunStages(core::Scheduler& scheduler,
                         absl::StatusOr<std::vector<core::Stage>> stages,
                         const core::Workspace& workspace);
  absl::Status RunBackward(core::Scheduler& scheduler, core::Kernel kernel);

  core::Problem problem_;
  core::Buffer<S> query_;
  core::Buffer<unsigned char> mask_;
  std::vector<KeyValue> copies_;
  core::Buffer<S> output_;
  // Of a backward pass alone.
  std::optional<core::GradientProblem> gradient_;
  core::Buffer<S> d_output_;
  core::Buffer<S> d_query_;
  core::Buffer<S> d_key_;
  core::Buffer<S> d_value_;
  core::Buffer<core::Wide<S>> logsumexp_;
  size_t turn_ = 0;
  int64_t workspace_bytes_ = 0;
};

}  // namespace attendant::bench

#endif  // ATTENDANT_BENCH_WORKLOAD_H_
