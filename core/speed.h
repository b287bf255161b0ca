// How long this machine takes for a problem, by what it took for small ones.
//
//   seconds = start + products * flop_seconds + pairs * pair_seconds + bytes * byte_seconds
//
// products: floating-point operations of the matrix products over what is visible; pairs: visible
// (query, key) pairs, each of which costs a softmax its exponential; bytes: of memory that caches
// do not hold. The factors are measured by computing real problems on the scheduler.
#ifndef ATTENDANT_CORE_SPEED_H_
#define ATTENDANT_CORE_SPEED_H_

#include <array>

#include "core/gradient.h"
#include "core/head.h"
#include "core/kernel.h"
#include "core/merge.h"
#include "core/mutex.h"
#include "core/problem.h"
#include "core/scheduler.h"
#include "core/tensor_view.h"

namespace attendant::core {

// Of one way to compute; 0 where it was not measured.
struct Rate {
  double start_seconds = 0;  // of a job, however small
  double flop_seconds = 0;   // of an operation of the matrix products
  double pair_seconds = 0;   // of a (query, key): its share of the softmax
  double edge_seconds = 0;   // of a query that sees a block of keys in part
};

// Of one type of numbers, as they are stored.
struct DTypeSpeed {
  Rate explicit_path;
  Rate chunked_path;
  // Where queries are too few to fill a vector.
  Rate explicit_few;
  Rate chunked_few;
  double projection_flop_seconds = 0;
};

struct Speed {
  std::array<DTypeSpeed, 5> of;  // by DType
  // Of keys and values that few queries read.
  double read_byte_seconds = 0;
  // Of scores that are too many to stay in memory that the process keeps: it gets its pages anew,
  // and each step of the explicit path goes over them.
  double fresh_byte_seconds = 0;
};

// Measures all of it on the scheduler's threads, the chunked path by `kernel`; takes about a
// quarter of a second on any number of threads. What could not be computed, for want of memory,
// stays 0. Not to be called on a compute thread.
Speed MeasureSpeed(Scheduler& scheduler, Kernel kernel);

// Of a slow core, by arithmetic, on so many threads: to tell short problems from long ones where
// nothing was measured. Right to some factor, and nothing to tell anybody. REQUIRES: threads > 0.
Speed NominalSpeed(int threads);

// Seconds of compute, on the path that the problem names, when nothing else is computed; 0 where
// that was not measured. Softcap, ALiBi, masks and layout are taken to cost nothing. A cost that
// saturates makes this a lower bound.
double SecondsOf(const Problem& problem, const Speed& speed);
double SecondsOf(const HeadProblem& problem, const Speed& speed);
// Rougher, to tell short jobs from long ones: a gradient as if its products took what the forward's
// do, a merge as long as its tensors take to be read.
double SecondsOf(const GradientProblem& problem, const Speed& speed);
double SecondsOf(const MergeProblem& problem, const Speed& speed);

// What to multiply SecondsOf with.
struct PathFactors {
  double explicit_path = 1;
  double chunked_path = 1;
};

// What the rates are worth by now: they may have been measured while the machine was busy, and
// clocks drift. Follows what problems took that had the threads for themselves: quickly where they
// were faster, slowly where they were not, since what else runs on a machine only makes them
// slower. Thread-safe.
class SpeedCorrection {
 public:
  // expected: SecondsOf the problem, whose path it was. Small problems say nothing and are left
  // out.
  void Observe(Path path, double expected, double measured);
  PathFactors factors() const;

 private:
  mutable Mutex mutex_;
  // Logarithms: a factor of 2 and one of 1/2 cancel out.
  double explicit_path_ ABSL_GUARDED_BY(mutex_) = 0;
  double chunked_path_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_SPEED_H_
