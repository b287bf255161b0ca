// Servers in processes of their own, as a service's are: in one process client and server would
// share an allocator, its locks and its caches.
#ifndef ATTENDANT_BENCH_CHILD_H_
#define ATTENDANT_BENCH_CHILD_H_

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace attendant::bench {

// A process that was started, until this ends it. Thread-compatible.
class Child {
 public:
  // Forks; in the child `run` says on the descriptor that it is given what it has to say, and does
  // not return before the child is to end. REQUIRES: this process has one thread.
  static absl::StatusOr<Child> Fork(const std::function<void(int)>& run);
  // Starts a program; what it has to say is its standard error.
  static absl::StatusOr<Child> Exec(const std::vector<std::string>& command);
  ~Child();
  Child(Child&& other) noexcept;
  Child& operator=(Child&& other) = delete;

  // What it has said, up to the first line that holds `text`. Returns UNAVAILABLE with all that it
  // said where it ends before.
  absl::StatusOr<std::string> ReadUntil(const std::string& text);

 private:
  Child(pid_t pid, int output) : pid_(pid), output_(output) {}

  pid_t pid_;
  int output_;
};

// The folder of this program.
std::string ProgramFolder();

}  // namespace attendant::bench

#endif  // ATTENDANT_BENCH_CHILD_H_
