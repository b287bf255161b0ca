#include "client/cli/call.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <random>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/arrays.h"
#include "client/cli/map.h"
#include "client/cli/npy.h"
#include "core/checked_math.h"
#include "core/half.h"

namespace attendant::cli {
namespace {

struct Inputs {
  Tensor query;
  Tensor key;
  Tensor value;
  size_t rank = 4;  // of the query, before it got four axes
};

std::string NormalBytes(v1::DataType dtype, int64_t count, std::mt19937& generator) {
  return core::WithStored(DTypeOf(dtype), [&]<typename S>() {
    std::normal_distribution<core::Wide<S>> normal;
    std::string bytes(static_cast<size_t>(count) * sizeof(S), '\0');
    auto* const values = reinterpret_cast<S*>(bytes.data());
    for (int64_t i = 0; i < count; ++i) {
      const core::Wide<S> value = normal(generator);
      core::Store(&value, 1, values + i);
    }
    return bytes;
  });
}

absl::StatusOr<Inputs> RandomInputs(const CallArguments& arguments) {
  int64_t bytes = 3 * core::SizeOf(DTypeOf(arguments.random_dtype));
  int64_t count = 1;
  for (const int64_t size : arguments.shape) {
    if (size < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("--shape has ", size, ", sizes must be 0 or more"));
    }
    count = core::SaturatingProduct({count, size});
    bytes = core::SaturatingProduct({bytes, size});
  }
  // More than any server computes at once: a slip of the keyboard.
  constexpr int64_t kMostBytes = int64_t{1} << 36;
  if (bytes > kMostBytes) {
    return absl::InvalidArgumentError(absl::StrCat("--shape=", absl::StrJoin(arguments.shape, ","),
                                                   " makes ", bytes, " bytes of arrays, at most ",
                                                   kMostBytes, " are made"));
  }
  std::mt19937 generator(arguments.random.value_or(0));
  const auto tensor = [&] {
    return Tensor{arguments.random_dtype, arguments.shape,
                  NormalBytes(arguments.random_dtype, count, generator)};
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

// Takes away again what MakeRank4 gave a query of that rank. head_axis: where the tensor has its
// heads; its batch is the first.
void RestoreRank(size_t rank, int head_axis, Tensor& tensor) {
  std::vector<int64_t>& shape = tensor.shape;
  if (rank < 3) shape.erase(shape.begin() + head_axis);
  if (rank < 4) shape.erase(shape.begin());
}

// NumPy has no bfloat16 of its own: what it can hold of one is a float32.
Tensor ForNpy(const Tensor& tensor) {
  if (tensor.dtype != v1::DATA_TYPE_BFLOAT16) return tensor;
  const auto count = static_cast<int64_t>(tensor.bytes.size() / sizeof(core::BFloat16));
  Tensor wide{v1::DATA_TYPE_FLOAT32, tensor.shape,
              std::string(static_cast<size_t>(count) * sizeof(float), '\0')};
  core::Widen(reinterpret_cast<const core::BFloat16*>(tensor.bytes.data()), count,
              reinterpret_cast<float*>(wide.bytes.data()));
  return wide;
}

// Of all results.
void RestoreRanks(size_t rank, v1::Layout layout, AttendResult& result) {
  RestoreRank(rank, layout == v1::LAYOUT_BTHD ? 2 : 1, result.output);
  for (auto* const tensor : {&result.weights, &result.logsumexp, &result.key_sums}) {
    if (tensor->has_value()) RestoreRank(rank, 1, **tensor);
  }
}

absl::Status WriteResults(const CallArguments& arguments, const AttendResult& result) {
  const std::pair<const std::string*, const Tensor*> files[] = {
      {&arguments.out, &result.output},
      {&arguments.out_weights, result.weights ? &*result.weights : nullptr},
      {&arguments.out_logsumexp, result.logsumexp ? &*result.logsumexp : nullptr},
      {&arguments.out_key_sums, result.key_sums ? &*result.key_sums : nullptr}};
  for (const auto& [path, tensor] : files) {
    if (path->empty() || tensor == nullptr) continue;
    if (absl::Status status = WriteNpy(*path, ForNpy(*tensor)); !status.ok()) return status;
  }
  return absl::OkStatus();
}

void PrintWeights(const Tensor& weights, int64_t head) {
  const int64_t queries = weights.shape[weights.shape.size() - 2];
  const int64_t keys = weights.shape.back();
  std::printf(
      "weights    head %lld: %s", static_cast<long long>(head),
      DrawMap(Numbers(weights, head * queries * keys, queries * keys), queries, keys).c_str());
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

void PrintShards(const ShardedResult& result) {
  const char* const by = result.by == ShardBy::kBatch   ? ", by batch"
                         : result.by == ShardBy::kHeads ? ", by heads"
                         : result.by == ShardBy::kKeys  ? ", by keys"
                                                        : "";
  std::printf("shards     %lld%s\n", static_cast<long long>(result.servers), by);
}

}  // namespace

ExitCode RunCall(const Connector& connect, const CallArguments& arguments) {
  const auto inputs = MakeInputs(arguments);
  if (!inputs.ok()) {
    return Fail(arguments.random.has_value() ? kUsage : kBadFile,
                std::string(inputs.status().message()));
  }
  v1::AttendOptions options = arguments.options;
  const int64_t heads =
      inputs->query.shape[options.layout() == v1::LAYOUT_BTHD ? size_t{2} : size_t{1}];
  if (arguments.print_weights.has_value()) {
    if (*arguments.print_weights < 0 || *arguments.print_weights >= heads) {
      return Fail(kUsage, absl::StrCat("--print-weights is ", *arguments.print_weights,
                                       ", must be below the ", heads, " heads"));
    }
    options.set_return_weights(true);
  }
  if (!arguments.out_weights.empty()) options.set_return_weights(true);
  if (!arguments.out_logsumexp.empty()) options.set_return_logsumexp(true);
  if (!arguments.out_key_sums.empty()) options.set_return_key_sums(true);
  if (absl::Status status = ReadMask(arguments.mask, options); !status.ok()) {
    return Fail(kBadFile, std::string(status.message()));
  }
  const auto client = connect();
  if (!client.ok()) return Fail(client.status());
  const auto begin = std::chrono::steady_clock::now();
  auto result = (*client)->AttendSharded(inputs->query.ref(), inputs->key.ref(),
                                         inputs->value.ref(), options, arguments.shard);
  const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - begin;
  if (!result.ok()) return Fail(result.status());
  RestoreRanks(inputs->rank, arguments.options.layout(), *result);
  const absl::Status written = WriteResults(arguments, *result);
  if (!written.ok()) return Fail(kBadFile, std::string(written.message()));
  Print(*result, wall.count());
  if ((*client)->shards() > 1) PrintShards(*result);
  if (arguments.print_weights.has_value() && inputs->query.shape[0] > 0) {
    PrintWeights(*result->weights, *arguments.print_weights);
  }
  return kSuccess;
}

}  // namespace attendant::cli
