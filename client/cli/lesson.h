// attend lesson: the attention head of five words, computed by a server and checked against
// LibTorch.
#ifndef ATTENDANT_CLIENT_CLI_LESSON_H_
#define ATTENDANT_CLIENT_CLI_LESSON_H_

#include "absl/strings/string_view.h"
#include "client/cli/exit_code.h"
#include "client/cpp/client.h"

namespace attendant::cli {

// A serialized attendant.golden.GoldenCase: the lesson's inputs, and what LibTorch made of them.
absl::string_view LessonGolden();

// Prints the shapes of all arrays, the table of weights, its row sums, and the largest difference
// from LibTorch. Fails where that is more than rounding.
ExitCode RunLesson(Client& client);

}  // namespace attendant::cli

#endif  // ATTENDANT_CLIENT_CLI_LESSON_H_
