// The fused kernel's pieces by themselves.
#ifndef ATTENDANT_BENCH_TILES_H_
#define ATTENDANT_BENCH_TILES_H_

#include "core/tensor_view.h"

namespace attendant::bench {

enum class Tile { kScore, kValue, kWeight };

// What a tile reads and writes. T is float or double.
template <typename T>
struct TileData {
  core::MatrixView<const T> rows;  // keys or values: (core::kFusedBlock, D)
  const T* panel = nullptr;        // queries, weights or scores: [D or key][lane]
  T* out = nullptr;                // scores, outputs or weights: [key or dimension][lane]
};

// Lanes of the widest panel on this CPU.
template <typename T>
int64_t PanelLanes();

// A whole block of keys against a panel. Returns the FLOPs it did: of a weight those of the
// polynomial alone.
template <typename T>
double RunTiles(Tile tile, const TileData<T>& data);

}  // namespace attendant::bench

#endif  // ATTENDANT_BENCH_TILES_H_
