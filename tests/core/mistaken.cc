#include "tests/core/mistaken.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace attendant::core {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// (B, H, T, W), whatever it was stored as.
struct Array {
  int64_t batch, heads, tokens, width;
  std::vector<double> numbers;

  Array(int64_t b, int64_t h, int64_t t, int64_t w)
      : batch(b), heads(h), tokens(t), width(w), numbers(static_cast<size_t>(b * h * t * w)) {}
  double& operator()(int64_t b, int64_t h, int64_t t, int64_t w) {
    return numbers[static_cast<size_t>(((b * heads + h) * tokens + t) * width + w)];
  }
};

// Splits what is stored one way into heads.
Array Split(const std::vector<double>& stored, Layout layout, int64_t b, int64_t h, int64_t t,
            int64_t w) {
  Array array(b, h, t, w);
  size_t from = 0;
  for (int64_t i = 0; i < b; ++i) {
    for (int64_t j = 0; j < (layout == Layout::kBhtd ? h : t); ++j) {
      for (int64_t k = 0; k < (layout == Layout::kBhtd ? t : h); ++k) {
        for (int64_t l = 0; l < w; ++l) {
          (layout == Layout::kBhtd ? array(i, j, k, l) : array(i, k, j, l)) = stored[from++];
        }
      }
    }
  }
  return array;
}

std::vector<double> Merge(Array& array, Layout layout) {
  std::vector<double> stored;
  const int64_t outer = layout == Layout::kBhtd ? array.heads : array.tokens;
  const int64_t inner = layout == Layout::kBhtd ? array.tokens : array.heads;
  for (int64_t i = 0; i < array.batch; ++i) {
    for (int64_t j = 0; j < outer; ++j) {
      for (int64_t k = 0; k < inner; ++k) {
        for (int64_t l = 0; l < array.width; ++l) {
          stored.push_back(layout == Layout::kBhtd ? array(i, j, k, l) : array(i, k, j, l));
        }
      }
    }
  }
  return stored;
}

Layout Flipped(Layout layout) { return layout == Layout::kBhtd ? Layout::kBthd : Layout::kBhtd; }

// Which keys position, lengths and window leave, and what they make of the mask.
class Hiding {
 public:
  Hiding(const Problem& problem, const std::vector<double>& mask, const Bugs& bugs)
      : p_(problem), mask_(mask), bugs_(bugs), causal_(problem.causal) {
    if (bugs.count("causal_ignored") > 0) causal_ = Causal::kNone;
    if (bugs.count("causal_not_asked_for") > 0) causal_ = Causal::kTopLeft;
    if (bugs.count("causal_wrong_corner") > 0) {
      causal_ = p_.causal == Causal::kTopLeft ? Causal::kBottomRight : Causal::kTopLeft;
    }
  }

  int64_t Length(int64_t b) const {
    const bool all = p_.key_lengths.empty() || bugs_.count("padded_keys_not_masked") > 0;
    return all ? p_.keys : p_.key_lengths[static_cast<size_t>(b)];
  }
  int64_t Position(int64_t b, int64_t i) const {
    return causal_ == Causal::kBottomRight ? i + Length(b) - p_.queries : i;
  }
  double Number(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return mask_[static_cast<size_t>(b * p_.mask->batch_stride + h * p_.mask->head_stride +
                                     i * p_.mask->query_stride + j * p_.mask->key_stride)];
  }
  bool Seen(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const int64_t at = Position(b, i);
    if (j >= Length(b)) return false;
    if (causal_ != Causal::kNone) {
      if (bugs_.count("causal_inverted") > 0) {
        if (j <= at) return false;
      } else if (bugs_.count("causal_mirrored") > 0) {
        if (j < at) return false;
      } else if (bugs_.count("causal_edge_one_late") > 0) {
        if (j > at + 1) return false;
      } else if (bugs_.count("causal_edge_one_early") > 0) {
        if (j >= at) return false;
      } else if (j > at) {
        return false;
      }
    }
    if (bugs_.count("window_ignored") == 0) {
      if (p_.window.left.has_value() && at - j > *p_.window.left) return false;
      // The causal edge took the place of the window's right side.
      if (p_.window.right.has_value() && causal_ == Causal::kNone && j - at > *p_.window.right) {
        return false;
      }
    }
    if (!p_.mask.has_value() || bugs_.count("mask_ignored") > 0) return true;
    if (bugs_.count("mask_added_as_0_and_1") + bugs_.count("mask_multiplied") > 0) return true;
    const bool hidden = Number(b, h, i, j) == -kInfinity;
    return hidden == (bugs_.count("mask_inverted") > 0);
  }

