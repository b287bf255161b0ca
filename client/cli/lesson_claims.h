// attend lesson CLAIM, attend lesson --all: what the lesson claims of an attention head, shown on a
// server with the lesson's own arrays.
#ifndef ATTENDANT_CLIENT_CLI_LESSON_CLAIMS_H_
#define ATTENDANT_CLIENT_CLI_LESSON_CLAIMS_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cli/exit_code.h"
#include "client/cpp/client.h"
#include "golden.pb.h"

namespace attendant::cli {

// A number that a claim says is small.
struct Seen {
  double number = 0;
  double bound = 0;
};

struct LessonClaim {
  const char* name;  // of the sub-command
  const char* says;
  absl::StatusOr<Seen> (*check)(Client&, const golden::GoldenCase& lesson);
};

// In the order in which they build on each other.
absl::Span<const LessonClaim> LessonClaims();

// Prints one line for each claim of that name, or for all where it is empty: the claim, the number
// seen, its bound, and whether it is within. Fails where one is not.
ExitCode RunLessonClaims(Client& client, const std::string& name);

}  // namespace attendant::cli

#endif  // ATTENDANT_CLIENT_CLI_LESSON_CLAIMS_H_
