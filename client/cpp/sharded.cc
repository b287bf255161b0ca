#include "client/cpp/sharded.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <functional>
#include <limits>
#include <new>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cpp/call_group.h"
#include "client/cpp/shard_plan.h"
#include "client/cpp/tensor_slice.h"
#include "core/checked_math.h"
#include "core/mutex.h"

namespace attendant {
namespace {

// A problem that is cut: its options are without the mask, which is a tensor like the others.
struct Parts {
  TensorSlice query;
  TensorSlice key;
  TensorSlice value;
  std::optional<TensorSlice> mask;
  v1::AttendOptions options;
};

void CutBatch(Range range, Parts* parts) {
  for (TensorSlice* const tensor : {&parts->query, &parts->key, &parts->value}) {
    *tensor = SliceOf(*tensor, 0, range);
  }
  CutMask(0, range, &parts->mask);
  KeepBatch(range, &parts->options);
}

// range: of key heads.
void CutHeads(const ShardSizes& sizes, Range range, Parts* parts) {
  const int64_t group = sizes.heads / sizes.kv_heads;
  const Range heads = {range.begin * group, range.end * group};
  parts->query = SliceOf(parts->query, sizes.heads_axis, heads);
  parts->key = SliceOf(parts->key, sizes.heads_axis, range);
  parts->value = SliceOf(parts->value, sizes.heads_axis, range);
  CutMask(1, heads, &parts->mask);
  KeepHeads(heads, &parts->options);
}

// ALiBi of a block whose queries are all on one side of its keys, as far as it depends on the key:
// -slope |from - j|, (1, H, 1, keys), and always a number.
template <typename T>
TensorSlice AlibiMask(const v1::AttendOptions& options, const KeyBlock& block, v1::DataType dtype) {
  auto bytes = std::make_shared<std::string>();
  for (const double slope : options.alibi_slopes()) {
    for (int64_t j = block.keys.begin; j < block.keys.end; ++j) {
      const double bias = -slope * static_cast<double>(std::abs(*block.alibi_from - j));
      constexpr double kLargest = static_cast<double>(std::numeric_limits<T>::max());
      const T number = static_cast<T>(std::clamp(bias, -kLargest, kLargest));
      bytes->append(reinterpret_cast<const char*>(&number), sizeof(number));
    }
  }
  return {{dtype, {1, options.alibi_slopes_size(), 1, block.keys.size()}, *bytes}, bytes};
}

bool IsDouble(const ShardSizes& sizes) { return sizes.dtype == v1::DATA_TYPE_FLOAT64; }

// What a server is asked for a block, from the whole.
Parts CutKeys(const ShardSizes& sizes, const KeyBlock& block, Parts parts) {
  CutBatch(block.batch, &parts);
  parts.query = SliceOf(parts.query, sizes.tokens_axis, block.queries);
  parts.key = SliceOf(parts.key, sizes.tokens_axis, block.keys);
  parts.value = SliceOf(parts.value, sizes.tokens_axis, block.keys);
  CutMask(2, block.queries, &parts.mask);
  CutMask(3, block.keys, &parts.mask);
  v1::AttendOptions& options = parts.options;
  options.set_return_logsumexp(true);
  options.clear_sinks();
  options.set_causal(block.causal);
  options.clear_window();
  if (block.left.has_value()) options.mutable_window()->set_left(*block.left);
  if (block.right.has_value()) options.mutable_window()->set_right(*block.right);
  options.mutable_key_lengths()->Assign(block.key_lengths.begin(), block.key_lengths.end());
  if (block.alibi_from.has_value()) {
    parts.mask = IsDouble(sizes) ? AlibiMask<double>(options, block, WideOf(sizes.dtype))
                                 : AlibiMask<float>(options, block, WideOf(sizes.dtype));
    options.clear_alibi_slopes();
  }
  return parts;
}

// Takes off a block's logsumexp what its mask left out of ALiBi: slope |p - from|.
template <typename T>
void TakeOffAlibi(const ShardSizes& sizes, const v1::AttendOptions& options, const KeyBlock& block,
                  Tensor* logsumexp) {
  auto* row = reinterpret_cast<T*>(logsumexp->bytes.data());
  for (int64_t batch = block.batch.begin; batch < block.batch.end; ++batch) {
    const int64_t offset = QueryOffset(sizes, options, batch);
    for (const double slope : options.alibi_slopes()) {
      for (int64_t i = block.queries.begin; i < block.queries.end; ++i, ++row) {
        if (std::isinf(*row)) continue;  // sees no key
        const int64_t distance = std::abs(i + offset - *block.alibi_from);
        *row = static_cast<T>(static_cast<double>(*row) - slope * static_cast<double>(distance));
      }
    }
  }
}

// Attention over a range of the keys, for all queries.
struct KeyPart {
  Tensor output;     // as the problem's
  Tensor logsumexp;  // (B, H, Tq)
};

// A server's share of the keys, the calls for it, and what comes of them.
struct KeyShard {
  Range keys;
  std::vector<KeyBlock> blocks;
  KeyPart part;
  v1::Stats stats;
};

template <typename T>
Tensor FilledWith(v1::DataType dtype, std::vector<int64_t> shape, T number) {
  Tensor tensor = ZerosOf(dtype, std::move(shape));
  auto* const numbers = reinterpret_cast<T*>(tensor.bytes.data());
  std::fill_n(numbers, tensor.bytes.size() / sizeof(T), number);
  return tensor;
}

KeyPart EmptyPart(const ShardSizes& sizes) {
  const std::vector<int64_t> rows = {sizes.batch, sizes.heads, sizes.queries};
  constexpr double kEmpty = -std::numeric_limits<double>::infinity();
  return {ZerosOf(sizes.dtype, OutputShape(sizes, sizes.batch, sizes.queries)),
          IsDouble(sizes) ? FilledWith(WideOf(sizes.dtype), rows, kEmpty)
                          : FilledWith(WideOf(sizes.dtype), rows, static_cast<float>(kEmpty))};
}

template <typename T>
void FillWithSinks(const ShardSizes& sizes, const v1::AttendOptions& options, Tensor* logsumexp) {
  auto* row = reinterpret_cast<T*>(logsumexp->bytes.data());
  for (int64_t batch = 0; batch < sizes.batch; ++batch) {
    for (const double sink : options.sinks()) {
      row = std::fill_n(row, sizes.queries, static_cast<T>(sink));
    }
  }
}

// The sinks as a part: they weigh, and have no values.
KeyPart SinkPart(const ShardSizes& sizes, const v1::AttendOptions& options) {
  KeyPart part = EmptyPart(sizes);
  if (IsDouble(sizes)) {
    FillWithSinks<double>(sizes, options, &part.logsumexp);
  } else {
    FillWithSinks<float>(sizes, options, &part.logsumexp);
  }
  return part;
}

// (B, x, y) as (B, y, x).
Tensor SwapLastAxes(const Tensor& from) {
  const auto element = static_cast<size_t>(ElementBytes(from.dtype));
  const auto rows = static_cast<size_t>(from.shape[1]);
  const auto columns = static_cast<size_t>(from.shape[2]);
  Tensor to{from.dtype, {from.shape[0], from.shape[2], from.shape[1]}, ""};
  to.bytes.reserve(from.bytes.size());
  for (size_t batch = 0; batch < static_cast<size_t>(from.shape[0]); ++batch) {
    for (size_t column = 0; column < columns; ++column) {
      for (size_t row = 0; row < rows; ++row) {
        to.bytes.append(from.bytes, ((batch * rows + row) * columns + column) * element, element);
      }
    }
  }
  return to;
}

// An answer whose optional tensors are there where they were asked for, all of the right shape.
absl::Status CheckAnswer(const ShardSizes& sizes, const v1::AttendOptions& options,
                         const AttendResult& result) {
  absl::Status status = CheckAnswer("output", result.output, sizes.dtype,
                                    OutputShape(sizes, sizes.batch, sizes.queries));
  const auto check = [&](bool asked, const char* name, const std::optional<Tensor>& tensor,
                         v1::DataType dtype, const std::vector<int64_t>& shape) {
    if (status.ok() && asked) status = CheckAnswer(name, tensor.value_or(Tensor{}), dtype, shape);
  };
  check(options.return_weights(), "weights", result.weights, sizes.dtype,
        {sizes.batch, sizes.heads, sizes.queries, sizes.keys});
  check(options.return_logsumexp(), "logsumexp", result.logsumexp, WideOf(sizes.dtype),
        {sizes.batch, sizes.heads, sizes.queries});
  check(options.return_key_sums(), "key_sums", result.key_sums, WideOf(sizes.dtype),
        {sizes.batch, sizes.heads, sizes.keys});
  return status;
}

// Runs call(0) .. call(count - 1) at once, each on a thread of its own as long as there are any.
// The first that fails stops the calls of the group, and its status is returned.
absl::Status RunAll(size_t count, CallGroup& group,
                    const std::function<absl::Status(size_t)>& call) {
  core::Mutex mutex;
  absl::Status first;
  const auto run = [&](size_t index) {
    absl::Status status = absl::ResourceExhaustedError("out of memory");
    try {
      status = call(index);
    } catch (const std::bad_alloc&) {
    }
    if (status.ok()) return;
    core::MutexLock lock(mutex);
    if (!first.ok()) return;
    first = std::move(status);
    group.Cancel();
  };
  std::vector<std::thread> threads;
  threads.reserve(count);
  size_t started = 1;
  try {
    for (; started < count; ++started) threads.emplace_back(run, started);
  } catch (const std::exception&) {
    // The system has no more, or no memory for one: the rest runs on this one.
  }
  if (count > 0) run(0);
  for (size_t index = started; index < count; ++index) run(index);
  for (std::thread& thread : threads) thread.join();
  return first;
}

}  // namespace

struct ShardedClient::Server {
  std::string address;
  std::shared_ptr<Client> client;
};

namespace {

absl::StatusOr<AttendResult> Call(Client& client, const Parts& parts, CallGroup& group) {
  if (!parts.mask.has_value()) {
    return client.Attend(parts.query.ref, parts.key.ref, parts.value.ref, parts.options, &group);
  }
  v1::AttendOptions options = parts.options;
  SetMask(parts.mask->ref, &options);
  return client.Attend(parts.query.ref, parts.key.ref, parts.value.ref, options, &group);
}

}  // namespace

// One call of AttendSharded.
class ShardedClient::Work {
 public:
  Work(const std::vector<Server>& servers, const ShardSizes& sizes, const Parts& whole,
       CallGroup& group)
      : servers_(servers), sizes_(sizes), whole_(whole), group_(group) {}

