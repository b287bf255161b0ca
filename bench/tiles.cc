#include "bench/tiles.h"

#include <cstdint>

#include "core/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/tiles.cc"
#include <hwy/foreach_target.h>  // compiles the rest of this file once a target
#include <hwy/highway.h>

#include "core/fused_tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attendant::bench::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace kernel = core::HWY_NAMESPACE;

constexpr int kVectors = kernel::kMostVectors;
constexpr int64_t kKeys = core::kFusedBlock;

template <typename T>
constexpr int64_t kLanes = kVectors* kernel::LanesOf<T>();

template <typename T>
double Score(const TileData<T>& data) {
  constexpr int kTile = kernel::TileKeys(kVectors);
  const kernel::Tag<T> d;
  for (int64_t j = 0; j < kKeys; j += kTile) {
    const T* keys[kTile];
    for (int i = 0; i < kTile; ++i) keys[i] = data.rows.Row(j + i);
    kernel::Vec<T> scores[kTile][kVectors];
    kernel::ScoreTile<T, kVectors, kTile, 0>(data.panel, keys, data.rows.columns, scores,
                                             [](int) {});
    for (int i = 0; i < kTile; ++i) {
      for (int c = 0; c < kVectors; ++c) {
        hn::Store(scores[i][c], d, data.out + (j + i) * kLanes<T> + c * kernel::LanesOf<T>());
      }
    }
  }
  return 2.0 * static_cast<double>(kKeys * data.rows.columns * kLanes<T>);
}

template <typename T>
double Value(const TileData<T>& data) {
  constexpr int kStrips = kernel::TileStrips(kVectors);
  const kernel::Strips<T> strips{data.rows.data, data.rows.columns / kernel::kStrip, kernel::kStrip,
                                 data.rows.stride};
  int64_t strip = 0;
  for (; strip + kStrips <= strips.count; strip += kStrips) {
    kernel::ValueTile<T, kVectors, kStrips>(
        strips, strip, kKeys, data.panel, [](int, int64_t) { return kernel::kEverySeen; },
        data.out);
  }
  return 2.0 * static_cast<double>(kKeys * strip * kernel::kStrip * kLanes<T>);
}

template <typename T>
double Weights(const TileData<T>& data) {
  const kernel::Tag<T> d;
  for (int64_t i = 0; i < kKeys * kLanes<T>; i += kernel::LanesOf<T>()) {
    hn::Store(kernel::Exp2(d, hn::Load(d, data.panel + i), hn::Zero(d)), d, data.out + i);
  }
  return 2.0 * (sizeof(T) == 4 ? 5 : 11) * static_cast<double>(kKeys * kLanes<T>);
}

template <typename T>
double Run(Tile tile, const TileData<T>& data) {
  if (tile == Tile::kScore) return Score(data);
  return tile == Tile::kValue ? Value(data) : Weights(data);
}

// HWY_EXPORT takes no template: each function by name, for float (F) and double (D).
double RunF(Tile tile, const TileData<float>& data) { return Run(tile, data); }
double RunD(Tile tile, const TileData<double>& data) { return Run(tile, data); }
int64_t LanesF() { return kLanes<float>; }
int64_t LanesD() { return kLanes<double>; }

}  // namespace attendant::bench::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attendant::bench {

HWY_EXPORT(RunF);
HWY_EXPORT(RunD);
HWY_EXPORT(LanesF);
HWY_EXPORT(LanesD);

template <>
double RunTiles(Tile tile, const TileData<float>& data) {
  return HWY_DYNAMIC_DISPATCH(RunF)(tile, data);
}
template <>
double RunTiles(Tile tile, const TileData<double>& data) {
  return HWY_DYNAMIC_DISPATCH(RunD)(tile, data);
}
template <>
int64_t PanelLanes<float>() {
  return HWY_DYNAMIC_DISPATCH(LanesF)();
}
template <>
int64_t PanelLanes<double>() {
  return HWY_DYNAMIC_DISPATCH(LanesD)();
}

}  // namespace attendant::bench
#endif  // HWY_ONCE
