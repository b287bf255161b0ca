// A mask, packed for a panel: one query a lane. Included inside a Highway target, compiled once for
// each.

// Per-target include guard.
#if defined(ATTENDANT_CORE_FUSED_MASK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTENDANT_CORE_FUSED_MASK_INL_H_
#undef ATTENDANT_CORE_FUSED_MASK_INL_H_
#else
#define ATTENDANT_CORE_FUSED_MASK_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/checked_math.h"
#include "core/fused_panel-inl.h"
#include "core/fused_tiles-inl.h"
#include "core/mask.h"

HWY_BEFORE_NAMESPACE();
namespace attendant::core::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Room that a block of a panel's mask takes; and that of its rows, where they must be read first.
template <typename T>
constexpr int64_t PackedMaskElements(int64_t lanes) {
  return (kFusedBlock + TileKeys(1)) * lanes;
}
template <typename T>
constexpr int64_t MaskRowElements(int64_t lanes) {
  return kFusedBlock * lanes;
}

// Transposes `bytes` of each of a vector's rows, a word of T a lane, to
// packed[word][vectors][lane], vector c. The last word is filled up with the last `unit` bytes of
// each row. look: called with each vector that is stored; returns what is.
template <typename T, class Look>
HWY_INLINE void PackRows(const unsigned char* const* rows, int64_t bytes, int64_t unit, int vectors,
                         int c, const Look& look, T* packed) {
  const Tag<T> d;
  constexpr int64_t kLanes = LanesOf<T>();
  constexpr int64_t kColumnBytes = kBlockLanes<T> * sizeof(T);
  const T* from[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) from[lane] = reinterpret_cast<const T*>(rows[lane]);
  const auto pack = [&](int64_t x, int64_t word) HWY_ATTR {
    Vec<T> columns[kBlockLanes<T>];
    LoadColumns(d, from, x, columns);
    for (int i = 0; i < kBlockLanes<T>; ++i) {
      hn::Store(look(columns[i]), d, packed + ((word + i) * vectors + c) * kLanes);
    }
  };
  const int64_t whole = bytes / kColumnBytes;
  for (int64_t block = 0; block < whole; ++block) {
    pack(block * kBlockLanes<T>, block * kBlockLanes<T>);
  }
  const int64_t rest = bytes % kColumnBytes;
  if (rest == 0) return;
  unsigned char ends[kLanes][kColumnBytes];
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    std::memcpy(ends[lane], rows[lane] + whole * kColumnBytes, static_cast<size_t>(rest));
    for (int64_t at = rest; at < kColumnBytes; ++at) ends[lane][at] = ends[lane][at - unit];
    from[lane] = reinterpret_cast<const T*>(ends[lane]);
  }
  pack(0, whole * kBlockLanes<T>);
}

// Flags of a vector's rows. hides, shows: set where some key is hidden or seen.
template <typename T>
HWY_INLINE void PackFlags(const unsigned char* const* rows, int64_t keys, int vectors, int c,
                          T* packed, bool& hides, bool& shows) {
  const Tag<T> d;
  const hn::RebindToUnsigned<Tag<T>> du;
  using Unsigned = hwy::MakeUnsigned<T>;
  const auto top = hn::Set(du, static_cast<Unsigned>(-1) / 0xff * kHiddenBit);
  const auto others = hn::Not(top);
  auto some = hn::Zero(du);
  auto all = top;
  const auto look = [&](Vec<T> v) HWY_ATTR {
    // The top bit of each byte that is 0: no other is without one of its own, and 0x7f and less
    // reach it.
    const auto word = hn::BitCast(du, v);
    const auto set = hn::Or(word, hn::Add(hn::And(word, others), others));
    const auto hidden = hn::AndNot(set, top);
    some = hn::Or(some, hidden);
    all = hn::And(all, hidden);
    return hn::BitCast(d, hidden);
  };
  PackRows<T>(rows, keys, 1, vectors, c, look, packed);
  hides = hides || !hn::AllTrue(du, hn::Eq(some, hn::Zero(du)));
  shows = shows || !hn::AllTrue(du, hn::Eq(all, top));
}

