// Arithmetic on sizes that came from a caller.
#ifndef ATTENDANT_CORE_CHECKED_MATH_H_
#define ATTENDANT_CORE_CHECKED_MATH_H_

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>

namespace attendant::core {

// The product, or nothing where it overflows. A factor of 0 makes 0 whatever the others are.
// REQUIRES: no factor is negative.
constexpr std::optional<int64_t> CheckedProduct(std::initializer_list<int64_t> factors) {
  for (const int64_t factor : factors) {
    if (factor == 0) return 0;
  }
  int64_t product = 1;
  for (const int64_t factor : factors) {
    if (__builtin_mul_overflow(product, factor, &product)) return std::nullopt;
  }
  return product;
}

// For costs, where 'more than 2^63' needs no exact value. REQUIRES: nothing is negative.
constexpr int64_t SaturatingProduct(std::initializer_list<int64_t> factors) {
  return CheckedProduct(factors).value_or(std::numeric_limits<int64_t>::max());
}
constexpr int64_t SaturatingSum(std::initializer_list<int64_t> terms) {
  int64_t sum = 0;
  for (const int64_t term : terms) {
    if (__builtin_add_overflow(sum, term, &sum)) return std::numeric_limits<int64_t>::max();
  }
  return sum;
}

constexpr int64_t CeilDiv(int64_t numerator, int64_t denominator) {
  return numerator / denominator + (numerator % denominator != 0 ? 1 : 0);
}

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_CHECKED_MATH_H_
