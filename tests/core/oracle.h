// Attention from its definition, in double and plain loops: what both paths are compared with.
#ifndef ATTENDANT_TESTS_CORE_ORACLE_H_
#define ATTENDANT_TESTS_CORE_ORACLE_H_

#include <vector>

#include "core/problem.h"

namespace attendant::core {

struct OracleResult {
  std::vector<double> output;     // in the problem's layout
  std::vector<double> weights;    // (B, H, Tq, Tk)
  std::vector<double> logsumexp;  // (B, H, Tq)
  std::vector<double> key_sums;   // (B, H, Tk)
};

// Whether query i of a batch sees key j as far as no mask hides it, from the fields of `problem`.
bool OracleSees(const Problem& problem, int64_t batch, int64_t i, int64_t j);

// Reads the fields of `problem` alone, none of its methods. Inputs are in the problem's layout;
// mask: what is added, -infinity where a key is hidden, one number for each of the mask's elements.
OracleResult Oracle(const Problem& problem, const std::vector<double>& query,
                    const std::vector<double>& key, const std::vector<double>& value,
                    const std::vector<double>& mask = {});

}  // namespace attendant::core

#endif  // ATTENDANT_TESTS_CORE_ORACLE_H_