// Numbers of a vector's rows, less each row's shift. adds: set where some number is not 0; hides,
// shows: as above.
template <typename T, bool kShift>
HWY_INLINE void PackNumbers(const unsigned char* const* rows, int64_t keys, Vec<T> shift,
                            int vectors, int c, T* packed, bool& adds, bool& hides, bool& shows) {
  const Tag<T> d;
  const hn::RebindToUnsigned<Tag<T>> du;
  const auto lowest = hn::Set(d, -std::numeric_limits<T>::infinity());
  const auto hidden = hn::BitCast(du, lowest);
  // The bits that some number has, and that all have: no bit where all are 0, those of -infinity in
  // both where all are that.
  auto some = hn::Zero(du);
  auto all = hidden;
  auto least = hn::Zero(d);
  const auto look = [&](Vec<T> v) HWY_ATTR {
    if constexpr (kShift) v = Shifted(d, v, shift);
    const auto bits = hn::BitCast(du, v);
    some = hn::Or(some, bits);
    all = hn::And(all, bits);
    least = hn::Min(v, least);  // the second where the first is NaN
    return v;
  };
  PackRows<T>(rows, keys * static_cast<int64_t>(sizeof(T)), sizeof(T), vectors, c, look, packed);
  adds = adds || !hn::AllTrue(du, hn::Eq(some, hn::Zero(du)));
  hides = hides || !hn::AllFalse(d, hn::Eq(least, lowest));
  shows = shows || !hn::AllTrue(du, hn::And(hn::Eq(some, hidden), hn::Eq(all, hidden)));
}

// Packs what the mask says of the panel's queries and `keys`, which are the block's rows, and says
// it there: a block that the mask hides has no rows any more, and one it leaves as it is no mask.
// packed: PackedMaskElements; read: MaskRowElements.
template <typename T>
void PackMask(const HeadMask<T>& mask, const Panel<T>& panel, KeyRange keys, T* packed, T* read,
              Block<T>& block) {
  const Tag<T> d;
  constexpr int64_t kLanes = LanesOf<T>();
  bool adds = false;
  bool hides = false;
  bool shows = false;
  const bool flags = mask.Flags(panel.first, keys.begin) != nullptr;
  const bool shifted = panel.shift != nullptr && std::any_of(panel.shift, panel.shift + panel.rows,
                                                             [](T shift) { return shift != 0; });
  for (int c = 0; c < panel.vectors; ++c) {
    const unsigned char* rows[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t query = panel.first + std::min(c * kLanes + lane, panel.rows - 1);
      if (flags) {
        rows[lane] = mask.Flags(query, keys.begin);
        continue;
      }
      const T* numbers = mask.Numbers(query, keys.begin);
      if (numbers == nullptr) {
        T* const row = read + lane * kFusedBlock;
        mask.Read(query, keys, row);
        numbers = row;
      }
      rows[lane] = reinterpret_cast<const unsigned char*>(numbers);
    }
    if (flags) {
      PackFlags<T>(rows, keys.size(), panel.vectors, c, packed, hides, shows);
    } else if (shifted) {
      const Vec<T> shift = hn::Load(d, panel.shift + c * kLanes);
      PackNumbers<T, true>(rows, keys.size(), shift, panel.vectors, c, packed, adds, hides, shows);
    } else {
      PackNumbers<T, false>(rows, keys.size(), hn::Zero(d), panel.vectors, c, packed, adds, hides,
                            shows);
    }
  }
  if (!shows) block.key.rows = 0;
  if (flags) {
    if (hides) block.flags = packed;
  } else if (adds) {
    block.bias = packed;
    block.bias_hides = hides;
  }
}

// Where the mask of the panel's queries and `keys` lies, to be fetched in time; empty where it is
// not read from there.
template <typename T>
MatrixView<const unsigned char> MaskBytes(const Problem& problem, const HeadMask<T>& mask,
                                          const Panel<T>& panel, KeyRange keys) {
  if (!mask.present() || keys.size() == 0) return {};
  const MaskLayout& layout = *problem.mask;
  const auto* const from = mask.At(panel.first, keys.begin);
  const int64_t rows = layout.query_stride == 0 ? 1 : panel.rows;
  const int64_t size = SizeOf(layout.dtype);
  return {from, rows, (layout.key_stride == 0 ? 1 : keys.size()) * size,
          layout.query_stride * size};
}

}  // namespace attendant::core::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
