#include "client/cli/call.h"

#include <chrono>
#include <cstdio>
#include <limits>
#include <random>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/npy.h"
#include "core/checked_math.h"

namespace attendant::cli {
namespace {

struct Inputs {
  Tensor query;
  Tensor key;
  Tensor value;
  size_t rank = 4;  // of the query, before it got four axes
};

template <typename T>
std::string NormalBytes(int64_t count, std::mt19937& generator) {
  std::normal_distribution<T> normal;
  std::string bytes(static_cast<size_t>(count) * sizeof(T), '\0');
  auto* const values = reinterpret_cast<T*>(bytes.data());
  for (int64_t i = 0; i < count; ++i) values[i] = normal(generator);
  return bytes;
}

absl::StatusOr<Inputs> RandomInputs(const CallArguments& arguments) {
  const bool wide = arguments.random_dtype == v1::DATA_TYPE_FLOAT64;
  int64_t bytes = 3 * (wide ? sizeof(double) : sizeof(float));
  int64_t count = 1;
  for (const int64_t size : arguments.shape) {
    if (size < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("--shape has ", size, ", sizes must be 0 or more"));
    }
    count = core::SaturatingProduct({count, size});
    bytes = core::SaturatingProduct({bytes, size});
  }
  // gRPC keeps a message's length in 31 bits.
  if (bytes > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--shape=", absl::StrJoin(arguments.shape, ","), " makes ", bytes,
                     " bytes of arrays, a message holds less than 2147483648"));
  }
  std::mt19937 generator(arguments.random.value_or(0));
  const auto tensor = [&] {
    return Tensor{
        arguments.random_dtype, arguments.shape,
        wide ? NormalBytes<double>(count, generator) : NormalBytes<float>(count, generator)};
  };
  Inputs inputs;
  inputs.query = tensor();
  inputs.key = tensor();
  inputs.value = tensor();
  return inputs;
}

absl::StatusOr<Inputs> ReadInputs(const CallArguments& arguments) {
  Inputs inputs;
  const std::pair<const std::string*, Tensor*> files[] = {{&arguments.query, &inputs.query},
                                                          {&arguments.key, &inputs.key},
                                                          {&arguments.value, &inputs.value}};
  for (const auto& [path, tensor] : files) {
    auto read = ReadNpy(*path);
    if (!read.ok()) return read.status();
    *tensor = *std::move(read);
  }
  return inputs;
}

// Gives a tensor of rank 2 or 3 the axes it lacks: one batch, one head. name: where it comes from.
absl::Status MakeRank4(const std::string& name, v1::Layout layout, Tensor& tensor) {
  std::vector<int64_t>& shape = tensor.shape;
  if (shape.size() < 2 || shape.size() > 4) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": its shape (", absl::StrJoin(shape, ", "), ") has ", shape.size(),
                     shape.size() == 1 ? " dimension" : " dimensions", ", must have 2 to 4"));
  }
  if (shape.size() == 2) shape.insert(shape.begin() + (layout == v1::LAYOUT_BTHD ? 1 : 0), 1);
  if (shape.size() == 3) shape.insert(shape.begin(), 1);
  return absl::OkStatus();
}

// The arrays with four axes each, and the rank that the query had. An error is the arguments' or a
// file's fault.
absl::StatusOr<Inputs> MakeInputs(const CallArguments& arguments) {
  auto inputs = arguments.random.has_value() ? RandomInputs(arguments) : ReadInputs(arguments);
  if (!inputs.ok()) return inputs;
  inputs->rank = inputs->query.shape.size();
  const bool random = arguments.random.has_value();
  const std::pair<std::string, Tensor*> parts[] = {
      {random ? "--shape" : arguments.query, &inputs->query},
      {random ? "--shape" : arguments.key, &inputs->key},
      {random ? "--shape" : arguments.value, &inputs->value}};
  for (const auto& [name, tensor] : parts) {
    absl::Status status = MakeRank4(name, arguments.options.layout(), *tensor);
    if (!status.ok()) return status;
  }
  return inputs;
}

// Takes away again what MakeRank4 gave a tensor of that rank.
void RestoreRank(size_t rank, v1::Layout layout, Tensor& tensor) {
  std::vector<int64_t>& shape = tensor.shape;
  if (rank < 4) shape.erase(shape.begin());
  if (rank < 3) shape.erase(shape.begin() + (layout == v1::LAYOUT_BTHD ? 1 : 0));
}

void Print(const AttendResult& result, double wall_seconds) {
  const v1::Stats& stats = result.stats;
  const double gflops = stats.compute_seconds() > 0
                            ? static_cast<double>(stats.flops()) / stats.compute_seconds() / 1e9
                            : 0;
  std::string path = v1::Path_Name(stats.path());
  path = absl::AsciiStrToLower(path.substr(std::string("PATH_").size()));
  std::printf("output     (%s)\n", absl::StrJoin(result.output.shape, ", ").c_str());
  std::printf("path       %s (%s, %lld threads)\n", path.c_str(), stats.kernel().c_str(),
              static_cast<long long>(stats.threads()));
  std::printf("time       %.3f ms: %.3f ms of compute, %.3f ms of waiting for it\n",
              wall_seconds * 1e3, stats.compute_seconds() * 1e3, stats.queue_seconds() * 1e3);
  std::printf("FLOPs      %lld\n", static_cast<long long>(stats.flops()));
  std::printf("GFLOP/s    %.1f\n", gflops);
  std::printf("workspace  %lld bytes\n", static_cast<long long>(stats.peak_workspace_bytes()));
}

}  // namespace

ExitCode RunCall(const Connector& connect, const CallArguments& arguments) {
  const auto inputs = MakeInputs(arguments);
  if (!inputs.ok()) {
    return Fail(arguments.random.has_value() ? kUsage : kBadFile,
                std::string(inputs.status().message()));
  }
  v1::AttendOptions options = arguments.options;
  if (!arguments.mask.empty()) {
    auto mask = ReadNpy(arguments.mask);
    if (!mask.ok()) return Fail(kBadFile, std::string(mask.status().message()));
    options.mutable_mask()->set_dtype(mask->dtype);
    options.mutable_mask()->mutable_shape()->Assign(mask->shape.begin(), mask->shape.end());
    options.mutable_mask()->set_data(std::move(mask->bytes));
  }
  const auto client = connect();
  if (!client.ok()) return Fail(client.status());
  const auto begin = std::chrono::steady_clock::now();
  auto result =
      (*client)->Attend(inputs->query.ref(), inputs->key.ref(), inputs->value.ref(), options);
  const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - begin;
  if (!result.ok()) return Fail(result.status());
  RestoreRank(inputs->rank, arguments.options.layout(), result->output);
  if (!arguments.out.empty()) {
    absl::Status status = WriteNpy(arguments.out, result->output);
    if (!status.ok()) return Fail(kBadFile, std::string(status.message()));
  }
  Print(*result, wall.count());
  return kSuccess;
}

}  // namespace attendant::cli
