#include "client/cpp/shard_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "client/cpp/status.h"
#include "core/checked_math.h"

namespace attendant {
namespace {

// Larger sides of a window show no more keys, and would overflow a position.
constexpr int64_t kWidestSide = int64_t{1} << 40;

// How many keys on either side of its own position a query sees; nothing: all.
struct Sides {
  std::optional<int64_t> left;
  std::optional<int64_t> right;
};

Sides SidesOf(const v1::AttendOptions& options) {
  Sides sides;
  if (options.window().has_left()) sides.left = std::min(options.window().left(), kWidestSide);
  if (options.window().has_right()) sides.right = std::min(options.window().right(), kWidestSide);
  return sides;
}

bool IsCausal(const v1::AttendOptions& options) {
  return options.causal() == v1::CAUSAL_TOP_LEFT || options.causal() == v1::CAUSAL_BOTTOM_RIGHT;
}

int64_t LengthOf(const ShardSizes& sizes, const v1::AttendOptions& options, int64_t batch) {
  return options.key_lengths().empty() ? sizes.keys : options.key_lengths(static_cast<int>(batch));
}

// Whether a tensor of these sizes may be counted in bytes, whatever is left out of them: a size of
// 0 counts as 1. No server takes a size of more than 31 bits, and no message holds 2^48 bytes.
bool CanBeCounted(absl::Span<const int64_t> sizes) {
  constexpr int64_t kMostBytes = int64_t{1} << 48;
  int64_t bytes = 8;
  for (const int64_t size : sizes) {
    if (size < 0 || size > std::numeric_limits<int32_t>::max()) return false;
    bytes = core::SaturatingProduct({bytes, std::max<int64_t>(size, 1)});
  }
  return bytes <= kMostBytes;
}

TensorRef RefOf(const v1::Tensor& tensor) {
  return {tensor.dtype(), {tensor.shape().begin(), tensor.shape().end()}, tensor.data()};
}

bool MaskFits(const ShardSizes& sizes, const v1::AttendOptions& options) {
  if (!options.has_mask()) return true;
  const TensorRef mask = RefOf(options.mask());
  const size_t rank = mask.shape().size();
  if (rank > 4 || !HasItsBytes(mask)) return false;
  const int64_t axes[] = {sizes.batch, sizes.heads, sizes.queries, sizes.keys};
  for (size_t axis = 0; axis < rank; ++axis) {
    const int64_t size = mask.shape()[axis];
    if (size != 1 && size != axes[4 - rank + axis]) return false;
  }
  // Of each head or of each batch: nobody can tell.
  const bool ambiguous = rank == 3 && mask.shape()[0] > 1 && sizes.batch == sizes.heads;
  return !ambiguous;
}

// Options that the parts do not carry to a server as they are, which would refuse these values.
bool NumbersFit(const ShardSizes& sizes, const v1::AttendOptions& options) {
  const auto per_head = [&](const google::protobuf::RepeatedField<double>& values, bool infinite) {
    if (!values.empty() && values.size() != sizes.heads) return false;
    return std::all_of(values.begin(), values.end(), [&](double value) {
      const double in_base_2 = value * std::numbers::log2e;
      const double held = sizes.dtype == v1::DATA_TYPE_FLOAT64
                              ? in_base_2
                              : static_cast<double>(static_cast<float>(in_base_2));
      return std::isfinite(held) || (infinite && held < 0);
    });
  };
  if (!per_head(options.alibi_slopes(), false) || !per_head(options.sinks(), true)) return false;
  const auto& lengths = options.key_lengths();
  if (!lengths.empty() && lengths.size() != sizes.batch) return false;
  if (options.window().left() < 0 || options.window().right() < 0) return false;
  return std::all_of(lengths.begin(), lengths.end(),
                     [&](int64_t length) { return length >= 0 && length <= sizes.keys; });
}

// Queries `queries` of a batch over keys `keys` by a window that says what p - left .. p + right
// does, without those queries and keys that no part of it concerns. Nothing where no query sees a
// key. seen: keys from there on are not there at all.
std::optional<KeyBlock> ShiftedBlock(Range queries, Range keys, int64_t offset, const Sides& sides,
                                     std::optional<int64_t> seen) {
  if (sides.right.has_value()) {
    queries.begin = std::max(queries.begin, keys.begin - offset - *sides.right);
  }
  if (sides.left.has_value()) {
    queries.end = std::min(queries.end, keys.end - offset + *sides.left);
  }
  if (queries.size() <= 0) return std::nullopt;
  KeyBlock block;
  block.queries = queries;
  block.keys = keys;
  const int64_t first = queries.begin + offset;
  if (sides.left.has_value()) block.keys.begin = std::max(keys.begin, first - *sides.left);
  // Lengths may differ from batch to batch: there the end stays, so that one call serves them all.
  if (sides.right.has_value() && !seen.has_value()) {
    block.keys.end = std::min(keys.end, queries.end + offset + *sides.right);
  }
  const int64_t position = first - block.keys.begin;
  const int64_t there = std::min(block.keys.end, seen.value_or(block.keys.end)) - block.keys.begin;
  if (sides.left.has_value() && queries.size() - 1 + position > *sides.left) {
    block.left = *sides.left - position;
  }
  if (sides.right.has_value() && position + *sides.right < there - 1) {
    block.right = position + *sides.right;
  }
  return block;
}

// A block whose queries stand at their own positions among its keys.
KeyBlock NativeBlock(Range queries, Range keys, v1::Causal causal, const Sides& sides) {
  KeyBlock block;
  block.queries = queries;
  block.keys = keys;
  block.causal = causal;
  block.left = sides.left;
  block.right = sides.right;
  return block;
}

// The blocks of one batch where ALiBi is asked for. seen: as in ShiftedBlock.
void AddAlibiBlocks(const ShardSizes& sizes, const v1::AttendOptions& options, Range keys,
                    int64_t batch, std::optional<int64_t> seen, std::vector<KeyBlock>* blocks) {
  const int64_t offset = QueryOffset(sizes, options, batch);
  const bool causal = IsCausal(options);
  const Sides window = SidesOf(options);
  const Sides sides = {window.left, causal ? std::optional<int64_t>(0) : window.right};
  if (offset <= keys.begin) {
    // From the query at the first key on, positions are the part's own.
    const int64_t first = std::min(keys.begin - offset, sizes.queries);
    if (!causal) {
      auto before = ShiftedBlock({0, first}, keys, offset, sides, seen);
      if (before.has_value()) {
        before->alibi_from = before->keys.begin;
        blocks->push_back(*before);
      }
    }
    if (first < sizes.queries) {
      blocks->push_back(NativeBlock({first, sizes.queries}, keys,
                                    causal ? v1::CAUSAL_TOP_LEFT : v1::CAUSAL_NONE, window));
    }
    return;
  }
  // Causal from the bottom right, and every query behind the first key. Up to the last key the
  // query stands at the key that is the last it sees: so does the last query of such a block.
  const int64_t among = std::clamp<int64_t>(keys.end - offset, 0, sizes.queries);
  if (among > 0) {
    blocks->push_back(
        NativeBlock({0, among}, {keys.begin, among + offset}, v1::CAUSAL_BOTTOM_RIGHT, window));
  }
  auto behind = ShiftedBlock({among, sizes.queries}, keys, offset, sides, seen);
  if (behind.has_value()) {
    behind->alibi_from = behind->keys.end - 1;
    blocks->push_back(*behind);
  }
}

// One call serves both, but for the batches and their lengths.
bool SameCall(const KeyBlock& a, const KeyBlock& b) {
  return a.queries == b.queries && a.keys == b.keys && a.causal == b.causal && a.left == b.left &&
         a.right == b.right && a.alibi_from == b.alibi_from &&
         a.key_lengths.empty() == b.key_lengths.empty();
}

// Adds a batch's block to the one of the batch before it where one call serves both.
void AddBlock(KeyBlock block, int64_t batch, std::vector<KeyBlock>* blocks) {
  block.batch = {batch, batch + 1};
  // That one is among the last few; where it is not, there is a call more.
  const size_t last = blocks->size();
  for (size_t i = last; i-- > last - std::min<size_t>(last, 4);) {
    KeyBlock& other = (*blocks)[i];
    if (other.batch.end != batch || !SameCall(other, block)) continue;
    other.batch.end = batch + 1;
    other.key_lengths.insert(other.key_lengths.end(), block.key_lengths.begin(),
                             block.key_lengths.end());
    return;
  }
  blocks->push_back(std::move(block));
}

std::vector<KeyBlock> BlocksOfBatch(const ShardSizes& sizes, const v1::AttendOptions& options,
                                    Range keys, int64_t batch) {
  std::vector<KeyBlock> blocks;
  const int64_t length = LengthOf(sizes, options, batch);
  if (length <= keys.begin) return blocks;
  std::optional<int64_t> seen;
  if (!options.key_lengths().empty()) seen = length;
  if (options.alibi_slopes().empty()) {
    Sides sides = SidesOf(options);
    if (IsCausal(options)) sides.right = 0;
    const auto block =
        ShiftedBlock({0, sizes.queries}, keys, QueryOffset(sizes, options, batch), sides, seen);
    if (block.has_value()) blocks.push_back(*block);
  } else {
    AddAlibiBlocks(sizes, options, keys, batch, seen, &blocks);
  }
  for (KeyBlock& block : blocks) {
    // From the bottom right lengths would move the positions, and that block ends before them.
    if (!seen.has_value() || block.causal == v1::CAUSAL_BOTTOM_RIGHT) continue;
    block.key_lengths = {std::clamp<int64_t>(length - block.keys.begin, 0, block.keys.size())};
  }
  return blocks;
}

template <typename T>
void Keep(Range range, google::protobuf::RepeatedField<T>* values) {
  if (values->empty()) return;
  const google::protobuf::RepeatedField<T> all = *values;
  values->Assign(all.begin() + range.begin, all.begin() + range.end);
}

}  // namespace

bool HasItsBytes(const TensorRef& tensor) {
  if (ElementBytes(tensor.dtype()) == 0 || !CanBeCounted(tensor.shape())) return false;
  const int64_t bytes =
      ProductOf(tensor.shape(), 0, tensor.shape().size()) * ElementBytes(tensor.dtype());
  return bytes == static_cast<int64_t>(tensor.bytes().size());
}

bool OptionsFit(const ShardSizes& sizes, const v1::AttendOptions& options) {
  return NumbersFit(sizes, options) && MaskFits(sizes, options);
}

std::optional<ShardSizes> SizesOf(const TensorRef& query, const TensorRef& key,
                                  const TensorRef& value, const v1::AttendOptions& options) {
  for (const TensorRef* const tensor : {&query, &key, &value}) {
    if (tensor->shape().size() != 4 || !HasItsBytes(*tensor)) return std::nullopt;
    if (tensor->dtype() != query.dtype()) return std::nullopt;
  }
  if (!v1::Layout_IsValid(options.layout()) || !v1::Causal_IsValid(options.causal())) {
    return std::nullopt;
  }
  ShardSizes sizes;
  if (options.layout() == v1::LAYOUT_BTHD) std::swap(sizes.heads_axis, sizes.tokens_axis);
  sizes.dtype = query.dtype();
  sizes.batch = query.shape()[0];
  sizes.heads = query.shape()[sizes.heads_axis];
  sizes.queries = query.shape()[sizes.tokens_axis];
  sizes.kv_heads = key.shape()[sizes.heads_axis];
  sizes.keys = key.shape()[sizes.tokens_axis];
  sizes.value_width = value.shape()[3];
  const bool groups = sizes.kv_heads == 0 ? sizes.heads == 0 : sizes.heads % sizes.kv_heads == 0;
  const bool fits = key.shape()[0] == sizes.batch && value.shape()[0] == sizes.batch &&
                    key.shape()[3] == query.shape()[3] &&
                    value.shape()[sizes.heads_axis] == sizes.kv_heads &&
                    value.shape()[sizes.tokens_axis] == sizes.keys && groups &&
                    // What empty tensors ask for may be of any size.
                    CanBeCounted({sizes.batch, sizes.heads, sizes.queries, sizes.value_width}) &&
                    CanBeCounted({sizes.batch, sizes.heads, sizes.queries, sizes.keys}) &&
                    OptionsFit(sizes, options);
  if (!fits) return std::nullopt;
  return sizes;
}

TensorRef MaskOf(const v1::AttendOptions& options) {
  TensorRef mask = RefOf(options.mask());
  std::vector<int64_t> shape = mask.shape();
  shape.insert(shape.begin(), 4 - shape.size(), 1);
  return {mask.dtype(), std::move(shape), mask.bytes()};
}

void SetMask(const TensorRef& mask, v1::AttendOptions* options) {
  v1::Tensor& to = *options->mutable_mask();
  to.set_dtype(mask.dtype());
  to.mutable_shape()->Assign(mask.shape().begin(), mask.shape().end());
  to.set_data(mask.bytes().data(), mask.bytes().size());
}

void CutMask(size_t axis, Range range, std::optional<TensorSlice>* mask) {
  if (!mask->has_value() || (*mask)->ref.shape()[axis] == 1) return;
  *mask = SliceOf(**mask, axis, range);
}

void KeepBatch(Range batch, v1::AttendOptions* options) {
  Keep(batch, options->mutable_key_lengths());
}

void KeepHeads(Range heads, v1::AttendOptions* options) {
  Keep(heads, options->mutable_alibi_slopes());
  Keep(heads, options->mutable_sinks());
}

std::vector<int64_t> OutputShape(const ShardSizes& sizes, int64_t batch, int64_t queries) {
  std::vector<int64_t> shape(4);
  shape[0] = batch;
  shape[sizes.heads_axis] = sizes.heads;
  shape[sizes.tokens_axis] = queries;
  shape[3] = sizes.value_width;
  return shape;
}

absl::Status CheckAnswer(const char* name, const Tensor& tensor, v1::DataType dtype,
                         const std::vector<int64_t>& shape, std::optional<size_t> read) {
  const size_t came = read.value_or(tensor.bytes.size());
  const auto bytes = static_cast<size_t>(BytesOf(shape, dtype));
  if (tensor.dtype == dtype && tensor.shape == shape && came == bytes) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(
      "the answer's ", name, " is ", came, " bytes of (", absl::StrJoin(tensor.shape, ", "),
      ") as ", v1::DataType_Name(tensor.dtype), ", must be ", bytes, " of (",
      absl::StrJoin(shape, ", "), ") as ", v1::DataType_Name(dtype)));
}

