// The mistakes that the referee knows: their names, what was done and what is right, and attention
// as each of them understands it.
//
// docs/check.md has them as a table.
#ifndef ATTENDANT_CORE_MISTAKES_H_
#define ATTENDANT_CORE_MISTAKES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "core/problem.h"

namespace attendant::core {

// In the order in which they are reported.
enum class Mistake : uint8_t {
  kSoftmaxOverQueries,
  kSoftmaxOverHeads,
  kSoftmaxOverBatch,
  kScaleMissing,
  kScaleByModelWidth,
  kScaleTwice,
  kScaleOptionIgnored,
  kScoresTransposed,
  kKeepdimsLost,
  kKeepdimsLostInMax,
  kKeepdimsLostInSum,
  kNotNormalised,
  kNoMaxSubtraction,
  kCausalIgnored,
  kCausalAdded,
  kCausalWrongCorner,
  kCausalEdgeLate,
  kCausalEdgeEarly,
  kCausalInverted,
  kCausalMirrored,
  kMaskIgnored,
  kMaskInverted,
  kMaskAddedAs01,
  kMaskMultiplied,
  kMaskScaled,
  kMaskAfterSoftmax,
  kFullyMaskedRowsNan,
  kFullyMaskedRowsAveraged,
  kSoftcapIgnored,
  kSoftcapAfterMask,
  kPaddedKeysNotMasked,
  kWindowIgnored,
  kAlibiIgnored,
  kSinksIgnored,
  kGroupedHeadsTiled,
  kHeadsSplitWithoutTranspose,
  kHeadsMergedWithoutTranspose,
  kLayoutMisread,
  kHeadsAndTokensSwapped,
  kWkIsWq,
  kWoMissing,
  kCount,
};

// Several mistakes at once.
class MistakeSet {
 public:
  MistakeSet() = default;
  explicit MistakeSet(std::vector<Mistake> mistakes) : list_(std::move(mistakes)) {
    for (const Mistake mistake : list_) bits_ |= Bit(mistake);
  }
  bool Has(Mistake mistake) const { return (bits_ & Bit(mistake)) != 0; }
  bool HasAny(std::initializer_list<Mistake> mistakes) const {
    uint64_t bits = 0;
    for (const Mistake mistake : mistakes) bits |= Bit(mistake);
    return (bits_ & bits) != 0;
  }
  const std::vector<Mistake>& list() const { return list_; }

 private:
  static uint64_t Bit(Mistake mistake) { return uint64_t{1} << static_cast<int>(mistake); }
  uint64_t bits_ = 0;
  std::vector<Mistake> list_;
};
static_assert(static_cast<int>(Mistake::kCount) <= 64);

// The problem that is checked: attention alone, or inside a head.
struct CheckProblem {
  // Of a head: what stands between its projections, whose (B, T, H * width) is the layout BTHD.
  Problem attend;
  bool head = false;
  bool x_has_batch = true;  // of a head
  int64_t d_model = 0;      // H * D without a head
  // Whether the output is all that the caller sent.
  bool output_only = true;
};

// What a finding says. Several codes are joined by '+', sentences follow each other.
std::string CodeOf(const MistakeSet& mistakes);
std::string MessageOf(const MistakeSet& mistakes);
// Fields of the request, such as "options.scale" or "head.options.scale", joined by ", ".
std::string FieldOf(const MistakeSet& mistakes, bool head);

// The mistakes that can be made in this problem and make a difference.
std::vector<Mistake> MistakesIn(const CheckProblem& problem);
// The pairs of them that can be made at once.
std::vector<MistakeSet> PairsIn(const CheckProblem& problem);

// Attention as somebody who makes these mistakes understands it. What changes the problem alone is
// in `problem`; the rest is asked of `mistakes` where it is computed.
struct Variant {
  Problem problem;
  Layout in = Layout::kBhtd;   // how query, key and value are read
  Layout out = Layout::kBhtd;  // how the output is written
  MistakeSet mistakes;

  bool Has(Mistake mistake) const { return mistakes.Has(mistake); }
};
Variant VariantOf(const CheckProblem& problem, const MistakeSet& mistakes);

// Whether its weights need the scores of other rows, of the same head (statistics of it), or of
// other heads or batches.
bool NeedsStatistics(const MistakeSet& mistakes);
bool NeedsOtherHeads(const MistakeSet& mistakes);

// Multiply-adds up to which mistakes that need the scores of other rows are looked for: of one
// head's scores alone, of the same in pairs, and of all heads' scores times the heads (or batches)
// that one of them needs.
inline constexpr int64_t kMostStatistics = int64_t{1} << 30;
inline constexpr int64_t kMostStatisticsOfPairs = int64_t{1} << 26;
inline constexpr int64_t kMostOtherHeads = int64_t{1} << 34;

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_MISTAKES_H_
