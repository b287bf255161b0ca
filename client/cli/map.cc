#include "client/cli/map.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "core/checked_math.h"

namespace attendant::cli {
namespace {

constexpr int64_t kMostLines = 32;
constexpr int64_t kMostCharacters = 72;
constexpr absl::string_view kShades = ".:-=+*#%@";
constexpr char kNaN = '?';

char ShadeOf(double weight, double largest) {
  if (std::isnan(weight)) return kNaN;
  if (weight == 0) return ' ';
  const double shade = weight / largest * static_cast<double>(kShades.size());
  return kShades[static_cast<size_t>(
      std::clamp<double>(std::ceil(shade) - 1, 0, static_cast<double>(kShades.size() - 1)))];
}

}  // namespace

std::string DrawMap(const std::vector<double>& weights, int64_t queries, int64_t keys) {
  const int64_t rows = std::max<int64_t>(core::CeilDiv(queries, kMostLines), 1);
  const int64_t columns = std::max<int64_t>(core::CeilDiv(keys, kMostCharacters), 1);
  double largest = 0;
  for (const double weight : weights) largest = std::max(largest, weight);  // passes over NaN
  std::string map =
      absl::StrFormat("%d queries by %d keys, %c = %.4g", queries, keys, kShades.back(), largest);
  if (rows * columns > 1) {
    absl::StrAppendFormat(&map, ", a character is the largest of %d by %d", rows, columns);
  }
  map += '\n';
  for (int64_t first = 0; first < queries; first += rows) {
    for (int64_t key = 0; key < keys; key += columns) {
      double most = 0;
      for (int64_t i = first; i < std::min(first + rows, queries); ++i) {
        for (int64_t j = key; j < std::min(key + columns, keys); ++j) {
          const double weight = weights[static_cast<size_t>(i * keys + j)];
          if (!(weight <= most)) most = weight;  // a NaN stays
        }
      }
      map += ShadeOf(most, largest);
    }
    map += '\n';
  }
  return map;
}

}  // namespace attendant::cli