absl::Status Labelled(const std::string& label, const absl::Status& status) {
  return Reworded(status, absl::StrCat(label, ": ", status.message()));
}

void AddStats(const v1::Stats& from, bool at_once, v1::Stats* to) {
  if (to->path() == v1::PATH_UNSPECIFIED) {
    *to = from;
    return;
  }
  to->set_flops(core::SaturatingSum({to->flops(), from.flops()}));
  const auto both = [at_once](double a, double b) { return at_once ? std::max(a, b) : a + b; };
  to->set_compute_seconds(both(to->compute_seconds(), from.compute_seconds()));
  to->set_queue_seconds(both(to->queue_seconds(), from.queue_seconds()));
  if (at_once) {
    to->set_threads(core::SaturatingSum({to->threads(), from.threads()}));
    to->set_peak_workspace_bytes(
        core::SaturatingSum({to->peak_workspace_bytes(), from.peak_workspace_bytes()}));
  } else {
    to->set_peak_workspace_bytes(std::max(to->peak_workspace_bytes(), from.peak_workspace_bytes()));
  }
}

std::vector<Range> SplitEvenly(int64_t size, int64_t parts) {
  std::vector<Range> ranges;
  const int64_t count = std::min(size, parts);
  int64_t begin = 0;
  for (int64_t part = 0; part < count; ++part) {
    const int64_t end = begin + size / count + (part < size % count ? 1 : 0);
    ranges.push_back({begin, end});
    begin = end;
  }
  return ranges;
}