 private:
  const Problem& p_;
  const std::vector<double>& mask_;
  const Bugs& bugs_;
  Causal causal_;
};

double ScaleWith(const Problem& p, int64_t d_model, const Bugs& bugs) {
  if (bugs.count("scale_missing") > 0) return 1;
  if (bugs.count("scale_by_d_model") > 0) return 1 / std::sqrt(static_cast<double>(d_model));
  if (bugs.count("scale_option_ignored") > 0) return 1 / std::sqrt(static_cast<double>(p.width));
  return bugs.count("scale_twice") > 0 ? p.scale * p.scale : p.scale;
}

// Scores before the softcap and the mask.
Array LogitsOf(const Problem& p, Array& q, Array& k, double scale, const Bugs& bugs) {
  Array logits(q.batch, q.heads, q.tokens, k.tokens);
  for (int64_t b = 0; b < q.batch; ++b) {
    for (int64_t h = 0; h < q.heads; ++h) {
      const int64_t kv =
          bugs.count("grouped_heads_tiled") > 0 ? h % k.heads : h / (q.heads / k.heads);
      for (int64_t i = 0; i < q.tokens; ++i) {
        for (int64_t j = 0; j < k.tokens; ++j) {
          double sum = 0;
          for (int64_t d = 0; d < p.width; ++d) {
            sum += bugs.count("scores_transposed") > 0 ? q(b, h, j, d) * k(b, kv, i, d)
                                                       : q(b, h, i, d) * k(b, kv, j, d);
          }
          logits(b, h, i, j) = scale * sum;
        }
      }
    }
  }
  return logits;
}

void FinishScores(const Problem& p, const Hiding& hiding, double scale, const Bugs& bugs,
                  Array& x) {
  const double cap = bugs.count("softcap_ignored") > 0 ? 0 : p.softcap;
  const bool cap_last = bugs.count("softcap_after_mask") > 0;
  for (int64_t b = 0; b < x.batch; ++b) {
    for (int64_t h = 0; h < x.heads; ++h) {
      for (int64_t i = 0; i < x.tokens; ++i) {
        for (int64_t j = 0; j < x.width; ++j) {
          double& s = x(b, h, i, j);
          if (cap != 0 && !cap_last) s = cap * std::tanh(s / cap);
          if (p.mask.has_value() && bugs.count("mask_ignored") == 0) {
            const double number = hiding.Number(b, h, i, j);
            const bool kept = number != -kInfinity;
            if (bugs.count("mask_added_as_0_and_1") > 0) {
              s += kept ? 1 : 0;
            } else if (bugs.count("mask_multiplied") > 0) {
              s *= kept ? 1 : 0;
            } else if (kept) {
              s += bugs.count("mask_added_before_scale") > 0 ? scale * number : number;
            }
          }
          if (!p.alibi_slopes.empty() && bugs.count("alibi_ignored") == 0) {
            s -= p.alibi_slopes[static_cast<size_t>(h)] *
                 std::abs(static_cast<double>(hiding.Position(b, i) - j));
          }
          if (!hiding.Seen(b, h, i, j) && bugs.count("mask_after_softmax") == 0) s = -kInfinity;
          if (cap != 0 && cap_last) s = cap * std::tanh(s / cap);
        }
      }
    }
  }
}

// The softmax of some numbers along one axis.
void SoftmaxOf(const std::vector<double*>& x, double sink, bool subtract, bool divide) {
  double most = sink;
  for (const double* s : x) most = std::max(most, *s);
  if (most == -kInfinity) {
    for (double* s : x) *s = 0;
    return;
  }
  if (!subtract) most = 0;
  double sum = std::exp(sink - most);
  for (double* s : x) sum += * s = std::exp(*s - most);
  for (double* s : x) *s /= divide ? sum : 1;
}

