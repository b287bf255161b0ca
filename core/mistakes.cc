#include "core/mistakes.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "core/checked_math.h"

namespace attendant::core {
namespace {

// Mistakes of one kind exclude each other, and kinds may exclude each other.
enum class Kind : uint8_t {
  kScale,
  kScores,
  kSoftmax,
  kMax,
  kCausal,
  kMask,
  kHiding,
  kEmptyRows,
  kSoftcap,
  kLengths,
  kWindow,
  kAlibi,
  kSinks,
  kGroups,
  kSplit,
  kMerge,
  kLayout,
  kAxes,
  kWk,
  kWo,
};

struct Entry {
  Mistake mistake;
  Kind kind;
  const char* code;
  const char* field;       // without a head
  const char* head_field;  // null: "head." before the other
  const char* message;
};

constexpr Entry kEntries[] = {
    {Mistake::kSoftmaxOverQueries, Kind::kSoftmax, "softmax_over_queries", "weights", "weights",
     "the softmax ran over the queries, so that each key's column of weights sums to 1; it runs "
     "over the keys, the last axis, so that each query's row does"},
    {Mistake::kSoftmaxOverHeads, Kind::kSoftmax, "softmax_over_heads", "weights", "weights",
     "the softmax ran over the heads; it runs over the keys, the last axis"},
    {Mistake::kSoftmaxOverBatch, Kind::kSoftmax, "softmax_over_batch", "weights", "weights",
     "the softmax ran over the batch; it runs over the keys, the last axis"},
    {Mistake::kScaleMissing, Kind::kScale, "scale_missing", "options.scale", nullptr,
     "the scores were not scaled; they are multiplied by options.scale, 1/sqrt(D) where it is "
     "unset, D the width of one head's query"},
    {Mistake::kScaleByModelWidth, Kind::kScale, "scale_by_d_model", "options.scale", nullptr,
     "the scores were divided by sqrt(d_model), the width of all heads together; the scale is "
     "1/sqrt(D), D the width of one head's query, where options.scale is unset"},
    {Mistake::kScaleTwice, Kind::kScale, "scale_twice", "options.scale", nullptr,
     "the scale was applied twice, such as once to the query and once to the scores, or as 1/D in "
     "place of 1/sqrt(D); it is applied once"},
    {Mistake::kScaleOptionIgnored, Kind::kScale, "scale_option_ignored", "options.scale", nullptr,
     "the scores were divided by sqrt(D) though options.scale says otherwise; its value takes the "
     "place of 1/sqrt(D)"},
    {Mistake::kScoresTransposed, Kind::kScores, "scores_transposed", "scores", "logits",
     "the scores are those of key * query^T; row i, column j is query i with key j, "
     "query * key^T"},
    {Mistake::kKeepdimsLost, Kind::kSoftmax, "keepdims_lost", "weights", "weights",
     "maximum and sum of the softmax lost their axis, so that column j got those of row j; both "
     "keep it (keepdims=True), so that each row gets its own"},
    {Mistake::kKeepdimsLostInMax, Kind::kSoftmax, "keepdims_lost_in_max", "weights", "weights",
     "the maximum of the softmax lost its axis, so that column j got that of row j; it keeps it "
     "(keepdims=True), so that each row gets its own"},
    {Mistake::kKeepdimsLostInSum, Kind::kSoftmax, "keepdims_lost_in_sum", "weights", "weights",
     "the sum of the softmax lost its axis, so that column j was divided by that of row j; it "
     "keeps it (keepdims=True), so that each row is divided by its own"},
    {Mistake::kNotNormalised, Kind::kSoftmax, "output_not_normalised", "weights", "weights",
     "the exponentials met the values without being divided by their sum; each row of weights "
     "sums to 1"},
    {Mistake::kNoMaxSubtraction, Kind::kMax, "no_max_subtraction", "weights", "weights",
     "exp overflowed, or was 0 for a whole row, because the row's maximum was not subtracted from "
     "the scores; it is subtracted first, which changes nothing else"},
    {Mistake::kCausalIgnored, Kind::kCausal, "causal_ignored", "options.causal", nullptr,
     "queries saw keys after their own; options.causal hides them"},
    {Mistake::kCausalAdded, Kind::kCausal, "causal_not_asked_for", "options.causal", nullptr,
     "keys after a query's own were hidden; options.causal is unset, every query sees them"},
    {Mistake::kCausalWrongCorner, Kind::kCausal, "causal_wrong_corner", "options.causal", nullptr,
     "the causal edge started at the other corner; with CAUSAL_TOP_LEFT the first query sees the "
     "first key alone, with CAUSAL_BOTTOM_RIGHT the last query sees the last key"},
    {Mistake::kCausalEdgeLate, Kind::kCausal, "causal_edge_one_late", "options.causal", nullptr,
     "each query saw one key after its own; it sees keys up to its own position"},
    {Mistake::kCausalEdgeEarly, Kind::kCausal, "causal_edge_one_early", "options.causal", nullptr,
     "each query missed its own key; it sees keys up to and including its own position"},
    {Mistake::kCausalInverted, Kind::kCausal, "causal_inverted", "options.causal", nullptr,
     "the causal mask was read the other way round: each query saw the keys after its own alone; "
     "it sees those up to its own position"},
    {Mistake::kCausalMirrored, Kind::kCausal, "causal_mirrored", "options.causal", nullptr,
     "each query saw its own key and those after it (triu); it sees its own and those before it "
     "(tril)"},
    {Mistake::kMaskIgnored, Kind::kMask, "mask_ignored", "options.mask", nullptr,
     "the mask was not applied; false or -infinity hides a key, and numbers are added"},
    {Mistake::kMaskInverted, Kind::kMask, "mask_inverted", "options.mask", nullptr,
     "true in the mask hid a key; true keeps it, false hides it"},
    {Mistake::kMaskAddedAs01, Kind::kMask, "mask_added_as_0_and_1", "options.mask", nullptr,
     "the mask was added to the scores as 0 and 1, which hides nothing; false hides a key, as "
     "-infinity added to its score would"},
    {Mistake::kMaskMultiplied, Kind::kMask, "mask_multiplied", "options.mask", nullptr,
     "the scores were multiplied by the mask, which leaves a hidden key the score 0; false hides a "
     "key, as -infinity added to its score would"},
    {Mistake::kMaskScaled, Kind::kMask, "mask_added_before_scale", "options.mask", nullptr,
     "the mask was added before the scale was applied; it is added to the scaled scores"},
    {Mistake::kMaskAfterSoftmax, Kind::kHiding, "mask_after_softmax", "weights", "weights",
     "hidden keys lost their weight after the softmax, so that rows no longer sum to 1; they are "
     "hidden before it"},
    {Mistake::kFullyMaskedRowsNan, Kind::kEmptyRows, "fully_masked_rows_nan", "weights", "weights",
     "rows that see no key are NaN, 0/0; they are 0"},
    {Mistake::kFullyMaskedRowsAveraged, Kind::kEmptyRows, "fully_masked_rows_averaged", "weights",
     "weights",
     "rows that see no key are the mean of all values, since a large number such as -1e9 took the "
     "place of every score alike; they are 0"},
    {Mistake::kSoftcapIgnored, Kind::kSoftcap, "softcap_ignored", "options.softcap", nullptr,
     "the scores were not capped; they become softcap * tanh(score / softcap)"},
    {Mistake::kSoftcapAfterMask, Kind::kSoftcap, "softcap_after_mask", "options.softcap", nullptr,
     "the softcap was applied after the mask, which leaves a hidden key the score -softcap and so "
     "some weight; scores are capped before anything is masked"},
    {Mistake::kPaddedKeysNotMasked, Kind::kLengths, "padded_keys_not_masked", "options.key_lengths",
     nullptr, "keys beyond key_lengths had weight; key j is seen where j < key_lengths[b]"},
    {Mistake::kWindowIgnored, Kind::kWindow, "window_ignored", "options.window", nullptr,
     "keys outside the window had weight; a query sees window.left keys before its own and "
     "window.right after it"},
    {Mistake::kAlibiIgnored, Kind::kAlibi, "alibi_ignored", "options.alibi_slopes", nullptr,
     "the scores lack ALiBi's bias; slope * |distance| is subtracted"},
    {Mistake::kSinksIgnored, Kind::kSinks, "sinks_ignored", "options.sinks", nullptr,
     "the softmax's denominator lacks the sinks; exp(sink) joins it"},
    {Mistake::kGroupedHeadsTiled, Kind::kGroups, "grouped_heads_tiled", "key", "head.w_k",
     "query head h read key head h % Hkv, as tiling the key heads gives; it reads head "
     "h / (H / Hkv), as repeating each of them does"},
    {Mistake::kHeadsSplitWithoutTranspose, Kind::kSplit, "heads_split_without_transpose", "query",
     "query",
     "query, key and value were split into heads by a reshape alone, which mixes heads and tokens; "
     "(B, T, H * D) becomes (B, T, H, D), then heads and tokens are exchanged"},
    {Mistake::kHeadsMergedWithoutTranspose, Kind::kMerge, "heads_merged_without_transpose",
     "candidate", "output",
     "the heads were merged by a reshape alone, which mixes heads and tokens; heads and tokens are "
     "exchanged first, (B, H, T, D) to (B, T, H, D)"},
    {Mistake::kLayoutMisread, Kind::kLayout, "layout_misread", "options.layout", nullptr,
     "the tensors' bytes were read and written in the other layout; options.layout says in which "
     "order heads and tokens stand"},
    {Mistake::kHeadsAndTokensSwapped, Kind::kAxes, "heads_and_tokens_swapped", "options.layout",
     "query",
     "the heads' axis was taken for the tokens' (BHTD read as BTHD, or the other way), so that "
     "each token attended across its heads; each head attends across the tokens"},
    {Mistake::kWkIsWq, Kind::kWk, "w_k_is_w_q", "key", "head.w_k",
     "the keys are x * W_q; they are x * W_k"},
    {Mistake::kWoMissing, Kind::kWo, "w_o_missing", "candidate", "head.w_o",
     "the output is the heads' contexts side by side; they are multiplied by W_o"},
};
static_assert(std::size(kEntries) == static_cast<size_t>(Mistake::kCount));

constexpr bool InOrder() {
  for (size_t i = 0; i < std::size(kEntries); ++i) {
    if (static_cast<size_t>(kEntries[i].mistake) != i) return false;
  }
  return true;
}
static_assert(InOrder());

const Entry& EntryOf(Mistake mistake) { return kEntries[static_cast<size_t>(mistake)]; }

// Whether something that does not depend on a mask's numbers hides keys.
bool HidesByPosition(const Problem& p) {
  return p.causal != Causal::kNone || !p.key_lengths.empty() || p.window.left.has_value() ||
         p.window.right.has_value();
}

bool HasOffsetElsewhere(const Problem& p) {
  Problem other = p;
  other.causal = p.causal == Causal::kTopLeft ? Causal::kBottomRight : Causal::kTopLeft;
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    if (other.Offset(batch) != p.Offset(batch)) return true;
  }
  return false;
}

double DefaultScale(int64_t width) {
  return 1 / std::sqrt(static_cast<double>(std::max<int64_t>(width, 1)));
}

int64_t HeadScores(const Problem& p) {
  return SaturatingProduct({p.queries, p.keys, std::max<int64_t>(p.width, 1)});
}
int64_t AllScores(const Problem& p) { return SaturatingProduct({p.batch, p.heads, HeadScores(p)}); }

bool AppliesToSoftmax(const CheckProblem& problem, Mistake mistake) {
  const Problem& p = problem.attend;
  const int64_t statistics =
      SaturatingProduct({HeadScores(p), problem.head ? p.heads : int64_t{1}});
  switch (mistake) {
    case Mistake::kSoftmaxOverQueries:
      return p.sinks.empty() && statistics <= kMostStatistics;
    case Mistake::kSoftmaxOverHeads:
      return p.sinks.empty() && p.heads > 1 &&
             SaturatingProduct({AllScores(p), p.heads}) <= kMostOtherHeads;
    case Mistake::kSoftmaxOverBatch:
      return p.sinks.empty() && p.batch > 1 &&
             SaturatingProduct({AllScores(p), p.batch}) <= kMostOtherHeads;
    case Mistake::kKeepdimsLost:
    case Mistake::kKeepdimsLostInMax:
    case Mistake::kKeepdimsLostInSum:
      return p.sinks.empty() && p.queries == p.keys && p.keys > 1 && statistics <= kMostStatistics;
    case Mistake::kMaskAfterSoftmax:
      return HidesByPosition(p) || p.mask.has_value();
    case Mistake::kFullyMaskedRowsNan:
    case Mistake::kFullyMaskedRowsAveraged:
      return p.sinks.empty() && (HidesByPosition(p) || p.mask.has_value());
    default:  // kNotNormalised, kNoMaxSubtraction
      return true;
  }
}

bool AppliesToScores(const CheckProblem& problem, Mistake mistake) {
  const Problem& p = problem.attend;
  switch (mistake) {
    case Mistake::kScaleMissing:
      return p.scale != 1;
    case Mistake::kScaleByModelWidth:
      return DefaultScale(problem.d_model) != p.scale;
    case Mistake::kScaleTwice:
      return p.scale * p.scale != p.scale;
    case Mistake::kScaleOptionIgnored:
      return DefaultScale(p.width) != p.scale;
    case Mistake::kScoresTransposed:
      return p.queries == p.keys && p.keys > 1;
    case Mistake::kSoftcapIgnored:
      return p.softcap != 0;
    case Mistake::kSoftcapAfterMask:
      return p.softcap != 0 &&
             (HidesByPosition(p) || p.mask.has_value() || !p.alibi_slopes.empty());
    case Mistake::kAlibiIgnored:
      return !p.alibi_slopes.empty();
    default:  // kSinksIgnored
      return !p.sinks.empty();
  }
}

bool AppliesToVisibility(const Problem& p, Mistake mistake) {
  switch (mistake) {
    case Mistake::kCausalAdded:
      return p.causal == Causal::kNone && p.keys > 1;
    case Mistake::kCausalWrongCorner:
      return p.causal != Causal::kNone && HasOffsetElsewhere(p);
    case Mistake::kMaskIgnored:
      return p.mask.has_value();
    case Mistake::kMaskInverted:
    case Mistake::kMaskAddedAs01:
    case Mistake::kMaskMultiplied:
      return p.mask.has_value() && p.mask->dtype == DType::kBool;
    case Mistake::kMaskScaled:
      return p.AddsMask() && p.scale != 1;
    case Mistake::kPaddedKeysNotMasked:
      return std::any_of(p.key_lengths.begin(), p.key_lengths.end(),
                         [&](int64_t length) { return length < p.keys; });
    case Mistake::kWindowIgnored:
      return p.window.left.has_value() || p.window.right.has_value();
    default:  // the causal edge
      return p.causal != Causal::kNone;
  }
}

bool AppliesToHeads(const CheckProblem& problem, Mistake mistake) {
  const Problem& p = problem.attend;
  const bool mixes_queries = p.heads > 1 && p.queries > 1;
  const bool mixes_keys = p.kv_heads > 1 && p.keys > 1;
  switch (mistake) {
    case Mistake::kGroupedHeadsTiled:
      return p.kv_heads > 1 && p.kv_heads < p.heads;
    case Mistake::kHeadsSplitWithoutTranspose:
      return mixes_queries || mixes_keys;
    case Mistake::kHeadsMergedWithoutTranspose:
      return mixes_queries;
    case Mistake::kLayoutMisread:
      return !problem.head && (mixes_queries || mixes_keys);
    case Mistake::kHeadsAndTokensSwapped:
      // Options that belong to a head, a query or a key of their own do not fit the other axis.
      return problem.output_only && p.queries == p.keys && (p.heads > 1 || p.keys > 1) &&
             !p.mask.has_value() && p.key_lengths.empty() && p.alibi_slopes.empty() &&
             p.sinks.empty();
    case Mistake::kWkIsWq:
      return problem.head;
    default:  // kWoMissing
      return problem.head && problem.d_model == p.heads * p.value_width;
  }
}

bool Applies(const CheckProblem& problem, Mistake mistake) {
  switch (EntryOf(mistake).kind) {
    case Kind::kSoftmax:
    case Kind::kMax:
    case Kind::kHiding:
    case Kind::kEmptyRows:
      return AppliesToSoftmax(problem, mistake);
    case Kind::kScale:
    case Kind::kScores:
    case Kind::kSoftcap:
    case Kind::kAlibi:
    case Kind::kSinks:
      return AppliesToScores(problem, mistake);
    case Kind::kCausal:
    case Kind::kMask:
    case Kind::kLengths:
    case Kind::kWindow:
      return AppliesToVisibility(problem.attend, mistake);
    default:
      return AppliesToHeads(problem, mistake);
  }
}

// Whether one of the two kinds leaves nothing for the other to be done in, in either order.
bool Exclude(Kind a, Kind b) {
  const auto either = [&](Kind first, std::initializer_list<Kind> others) {
    return (a == first && std::find(others.begin(), others.end(), b) != others.end()) ||
           (b == first && std::find(others.begin(), others.end(), a) != others.end());
  };
  return a == b || either(Kind::kLayout, {Kind::kSplit, Kind::kMerge, Kind::kAxes}) ||
         either(Kind::kAxes, {Kind::kSplit, Kind::kMerge, Kind::kGroups}) ||
         either(Kind::kHiding, {Kind::kEmptyRows, Kind::kSoftcap, Kind::kMask});
}

Layout Other(Layout layout) { return layout == Layout::kBhtd ? Layout::kBthd : Layout::kBhtd; }

void SwapHeadsAndTokens(Variant& variant) {
  Problem& p = variant.problem;
  std::swap(p.heads, p.queries);
  std::swap(p.kv_heads, p.keys);
  p.layout = Other(p.layout);
  variant.in = Other(variant.in);
  variant.out = Other(variant.out);
}

double ScaleOf(const CheckProblem& problem, const MistakeSet& mistakes) {
  const double scale = problem.attend.scale;
  if (mistakes.Has(Mistake::kScaleMissing)) return 1;
  if (mistakes.Has(Mistake::kScaleByModelWidth)) return DefaultScale(problem.d_model);
  if (mistakes.Has(Mistake::kScaleTwice)) return scale * scale;
  if (mistakes.Has(Mistake::kScaleOptionIgnored)) return DefaultScale(problem.attend.width);
  return scale;
}

Causal CausalOf(const Problem& p, const MistakeSet& mistakes) {
  if (mistakes.Has(Mistake::kCausalIgnored)) return Causal::kNone;
  if (mistakes.Has(Mistake::kCausalAdded)) return Causal::kTopLeft;
  if (!mistakes.Has(Mistake::kCausalWrongCorner)) return p.causal;
  return p.causal == Causal::kTopLeft ? Causal::kBottomRight : Causal::kTopLeft;
}

// REQUIRES: each applies by itself, a before b in their order.
bool Compatible(const CheckProblem& problem, Mistake a, Mistake b) {
  if (Exclude(EntryOf(a).kind, EntryOf(b).kind)) return false;
  for (const auto& [swapped, other] : {std::pair(a, b), std::pair(b, a)}) {
    if (swapped != Mistake::kHeadsAndTokensSwapped) continue;
    // What needs as many queries as keys needs it of the axes as they are then understood.
    CheckProblem understood = problem;
    understood.attend = VariantOf(problem, MistakeSet({swapped})).problem;
    if (!Applies(understood, other)) return false;
  }
  const int64_t scores = SaturatingProduct(
      {HeadScores(problem.attend), problem.head ? problem.attend.heads : int64_t{1}});
  return !NeedsStatistics(MistakeSet({a, b})) || scores <= kMostStatisticsOfPairs;
}

}  // namespace

