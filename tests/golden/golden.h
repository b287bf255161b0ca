// The goldens of this folder, for tests: requests with the answers of another implementation.
#ifndef ATTENDANT_TESTS_GOLDEN_GOLDEN_H_
#define ATTENDANT_TESTS_GOLDEN_GOLDEN_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "golden.pb.h"

namespace attendant::golden {

// Reads one file. The case has a request and an answer of the same kind. Errors name the file:
// NOT_FOUND where it cannot be opened, DATA_LOSS where it holds no such case, or one whose name is
// not the file's.
absl::StatusOr<GoldenCase> Load(const std::string& path);

// Every *.golden directly in `folder`, sorted by name; the tests' own are in ATTENDANT_GOLDEN_DIR.
// Returns NOT_FOUND naming the folder where it cannot be read or holds none, so that no test passes
// over nothing; else as Load.
absl::StatusOr<std::vector<GoldenCase>> LoadAll(const std::string& folder);

}  // namespace attendant::golden

#endif  // ATTENDANT_TESTS_GOLDEN_GOLDEN_H_
