#include "core/mask.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/half.h"

namespace attendant::core {
namespace {

// Keys whose numbers are read at a time where only some question about them is asked.
constexpr int64_t kReadKeys = 256;

template <typename T>
void ReadNumbers(DType dtype, const void* from, int64_t n, T* to) {
  if (dtype == DTypeOf<T>()) {
    std::copy_n(static_cast<const T*>(from), n, to);
    return;
  }
  if (dtype == DType::kBool) {
    std::transform(static_cast<const uint8_t*>(from), static_cast<const uint8_t*>(from) + n, to,
                   [](uint8_t seen) { return seen != 0 ? T{0} : kHiddenBias<T>; });
    return;
  }
  if constexpr (sizeof(T) == sizeof(float)) {
    if (dtype == DType::kFloat16) Widen(static_cast<const Float16*>(from), n, to);
    if (dtype == DType::kBFloat16) Widen(static_cast<const BFloat16*>(from), n, to);
  }
}

}  // namespace

template <typename T>
HeadMask<T>::HeadMask(const Problem& problem, const void* data, int64_t batch, int64_t head) {
  sink_ = problem.sinks.empty() ? kHiddenBias<double> : problem.sinks[head];
  if (!problem.mask.has_value()) return;
  const MaskLayout& mask = *problem.mask;
  present_ = true;
  dtype_ = mask.dtype;
  query_stride_ = mask.query_stride;
  key_stride_ = mask.key_stride;
  data_ = static_cast<const unsigned char*>(data) +
          (batch * mask.batch_stride + head * mask.head_stride) * SizeOf(dtype_);
}

template <typename T>
void HeadMask<T>::Read(int64_t query, KeyRange keys, T* bias) const {
  if (key_stride_ == 1) {
    ReadNumbers(dtype_, At(query, keys.begin), keys.size(), bias);
    return;
  }
  T same = 0;
  ReadNumbers(dtype_, At(query, 0), 1, &same);
  std::fill_n(bias, keys.size(), same);
}

template <typename T>
bool HeadMask<T>::Hides(int64_t query, int64_t key) const {
  if (!present()) return false;
  T bias = 0;
  Read(query, {key, key + 1}, &bias);
  return bias == kHiddenBias<T>;
}

template <typename T>
T HeadMask<T>::Largest(int64_t query, KeyRange keys) const {
  T largest = kHiddenBias<T>;
  for (int64_t first = keys.begin; first < keys.end; first += kReadKeys) {
    const KeyRange part{first, std::min(first + kReadKeys, keys.end)};
    T numbers[kReadKeys];
    Read(query, part, numbers);
    for (int64_t j = 0; j < part.size(); ++j) largest = std::max(largest, numbers[j]);
  }
  return largest;
}

template <typename T>
T HeadMask<T>::Shift(int64_t query, KeyRange keys) const {
  if (!added()) return 0;
  const T largest = Largest(query, keys);
  const bool far = std::isfinite(largest) && std::abs(largest) >= kFar<T>;
  return far && sink_ - largest < kFar<T> ? largest : T{0};
}

template class HeadMask<float>;
template class HeadMask<double>;

}  // namespace attendant::core
