// attend call: one Attend on arrays of the caller's, or on random ones.
#ifndef ATTENDANT_CLIENT_CLI_CALL_H_
#define ATTENDANT_CLIENT_CLI_CALL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "client/cli/exit_code.h"
#include "client/cpp/client.h"
#include "client/cpp/sharded.h"

namespace attendant::cli {

struct CallArguments {
  // .npy files: (tokens, width), (heads, tokens, width) or (batch, heads, tokens, width), with
  // heads and tokens exchanged where the layout is BTHD.
  std::string query;
  std::string key;
  std::string value;
  // Or: one shape for all three, with normal values from this seed.
  std::vector<int64_t> shape;
  std::optional<uint32_t> random;
  v1::DataType random_dtype = v1::DATA_TYPE_FLOAT32;
  std::string mask;  // .npy, of bool or numbers; empty: none
  // .npy files to write, of the query's rank or what is left of it; empty: not written, and the
  // last three are not asked for either.
  std::string out;
  std::string out_weights;
  std::string out_logsumexp;
  std::string out_key_sums;
  v1::AttendOptions options;
  ShardBy shard = ShardBy::kAuto;        // where there are several servers
  std::optional<int64_t> shards;         // parts, where one name stands for several servers
  std::optional<int64_t> print_weights;  // the head of the first batch whose weights are drawn
};

using Connector = std::function<absl::StatusOr<std::unique_ptr<ShardedClient>>()>;

// Makes the arrays, then connects and calls. Prints the path, time, FLOPs, GFLOP/s and workspace
// bytes, how the work was shared where there are several servers, and a map of the weights where it
// is asked for.
ExitCode RunCall(const Connector& connect, const CallArguments& arguments);

}  // namespace attendant::cli

#endif  // ATTENDANT_CLIENT_CLI_CALL_H_