absl::Status CheckByKeys(const v1::AttendOptions& options) {
  const auto refused = [](const char* option, const char* why) {
    return absl::InvalidArgumentError(
        absl::StrCat("options.", option, ": ", why, "; shard by heads or by batch"));
  };
  if (options.return_weights()) {
    return refused("return_weights", "is true, and by keys no server has a row's weights");
  }
  if (options.return_key_sums()) {
    return refused("return_key_sums", "is true, and by keys no server has a row's weights");
  }
  if (!options.alibi_slopes().empty() && options.has_mask() &&
      options.causal() != v1::CAUSAL_TOP_LEFT) {
    return refused("alibi_slopes",
                   "are given with a mask, and by keys need one of their own unless causal is "
                   "CAUSAL_TOP_LEFT");
  }
  return absl::OkStatus();
}

ShardBy ChooseShardBy(const ShardSizes& sizes, const v1::AttendOptions& options, int64_t servers) {
  const int64_t batch = std::min(sizes.batch, servers);
  const int64_t heads = std::min(sizes.kv_heads, servers);
  const int64_t keys = CheckByKeys(options).ok() ? std::min(sizes.keys, servers) : 0;
  if (std::max(batch, heads) < std::min(servers, keys)) return ShardBy::kKeys;
  if (batch != heads) return batch > heads ? ShardBy::kBatch : ShardBy::kHeads;
  if (batch == 0) return ShardBy::kBatch;
  const auto largest_share = [&](int64_t units) {
    return static_cast<double>(core::CeilDiv(units, servers)) / static_cast<double>(units);
  };
  return largest_share(sizes.kv_heads) < largest_share(sizes.batch) ? ShardBy::kHeads
                                                                    : ShardBy::kBatch;
}

int64_t QueryOffset(const ShardSizes& sizes, const v1::AttendOptions& options, int64_t batch) {
  if (options.causal() != v1::CAUSAL_BOTTOM_RIGHT) return 0;
  return LengthOf(sizes, options, batch) - sizes.queries;
}

std::vector<KeyBlock> KeyBlocksOf(const ShardSizes& sizes, const v1::AttendOptions& options,
                                  Range keys) {
  std::vector<KeyBlock> blocks;
  for (int64_t batch = 0; batch < sizes.batch; ++batch) {
    for (KeyBlock& block : BlocksOfBatch(sizes, options, keys, batch)) {
      AddBlock(std::move(block), batch, &blocks);
    }
  }
  return blocks;
}

}  // namespace attendant
