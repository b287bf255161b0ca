#include "tests/core/oracle.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace attendant::core {
namespace {

// Where the vector of one token of one head begins.
int64_t Offset(Layout layout, int64_t heads, int64_t tokens, int64_t width, int64_t batch,
               int64_t head, int64_t token) {
  if (layout == Layout::kBhtd) return ((batch * heads + head) * tokens + token) * width;
  return ((batch * tokens + token) * heads + head) * width;
}

int64_t Length(const Problem& p, int64_t batch) {
  return p.key_lengths.empty() ? p.keys : p.key_lengths[batch];
}

// Where query i stands among the keys.
int64_t Position(const Problem& p, int64_t batch, int64_t i) {
  return p.causal == Causal::kBottomRight ? i + Length(p, batch) - p.queries : i;
}

double Dot(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t d = 0; d < n; ++d) sum += a[d] * b[d];
  return sum;
}

// Turns the scores of the `seen` keys of a row into weights; returns its logsumexp.
double Softmax(double* row, const std::vector<int64_t>& seen, double sink) {
  double max = sink;
  for (const int64_t j : seen) max = std::max(max, row[j]);  // passes over NaN
  double sum = std::isinf(sink) ? 0 : std::exp(sink - max);
  for (const int64_t j : seen) {
    row[j] = std::exp(row[j] - max);
    sum += row[j];
  }
  for (const int64_t j : seen) row[j] /= sum;
  return max + std::log(sum);
}

}  // namespace

bool OracleSees(const Problem& p, int64_t batch, int64_t i, int64_t j) {
  const int64_t length = Length(p, batch);
  const int64_t position = Position(p, batch, i);
  if (j >= length) return false;
  if (p.causal != Causal::kNone && j > position) return false;
  if (p.window.left.has_value() && position - j > *p.window.left) return false;
  if (p.window.right.has_value() && j - position > *p.window.right) return false;
  return true;
}

OracleResult Oracle(const Problem& p, const std::vector<double>& query,
                    const std::vector<double>& key, const std::vector<double>& value,
                    const std::vector<double>& mask) {
  OracleResult result;
  result.output.assign(p.batch * p.heads * p.queries * p.value_width, 0);
  result.weights.assign(p.batch * p.heads * p.queries * p.keys, 0);
  result.logsumexp.assign(p.batch * p.heads * p.queries, -std::numeric_limits<double>::infinity());
  result.key_sums.assign(p.batch * p.heads * p.keys, 0);
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.heads; ++h) {
      const int64_t kv_head = h / (p.heads / p.kv_heads);
      for (int64_t i = 0; i < p.queries; ++i) {
        const auto bias = [&](int64_t j) {
          if (!p.mask.has_value()) return 0.0;
          return mask[static_cast<size_t>(b * p.mask->batch_stride + h * p.mask->head_stride +
                                          i * p.mask->query_stride + j * p.mask->key_stride)];
        };
        std::vector<int64_t> seen;
        for (int64_t j = 0; j < p.keys; ++j) {
          const bool masked = bias(j) == -std::numeric_limits<double>::infinity();
          if (!masked && OracleSees(p, b, i, j)) seen.push_back(j);
        }
        const double sink = p.sinks.empty() ? -std::numeric_limits<double>::infinity() : p.sinks[h];
        const int64_t row = (b * p.heads + h) * p.queries + i;
        if (seen.empty()) {
          result.logsumexp[row] = sink;
          continue;
        }
        double* const weights = result.weights.data() + row * p.keys;
        double* const sums = result.key_sums.data() + (b * p.heads + h) * p.keys;
        double* const output =
            result.output.data() + Offset(p.layout, p.heads, p.queries, p.value_width, b, h, i);
        const double* const q =
            query.data() + Offset(p.layout, p.heads, p.queries, p.width, b, h, i);
        for (const int64_t j : seen) {
          const double* const k =
              key.data() + Offset(p.layout, p.kv_heads, p.keys, p.width, b, kv_head, j);
          double& score = weights[j];
          score = p.scale * Dot(q, k, p.width);
          if (p.softcap != 0) score = p.softcap * std::tanh(score / p.softcap);
          score += bias(j);
          if (!p.alibi_slopes.empty()) {
            score -= p.alibi_slopes[h] * std::abs(static_cast<double>(Position(p, b, i) - j));
          }
        }
        result.logsumexp[row] = Softmax(weights, seen, sink);
        for (const int64_t j : seen) {
          const double* const v =
              value.data() + Offset(p.layout, p.kv_heads, p.keys, p.value_width, b, kv_head, j);
          for (int64_t d = 0; d < p.value_width; ++d) output[d] += weights[j] * v[d];
          sums[j] += weights[j];
        }
      }
    }
  }
  return result;
}

}  // namespace attendant::core
