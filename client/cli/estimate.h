// attend estimate: what a call of some sizes would cost.
#ifndef ATTENDANT_CLIENT_CLI_ESTIMATE_H_
#define ATTENDANT_CLIENT_CLI_ESTIMATE_H_

#include <functional>
#include <memory>
#include <string>

#include "client/cli/exit_code.h"
#include "client/cpp/client.h"

namespace attendant::cli {

struct EstimateArguments {
  v1::EstimateRequest request;
  bool json = false;  // one object instead of a table and plots
  std::string svg;    // where to write a picture; empty: nowhere
};

// Asks the server, and asks again for other numbers of tokens where curves are drawn. Prints a
// table of the steps on both paths, and plots of operations, seconds and workspace against the
// tokens.
ExitCode RunEstimate(Client& client, const EstimateArguments& arguments);

}  // namespace attendant::cli

#endif  // ATTENDANT_CLIENT_CLI_ESTIMATE_H_