// Along axis 0 (batch), 1 (heads), 2 (queries) or 3 (keys).
void SoftmaxAlong(int axis, const std::vector<double>& sinks, const Bugs& bugs, Array& x) {
  const int64_t sizes[] = {x.batch, x.heads, x.tokens, x.width};
  int64_t starts[] = {x.batch, x.heads, x.tokens, x.width};
  starts[axis] = 1;
  for (int64_t b = 0; b < starts[0]; ++b) {
    for (int64_t h = 0; h < starts[1]; ++h) {
      for (int64_t i = 0; i < starts[2]; ++i) {
        for (int64_t j = 0; j < starts[3]; ++j) {
          std::vector<double*> along;
          for (int64_t n = 0; n < sizes[axis]; ++n) {
            int64_t at[] = {b, h, i, j};
            at[axis] = n;
            along.push_back(&x(at[0], at[1], at[2], at[3]));
          }
          const bool sink = !sinks.empty() && bugs.count("sinks_ignored") == 0;
          SoftmaxOf(along, sink ? sinks[static_cast<size_t>(h)] : -kInfinity,
                    bugs.count("no_max_subtraction") == 0,
                    bugs.count("output_not_normalised") == 0);
        }
      }
    }
  }
}

// x - x.max(-1) and e / e.sum(-1) of a square, where one or both lose their axis.
void SoftmaxWithoutKeepdims(const Bugs& bugs, Array& x) {
  const int64_t n = x.tokens;
  const bool both = bugs.count("keepdims_lost") > 0;
  const bool max_lost = both || bugs.count("keepdims_lost_in_max") > 0;
  const bool sum_lost = both || bugs.count("keepdims_lost_in_sum") > 0;
  for (int64_t b = 0; b < x.batch; ++b) {
    for (int64_t h = 0; h < x.heads; ++h) {
      std::vector<double> most(static_cast<size_t>(n), -kInfinity);
      std::vector<double> sums(static_cast<size_t>(n));
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = 0; j < n; ++j) {
          most[static_cast<size_t>(i)] = std::max(most[static_cast<size_t>(i)], x(b, h, i, j));
        }
      }
      if (bugs.count("no_max_subtraction") > 0) std::fill(most.begin(), most.end(), 0);
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = 0; j < n; ++j) {
          double& s = x(b, h, i, j);
          const double reference = most[static_cast<size_t>(max_lost ? j : i)];
          s = s == -kInfinity ? 0 : std::exp(s - reference);
          sums[static_cast<size_t>(i)] += s;
        }
      }
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = 0; j < n; ++j) {
          const double sum = sums[static_cast<size_t>(sum_lost ? j : i)];
          x(b, h, i, j) = x(b, h, i, j) == 0 && sum == 0 ? 0 : x(b, h, i, j) / sum;
        }
      }
    }
  }
}

void SoftmaxWith(const Problem& p, const Bugs& bugs, Array& x) {
  if (bugs.count("keepdims_lost") + bugs.count("keepdims_lost_in_max") +
          bugs.count("keepdims_lost_in_sum") >
      0) {
    SoftmaxWithoutKeepdims(bugs, x);
    return;
  }
  const int axis = bugs.count("softmax_over_queries") > 0 ? 2
                   : bugs.count("softmax_over_heads") > 0 ? 1
                   : bugs.count("softmax_over_batch") > 0 ? 0
                                                          : 3;
  SoftmaxAlong(axis, p.sinks, bugs, x);
}

void HideWeights(const Hiding& hiding, const Array& scores, const Bugs& bugs, Array& x) {
  Array s = scores;
  for (int64_t b = 0; b < x.batch; ++b) {
    for (int64_t h = 0; h < x.heads; ++h) {
      for (int64_t i = 0; i < x.tokens; ++i) {
        bool sees_none = true;
        for (int64_t j = 0; j < x.width; ++j) {
          sees_none = sees_none && s(b, h, i, j) == -kInfinity;
          if (bugs.count("mask_after_softmax") > 0 && !hiding.Seen(b, h, i, j)) x(b, h, i, j) = 0;
        }
        for (int64_t j = 0; j < x.width; ++j) {
          if (sees_none && bugs.count("fully_masked_rows_nan") > 0) x(b, h, i, j) = std::nan("");
          if (sees_none && bugs.count("fully_masked_rows_averaged") > 0) {
            x(b, h, i, j) = 1.0 / static_cast<double>(x.width);
          }
        }
      }
    }
  }
}