  // Nothing where there is no more than one part.
  std::optional<absl::StatusOr<ShardedResult>> ByRows(ShardBy by);
  std::optional<absl::StatusOr<ShardedResult>> ByKeys();

 private:
  int64_t servers() const { return static_cast<int64_t>(servers_.size()); }
  std::string Label(size_t shard, size_t shards, const char* unit, Range range) const {
    return absl::StrCat("shard ", shard + 1, " of ", shards, " (", unit, " ", range.begin, " to ",
                        range.end - 1, ") at ", servers_[shard].address);
  }
  absl::Status AttendRows(ShardBy by, Range range, Client& client, AttendResult* result) const;
  std::vector<KeyShard> KeyShards() const;
  absl::Status AttendBlock(const KeyBlock& block, Client& client, KeyShard* shard) const;
  absl::StatusOr<MergeResult> MergeRows(const std::vector<KeyPart>& parts, Range range,
                                        Client& client) const;
  absl::StatusOr<KeyPart> Merged(std::vector<KeyPart> parts) const;

  const std::vector<Server>& servers_;
  const ShardSizes& sizes_;
  const Parts& whole_;
  CallGroup& group_;
};

namespace {

// The parts' tensors as one, in order; each is released as soon as it is copied.
Tensor Joined(std::vector<AttendResult>& results, Tensor& (*tensor)(AttendResult&), size_t axis) {
  Tensor whole{tensor(results[0]).dtype, tensor(results[0]).shape, ""};
  whole.shape[axis] = 0;
  for (AttendResult& result : results) whole.shape[axis] += tensor(result).shape[axis];
  whole = ZerosOf(whole.dtype, std::move(whole.shape));
  int64_t begin = 0;
  for (AttendResult& result : results) {
    Tensor& part = tensor(result);
    Place(part, axis == 0 ? begin : 0, std::max<size_t>(axis, 1), axis == 0 ? 0 : begin, &whole);
    begin += part.shape[axis];
    part.bytes = std::string();
  }
  return whole;
}

}  // namespace

// range: of the batch, or of key heads.
absl::Status ShardedClient::Work::AttendRows(ShardBy by, Range range, Client& client,
                                             AttendResult* result) const {
  Parts parts = whole_;
  ShardSizes sizes = sizes_;
  if (by == ShardBy::kBatch) {
    CutBatch(range, &parts);
    sizes.batch = range.size();
  } else {
    CutHeads(sizes_, range, &parts);
    sizes.heads = sizes_.heads / sizes_.kv_heads * range.size();
  }
  auto answer = Call(client, parts, group_);
  if (!answer.ok()) return answer.status();
  *result = *std::move(answer);
  return CheckAnswer(sizes, parts.options, *result);
}

std::optional<absl::StatusOr<ShardedResult>> ShardedClient::Work::ByRows(ShardBy by) {
  const bool by_batch = by == ShardBy::kBatch;
  const std::vector<Range> ranges =
      SplitEvenly(by_batch ? sizes_.batch : sizes_.kv_heads, servers());
  if (ranges.size() <= 1) return std::nullopt;
  std::vector<AttendResult> results(ranges.size());
  absl::Status status = RunAll(ranges.size(), group_, [&](size_t i) {
    absl::Status attended = AttendRows(by, ranges[i], *servers_[i].client, &results[i]);
    if (attended.ok()) return attended;
    return Labelled(Label(i, ranges.size(), by_batch ? "batch" : "key heads", ranges[i]), attended);
  });
  if (!status.ok()) return status;
  ShardedResult whole;
  whole.by = by;
  whole.servers = static_cast<int64_t>(ranges.size());
  for (const AttendResult& result : results) AddStats(result.stats, true, &whole.stats);
  whole.output = Joined(
      results, [](AttendResult& r) -> Tensor& { return r.output; },
      by_batch ? 0 : sizes_.heads_axis);
  const size_t axis = by_batch ? 0 : 1;
  const v1::AttendOptions& options = whole_.options;
  if (options.return_weights()) {
    whole.weights = Joined(
        results, [](AttendResult& r) -> Tensor& { return *r.weights; }, axis);
  }
  if (options.return_logsumexp()) {
    whole.logsumexp = Joined(
        results, [](AttendResult& r) -> Tensor& { return *r.logsumexp; }, axis);
  }
  if (options.return_key_sums()) {
    whole.key_sums = Joined(
        results, [](AttendResult& r) -> Tensor& { return *r.key_sums; }, axis);
  }
  return whole;
}

// The shard's part is made here where the block is not all of it.
absl::Status ShardedClient::Work::AttendBlock(const KeyBlock& block, Client& client,
                                              KeyShard* shard) const {
  const Parts parts = CutKeys(sizes_, block, whole_);
  auto result = Call(client, parts, group_);
  if (!result.ok()) return result.status();
  ShardSizes sizes = sizes_;
  sizes.batch = block.batch.size();
  sizes.queries = block.queries.size();
  sizes.keys = block.keys.size();
  absl::Status status = CheckAnswer(sizes, parts.options, *result);
  if (!status.ok()) return status;
  if (block.alibi_from.has_value()) {
    if (IsDouble(sizes_)) {
      TakeOffAlibi<double>(sizes_, whole_.options, block, &*result->logsumexp);
    } else {
      TakeOffAlibi<float>(sizes_, whole_.options, block, &*result->logsumexp);
    }
  }
  AddStats(result->stats, false, &shard->stats);
  KeyPart* const part = &shard->part;
  if (sizes.batch == sizes_.batch && sizes.queries == sizes_.queries) {
    *part = {std::move(result->output), *std::move(result->logsumexp)};
    return absl::OkStatus();
  }
  if (part->output.shape.empty()) *part = EmptyPart(sizes_);
  Place(result->output, block.batch.begin, sizes_.tokens_axis, block.queries.begin, &part->output);
  Place(*result->logsumexp, block.batch.begin, 2, block.queries.begin, &part->logsumexp);
  return absl::OkStatus();
}

// Rows `range` of all heads and batches, one after the other: parts[0] has the place of the result.
absl::StatusOr<MergeResult> ShardedClient::Work::MergeRows(const std::vector<KeyPart>& parts,
                                                           Range range, Client& client) const {
  std::vector<MergePart> of_rows;
  const std::vector<int64_t> rows = {1, 1, range.size()};
  const std::vector<int64_t> outputs = {1, 1, range.size(), sizes_.value_width};
  for (const KeyPart& part : parts) {
    const auto flat = [&](const Tensor& tensor, const std::vector<int64_t>& shape) {
      const auto row =
          static_cast<size_t>(ProductOf(shape, 3, shape.size()) * ElementBytes(tensor.dtype));
      return TensorRef(tensor.dtype, shape,
                       absl::string_view(tensor.bytes)
                           .substr(row * static_cast<size_t>(range.begin),
                                   row * static_cast<size_t>(range.size())));
    };
    of_rows.push_back({flat(part.output, outputs), flat(part.logsumexp, rows)});
  }
  auto result = client.Merge(of_rows, &group_);
  if (!result.ok()) return result;
  for (absl::Status status :
       {CheckAnswer("output", result->output, sizes_.dtype, outputs),
        CheckAnswer("logsumexp", result->logsumexp, WideOf(sizes_.dtype), rows)}) {
    if (!status.ok()) return status;
  }
  return result;
}

// The parts merged, each server taking a share of the rows: what is sent and computed for it is
// spread as the attention was. Merge asks of rows only that each has its logsumexp, so that they
// may stand in the order of either layout.
absl::StatusOr<KeyPart> ShardedClient::Work::Merged(std::vector<KeyPart> parts) const {
  if (parts.size() == 1) return std::move(parts[0]);
  const bool tokens_first = sizes_.tokens_axis == 1;
  if (tokens_first) {
    for (KeyPart& part : parts) part.logsumexp = SwapLastAxes(part.logsumexp);
  }
  const std::vector<Range> ranges =
      SplitEvenly(sizes_.batch * sizes_.heads * sizes_.queries, servers());
  std::vector<MergeResult> merged(ranges.size());
  absl::Status status = RunAll(ranges.size(), group_, [&](size_t i) {
    auto result = MergeRows(parts, ranges[i], *servers_[i].client);
    if (!result.ok()) {
      return Labelled(absl::StrCat("merging rows ", ranges[i].begin, " to ", ranges[i].end - 1,
                                   " at ", servers_[i].address),
                      result.status());
    }
    merged[i] = *std::move(result);
    return absl::OkStatus();
  });
  if (!status.ok()) return status;
  KeyPart whole = std::move(parts[0]);
  whole.output.bytes.clear();
  whole.logsumexp.bytes.clear();
  for (const MergeResult& result : merged) {
    whole.output.bytes += result.output.bytes;
    whole.logsumexp.bytes += result.logsumexp.bytes;
  }
  if (tokens_first) whole.logsumexp = SwapLastAxes(whole.logsumexp);
  return whole;
}

std::vector<KeyShard> ShardedClient::Work::KeyShards() const {
  std::vector<KeyShard> shards;
  if (sizes_.keys <= 1 || sizes_.batch * sizes_.heads * sizes_.queries == 0) return shards;
  for (const Range keys : SplitEvenly(sizes_.keys, servers())) {
    KeyShard shard;
    shard.keys = keys;
    shard.blocks = KeyBlocksOf(sizes_, whole_.options, keys);
    // Keys that nobody sees are not sent.
    if (!shard.blocks.empty()) shards.push_back(std::move(shard));
  }
  return shards;
}

std::optional<absl::StatusOr<ShardedResult>> ShardedClient::Work::ByKeys() {
  std::vector<KeyShard> shards = KeyShards();
  if (shards.empty()) return std::nullopt;
  absl::Status status = RunAll(shards.size(), group_, [&](size_t i) {
    for (const KeyBlock& block : shards[i].blocks) {
      absl::Status attended = AttendBlock(block, *servers_[i].client, &shards[i]);
      if (attended.ok()) continue;
      return Labelled(Label(i, shards.size(), "keys", shards[i].keys), attended);
    }
    return absl::OkStatus();
  });
  if (!status.ok()) return status;
  ShardedResult result;
  result.by = ShardBy::kKeys;
  result.servers = static_cast<int64_t>(shards.size());
  std::vector<KeyPart> parts;
  for (KeyShard& shard : shards) {
    AddStats(shard.stats, true, &result.stats);
    parts.push_back(std::move(shard.part));
  }
  if (!whole_.options.sinks().empty()) parts.push_back(SinkPart(sizes_, whole_.options));
  auto merged = Merged(std::move(parts));
  if (!merged.ok()) return merged.status();
  result.output = std::move(merged->output);
  if (whole_.options.return_logsumexp()) result.logsumexp = std::move(merged->logsumexp);
  return result;
}

ShardedClient::ShardedClient(std::vector<Server> servers, const ClientOptions& options)
    : servers_(std::move(servers)), options_(options) {}

ShardedClient::~ShardedClient() = default;

int64_t ShardedClient::shards() const { return static_cast<int64_t>(servers_.size()); }

absl::StatusOr<std::unique_ptr<ShardedClient>> ShardedClient::Connect(
    const std::vector<std::string>& addresses, const ClientOptions& options) {
  if (addresses.empty()) return absl::InvalidArgumentError("no server's address was given");
  std::vector<Server> servers(addresses.size());
  CallGroup group(options.connect_timeout);
  absl::Status status = RunAll(addresses.size(), group, [&](size_t i) {
    auto client = Client::Connect(addresses[i], options);
    if (!client.ok()) return client.status();
    servers[i] = {addresses[i], *std::move(client)};
    return absl::OkStatus();
  });
  if (!status.ok()) return status;
  return std::unique_ptr<ShardedClient>(new ShardedClient(std::move(servers), options));
}

absl::StatusOr<std::unique_ptr<ShardedClient>> ShardedClient::ConnectBalanced(
    const std::string& name, int64_t shards, ClientOptions options) {
  if (shards < 1) {
    return absl::InvalidArgumentError(absl::StrCat("shards is ", shards, ", must be 1 or more"));
  }
  options.round_robin = true;
  auto client = Client::Connect(name, options);
  if (!client.ok()) return client.status();
  const Server server = {name, *std::move(client)};
  return std::unique_ptr<ShardedClient>(
      new ShardedClient(std::vector<Server>(static_cast<size_t>(shards), server), options));
}

absl::StatusOr<ShardedResult> ShardedClient::AttendSharded(const TensorRef& query,
                                                           const TensorRef& key,
                                                           const TensorRef& value,
                                                           const v1::AttendOptions& options,
                                                           ShardBy by) {
  // Parts have memory of their own; nothing else throws.
  try {
    return AttendParts(query, key, value, options, by);
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("out of memory");
  }
}

absl::StatusOr<ShardedResult> ShardedClient::AttendParts(const TensorRef& query,
                                                         const TensorRef& key,
                                                         const TensorRef& value,
                                                         const v1::AttendOptions& options,
                                                         ShardBy by) {
  CallGroup group(options_.call_timeout);
  const auto on_one_server = [&]() -> absl::StatusOr<ShardedResult> {
    auto result = servers_[0].client->Attend(query, key, value, options, &group);
    if (result.ok()) return ShardedResult{*std::move(result)};
    if (servers_.size() == 1) return result.status();
    return Labelled(absl::StrCat("the whole at ", servers_[0].address), result.status());
  };
  const std::optional<ShardSizes> sizes = SizesOf(query, key, value, options);
  if (servers_.size() == 1 || !sizes.has_value()) return on_one_server();
  if (by == ShardBy::kAuto) by = ChooseShardBy(*sizes, options, shards());
  if (by == ShardBy::kKeys) {
    if (absl::Status status = CheckByKeys(options); !status.ok()) return status;
  }
  Parts whole = {{query, nullptr}, {key, nullptr}, {value, nullptr}, std::nullopt, options};
  if (options.has_mask()) whole.mask = TensorSlice{MaskOf(options), nullptr};
  whole.options.clear_mask();
  Work work(servers_, *sizes, whole, group);
  auto result = by == ShardBy::kKeys ? work.ByKeys() : work.ByRows(by);
  return result.has_value() ? *std::move(result) : on_one_server();
}

}  // namespace attendant
