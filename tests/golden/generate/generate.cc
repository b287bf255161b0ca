// Writes the goldens: requests of the contract with the answers that LibTorch gives to them.
//
//   generate FOLDER      reads FOLDER/lesson_inputs.txt, writes FOLDER/NAME.golden for every case
//
// All is float64. The output comes from LibTorch's MATH backend, the plain composition of matrix
// products and softmax. Its flash backend is no reference: it has rules of its own, such as 0 for a
// query row of NaN. The logits, logsumexp, weights and key sums are composed from LibTorch's
// operations, and so is the output where an option is asked for that LibTorch has not.
//
// Axis letters: B batch, H query heads, Hkv key and value heads, Tq query tokens, Tk key tokens, T
// where both are the same, D width of query and key, Dv width of value.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/version.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "attendant/v1/attention.pb.h"
#include "golden.pb.h"

namespace attendant::golden {
namespace {

// Tensor.data is little-endian, and is written from memory as it stands.
static_assert(std::endian::native == std::endian::little);

// A case returns its weights and key sums up to this many weights (B * H * Tq * Tk): 64 KiB.
constexpr int64_t kMostWeights = 64 * 1024 / sizeof(double);

// ---- The cases. ----

struct AttendCase {
  const char* name;
  int64_t batch = 1;
  int64_t heads = 1;
  int64_t kv_heads = 0;  // 0: as heads
  int64_t queries = 0;
  int64_t keys = 0;
  int64_t width = 0;
  int64_t value_width = 0;  // 0: as width
  std::optional<double> scale = std::nullopt;
  bool causal = false;       // TOP_LEFT: the one that LibTorch has
  bool bthd = false;         // layout BTHD in place of BHTD
  double largest_score = 0;  // rescales query and key until max |q.k| is this; 0: leaves them
  // Of a mask of random numbers, or with bool_mask of random truths; nothing: no mask.
  std::optional<std::vector<int64_t>> mask_shape = std::nullopt;
  bool bool_mask = false;
  // What LibTorch has not.
  bool bottom_right = false;
  std::vector<int64_t> key_lengths = {};
  std::optional<int64_t> window_left = std::nullopt;
  std::optional<int64_t> window_right = std::nullopt;
  double softcap = 0;
  bool alibi = false;  // slopes of 1/2, 1/4, 1/6, ...
  bool sinks = false;  // of -1/2, 0, 1/2, ...
  // Query, key, value and a mask of numbers hold numbers of this type.
  at::ScalarType rounded = at::kDouble;

