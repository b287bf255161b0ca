// What the command line exits with, and where its errors go.
#ifndef ATTENDANT_CLIENT_CLI_EXIT_CODE_H_
#define ATTENDANT_CLIENT_CLI_EXIT_CODE_H_

#include <cstdio>
#include <string>

#include "absl/status/status.h"

namespace attendant::cli {

enum ExitCode {
  kSuccess = 0,
  kFailure = 1,      // the answer was not what it must be, or something else went wrong
  kUsage = 2,        // the command line is wrong
  kUnreachable = 3,  // no server, or not ready
  kBadFile = 4,      // a file cannot be read or written, or does not hold an array
  kRefused = 5,      // the server found the request wrong, or too large
  kTimeout = 6,      // the time allowed had passed
};

inline ExitCode ExitCodeOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return kSuccess;
    case absl::StatusCode::kUnavailable:
      return kUnreachable;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kNotFound:
      return kRefused;
    case absl::StatusCode::kDeadlineExceeded:
      return kTimeout;
    default:
      return kFailure;
  }
}

// Prints one line to standard error.
inline ExitCode Fail(ExitCode code, const std::string& message) {
  std::fprintf(stderr, "attend: %s\n", message.c_str());
  return code;
}
inline ExitCode Fail(const absl::Status& status) {
  return Fail(ExitCodeOf(status), std::string(status.message()));
}

}  // namespace attendant::cli

#endif  // ATTENDANT_CLIENT_CLI_EXIT_CODE_H_
