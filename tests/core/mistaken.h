// Attention with mistakes in it, as a person would write them: whole arrays, plain loops, one bug
// at its place. What the referee is tested with, and independent of it.
#ifndef ATTENDANT_TESTS_CORE_MISTAKEN_H_
#define ATTENDANT_TESTS_CORE_MISTAKEN_H_

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "core/problem.h"

namespace attendant::core {

// The codes of the mistakes that are made, as docs/check.md lists them.
using Bugs = std::set<std::string>;

struct MistakenInputs {
  std::vector<double> query;
  std::vector<double> key;
  std::vector<double> value;
  // One for each of the mask's elements: what is added, -infinity where a key is hidden.
  std::vector<double> mask = {};
};

struct MistakenHead {
  std::vector<double> x, w_q, w_k, w_v, w_o;
  std::vector<double> mask = {};
  int64_t d_model = 1;
};

struct MistakenResult {
  // (B, H, T, ..) but for the output, which is in the problem's layout, or x's of a head.
  std::vector<double> query, key, value, logits, weights, context, output;
};

// d_model: of all heads together.
MistakenResult MistakenAttention(const Problem& problem, const MistakenInputs& inputs,
                                 int64_t d_model, const Bugs& bugs);
// problem: in the layout BTHD, of equal heads and tokens.
MistakenResult MistakenHeadOf(const Problem& problem, const MistakenHead& inputs, const Bugs& bugs);

}  // namespace attendant::core

#endif  // ATTENDANT_TESTS_CORE_MISTAKEN_H_
