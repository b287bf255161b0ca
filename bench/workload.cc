#include "bench/workload.h"

#include <algorithm>
#include <random>
#include <utility>

#include "bench/memory.h"
#include "core/attend.h"
#include "core/half.h"

namespace attendant::bench {
namespace {

constexpr int64_t kMostBytes = int64_t{3} << 29;

// Drawing is slower than what is measured, so that values repeat: after a prime number of them, for
// no row to be another's.
constexpr int64_t kDrawn = 1'000'003;

template <typename S>
std::vector<S> Draw() {
  std::mt19937 generator(1);
  std::normal_distribution<core::Wide<S>> normal;
  std::vector<core::Wide<S>> values(kDrawn);
  for (core::Wide<S>& value : values) value = normal(generator);
  std::vector<S> stored(kDrawn);
  core::Store(values.data(), kDrawn, stored.data());
  return stored;
}

template <typename S>
absl::Status AllocateAndFill(int64_t count, int64_t first, core::Buffer<S>& buffer) {
  static const auto* const drawn = new std::vector<S>(Draw<S>());
  auto allocated = core::Workspace::Process().Allocate<S>(count);
  if (!allocated.ok()) return allocated.status();
  buffer = *std::move(allocated);
  for (int64_t i = 0; i < count;) {
    const int64_t from = (first + i) % kDrawn;
    const int64_t run = std::min(kDrawn - from, count - i);
    std::copy_n(drawn->data() + from, run, buffer.data() + i);
    i += run;
  }
  return absl::OkStatus();
}

}  // namespace

int64_t CopiesOf(const Case& c) {
  if (!c.decode) return 1;
  const int64_t bytes = 2 * c.batch * c.kv_heads * c.keys * c.width * core::SizeOf(c.dtype);
  return std::max<int64_t>(std::min(4 * LastLevelCacheBytes(), kMostBytes) / bytes + 1, 1);
}

template <typename S>
absl::StatusOr<Workload<S>> Workload<S>::Make(const Case& c, int64_t copies) {
  Workload workload(c);
  const int64_t queries = c.batch * c.heads * c.queries * c.width;
  const int64_t keys = c.batch * c.kv_heads * c.keys * c.width;
  workload.copies_.resize(copies);
  std::vector<std::pair<core::Buffer<S>*, int64_t>> buffers = {{&workload.query_, queries},
                                                               {&workload.output_, queries}};
  for (KeyValue& copy : workload.copies_) {
    buffers.push_back({&copy.key, keys});
    buffers.push_back({&copy.value, keys});
  }
  if (c.pass != Pass::kForward) {
    buffers.push_back({&workload.d_output_, queries});
    buffers.push_back({&workload.d_query_, queries});
    buffers.push_back({&workload.d_key_, keys});
    buffers.push_back({&workload.d_value_, keys});
  }
  int64_t first = 0;
  for (const auto& [buffer, count] : buffers) {
    if (absl::Status status = AllocateAndFill(count, first, *buffer); !status.ok()) return status;
    first += count;
  }
  if (absl::Status status = workload.MakeMask(c.mask); !status.ok()) return status;
  return workload;
}

template <typename S>
absl::Status Workload<S>::MakeMask(Mask mask) {
  if (mask == Mask::kNone) return absl::OkStatus();
  const int64_t count = problem_.queries * problem_.keys;
  auto bytes = core::Workspace::Process().Allocate<unsigned char>(
      count * core::SizeOf(problem_.mask->dtype));
  if (!bytes.ok()) return bytes.status();
  mask_ = *std::move(bytes);
  std::mt19937 generator(2);
  std::normal_distribution<core::Wide<S>> normal;
  for (int64_t i = 0; i < count; ++i) {
    if (mask == Mask::kBool) {
      mask_.data()[i] = generator() % 2;
      continue;
    }
    const bool far = mask == Mask::kFar && generator() % 10 != 0;
    const core::Wide<S> number = far ? -1e30f : normal(generator);
    core::Store(&number, 1, reinterpret_cast<S*>(mask_.data()) + i);
  }
  return absl::OkStatus();
}

template <typename S>
core::AttendTensors<S> Workload<S>::Tensors(const KeyValue& copy) {
  const core::Problem& p = problem_;
  const auto view = [&](auto* data, int64_t heads, int64_t tokens) {
    return core::TensorView(data, p.layout, heads, tokens, p.width);
  };
  core::AttendTensors<S> tensors;
  tensors.query = view(static_cast<const S*>(query_.data()), p.heads, p.queries);
  tensors.key = view(static_cast<const S*>(copy.key.data()), p.kv_heads, p.keys);
  tensors.value = view(static_cast<const S*>(copy.value.data()), p.kv_heads, p.keys);
  tensors.mask = mask_.data();
  tensors.output = view(output_.data(), p.heads, p.queries);
  return tensors;
}

template <typename S>
absl::Status Workload<S>::RunStages(core::Scheduler& scheduler,
                                    absl::StatusOr<std::vector<core::Stage>> stages,
                                    const core::Workspace& workspace) {
  if (!stages.ok()) return stages.status();
  absl::Status status = scheduler.Run(*std::move(stages));
  workspace_bytes_ = std::max(workspace_bytes_, workspace.peak_bytes());
  return status;
}

template <typename S>
absl::Status Workload<S>::Run(core::Scheduler& scheduler, core::Kernel kernel) {
  if (gradient_.has_value()) return RunBackward(scheduler, kernel);
  core::Workspace workspace;
  return RunStages(
      scheduler,
      core::AttendStages<S>(problem_, Tensors(Next()), {&workspace, scheduler.threads(), kernel}),
      workspace);
}

template <typename S>
absl::Status Workload<S>::RunBackward(core::Scheduler& scheduler, core::Kernel kernel) {
  const core::Problem& p = problem_;
  core::AttendTensors<S> forward = Tensors(Next());
  core::Workspace workspace;
  const core::Resources resources{&workspace, scheduler.threads(), kernel};
  if (gradient_->given && logsumexp_.data() == nullptr) {
    auto logsumexp =
        core::Workspace::Process().Allocate<core::Wide<S>>(p.batch * p.heads * p.queries);
    if (!logsumexp.ok()) return logsumexp.status();
    logsumexp_ = *std::move(logsumexp);
    forward.logsumexp = logsumexp_.data();
    auto stages = core::AttendStages<S>(p, forward, resources);
    if (!stages.ok()) return stages.status();
    absl::Status status = scheduler.Run(*std::move(stages));
    if (!status.ok()) return status;
  }
  core::GradientTensors<S> tensors;
  tensors.query = forward.query;
  tensors.key = forward.key;
  tensors.value = forward.value;
  tensors.mask = forward.mask;
  tensors.output = {output_.data(), p.layout, p.heads, p.queries, p.value_width};
  tensors.logsumexp = logsumexp_.data();
  tensors.d_output =
      core::TensorView<const S>(d_output_.data(), p.layout, p.heads, p.queries, p.value_width)
          .Strided();
  tensors.d_query = {d_query_.data(), p.layout, p.heads, p.queries, p.width};
  tensors.d_key = {d_key_.data(), p.layout, p.kv_heads, p.keys, p.width};
  tensors.d_value = {d_value_.data(), p.layout, p.kv_heads, p.keys, p.value_width};
  return RunStages(scheduler, core::GradientStages<S>(*gradient_, tensors, resources), workspace);
}

template <typename S>
const typename Workload<S>::KeyValue& Workload<S>::Next() {
  turn_ = (turn_ + 1) % copies_.size();
  return copies_[turn_];
}

template class Workload<float>;
template class Workload<double>;
template class Workload<core::Float16>;
template class Workload<core::BFloat16>;

}  // namespace attendant::bench
