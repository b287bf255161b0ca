// Faults that tests ask for: memory that is refused, an engine that fails, a tile that takes long.
//
// They exist where a source file is compiled with ATTENDANT_FAULTS, which the tests' own copies of
// scheduler.cc, workspace.cc and call.cc are; what is shipped has nothing of them. Everything here
// is thread-safe.
#ifndef ATTENDANT_CORE_FAULTS_H_
#define ATTENDANT_CORE_FAULTS_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace attendant::core::faults {

#ifdef ATTENDANT_FAULTS
static constexpr bool kCompiledIn = true;
#else
static constexpr bool kCompiledIn = false;
#endif

enum class Point : uint8_t {
  kAllocation,   // of a workspace, a job, or a place in the queue: RESOURCE_EXHAUSTED
  kEngineError,  // a tile is not run: INTERNAL
  kSlowTile,     // a tile starts some milliseconds late
  kCount,
};

// How often a point was passed while it was armed, and what it does.
struct State {
  std::atomic<int64_t> every_nth = 0;  // 0: never
  std::atomic<int64_t> passed = 0;
  std::atomic<int64_t> fired = 0;
};
inline std::array<State, static_cast<size_t>(Point::kCount)> states;
inline State& StateOf(Point point) { return states[static_cast<size_t>(point)]; }

// From now on every nth passage of the point fails, the nth first; 0: none does. The counts begin
// again.
inline void Arm(Point point, int64_t every_nth) {
  State& state = StateOf(point);
  state.every_nth = 0;
  state.passed = 0;
  state.fired = 0;
  state.every_nth = every_nth;
}
inline void DisarmAll() {
  for (State& state : states) state.every_nth = 0;
}
// Since the point was armed.
inline int64_t Fired(Point point) { return StateOf(point).fired; }

// Called at the point itself: whether it is to fail.
inline bool Fires(Point point) {
  State& state = StateOf(point);
  const int64_t every_nth = state.every_nth;
  if (every_nth == 0 || (++state.passed) % every_nth != 0) return false;
  ++state.fired;
  return true;
}

}  // namespace attendant::core::faults

#endif  // ATTENDANT_CORE_FAULTS_H_
