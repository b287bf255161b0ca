// A folder of a test's own, gone with the process.
#ifndef ATTENDANT_TESTS_TEMP_DIR_H_
#define ATTENDANT_TESTS_TEMP_DIR_H_

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <string>

namespace attendant {

class TempDir {
 public:
  TempDir() : path_(testing::TempDir() + "attendant_XXXXXX") {
    if (mkdtemp(path_.data()) == nullptr) std::abort();
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  std::string PathOf(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace attendant

#endif  // ATTENDANT_TESTS_TEMP_DIR_H_
