#include "core/comparison.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "core/half.h"

namespace attendant::core {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kFarthest = std::numeric_limits<int64_t>::max();
// As far away as simulated arithmetic: up to this factor in either direction.
constexpr double kAlike = 4;

// The place of a number among those of its type, in their order; 0 for both zeros.
template <typename Bits>
int64_t PlaceOf(Bits bits) {
  constexpr Bits kSign = Bits{1} << (sizeof(Bits) * 8 - 1);
  const auto size = static_cast<int64_t>(bits & ~kSign);
  return (bits & kSign) != 0 ? -size : size;
}
int64_t PlaceOf(DType dtype, double x) {
  return WithStored(dtype, [x]<typename S>() {
    const auto wide = static_cast<Wide<S>>(x);
    S stored{};
    Store(&wide, 1, &stored);
    if constexpr (sizeof(S) == 8) return PlaceOf(std::bit_cast<uint64_t>(stored));
    if constexpr (sizeof(S) == 4) return PlaceOf(std::bit_cast<uint32_t>(stored));
    if constexpr (sizeof(S) == 2) return PlaceOf(std::bit_cast<uint16_t>(stored));
  });
}

}  // namespace

size_t LevelOf(DType dtype) {
  size_t level = 0;
  while (kLevels[level].dtype != dtype) ++level;
  return level;
}

int PrecisionOf(DType dtype) {
  return dtype == DType::kFloat32 ? 24 : dtype == DType::kFloat16 ? 11 : 8;
}
int BitsOf(double x) {
  int exponent = 0;
  const auto significand = static_cast<uint64_t>(std::abs(std::frexp(x, &exponent)) * 0x1p53);
  return significand == 0 ? 0 : 53 - std::countr_zero(significand);
}

double Apart(double a, double b) {
  if (a == b || (std::isnan(a) && std::isnan(b))) return 0;
  return std::isfinite(a) && std::isfinite(b) ? std::abs(a - b) : kInfinity;
}

int64_t UlpsApart(DType dtype, double candidate, double ours) {
  if (std::isnan(candidate) || std::isnan(ours)) {
    return std::isnan(candidate) && std::isnan(ours) ? 0 : kFarthest;
  }
  int64_t apart = 0;
  if (__builtin_sub_overflow(PlaceOf(dtype, candidate), PlaceOf(dtype, ours), &apart)) {
    return kFarthest;
  }
  return std::abs(apart);
}

void ToDouble(DType dtype, const void* from, int64_t first, int64_t count, double* to) {
  WithStored(dtype, [&]<typename S>() {
    const S* const stored = static_cast<const S*>(from) + first;
    if constexpr (kIsHalf<S>) {
      float wide[64];
      for (int64_t done = 0; done < count; done += 64) {
        const int64_t n = std::min<int64_t>(64, count - done);
        Widen(stored + done, n, wide);
        std::copy_n(wide, n, to + done);
      }
    } else {
      std::copy_n(stored, count, to);
    }
    return 0;
  });
}

double NormOfColumns(const MatrixView<const double>& matrix) {
  std::vector<double> squares(static_cast<size_t>(matrix.columns));
  for (int64_t row = 0; row < matrix.rows; ++row) {
    for (int64_t column = 0; column < matrix.columns; ++column) {
      const double x = matrix.Row(row)[column];
      if (std::isfinite(x)) squares[static_cast<size_t>(column)] += x * x;
    }
  }
  return squares.empty() ? 0 : std::sqrt(*std::max_element(squares.begin(), squares.end()));
}

double NormOfRows(const double* rows, int64_t count, int64_t width) {
  double largest = 0;
  for (int64_t row = 0; row < count; ++row) {
    double squares = 0;
    for (int64_t d = 0; d < width; ++d) {
      const double x = rows[row * width + d];
      if (std::isfinite(x)) squares += x * x;
    }
    largest = std::max(largest, squares);
  }
  return std::sqrt(largest);
}

void Comparison::Merge(const Comparison& other) {
  const bool further = other.worst.apart > worst.apart ||
                       (other.worst.apart == worst.apart && other.worst.element < worst.element);
  if (further) worst = other.worst;
  ulps = std::max(ulps, other.ulps);
  any_finite = any_finite || other.any_finite;
  for (size_t level = 0; level < kLevelCount; ++level) {
    within[level] = within[level] && other.within[level];
    held[level] = held[level] && other.held[level];
    telling[level] += other.telling[level];
  }
}

void Likeness::Add(double theirs, double simulated, double ours) {
  const double off = Apart(theirs, ours);
  theirs_.push_back(off);
  simulated_most_ = std::max(simulated_most_, Apart(simulated, ours));
  theirs_most_ = std::max(theirs_most_, off);
  residual_ = std::max(residual_, Apart(theirs, simulated));
  squares_ += off * off;
  squares_of_simulated_ += Apart(simulated, ours) * Apart(simulated, ours);
  squares_of_residual_ += Apart(theirs, simulated) * Apart(theirs, simulated);
}

bool Likeness::SameSize() const {
  const double typical =
      std::sqrt(squares_of_simulated_ / static_cast<double>(std::max<size_t>(theirs_.size(), 1)));
  const auto off = std::count_if(theirs_.begin(), theirs_.end(),
                                 [&](double x) { return x >= typical / (2 * kAlike); });
  return typical > 0 && 2 * off >= static_cast<int64_t>(theirs_.size()) &&
         theirs_most_ <= kAlike * simulated_most_ && simulated_most_ <= kAlike * theirs_most_;
}

}  // namespace attendant::core
