// The arithmetic contract of core/fused_kernel.h as a program: one row, one number at a time, with
// std::fma. The kernel must give the same bits.
#ifndef ATTENDANT_TESTS_CORE_FUSED_REFERENCE_H_
#define ATTENDANT_TESTS_CORE_FUSED_REFERENCE_H_

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>
#include <set>
#include <type_traits>
#include <vector>

#include "core/problem.h"
#include "core/tensor_view.h"

namespace attendant::core {

// What a mutant of the rule changes; the defaults are the rule.
struct FusedRule {
  int64_t decision = 4;  // keys between two looks at the reference
  int64_t block = 192;
  int64_t segment = 4032;
  int threshold = 32;
  // Groups of keys, by their first, at which a neighbour's reference moves: this one moves along.
  const std::set<int64_t>* moves = nullptr;
};

// What happens to a row's scores beside scaling, in base 2.
template <typename T>
struct FusedScores {
  T softcap = 0;  // 0: none
  T slope = 0;
  int64_t position = 0;  // of the query among the keys
  // What the mask adds for each key, -infinity where it hides it; or nothing. Whether it adds.
  std::vector<T> bias = {};
  bool added = false;
  double natural_sink = -std::numeric_limits<double>::infinity();  // not in base 2
};

template <typename T>
struct FusedRow {
  std::vector<T> output;
  T reference = 0;
  T sum = 0;
  std::set<int64_t> moves;  // groups of keys, by their first, at which the reference moved
  T shift = 0;
};

template <typename T>
class FusedReference {
 public:
  // A row that sees the keys `visible`. query: of D elements. scale: with log2(e) in it.
  FusedReference(const T* query, const MatrixView<const T>& key, const MatrixView<const T>& value,
                 KeyRange visible, T scale, const FusedScores<T>& scores = {},
                 const FusedRule& rule = {})
      : key_(key), value_(value), visible_(visible), scores_(scores), rule_(rule) {
    for (int64_t d = 0; d < key.columns; ++d) query_.push_back(scale * query[d]);
  }

  FusedRow<T> Run() {
    FusedRow<T> total = Sweep();
    constexpr T kFar = kFloat ? T(0x1p99) : T(0x1p995);
    if (scores_.added && !(std::abs(total.reference) < kFar)) {
      T largest = -std::numeric_limits<T>::infinity();
      for (int64_t j = visible_.begin; j < visible_.end; ++j) {
        if (scores_.bias[j] > largest) largest = scores_.bias[j];
      }
      if (std::isfinite(largest) && std::abs(largest) >= kFar &&
          scores_.natural_sink - largest < kFar) {
        shift_ = largest;
        total = Sweep();
      }
    }
    total.shift = shift_;
    const T inverse = total.sum == 0 ? T{0} : 1 / total.sum;
    for (T& element : total.output) {
      element = (element + 0) * inverse;
      if (std::isnan(element)) element = std::numeric_limits<T>::quiet_NaN();
    }
    return total;
  }

 private:
  // All segments and the sink.
  FusedRow<T> Sweep() {
    FusedRow<T> total{std::vector<T>(value_.columns, 0), NoReference(), 0, {}};
    for (int64_t first = 0; first < visible_.end; first += rule_.segment) {
      FusedRow<T> part = Segment(first, std::min(first + rule_.segment, visible_.end));
      total.moves.merge(part.moves);
      Merge(total, part);
    }
    const T sink =
        static_cast<T>((scores_.natural_sink - static_cast<double>(shift_)) * std::numbers::log2e);
    if (!std::isinf(sink)) {
      const T reference = std::nearbyint(sink) + rule_.threshold;
      Merge(total, {std::vector<T>(value_.columns, 0), reference, Weight(sink, reference), {}});
    }
    return total;
  }

  static constexpr bool kFloat = std::is_same_v<T, float>;
  static constexpr int kBias = std::numeric_limits<T>::max_exponent - 1;
  using Bits = std::conditional_t<kFloat, uint32_t, uint64_t>;

  static T NoReference() { return -std::ldexp(T{1}, kBias); }

  static T PowerOfTwo(T e) { return e >= 1 - kBias ? std::ldexp(T{1}, static_cast<int>(e)) : T{0}; }

  static void Merge(FusedRow<T>& total, const FusedRow<T>& part) {
    if (part.sum == 0) return;
    const T merged = std::max(total.reference, part.reference);
    const T factor = PowerOfTwo(part.reference - merged);
    const T total_factor = PowerOfTwo(total.reference - merged);
    total.reference = merged;
    total.sum = std::fma(part.sum, factor, total.sum * total_factor);
    for (size_t x = 0; x < total.output.size(); ++x) {
      total.output[x] = std::fma(part.output[x], factor, total.output[x] * total_factor);
    }
  }

  // 2^(s - m): the polynomial and its exponent.
  static T Weight(T s, T m) {
    const T n = std::nearbyint(s);
    const T r = s - n;
    const T e = n - m;
    if (e < (kFloat ? T{-125} : T{-1021})) return 0;
    if (std::isnan(r)) return r;
    const Bits shift = static_cast<Bits>(static_cast<int64_t>(e))
                       << (std::numeric_limits<T>::digits - 1);
    return std::bit_cast<T>(static_cast<Bits>(std::bit_cast<Bits>(Polynomial(r)) + shift));
  }