std::string CodeOf(const MistakeSet& mistakes) {
  std::string code;
  for (const Mistake mistake : mistakes.list()) {
    absl::StrAppend(&code, code.empty() ? "" : "+", EntryOf(mistake).code);
  }
  return code;
}

std::string MessageOf(const MistakeSet& mistakes) {
  std::string message = mistakes.list().size() > 1 ? "two mistakes at once: " : "";
  for (const Mistake mistake : mistakes.list()) {
    const bool first = mistake == mistakes.list().front();
    absl::StrAppend(&message, first ? "" : "; and: ", EntryOf(mistake).message);
  }
  return message;
}

std::string FieldOf(const MistakeSet& mistakes, bool head) {
  std::string field;
  for (const Mistake mistake : mistakes.list()) {
    const Entry& entry = EntryOf(mistake);
    const std::string name = !head                         ? entry.field
                             : entry.head_field != nullptr ? entry.head_field
                                                           : absl::StrCat("head.", entry.field);
    absl::StrAppend(&field, field.empty() ? "" : ", ", name);
  }
  return field;
}

bool NeedsStatistics(const MistakeSet& mistakes) {
  return mistakes.HasAny({Mistake::kSoftmaxOverQueries, Mistake::kKeepdimsLost,
                          Mistake::kKeepdimsLostInMax, Mistake::kKeepdimsLostInSum});
}

