// How a problem is cut into parts that several servers compute. Pure: sizes and options, no calls.
//
// By batch or by heads a part is a problem of its own. By keys it is not: which keys a query sees
// is said by positions, and a server counts them from the first key that it gets. Query i stands
// at p = i + offset, as the contract defines it; in a part whose first query is i0 and whose first
// key is j0 it stands at (i - i0) + (i0 + offset - j0). That is another problem of the contract:
//
//   causal and window   keys p - left .. p + right are seen, right = 0 where causal. Queries that
//                       see no key of the part are left out, and keys before the first that is
//                       seen: then a window, without causal, says the same (ShiftedBlock)
//   key_lengths         clamped to the part
//   ALiBi               -slope |p - j|. Where the part's own position of a query is its distance
//                       from the part's first key, the option says the same. Where a query stands
//                       before all keys of a part, or behind them, with c the key that is nearest,
//                       |p - j| = |p - c| + |c - j|: the second is a mask of (1, H, 1, keys), the
//                       first is subtracted from the logsumexp, times the slope
//   sinks               a part of their own, without keys: output 0, logsumexp = sink
#ifndef ATTENDANT_CLIENT_CPP_SHARD_PLAN_H_
#define ATTENDANT_CLIENT_CPP_SHARD_PLAN_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "attendant/v1/attention.pb.h"
#include "client/cpp/client.h"
#include "client/cpp/sharded.h"
#include "client/cpp/tensor_slice.h"

namespace attendant {

// Sizes of a problem, its axes named.
struct ShardSizes {
  int64_t batch = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t queries = 0;
  int64_t keys = 0;
  int64_t value_width = 0;
  v1::DataType dtype = v1::DATA_TYPE_UNSPECIFIED;
  size_t heads_axis = 1;   // of query, key, value and output
  size_t tokens_axis = 2;  // the other of the two
};

// Nothing where the problem cannot be cut because it is none: shapes, lengths or options that a
// server refuses. What is refused is the server's to say. What is returned can be cut: every
// tensor has the bytes of its shape, and options one a batch or head have that many.
std::optional<ShardSizes> SizesOf(const TensorRef& query, const TensorRef& key,
                                  const TensorRef& value, const v1::AttendOptions& options);

// Whether the tensor's bytes are those of its shape.
bool HasItsBytes(const TensorRef& tensor);

// Whether the options are ones that a server takes for these sizes.
bool OptionsFit(const ShardSizes& sizes, const v1::AttendOptions& options);

// The mask with four axes.
// REQUIRES: options.has_mask(), and SizesOf returned something.
TensorRef MaskOf(const v1::AttendOptions& options);

// Makes it the options' mask.
void SetMask(const TensorRef& mask, v1::AttendOptions* options);

// Takes a range of axis `axis` of (B, H, Tq, Tk). What is broadcast along it stays whole.
void CutMask(size_t axis, Range range, std::optional<TensorSlice>* mask);

// Options that are one a batch, or one a query head, as far as the range has them.
void KeepBatch(Range batch, v1::AttendOptions* options);
void KeepHeads(Range heads, v1::AttendOptions* options);

// (batch, heads, queries, value width) in the layout.
std::vector<int64_t> OutputShape(const ShardSizes& sizes, int64_t batch, int64_t queries);

// Parts are put together by the shapes that were asked for: INTERNAL where an answer's tensor has
// another. read: the bytes that came, where they are not the tensor's.
absl::Status CheckAnswer(const char* name, const Tensor& tensor, v1::DataType dtype,
                         const std::vector<int64_t>& shape,
                         std::optional<size_t> read = std::nullopt);

// The status with "label: " before its message.
absl::Status Labelled(const std::string& label, const absl::Status& status);

// Adds a part's: computed at once on another server, or one after the other.
void AddStats(const v1::Stats& from, bool at_once, v1::Stats* to);

// `size` in at most `parts` ranges of nearly the same length, in order, none empty.
std::vector<Range> SplitEvenly(int64_t size, int64_t parts);

// INVALID_ARGUMENT naming the option where its meaning cannot be had from parts of the keys.
absl::Status CheckByKeys(const v1::AttendOptions& options);

// What kAuto means: batch or heads, the one whose largest part is smaller, where there are as many
// as servers; else the one of batch, heads and keys that gives the most servers work.
ShardBy ChooseShardBy(const ShardSizes& sizes, const v1::AttendOptions& options, int64_t servers);

// Query i of the batch stands at key i + QueryOffset.
int64_t QueryOffset(const ShardSizes& sizes, const v1::AttendOptions& options, int64_t batch);

// One call for a part of the keys: these queries of these batches, and what its options say.
struct KeyBlock {
  Range batch;
  Range queries;
  Range keys;  // of the whole
  v1::Causal causal = v1::CAUSAL_NONE;
  std::optional<int64_t> left;
  std::optional<int64_t> right;
  // One a batch, of the block; empty: all.
  std::vector<int64_t> key_lengths;
  // ALiBi as a mask: the key of the whole from which it counts. Nothing: by the option itself.
  std::optional<int64_t> alibi_from;
};

// The calls for keys `keys`; each query of a batch is in one of them at most, and those in none
// see none of the keys.
// REQUIRES: CheckByKeys(options) is OK.
std::vector<KeyBlock> KeyBlocksOf(const ShardSizes& sizes, const v1::AttendOptions& options,
                                  Range keys);

}  // namespace attendant

#endif  // ATTENDANT_CLIENT_CPP_SHARD_PLAN_H_
