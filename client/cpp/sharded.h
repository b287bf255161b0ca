// One problem over several Attendant servers.
//
//   auto servers = attendant::ShardedClient::Connect({"10.0.0.1:50051", "10.0.0.2:50051"});
//   auto result = (*servers)->AttendSharded({query, shape}, {key, shape}, {value, shape});
//
// By batch or by heads each server computes whole rows: the answer has the same bits as one
// server's (on the chunked path; docs/exactness.md). By keys each server computes all queries over
// a range of the keys, and the servers merge what comes out by its logsumexp.
#ifndef ATTENDANT_CLIENT_CPP_SHARDED_H_
#define ATTENDANT_CLIENT_CPP_SHARDED_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attendant/v1/attention.pb.h"
#include "client/cpp/client.h"

namespace attendant {

// What each server gets a part of.
enum class ShardBy {
  // Batch or heads where there are as many of them as servers; else the keys, where the options
  // can be had by them; else what there is of batch or heads.
  kAuto,
  kBatch,
  // Key heads, each with the query heads that read it.
  kHeads,
  // Ranges of keys: for long contexts of few heads.
  kKeys,
};

// An answer with how it was made. stats: FLOPs, threads and workspace are sums over the servers,
// seconds the largest of any; path and kernel are the first one's. Merging is not in them.
struct ShardedResult : AttendResult {
  ShardBy by = ShardBy::kAuto;  // kAuto: one server computed the whole
  int64_t servers = 1;          // that computed a part
};

// Thread-safe: calls may be made from several threads at once.
class ShardedClient {
 public:
  // A server an address; each part goes to another one. Returns UNAVAILABLE naming the address
  // where no server answers in time, INVALID_ARGUMENT without an address.
  static absl::StatusOr<std::unique_ptr<ShardedClient>> Connect(
      const std::vector<std::string>& addresses, const ClientOptions& options = {});
  // One name for several servers, `shards` parts: a name that stands for all addresses (they are
  // called in turn), or a proxy that balances calls. A balancer of connections would bring all
  // parts to one server: give it the addresses instead.
  static absl::StatusOr<std::unique_ptr<ShardedClient>> ConnectBalanced(const std::string& name,
                                                                        int64_t shards,
                                                                        ClientOptions options = {});
  ~ShardedClient();
  ShardedClient(const ShardedClient&) = delete;
  ShardedClient& operator=(const ShardedClient&) = delete;

  int64_t shards() const;

  // As Client::Attend, the parts computed at once; a thread a part while it runs. call_timeout is
  // for the whole. Fewer servers are called where there are fewer batches, heads or keys.
  //
  // By batch and by heads every option means what it means to one server. By keys
  //   - the answer is one server's to within rounding; in half precision each part is rounded
  //     before it is merged, so that the answer may be one unit of its last place further away;
  //   - what a part weighs is known as exactly as its logsumexp holds it. Where a mask's -1e9 is on
  //     every key of a row, float32 keeps steps of 64 there: the parts then weigh the same, however
  //     many keys each has;
  //   - causal, window, key_lengths, mask, softcap and sinks mean the same;
  //   - alibi_slopes too, but not together with a mask, unless causal is TOP_LEFT. It may need two
  //     calls a part;
  //   - return_logsumexp is served; return_weights and return_key_sums are not: a weight depends on
  //     all keys.
  // What is not served gets INVALID_ARGUMENT naming the option.
  //
  // The first error of any part stops the others and is returned: its message names the part and
  // the server.
  absl::StatusOr<ShardedResult> AttendSharded(const TensorRef& query, const TensorRef& key,
                                              const TensorRef& value,
                                              const v1::AttendOptions& options = {},
                                              ShardBy by = ShardBy::kAuto);

 private:
  struct Server;
  class Work;
  ShardedClient(std::vector<Server> servers, const ClientOptions& options);
  absl::StatusOr<ShardedResult> AttendParts(const TensorRef& query, const TensorRef& key,
                                            const TensorRef& value,
                                            const v1::AttendOptions& options, ShardBy by);

  const std::vector<Server> servers_;
  const ClientOptions options_;
};

}  // namespace attendant

#endif  // ATTENDANT_CLIENT_CPP_SHARDED_H_