bool NeedsOtherHeads(const MistakeSet& mistakes) {
  return mistakes.HasAny({Mistake::kSoftmaxOverHeads, Mistake::kSoftmaxOverBatch});
}

std::vector<Mistake> MistakesIn(const CheckProblem& problem) {
  std::vector<Mistake> mistakes;
  for (const Entry& entry : kEntries) {
    if (Applies(problem, entry.mistake)) mistakes.push_back(entry.mistake);
  }
  return mistakes;
}

std::vector<MistakeSet> PairsIn(const CheckProblem& problem) {
  const std::vector<Mistake> mistakes = MistakesIn(problem);
  std::vector<MistakeSet> pairs;
  for (size_t a = 0; a < mistakes.size(); ++a) {
    for (size_t b = a + 1; b < mistakes.size(); ++b) {
      if (!Compatible(problem, mistakes[a], mistakes[b])) continue;
      pairs.push_back(MistakeSet({mistakes[a], mistakes[b]}));
    }
  }
  return pairs;
}

Variant VariantOf(const CheckProblem& problem, const MistakeSet& mistakes) {
  Variant variant{problem.attend, problem.attend.layout, problem.attend.layout, mistakes};
  Problem& p = variant.problem;
  p.scale = ScaleOf(problem, mistakes);
  p.causal = CausalOf(p, mistakes);
  if (mistakes.Has(Mistake::kSoftcapIgnored)) p.softcap = 0;
  if (mistakes.Has(Mistake::kMaskIgnored)) p.mask.reset();
  if (mistakes.Has(Mistake::kPaddedKeysNotMasked)) p.key_lengths.clear();
  if (mistakes.Has(Mistake::kWindowIgnored)) p.window = {};
  if (mistakes.Has(Mistake::kAlibiIgnored)) p.alibi_slopes.clear();
  if (mistakes.Has(Mistake::kSinksIgnored)) p.sinks.clear();
  if (mistakes.HasAny({Mistake::kHeadsSplitWithoutTranspose, Mistake::kLayoutMisread})) {
    variant.in = Other(variant.in);
  }
  if (mistakes.HasAny({Mistake::kHeadsMergedWithoutTranspose, Mistake::kLayoutMisread})) {
    variant.out = Other(variant.out);
  }
  if (mistakes.Has(Mistake::kHeadsAndTokensSwapped)) SwapHeadsAndTokens(variant);
  return variant;
}

}  // namespace attendant::core
