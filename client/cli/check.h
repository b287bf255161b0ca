// attend check: your own attention, or a whole head, against the server's.
#ifndef ATTENDANT_CLIENT_CLI_CHECK_H_
#define ATTENDANT_CLIENT_CLI_CHECK_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/cli/exit_code.h"
#include "client/cpp/client.h"

namespace attendant::cli {

struct CheckArguments {
  // .npy files, as those of attend call.
  std::string query;
  std::string key;
  std::string value;
  // Or of a head: x (tokens, d_model) or (batch, tokens, d_model), and its matrices.
  std::string x;
  std::string w_q;
  std::string w_k;
  std::string w_v;
  std::string w_o;
  int64_t heads = 1;
  // The output to check; of a head it may be left out where another array is there.
  std::string candidate;
  // Of a head: "query" .. "context" to the file of what stands between x and the output.
  std::map<std::string, std::string> intermediates;
  std::string mask;  // .npy, of bool or numbers; empty: none
  v1::AttendOptions options;
  bool json = false;
};

using ClientConnector = std::function<absl::StatusOr<std::unique_ptr<Client>>()>;

// Prints the verdict, the largest difference, what was allowed, and which known mistakes explain
// it. Fails where the verdict is MISMATCH.
ExitCode RunCheck(const ClientConnector& connect, const CheckArguments& arguments);

}  // namespace attendant::cli

#endif  // ATTENDANT_CLIENT_CLI_CHECK_H_
