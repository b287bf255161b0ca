#include "server/byte_ranges.h"

#include <algorithm>
#include <iterator>

namespace attendant::server {

std::optional<ByteRange> ByteRanges::Add(ByteRange range) {
  if (range.begin == range.end) return std::nullopt;
  auto next = ends_.upper_bound(range.begin);
  const auto before = next == ends_.begin() ? ends_.end() : std::prev(next);
  if (before != ends_.end() && before->second > range.begin) {
    return ByteRange{range.begin, std::min(before->second, range.end)};
  }
  if (next != ends_.end() && next->first < range.end) {
    return ByteRange{next->first, std::min(next->second, range.end)};
  }
  int64_t end = range.end;
  if (next != ends_.end() && next->first == end) {
    end = next->second;
    next = ends_.erase(next);
  }
  if (before != ends_.end() && before->second == range.begin) {
    before->second = end;
  } else {
    ends_.emplace_hint(next, range.begin, end);
  }
  return std::nullopt;
}

std::optional<ByteRange> ByteRanges::FirstMissing(int64_t size) const {
  int64_t begin = 0;
  auto next = ends_.begin();
  if (next != ends_.end() && next->first == 0) begin = (next++)->second;
  if (begin >= size) return std::nullopt;
  return ByteRange{begin, next == ends_.end() ? size : next->first};
}

}  // namespace attendant::server