Array ContextOf(Array& weights, Array& v, const Bugs& bugs) {
  Array context(weights.batch, weights.heads, weights.tokens, v.width);
  for (int64_t b = 0; b < weights.batch; ++b) {
    for (int64_t h = 0; h < weights.heads; ++h) {
      const int64_t kv =
          bugs.count("grouped_heads_tiled") > 0 ? h % v.heads : h / (weights.heads / v.heads);
      for (int64_t i = 0; i < weights.tokens; ++i) {
        for (int64_t d = 0; d < v.width; ++d) {
          for (int64_t j = 0; j < v.tokens; ++j) {
            context(b, h, i, d) += weights(b, h, i, j) * v(b, kv, j, d);
          }
        }
      }
    }
  }
  return context;
}

std::vector<double> Product(const std::vector<double>& a, const std::vector<double>& b,
                            int64_t inner) {
  const auto n = static_cast<size_t>(inner);
  const size_t columns = b.size() / n;
  std::vector<double> product(a.size() / n * columns);
  for (size_t row = 0; row < a.size() / n; ++row) {
    for (size_t column = 0; column < columns; ++column) {
      for (size_t k = 0; k < n; ++k) {
        product[row * columns + column] += a[row * n + k] * b[k * columns + column];
      }
    }
  }
  return product;
}

}  // namespace

MistakenResult MistakenAttention(const Problem& problem, const MistakenInputs& inputs,
                                 int64_t d_model, const Bugs& bugs) {
  Problem p = problem;
  if (bugs.count("heads_and_tokens_swapped") > 0) {
    // The tensors keep their bytes; the axes' names do not.
    std::swap(p.heads, p.queries);
    std::swap(p.kv_heads, p.keys);
    p.layout = Flipped(p.layout);
  }
  const bool misread = bugs.count("layout_misread") > 0;
  const bool split_flipped = misread || bugs.count("heads_split_without_transpose") > 0;
  const bool merge_flipped = misread || bugs.count("heads_merged_without_transpose") > 0;
  const Layout in = split_flipped ? Flipped(p.layout) : p.layout;
  Array q = Split(inputs.query, in, p.batch, p.heads, p.queries, p.width);
  Array k = Split(inputs.key, in, p.batch, p.kv_heads, p.keys, p.width);
  Array v = Split(inputs.value, in, p.batch, p.kv_heads, p.keys, p.value_width);
  const Hiding hiding(p, inputs.mask, bugs);
  const double scale = ScaleWith(p, d_model, bugs);
  Array x = LogitsOf(p, q, k, scale, bugs);
  MistakenResult result;
  result.query = q.numbers;
  result.key = k.numbers;
  result.value = v.numbers;
  result.logits = x.numbers;
  FinishScores(p, hiding, scale, bugs, x);
  const Array scores = x;
  SoftmaxWith(p, bugs, x);
  HideWeights(hiding, scores, bugs, x);
  result.weights = x.numbers;
  Array context = ContextOf(x, v, bugs);
  result.context = context.numbers;
  result.output = Merge(context, merge_flipped ? Flipped(p.layout) : p.layout);
  return result;
}

MistakenResult MistakenHeadOf(const Problem& problem, const MistakenHead& in, const Bugs& bugs) {
  MistakenInputs inner;
  inner.query = Product(in.x, in.w_q, in.d_model);
  inner.key = Product(in.x, bugs.count("w_k_is_w_q") > 0 ? in.w_q : in.w_k, in.d_model);
  inner.value = Product(in.x, in.w_v, in.d_model);
  inner.mask = in.mask;
  MistakenResult result = MistakenAttention(problem, inner, in.d_model, bugs);
  if (bugs.count("w_o_missing") == 0) {
    result.output = Product(result.output, in.w_o, problem.heads * problem.value_width);
  }
  return result;
}

}  // namespace attendant::core
