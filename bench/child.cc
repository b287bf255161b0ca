#include "bench/child.h"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace attendant::bench {

absl::StatusOr<Child> Child::Fork(const std::function<void(int)>& run) {
  int ends[2];
  if (pipe(ends) != 0) return absl::UnavailableError("no pipe");
  const pid_t pid = fork();
  if (pid < 0) return absl::UnavailableError("no process");
  if (pid == 0) {
    // It does not outlive us, however we end.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(ends[0]);
    run(ends[1]);
    _exit(1);
  }
  close(ends[1]);
  return Child(pid, ends[0]);
}

absl::StatusOr<Child> Child::Exec(const std::vector<std::string>& command) {
  std::vector<char*> arguments;
  arguments.reserve(command.size() + 1);
  for (const std::string& argument : command) {
    arguments.push_back(const_cast<char*>(argument.c_str()));
  }
  arguments.push_back(nullptr);
  return Fork([&](int output) {
    dup2(output, STDERR_FILENO);
    execv(arguments[0], arguments.data());
  });
}

Child::Child(Child&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)), output_(std::exchange(other.output_, -1)) {}

Child::~Child() {
  if (pid_ < 0) return;
  kill(pid_, SIGTERM);
  waitpid(pid_, nullptr, 0);
  close(output_);
}

absl::StatusOr<std::string> Child::ReadUntil(const std::string& text) {
  std::string said;
  char byte = 0;
  while (read(output_, &byte, 1) == 1) {
    said += byte;
    if (byte == '\n' && absl::StrContains(said, text)) return said;
  }
  return absl::UnavailableError(absl::StrCat("a server did not start: ", said));
}

std::string ProgramFolder() {
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/exe", error).parent_path().string();
}

}  // namespace attendant::bench