  bool Composed() const {
    return bottom_right || !key_lengths.empty() || window_left.has_value() ||
           window_right.has_value() || softcap != 0 || alibi || sinks;
  }
};

// Three batches of two heads, 5 queries and 7 keys, under another name.
AttendCase Small(const char* name) {
  return {.name = name, .batch = 3, .heads = 2, .queries = 5, .keys = 7, .width = 4};
}
AttendCase Masked(const char* name, std::vector<int64_t> shape, bool bool_mask) {
  AttendCase c = Small(name);
  c.mask_shape = std::move(shape);
  c.bool_mask = bool_mask;
  return c;
}
// `c` with `change` made to it.
template <typename Change>
AttendCase With(AttendCase c, const Change& change) {
  change(c);
  return c;
}

const AttendCase kAttendCases[] = {
    {.name = "plain_one_token", .queries = 1, .keys = 1, .width = 4},
    {.name = "plain_one_head", .queries = 5, .keys = 5, .width = 4},
    {.name = "plain_heads", .heads = 4, .queries = 9, .keys = 9, .width = 8},
    {.name = "plain_batches", .batch = 5, .queries = 6, .keys = 6, .width = 5},
    {.name = "plain_batches_heads", .batch = 3, .heads = 2, .queries = 7, .keys = 7, .width = 8},

    {.name = "cross_fewer_queries", .batch = 2, .heads = 2, .queries = 5, .keys = 11, .width = 8},
    {.name = "cross_more_queries", .batch = 2, .heads = 2, .queries = 11, .keys = 5, .width = 8},
    {.name = "cross_one_query", .batch = 2, .heads = 3, .queries = 1, .keys = 17, .width = 8},
    {.name = "cross_one_key", .heads = 2, .queries = 9, .keys = 1, .width = 8},
    {.name = "cross_3_by_513", .heads = 2, .queries = 3, .keys = 513, .width = 8},
    {.name = "cross_513_by_3", .heads = 2, .queries = 513, .keys = 3, .width = 8},

    {.name = "causal_square",
     .batch = 2,
     .heads = 2,
     .queries = 9,
     .keys = 9,
     .width = 8,
     .causal = true},
    {.name = "causal_fewer_queries",
     .batch = 2,
     .heads = 2,
     .queries = 5,
     .keys = 11,
     .width = 8,
     .causal = true},
    {.name = "causal_more_queries",
     .batch = 2,
     .heads = 2,
     .queries = 11,
     .keys = 5,
     .width = 8,
     .causal = true},
    {.name = "causal_one_query", .heads = 2, .queries = 1, .keys = 6, .width = 8, .causal = true},
    {.name = "causal_scale_negative",
     .heads = 2,
     .queries = 9,
     .keys = 9,
     .width = 8,
     .scale = -0.75,
     .causal = true},
    {.name = "causal_tokens_129", .queries = 129, .keys = 129, .width = 8, .causal = true},
    {.name = "causal_tokens_257", .queries = 257, .keys = 257, .width = 8, .causal = true},
    {.name = "causal_tokens_513", .queries = 513, .keys = 513, .width = 8, .causal = true},

    {.name = "grouped_two_to_one",
     .batch = 2,
     .heads = 4,
     .kv_heads = 2,
     .queries = 7,
     .keys = 7,
     .width = 8},
    {.name = "grouped_multi_query",
     .batch = 2,
     .heads = 4,
     .kv_heads = 1,
     .queries = 7,
     .keys = 7,
     .width = 8},
    {.name = "grouped_causal",
     .batch = 2,
     .heads = 4,
     .kv_heads = 2,
     .queries = 9,
     .keys = 9,
     .width = 8,
     .causal = true},
    {.name = "grouped_cross_value_width",
     .batch = 2,
     .heads = 6,
     .kv_heads = 3,
     .queries = 5,
     .keys = 11,
     .width = 8,
     .value_width = 5},
    {.name = "grouped_tokens_257",
     .heads = 4,
     .kv_heads = 2,
     .queries = 257,
     .keys = 257,
     .width = 8},

    {.name = "value_wider", .heads = 2, .queries = 9, .keys = 9, .width = 4, .value_width = 9},
    {.name = "value_narrower", .heads = 2, .queries = 9, .keys = 9, .width = 8, .value_width = 3},
    {.name = "value_of_one", .heads = 2, .queries = 9, .keys = 9, .width = 8, .value_width = 1},

    {.name = "scale_positive", .heads = 2, .queries = 9, .keys = 9, .width = 8, .scale = 1.5},
    {.name = "scale_zero", .heads = 2, .queries = 9, .keys = 9, .width = 8, .scale = 0.0},
    {.name = "scale_negative", .heads = 2, .queries = 9, .keys = 9, .width = 8, .scale = -0.5},

    // Each side of 128, 256 and 512, where blocks of keys and queries are likely to end.
    {.name = "tokens_127", .heads = 2, .queries = 127, .keys = 127, .width = 8},
    {.name = "tokens_128", .heads = 2, .queries = 128, .keys = 128, .width = 8},
    {.name = "tokens_129", .heads = 2, .queries = 129, .keys = 129, .width = 8},
    {.name = "tokens_256", .heads = 2, .queries = 256, .keys = 256, .width = 8},
    {.name = "tokens_257", .heads = 2, .queries = 257, .keys = 257, .width = 8},
    {.name = "tokens_512", .heads = 2, .queries = 512, .keys = 512, .width = 8},
    {.name = "tokens_513", .heads = 2, .queries = 513, .keys = 513, .width = 8},

    {.name = "bthd_plain",
     .batch = 3,
     .heads = 2,
     .queries = 7,
     .keys = 7,
     .width = 8,
     .bthd = true},
    {.name = "bthd_cross_value_width",
     .batch = 2,
     .heads = 3,
     .queries = 5,
     .keys = 11,
     .width = 8,
     .value_width = 5,
     .bthd = true},
    {.name = "bthd_causal",
     .batch = 2,
     .heads = 2,
     .queries = 9,
     .keys = 9,
     .width = 8,
     .causal = true,
     .bthd = true},
    {.name = "bthd_grouped",
     .batch = 2,
     .heads = 4,
     .kv_heads = 2,
     .queries = 7,
     .keys = 7,
     .width = 8,
     .bthd = true},
    {.name = "bthd_grouped_causal",
     .batch = 2,
     .heads = 4,
     .kv_heads = 1,
     .queries = 5,
     .keys = 11,
     .width = 8,
     .causal = true,
     .bthd = true},
    {.name = "bthd_tokens_257", .heads = 2, .queries = 257, .keys = 257, .width = 8, .bthd = true},

    // Widths below a SIMD register, of one, and of several; 67 tokens fill none exactly.
    {.name = "width_1", .queries = 67, .keys = 67, .width = 1},
    {.name = "width_3", .queries = 67, .keys = 67, .width = 3},
    {.name = "width_8", .queries = 67, .keys = 67, .width = 8},
    {.name = "width_64", .queries = 67, .keys = 67, .width = 64},
    {.name = "width_80", .queries = 67, .keys = 67, .width = 80},

    // Scores whose exponentials overflow even float64 unless the row's maximum is subtracted first.
    {.name = "extreme_scores",
     .heads = 2,
     .queries = 33,
     .keys = 33,
     .width = 64,
     .largest_score = 1e4},
    {.name = "extreme_scores_unscaled",
     .heads = 2,
     .queries = 33,
     .keys = 33,
     .width = 8,
     .scale = 1.0,
     .largest_score = 1e4},
    {.name = "extreme_scores_scale_negative",
     .heads = 2,
     .queries = 33,
     .keys = 33,
     .width = 8,
     .scale = -1.0,
     .largest_score = 1e4},
    {.name = "extreme_scores_causal",
     .heads = 2,
     .queries = 67,
     .keys = 67,
     .width = 8,
     .causal = true,
     .largest_score = 1e4},
    {.name = "extreme_scores_grouped_bthd",
     .heads = 4,
     .kv_heads = 2,
     .queries = 33,
     .keys = 33,
     .width = 8,
     .bthd = true,
     .largest_score = 1e4},
    {.name = "extreme_scores_tokens_257",
     .queries = 257,
     .keys = 257,
     .width = 8,
     .largest_score = 1e4},

    // Masks of every broadcast shape.
    Masked("mask_bool_full", {3, 2, 5, 7}, true),
    Masked("mask_bool_of_batch", {3, 1, 5, 7}, true),
    Masked("mask_bool_of_head", {2, 5, 7}, true),
    Masked("mask_bool_of_query", {5, 7}, true),
    Masked("mask_bool_of_key", {7}, true),
    Masked("mask_bool_of_padding", {3, 1, 1, 7}, true),
    Masked("mask_float_full", {3, 2, 5, 7}, false),
    Masked("mask_float_of_batch", {3, 1, 5, 7}, false),
    Masked("mask_float_of_head", {2, 5, 7}, false),
    Masked("mask_float_of_query", {5, 7}, false),
    Masked("mask_float_of_key", {7}, false),
    Masked("mask_float_of_row", {5, 1}, false),
    Masked("mask_float_of_all", {}, false),
    With(Masked("mask_float_grouped_bthd", {3, 4, 5, 7}, false),
         [](AttendCase& c) {
           c.heads = 4;
           c.kv_heads = 2;
           c.bthd = true;
         }),
    With(Masked("mask_bool_tokens_257", {40, 257}, true),
         [](AttendCase& c) {
           c.batch = 1;
           c.queries = 40;
           c.keys = 257;
         }),
    With(Masked("mask_float_tokens_257", {40, 257}, false),
         [](AttendCase& c) {
           c.batch = 1;
           c.queries = 40;
           c.keys = 257;
         }),

    // What LibTorch has not, each alone and together.
    With(Small("bottom_right_fewer_queries"), [](AttendCase& c) { c.bottom_right = true; }),
    With(Small("bottom_right_more_queries"),
         [](AttendCase& c) {
           c.bottom_right = true;
           c.queries = 9;
         }),
    With(Small("lengths"),
         [](AttendCase& c) {
           c.key_lengths = {7, 0, 3};
         }),
    With(Small("lengths_bottom_right"),
         [](AttendCase& c) {
           c.key_lengths = {7, 1, 4};
           c.bottom_right = true;
         }),
    With(Small("window"),
         [](AttendCase& c) {
           c.window_left = 1;
           c.window_right = 2;
         }),
    With(Small("window_bottom_right"),
         [](AttendCase& c) {
           c.window_left = 2;
           c.bottom_right = true;
         }),
    With(Small("softcap"), [](AttendCase& c) { c.softcap = 0.75; }),
    With(Small("alibi"), [](AttendCase& c) { c.alibi = true; }),
    With(Small("alibi_bottom_right"),
         [](AttendCase& c) {
           c.alibi = true;
           c.bottom_right = true;
         }),
    With(Small("sinks"), [](AttendCase& c) { c.sinks = true; }),
    With(Masked("options_with_bool_mask", {3, 1, 5, 7}, true),
         [](AttendCase& c) {
           c.softcap = 2;
           c.alibi = true;
           c.sinks = true;
           c.key_lengths = {7, 5, 6};
         }),
    With(Masked("options_with_float_mask", {4, 70, 300}, false),
         [](AttendCase& c) {
           c.batch = 1;
           c.heads = 4;
           c.kv_heads = 2;
           c.queries = 70;
           c.keys = 300;
           c.bthd = true;
           c.bottom_right = true;
           c.window_left = 200;
           c.softcap = 2;
           c.alibi = true;
           c.sinks = true;
         }),

    // Inputs that half precision holds, so that only its arithmetic is left to differ.
    With(Small("float16_plain"), [](AttendCase& c) { c.rounded = at::kHalf; }),
    With(Masked("float16_masked", {5, 7}, false), [](AttendCase& c) { c.rounded = at::kHalf; }),
    With(Small("float16_tokens_257"),
         [](AttendCase& c) {
           c.rounded = at::kHalf;
           c.batch = 1;
           c.queries = 40;
           c.keys = 257;
           c.width = 16;
         }),
    With(Small("bfloat16_plain"), [](AttendCase& c) { c.rounded = at::kBFloat16; }),
    With(Masked("bfloat16_masked", {5, 7}, false),
         [](AttendCase& c) { c.rounded = at::kBFloat16; }),
    With(Small("bfloat16_tokens_257"),
         [](AttendCase& c) {
           c.rounded = at::kBFloat16;
           c.batch = 1;
           c.queries = 40;
           c.keys = 257;
           c.width = 16;
         }),
};

struct HeadCase {
  const char* name;
  int64_t batch = 0;  // 0: x has no batch axis
  int64_t tokens = 0;
  int64_t d_model = 0;
  int64_t heads = 1;  // of the request: 0 means 1
  int64_t d_k = 0;
  int64_t d_v = 0;
  std::optional<double> scale = std::nullopt;
  bool causal = false;
  bool intermediates = true;
  bool from_lesson = false;  // inputs from lesson_inputs.txt; the sizes above stay unused
};

const HeadCase kHeadCases[] = {
    {.name = "lesson_head", .from_lesson = true},
    {.name = "head_multi", .batch = 2, .tokens = 7, .d_model = 12, .heads = 3, .d_k = 4, .d_v = 5},
    {.name = "head_multi_causal",
     .tokens = 9,
     .d_model = 12,
     .heads = 2,
     .d_k = 5,
     .d_v = 3,
     .scale = 0.8,
     .causal = true},
    {.name = "head_output_only",
     .batch = 3,
     .tokens = 6,
     .d_model = 8,
     .heads = 0,
     .d_k = 4,
     .d_v = 4,
     .intermediates = false},
};

// ---- Inputs. ----

// FNV-1a of the name: a case draws the same numbers whatever stands before it in its table.
uint64_t SeedOf(const std::string& name) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

at::Tensor Normal(at::IntArrayRef shape) { return at::randn(shape, at::kDouble); }

// Key or value (B, Hkv, Tk, .) as the query heads read it: (B, heads, Tk, .).
at::Tensor ForQueryHeads(const at::Tensor& grouped, int64_t heads) {
  return grouped.repeat_interleave(heads / grouped.size(1), 1);
}

// q.k for every head, (B, H, Tq, Tk), from head-major query and key.
at::Tensor RawScores(const at::Tensor& query, const at::Tensor& key) {
  return at::matmul(query, ForQueryHeads(key, query.size(1)).transpose(-2, -1));
}

// Slopes and sinks by head.
std::vector<double> SlopesOf(const AttendCase& c) {
  std::vector<double> slopes;
  for (int64_t h = 0; c.alibi && h < c.heads; ++h)
    slopes.push_back(0.5 / static_cast<double>(h + 1));
  return slopes;
}
std::vector<double> SinksOf(const AttendCase& c) {
  std::vector<double> sinks;
  for (int64_t h = 0; c.sinks && h < c.heads; ++h)
    sinks.push_back(0.5 * static_cast<double>(h - 1));
  return sinks;
}

// Head-major. A BTHD request holds the same tensors with tokens and heads exchanged.
struct AttendInputs {
  at::Tensor query;
  at::Tensor key;
  at::Tensor value;
  at::Tensor mask = {};   // kBool, or numbers of which some are -infinity; undefined: none
  at::Tensor sinks = {};  // (H); undefined: none
};

// One key in four is hidden, but the first of each row of the mask: every query sees one.
at::Tensor DrawMask(const AttendCase& c) {
  const at::Tensor numbers = Normal(*c.mask_shape);
  at::Tensor seen = at::rand(*c.mask_shape, at::kDouble) > 0.25;
  if (seen.dim() > 0) seen.select(-1, 0).fill_(true);
  if (seen.dim() == 0) seen.fill_(true);
  if (c.bool_mask) return seen;
  return numbers.masked_fill(seen.logical_not(), -std::numeric_limits<double>::infinity());
}

AttendInputs Draw(const AttendCase& c) {
  at::manual_seed(SeedOf(c.name));
  const int64_t kv_heads = c.kv_heads == 0 ? c.heads : c.kv_heads;
  const int64_t value_width = c.value_width == 0 ? c.width : c.value_width;
  AttendInputs inputs = {.query = Normal({c.batch, c.heads, c.queries, c.width}),
                         .key = Normal({c.batch, kv_heads, c.keys, c.width}),
                         .value = Normal({c.batch, kv_heads, c.keys, value_width})};
  if (c.largest_score > 0) {
    const double largest = RawScores(inputs.query, inputs.key).abs().max().item<double>();
    // Rounded to float32: the last bits of a product depend on the CPU, the inputs must not.
    const double factor = static_cast<float>(std::sqrt(c.largest_score / largest));
    inputs.query.mul_(factor);
    inputs.key.mul_(factor);
  }
  if (c.mask_shape.has_value()) inputs.mask = DrawMask(c);
  if (c.sinks) inputs.sinks = at::tensor(SinksOf(c), at::kDouble);
  for (at::Tensor* tensor : {&inputs.query, &inputs.key, &inputs.value, &inputs.mask}) {
    if (!tensor->defined() || tensor->scalar_type() == at::kBool) continue;
    *tensor = tensor->to(c.rounded).to(at::kDouble);
  }
  return inputs;
}

// The loss's gradient of the output: of a seed of its own, for the inputs are those of the forward.
at::Tensor DrawDOutput(const AttendCase& c) {
  at::manual_seed(SeedOf(std::string("backward_") + c.name));
  const at::Tensor numbers =
      Normal({c.batch, c.heads, c.queries, c.value_width == 0 ? c.width : c.value_width});
  return numbers.to(c.rounded).to(at::kDouble);
}

struct HeadInputs {
  at::Tensor x;
  at::Tensor w_q;
  at::Tensor w_k;
  at::Tensor w_v;
  at::Tensor w_o;
};

HeadInputs Draw(const HeadCase& c) {
  at::manual_seed(SeedOf(c.name));
  const int64_t heads = c.heads == 0 ? 1 : c.heads;
  at::Tensor x = Normal({c.batch == 0 ? 1 : c.batch, c.tokens, c.d_model});
  if (c.batch == 0) x = x.squeeze(0);
  // Halved, as the lesson's are: logits stay small and every weight counts.
  return {.x = x * 0.5,
          .w_q = Normal({c.d_model, heads * c.d_k}) * 0.5,
          .w_k = Normal({c.d_model, heads * c.d_k}) * 0.5,
          .w_v = Normal({c.d_model, heads * c.d_v}) * 0.5,
          .w_o = Normal({heads * c.d_v, c.d_model}) * 0.5};
}

// The matrices of lesson_inputs.txt by name. Throws where the file is not as its comment says.
std::map<std::string, at::Tensor> ReadMatrices(const std::filesystem::path& path) {
  std::ifstream file(path);
  TORCH_CHECK(file, "cannot open ", path.string());
  std::map<std::string, at::Tensor> matrices;
  std::string line;
  while (std::getline(file, line)) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream header(line);
    std::string name;
    int64_t rows = 0;
    int64_t columns = 0;
    TORCH_CHECK(header >> name >> rows >> columns, path.string(), ": bad header: ", line);
    at::Tensor matrix = at::empty({rows, columns}, at::kDouble);
    for (double& value : std::span(matrix.mutable_data_ptr<double>(), matrix.numel())) {
      std::string token;
      TORCH_CHECK(file >> token, path.string(), ": ", name, " ends early");
      // operator>> reads no hexadecimal floats.
      value = std::strtod(token.c_str(), nullptr);
    }
    std::getline(file, line);  // the rest of the last row's line
    matrices[name] = matrix;
  }
  return matrices;
}

HeadInputs LessonInputs(const std::filesystem::path& path) {
  const auto matrices = ReadMatrices(path);
  return {.x = matrices.at("X"),
          .w_q = matrices.at("W_q"),
          .w_k = matrices.at("W_k"),
          .w_v = matrices.at("W_v"),
          .w_o = matrices.at("W_o")};
}

// ---- Answers. ----

struct AttendAnswer {
  at::Tensor output;           // (B, H, Tq, Dv)
  at::Tensor logits;           // (B, H, Tq, Tk), scaled, before softcap and masks
  at::Tensor weights;          // (B, H, Tq, Tk)
  at::Tensor logsumexp;        // (B, H, Tq)
  at::Tensor key_sums;         // (B, H, Tk)
  at::Tensor backend_weights;  // as weights: what the backend says it used
};

// Throws, naming the case, unless all is finite, but for the logsumexp of rows that see no key, and
// the composed weights are the backend's.
void CheckAnswer(const char* name, const AttendAnswer& answer) {
  TORCH_CHECK(at::isfinite(answer.output).all().item<bool>(), name, ": output is not finite");
  const at::Tensor empty = (answer.weights.sum(-1) == 0) & (answer.logsumexp < 0);
  TORCH_CHECK((at::isfinite(answer.logsumexp) | empty).all().item<bool>(), name,
              ": logsumexp is not finite");
  // A weight's relative error is its logit's absolute error. The backend scales query and key by
  // sqrt(scale) each, we scale their product: the logits differ by a few roundings of their size.
  const double largest_logit = answer.logits.abs().max().item<double>();
  const double tolerance = 64 * std::numeric_limits<double>::epsilon() * (1 + largest_logit);
  const double difference = (answer.weights - answer.backend_weights).abs().max().item<double>();
  TORCH_CHECK(difference <= tolerance, name, ": weights differ from the backend's by ", difference);
}

at::Tensor ByHead(const std::vector<double>& values) {
  return at::tensor(values, at::kDouble).view({1, static_cast<int64_t>(values.size()), 1, 1});
}

// How many keys of each batch are real, and i + offset - j: (B, 1, 1, 1) and (B, 1, Tq, Tk).
at::Tensor LengthsOf(const AttendCase& c) {
  const at::Tensor lengths = c.key_lengths.empty() ? at::full({c.batch}, c.keys, at::kLong)
                                                   : at::tensor(c.key_lengths, at::kLong);
  return lengths.view({c.batch, 1, 1, 1});
}
at::Tensor DistancesOf(const AttendCase& c) {
  const at::Tensor query = at::arange(c.queries, at::kLong).view({1, 1, c.queries, 1});
  const at::Tensor key = at::arange(c.keys, at::kLong).view({1, 1, 1, c.keys});
  return (c.bottom_right ? query + LengthsOf(c) - c.queries : query.expand({c.batch, 1, -1, 1})) -
         key;
}

// (B, 1, Tq, Tk): what a query sees by position.
at::Tensor SeenByPosition(const AttendCase& c) {
  const at::Tensor distance = DistancesOf(c);
  at::Tensor seen = at::arange(c.keys, at::kLong).view({1, 1, 1, c.keys}) < LengthsOf(c);
  seen = seen.expand({c.batch, 1, c.queries, c.keys});
  if (c.causal || c.bottom_right) seen = seen & (distance >= 0);
  if (c.window_left.has_value()) seen = seen & (distance <= *c.window_left);
  if (c.window_right.has_value()) seen = seen & (distance >= -*c.window_right);
  return seen;
}

// Attention over head-major tensors.
AttendAnswer Attend(const AttendInputs& in, const AttendCase& c) {
  const double infinity = std::numeric_limits<double>::infinity();
  AttendAnswer answer;
  answer.logits = RawScores(in.query, in.key) *
                  c.scale.value_or(1 / std::sqrt(static_cast<double>(in.query.size(3))));
  at::Tensor scores = answer.logits;
  if (c.softcap != 0) scores = c.softcap * at::tanh(scores / c.softcap);
  at::Tensor seen = SeenByPosition(c);
  if (in.mask.defined() && c.bool_mask) seen = seen & in.mask;
  if (in.mask.defined() && !c.bool_mask) scores = scores + in.mask;
  if (c.alibi) scores = scores - ByHead(SlopesOf(c)) * DistancesOf(c).abs();
  scores = scores.masked_fill(seen.logical_not(), -infinity);
  // A sink is one more key, without a value.
  if (c.sinks) {
    const at::Tensor sinks =
        in.sinks.view({1, c.heads, 1, 1}).expand({scores.size(0), -1, scores.size(2), 1});
    scores = at::cat({scores, sinks}, -1);
  }
  answer.logsumexp = at::logsumexp(scores, -1);
  const at::Tensor empty = (answer.logsumexp == -infinity).unsqueeze(-1);
  // Before the softmax as well: the gradient of a row without a key would be NaN.
  answer.weights = at::softmax(scores.masked_fill(empty, 0), -1)
                       .masked_fill(empty, 0)
                       .narrow(-1, 0, in.key.size(2));
  answer.key_sums = answer.weights.sum(2);
  if (c.Composed()) {
    answer.output = at::matmul(answer.weights, ForQueryHeads(in.value, in.query.size(1)));
    answer.backend_weights = answer.weights;
    return answer;
  }
  // The MATH backend itself, which scaled_dot_product_attention would choose among others.
  const bool grouped = in.query.size(1) != in.key.size(1);
  // It takes numbers alone: the truths are converted where it is called from.
  std::optional<at::Tensor> mask;
  if (in.mask.defined()) {
    const at::Tensor numbers =
        c.bool_mask
            ? at::zeros_like(in.mask, at::kDouble).masked_fill(in.mask.logical_not(), -infinity)
            : in.mask;
    mask = numbers.expand({c.batch, c.heads, c.queries, c.keys});
  }
  std::tie(answer.output, answer.backend_weights) = at::_scaled_dot_product_attention_math(
      in.query, in.key, in.value, mask, /*dropout_p=*/0.0, c.causal, /*dropout_mask=*/{}, c.scale,
      /*enable_gqa=*/grouped);
  return answer;
}

struct HeadAnswer {
  at::Tensor output;    // as x
  AttendInputs inputs;  // the projections
  AttendAnswer attend;  // its output is the context
};

// (B, T, H * d) as (B, H, T, d): head h owns columns h * d to (h + 1) * d.
at::Tensor SplitHeads(const at::Tensor& joined, int64_t heads) {
  return joined.unflatten(-1, {heads, joined.size(-1) / heads}).transpose(1, 2);
}

HeadAnswer Head(const HeadInputs& in, const HeadCase& c) {
  const int64_t heads = c.heads == 0 ? 1 : c.heads;
  const at::Tensor x = in.x.dim() == 2 ? in.x.unsqueeze(0) : in.x;
  HeadAnswer answer;
  answer.inputs = {.query = SplitHeads(at::matmul(x, in.w_q), heads),
                   .key = SplitHeads(at::matmul(x, in.w_k), heads),
                   .value = SplitHeads(at::matmul(x, in.w_v), heads)};
  const AttendCase inner = {.name = c.name,
                            .batch = x.size(0),
                            .heads = heads,
                            .queries = x.size(1),
                            .keys = x.size(1),
                            .width = answer.inputs.query.size(3),
                            .scale = c.scale,
                            .causal = c.causal};
  answer.attend = Attend(answer.inputs, inner);
  const at::Tensor joined = answer.attend.output.transpose(1, 2).flatten(2);
  answer.output = at::matmul(joined, in.w_o).view_as(in.x);
  return answer;
}

// ---- Messages. ----

// Row-major, whatever the tensor's strides.
void Store(const at::Tensor& tensor, v1::Tensor* message) {
  const at::Tensor dense = tensor.contiguous();
  const bool truths = dense.scalar_type() == at::kBool;
  message->set_dtype(truths ? v1::DATA_TYPE_BOOL : v1::DATA_TYPE_FLOAT64);
  for (const int64_t size : dense.sizes()) message->add_shape(size);
  message->set_data(dense.const_data_ptr(), dense.nbytes());
}

// composed: the output is not the backend's.
GoldenCase NewGolden(const std::string& name, bool composed) {
  GoldenCase golden;
  golden.set_name(name);
  golden.set_origin(composed ? "LibTorch " TORCH_VERSION ", composed of its operations"
                             : "LibTorch " TORCH_VERSION ", MATH backend");
  return golden;
}

void SetOptions(const AttendInputs& inputs, const AttendCase& c, v1::AttendOptions* options) {
  if (c.bthd) options->set_layout(v1::LAYOUT_BTHD);
  if (c.scale.has_value()) options->set_scale(*c.scale);
  if (c.causal) options->set_causal(v1::CAUSAL_TOP_LEFT);
  if (c.bottom_right) options->set_causal(v1::CAUSAL_BOTTOM_RIGHT);
  if (inputs.mask.defined()) Store(inputs.mask.detach(), options->mutable_mask());
  options->mutable_key_lengths()->Assign(c.key_lengths.begin(), c.key_lengths.end());
  if (c.window_left.has_value()) options->mutable_window()->set_left(*c.window_left);
  if (c.window_right.has_value()) options->mutable_window()->set_right(*c.window_right);
  options->set_softcap(c.softcap);
  const std::vector<double> slopes = SlopesOf(c);
  options->mutable_alibi_slopes()->Assign(slopes.begin(), slopes.end());
  const std::vector<double> sinks = SinksOf(c);
  options->mutable_sinks()->Assign(sinks.begin(), sinks.end());
}

GoldenCase MakeGolden(const AttendCase& c) {
  const AttendInputs inputs = Draw(c);
  const AttendAnswer answer = Attend(inputs, c);
  CheckAnswer(c.name, answer);
  const auto in_layout = [&c](const at::Tensor& t) { return c.bthd ? t.transpose(1, 2) : t; };

  GoldenCase golden = NewGolden(c.name, c.Composed());
  v1::AttendRequest* request = golden.mutable_attend();
  Store(in_layout(inputs.query), request->mutable_query());
  Store(in_layout(inputs.key), request->mutable_key());
  Store(in_layout(inputs.value), request->mutable_value());
  v1::AttendOptions* options = request->mutable_options();
  SetOptions(inputs, c, options);
  options->set_return_logsumexp(true);

  v1::AttendResponse* response = golden.mutable_attend_response();
  Store(in_layout(answer.output), response->mutable_output());
  Store(answer.logsumexp, response->mutable_logsumexp());
  if (answer.weights.numel() <= kMostWeights) {
    options->set_return_weights(true);
    options->set_return_key_sums(true);
    Store(answer.weights, response->mutable_weights());
    Store(answer.key_sums, response->mutable_key_sums());
  }
  return golden;
}

// The gradient of sum(output * d_output), by LibTorch's autograd.
GoldenCase MakeBackwardGolden(const AttendCase& c) {
  AttendInputs inputs = Draw(c);
  const at::Tensor d_output = DrawDOutput(c);
  const bool numbers = inputs.mask.defined() && !c.bool_mask;
  std::vector<at::Tensor*> variables = {&inputs.query, &inputs.key, &inputs.value};
  if (numbers) variables.push_back(&inputs.mask);
  if (c.sinks) variables.push_back(&inputs.sinks);
  for (at::Tensor* const variable : variables) variable->set_requires_grad(true);
  Attend(inputs, c).output.backward(d_output);
  for (const at::Tensor* const variable : variables) {
    TORCH_CHECK(at::isfinite(variable->grad()).all().item<bool>(), c.name,
                ": a gradient is not finite");
  }
  GoldenCase golden = NewGolden(std::string("backward_") + c.name, c.Composed());
  v1::BackwardRequest* request = golden.mutable_backward();
  v1::BackwardResponse* response = golden.mutable_backward_response();
  const auto in_layout = [&c](const at::Tensor& t) { return c.bthd ? t.transpose(1, 2) : t; };
  Store(in_layout(inputs.query.detach()), request->mutable_query());
  Store(in_layout(inputs.key.detach()), request->mutable_key());
  Store(in_layout(inputs.value.detach()), request->mutable_value());
  Store(in_layout(d_output), request->mutable_d_output());
  SetOptions(inputs, c, request->mutable_options());
  request->set_return_d_mask(numbers);
  Store(in_layout(inputs.query.grad()), response->mutable_d_query());
  Store(in_layout(inputs.key.grad()), response->mutable_d_key());
  Store(in_layout(inputs.value.grad()), response->mutable_d_value());
  if (numbers) Store(inputs.mask.grad(), response->mutable_d_mask());
  for (int64_t h = 0; c.sinks && h < c.heads; ++h) {
    response->add_d_sinks(inputs.sinks.grad()[h].item<double>());
  }
  return golden;
}

GoldenCase MakeGolden(const HeadCase& c, const std::filesystem::path& folder) {
  const HeadInputs inputs = c.from_lesson ? LessonInputs(folder / "lesson_inputs.txt") : Draw(c);
  const HeadAnswer answer = Head(inputs, c);
  CheckAnswer(c.name, answer.attend);

  GoldenCase golden = NewGolden(c.name, /*composed=*/false);
  v1::HeadRequest* request = golden.mutable_head();
  Store(inputs.x, request->mutable_x());
  Store(inputs.w_q, request->mutable_w_q());
  Store(inputs.w_k, request->mutable_w_k());
  Store(inputs.w_v, request->mutable_w_v());
  Store(inputs.w_o, request->mutable_w_o());
  request->set_heads(c.heads);
  if (c.scale.has_value()) request->mutable_options()->set_scale(*c.scale);
  if (c.causal) request->mutable_options()->set_causal(v1::CAUSAL_TOP_LEFT);
  request->set_return_intermediates(c.intermediates);

  v1::HeadResponse* response = golden.mutable_head_response();
  Store(answer.output, response->mutable_output());
  if (c.intermediates) {
    Store(answer.inputs.query, response->mutable_query());
    Store(answer.inputs.key, response->mutable_key());
    Store(answer.inputs.value, response->mutable_value());
    Store(answer.attend.logits, response->mutable_logits());
    Store(answer.attend.weights, response->mutable_weights());
    Store(answer.attend.output, response->mutable_context());
  }
  return golden;
}

void Write(const GoldenCase& golden, const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / (golden.name() + ".golden");
  std::ofstream file(path, std::ios::binary);
  TORCH_CHECK(golden.SerializeToOstream(&file) && file.flush(), "cannot write ", path.string());
}

// 2.6 is the oldest release these answers were checked with. Its MATH backend has what they need:
// grouped heads and a negative scale.
bool VersionSuffices() {
  return TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 6);
}

void Run(const std::filesystem::path& folder) {
  // One thread: how a sum is split never depends on the machine.
  at::set_num_threads(1);
  for (const HeadCase& c : kHeadCases) Write(MakeGolden(c, folder), folder);
  size_t written = std::size(kHeadCases);
  for (const AttendCase& c : kAttendCases) {
    Write(MakeGolden(c), folder);
    ++written;
    // Of the same size as those that return their weights.
    if (c.batch * c.heads * c.queries * c.keys > kMostWeights || c.largest_score > 0) continue;
    Write(MakeBackwardGolden(c), folder);
    ++written;
  }
  std::cout << written << " goldens of LibTorch " << TORCH_VERSION << "\n";
}

int Main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: generate FOLDER\n";
    return 2;
  }
  if (!VersionSuffices()) {
    std::cerr << "LibTorch 2.6 or later is needed, this is " << TORCH_VERSION << "\n";
    return 1;
  }
  try {
    Run(argv[1]);
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << "\n";
    return 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace attendant::golden

int main(int argc, char** argv) { return attendant::golden::Main(argc, argv); }
