// Which bytes of a tensor have come, in pieces of any order.
#ifndef ATTENDANT_SERVER_BYTE_RANGES_H_
#define ATTENDANT_SERVER_BYTE_RANGES_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

namespace attendant::server {

// Bytes begin <= i < end.
struct ByteRange {
  int64_t begin = 0;
  int64_t end = 0;
  bool operator==(const ByteRange&) const = default;
};

// Thread-compatible. Ranges that meet are one: memory grows with the gaps, not with the pieces.
class ByteRanges {
 public:
  // Returns the first bytes of the range that are here already: then nothing was added.
  // REQUIRES: 0 <= begin <= end.
  std::optional<ByteRange> Add(ByteRange range);

  // The first bytes below `size` that are missing.
  std::optional<ByteRange> FirstMissing(int64_t size) const;

  // How many pieces there would be with all gaps as they are.
  size_t count() const { return ends_.size(); }

 private:
  std::map<int64_t, int64_t> ends_;  // by begin; no two touch
};

}  // namespace attendant::server

#endif  // ATTENDANT_SERVER_BYTE_RANGES_H_
