#include "core/self_check.h"

#include <array>
#include <cmath>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "core/attend.h"

namespace attendant::core {
namespace {

// More queries than the widest vector has lanes, and a rest.
constexpr int64_t kQueries = 20;
constexpr int64_t kKeys = 7;
constexpr int64_t kWidth = 4;
constexpr int64_t kValueWidth = 2;

// Numbers that every type holds: eighths and quarters.
constexpr double QueryAt(int64_t i, int64_t d) {
  return static_cast<double>((i * 5 + d * 3) % 11 - 5) / 8;
}
constexpr double KeyAt(int64_t j, int64_t d) {
  return static_cast<double>((j * 7 + d * 2) % 13 - 6) / 8;
}
constexpr double ValueAt(int64_t j, int64_t d) {
  return static_cast<double>((j * 3 + d * 5) % 9 - 4) / 4;
}

// The attention of them with the scale 1/2, to 40 digits and rounded. (kQueries, kValueWidth)
constexpr double kRight[] = {
    -0.38818850026318796, 0.25787982233971252, -0.28688051120877334, 0.19015114019090282,
    -0.35773139697465717, 0.24614859928873126, -0.39999295125041123, 0.30494949896990031,
    -0.35175608951206611, 0.23896523491854851, -0.39215784458330566, 0.29679140062156939,
    -0.34655087608474444, 0.23179796274405276, -0.38501654074000075, 0.28848327768762422,
    -0.29875961900492215, 0.20427648936740622, -0.39326678468303999, 0.2652160411339477,
    -0.2924020260385678,  0.197169379277746,   -0.38818850026318796, 0.25787982233971252,
    -0.28688051120877334, 0.19015114019090282, -0.35773139697465717, 0.24614859928873126,
    -0.39999295125041123, 0.30494949896990031, -0.35175608951206611, 0.23896523491854851,
    -0.39215784458330566, 0.29679140062156939, -0.34655087608474444, 0.23179796274405276,
    -0.38501654074000075, 0.28848327768762422, -0.29875961900492215, 0.20427648936740622,
};
static_assert(std::size(kRight) == kQueries * kValueWidth);

template <typename T, size_t kRows, size_t kColumns, typename At>
std::array<T, kRows * kColumns> Filled(const At& at) {
  std::array<T, kRows * kColumns> numbers;
  for (size_t i = 0; i < numbers.size(); ++i) {
    numbers[i] =
        static_cast<T>(at(static_cast<int64_t>(i / kColumns), static_cast<int64_t>(i % kColumns)));
  }
  return numbers;
}

template <typename T>
absl::Status Compare(const std::array<T, kQueries * kValueWidth>& output, const Problem& p) {
  // Numbers of at most 1 are sums of seven products: some roundings.
  const double allowed = sizeof(T) == sizeof(float) ? 1e-5 : 1e-13;
  for (size_t i = 0; i < output.size(); ++i) {
    const auto computed = static_cast<double>(output[i]);
    if (std::abs(computed - kRight[i]) <= allowed) continue;
    return absl::InternalError(absl::StrCat("self-check: ", NameOf(p.dtype), " on the ",
                                            p.path == Path::kExplicit ? "explicit" : "chunked",
                                            " path computes ", computed, " in place of ", kRight[i],
                                            " (element ", i, ")"));
  }
  return absl::OkStatus();
}

template <typename T>
absl::Status CheckPath(Scheduler& scheduler, Kernel kernel, Path path) {
  constexpr double kExpectedSeconds = 1e-5;
  const auto query = Filled<T, kQueries, kWidth>(QueryAt);
  const auto key = Filled<T, kKeys, kWidth>(KeyAt);
  const auto value = Filled<T, kKeys, kValueWidth>(ValueAt);
  std::array<T, kQueries* kValueWidth> output = {};
  Problem p;
  p.dtype = DTypeOf<T>();
  p.path = path;
  p.batch = p.heads = p.kv_heads = 1;
  p.queries = kQueries;
  p.keys = kKeys;
  p.width = kWidth;
  p.value_width = kValueWidth;
  p.scale = 0.5;
  AttendTensors<T> tensors;
  tensors.query = {query.data(), p.layout, 1, kQueries, kWidth};
  tensors.key = {key.data(), p.layout, 1, kKeys, kWidth};
  tensors.value = {value.data(), p.layout, 1, kKeys, kValueWidth};
  tensors.output = {output.data(), p.layout, 1, kQueries, kValueWidth};
  Workspace workspace;
  auto stages = AttendStages(p, tensors, {&workspace, scheduler.threads(), kernel});
  if (!stages.ok()) return stages.status();
  absl::Status status = scheduler.Run(*std::move(stages), nullptr, kExpectedSeconds);
  return status.ok() ? Compare(output, p) : status;
}

}  // namespace

absl::Status SelfCheck(Scheduler& scheduler, Kernel kernel) {
  for (const Path path : {Path::kChunked, Path::kExplicit}) {
    for (absl::Status status :
         {CheckPath<float>(scheduler, kernel, path), CheckPath<double>(scheduler, kernel, path)}) {
      if (!status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

}  // namespace attendant::core
