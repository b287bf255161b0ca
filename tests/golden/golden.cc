#include "tests/golden/golden.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace attendant::golden {
namespace {

constexpr char kExtension[] = ".golden";

bool IsWhole(const GoldenCase& golden) {
  return (golden.has_attend() && golden.has_attend_response()) ||
         (golden.has_head() && golden.has_head_response()) ||
         (golden.has_backward() && golden.has_backward_response());
}

// Paths of the goldens directly in `folder`. NOT_FOUND where it cannot be read.
absl::StatusOr<std::vector<std::filesystem::path>> List(const std::string& folder) {
  std::vector<std::filesystem::path> paths;
  std::error_code error;
  // increment() in place of ++, which throws.
  for (std::filesystem::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    if (entry->path().extension() == kExtension) paths.push_back(entry->path());
  }
  if (error) return absl::NotFoundError(absl::StrCat(folder, ": ", error.message()));
  return paths;
}

}  // namespace

absl::StatusOr<GoldenCase> Load(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat(path, ": cannot be opened"));
  GoldenCase golden;
  if (!golden.ParseFromIstream(&file)) {
    return absl::DataLossError(absl::StrCat(path, ": is no serialized GoldenCase"));
  }
  if (!IsWhole(golden)) {
    return absl::DataLossError(
        absl::StrCat(path, ": lacks a request, or an answer of the request's kind"));
  }
  if (golden.name() != std::filesystem::path(path).stem().string()) {
    return absl::DataLossError(absl::StrCat(path, ": holds a case of the name ", golden.name()));
  }
  return golden;
}

absl::StatusOr<std::vector<GoldenCase>> LoadAll(const std::string& folder) {
  const auto paths = List(folder);
  if (!paths.ok()) return paths.status();
  if (paths->empty()) return absl::NotFoundError(absl::StrCat(folder, ": holds no *.golden"));
  std::vector<GoldenCase> goldens;
  for (const std::filesystem::path& path : *paths) {
    auto golden = Load(path.string());
    if (!golden.ok()) return golden.status();
    goldens.push_back(*std::move(golden));
  }
  std::sort(goldens.begin(), goldens.end(),
            [](const GoldenCase& a, const GoldenCase& b) { return a.name() < b.name(); });
  return goldens;
}

}  // namespace attendant::golden
