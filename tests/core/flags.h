// What the command line of core_test may say beside GoogleTest's flags.
#ifndef ATTENDANT_TESTS_CORE_FLAGS_H_
#define ATTENDANT_TESTS_CORE_FLAGS_H_

#include <cstdint>

namespace attendant::core {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr int64_t kProblems = 60;
#else
inline constexpr int64_t kProblems = 600;
#endif

struct Flags {
  int64_t problems = kProblems;  // random ones, for each type and kernel
  uint32_t seed = 20240917;      // of the first; the next have the numbers after it
};

// Set by main.cc before any test runs.
inline Flags& TheFlags() {
  static Flags flags;
  return flags;
}

}  // namespace attendant::core

#endif  // ATTENDANT_TESTS_CORE_FLAGS_H_