  static T Tanh(T x) {
    const T u = std::fmin(T{kFloat ? 32 : 64}, std::abs(x) * T(2 * std::numbers::log2e));
    if (std::isnan(x)) return x;
    const T n = std::nearbyint(u);
    const T power = std::ldexp(T{1}, static_cast<int>(n));
    const T less = std::fma(power, Polynomial(u - n, /*minus_one=*/true), power - 1);
    return std::copysign(less / (less + 2), x);
  }

  // Highest power first; double takes the even and the odd powers apart. minus_one: without the
  // constant, which is added last.
  static T Polynomial(T r, bool minus_one = false) {
    static constexpr float kF[] = {0.001326472712f, 0.009671512645f, 0.05550733743f,
                                   0.2402224209f,   0.6931469776f,   1.0f};
    static constexpr double kD[] = {
        4.4549605981865183938e-10, 7.0725859492692236999e-9,   1.0178062445845773521e-7,
        1.3215442587921689653e-6,  0.000015252733829836118394, 0.00015403530441736050155,
        0.001333355814641693531,   0.0096181291076068885273,   0.055504108664821594339,
        0.2402265069591009822,     0.69314718055994530942,     1.0};
    if constexpr (kFloat) {
      T p = kF[0];
      for (size_t i = 1; i + 1 < std::size(kF); ++i) p = std::fma(p, r, kF[i]);
      return minus_one ? p * r : std::fma(p, r, T{1});
    } else {
      const T r2 = r * r;
      T parts[] = {kD[0], kD[1]};
      for (size_t i = 2; i + 1 < std::size(kD); ++i) {
        parts[i % 2] = std::fma(parts[i % 2], r2, kD[i]);
      }
      const T even = minus_one ? parts[1] * r2 : std::fma(parts[1], r2, T{1});
      return std::fma(parts[0], r, even);
    }
  }

  bool Sees(int64_t j) const {
    return visible_.begin <= j && j < visible_.end &&
           (scores_.bias.empty() || scores_.bias[j] != -std::numeric_limits<T>::infinity());
  }

  T Score(int64_t j) const {
    T s = 0;
    for (int64_t d = 0; d < key_.columns; ++d) s = std::fma(key_.Row(j)[d], query_[d], s);
    if (scores_.softcap != 0) s = Tanh(s * (1 / scores_.softcap)) * scores_.softcap;
    if (!scores_.bias.empty()) {
      const T bias = std::max(scores_.bias[j] - shift_, std::numeric_limits<T>::lowest());
      s = std::fma(bias, T(std::numbers::log2e), s);
    }
    if (scores_.slope != 0) {
      const int64_t origin = j / rule_.block * rule_.block;
      const T distance =
          std::abs(static_cast<T>(scores_.position - origin) - static_cast<T>(j - origin));
      s = std::fma(-scores_.slope, distance, s);
    }
    return s;
  }

  FusedRow<T> Segment(int64_t begin, int64_t end) {
    FusedRow<T> state{std::vector<T>(value_.columns, 0), NoReference(), 0, {}};
    for (int64_t first = begin; first < end; first += rule_.block) {
      Block(state, first, std::min(first + rule_.block, end));
    }
    return state;
  }

  void Block(FusedRow<T>& state, int64_t begin, int64_t end) {
    std::vector<T> weights;
    T block_sum = 0;
    for (int64_t j = begin; j < end; j += rule_.decision) {
      const int64_t group_end = std::min(j + rule_.decision, end);
      std::vector<T> scores;
      T largest = -std::numeric_limits<T>::infinity();
      for (int64_t i = j; i < group_end; ++i) {
        scores.push_back(Sees(i) ? Score(i) : -std::numeric_limits<T>::infinity());
        if (scores.back() > largest) largest = scores.back();
      }
      if (largest - state.reference > rule_.threshold ||
          (rule_.moves != nullptr && rule_.moves->contains(j))) {
        const T moved = std::max(state.reference, std::nearbyint(largest) + rule_.threshold);
        const T factor = PowerOfTwo(state.reference - moved);
        state.reference = moved;
        state.sum *= factor;
        block_sum *= factor;
        for (T& element : state.output) element *= factor;
        for (T& weight : weights) weight *= factor;
        state.moves.insert(j);
      }
      for (const T score : scores) {
        weights.push_back(Weight(score, state.reference));
        block_sum += weights.back();
      }
    }
    state.sum += block_sum;
    for (int64_t x = 0; x < value_.columns; ++x) {
      T sum = 0;
      for (int64_t j = begin; j < end; ++j) {
        if (Sees(j)) sum = std::fma(value_.Row(j)[x], weights[j - begin], sum);
      }
      state.output[x] += sum;
    }
  }

  std::vector<T> query_;
  MatrixView<const T> key_;
  MatrixView<const T> value_;
  KeyRange visible_;
  FusedScores<T> scores_;
  FusedRule rule_;
  T shift_ = 0;
};

}  // namespace attendant::core

#endif  // ATTENDANT_TESTS_CORE_FUSED_REFERENCE_H_
