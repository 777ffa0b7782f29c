// SPDX-License-Identifier: Apache-2.0
// Parsing and checking of the shape options.
#include "options.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/check.h"
#include "command_line.h"
#include "kernels/head_dims.h"
#include "kernels/problem.h"
#include "option_errors.h"
#include "plan/tree_order.h"

namespace treeattn::tools {
namespace {

constexpr std::int64_t kMostTokens = std::int64_t{1} << 40;
constexpr std::int64_t kMostHeads = 65536;
constexpr char kGroup[] = "Shape";

Layout parse_layout(const std::string& text) {
  if (text.empty() || text == "tokens_first") return Layout::kTokensFirst;
  if (text == "heads_first") return Layout::kHeadsFirst;
  base::throw_invalid("--layout is \"{}\"; accepted: tokens_first, heads_first", text);
}

std::size_t product(std::initializer_list<std::int64_t> factors) {
  std::size_t out = 1;
  for (const std::int64_t factor : factors) {
    base::require(!__builtin_mul_overflow(out, static_cast<std::size_t>(factor), &out),
                  "--heads, --head-dim, --batch, --tokens, --queries and the size of a page make more bytes than fit "
                  "in {} bits: {}; accepted: smaller numbers",
                  8 * sizeof(out), fmt::join(factors, " * "));
  }
  return out;
}

void check(const Shape& shape) {
  base::require(shape.heads % shape.kv_heads == 0, "--kv-heads is {}; accepted: numbers that divide --heads, {}",
                shape.kv_heads, shape.heads);
  const std::int64_t fewest = shape.shortest > 0 ? shape.shortest : shape.tokens;
  base::require(!shape.causal || shape.queries <= fewest,
                "--queries is {}; accepted with --causal: 1 to the tokens of a sequence, {} (the queries are the last)",
                shape.queries, fewest);
  base::require(shape.shortest == 0 || shape.page_tokens > 0,
                "--lengths without --page; accepted: both, as sequences of mixed lengths lie in pages");
  base::require(shape.page_tokens == 0 || shape.layout == Layout::kTokensFirst,
                "--layout is heads_first with --page; accepted: tokens_first, which pages are in");
  // So that no later sum of bytes can wrap round. The last page of a sequence is a whole one.
  product({64, shape.batch, shape.tokens + shape.page_tokens, shape.kv_heads, shape.head_dim});
  product({64, shape.batch, shape.queries, shape.heads, shape.head_dim});
}

}  // namespace

std::vector<std::string> split_list(const std::string& list) {
  std::vector<std::string> out;
  std::size_t begin = 0;
  while (true) {
    const std::size_t comma = list.find(',', begin);
    out.push_back(list.substr(begin, comma - begin));
    if (comma == std::string::npos) return out;
    begin = comma + 1;
  }
}

std::int64_t parse_count(std::string_view option, std::string_view text, std::int64_t least, std::int64_t most,
                         std::int64_t step) {
  std::int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  const std::string_view suffix(stop, static_cast<std::size_t>(end - stop));
  std::int64_t unit = 0;
  if (suffix.empty()) unit = 1;
  if (suffix == "k" || suffix == "K") unit = 1 << 10;
  if (suffix == "m" || suffix == "M") unit = 1 << 20;
  const bool good = error == std::errc() && unit != 0 && !__builtin_mul_overflow(value, unit, &value);
  base::require(good && value >= least && value <= most && value % step == 0,
                "{} is \"{}\"; accepted: {} from {} to {} (k and m stand for 1024 and 1024 x 1024)", option, text,
                step == 1 ? "whole numbers" : fmt::format("multiples of {}", step), least, most);
  return value;
}

int parse_count_or(std::string_view option, std::string_view text, int least, int most, int otherwise, int step) {
  return text.empty() ? otherwise : static_cast<int>(parse_count(option, text, least, most, step));
}

std::optional<double> parse_number(std::string_view text) {
  double value = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || stop != text.data() + text.size()) return {};
  return value;
}

double parse_real(const char* option, const std::string& text, double least, double most) {
  const std::optional<double> value = parse_number(text);
  base::require(value && *value >= least && *value <= most, "{} is \"{}\"; accepted: a number from {} to {}", option,
                text, least, most);
  return *value;
}

Seconds parse_deadline(const std::string& text, Seconds otherwise) {
  return text.empty() ? otherwise : Seconds(parse_real("--deadline", text, 0.001, 1e6));
}

int parse_branches(const std::string& text, int otherwise) {
  const int branches = parse_count_or("--branches", text, 1, 65536, otherwise);
  with_option("--branches", text, [&] { plan::check_order({.branches = branches}); });
  return branches;
}

Strategy parse_strategy_option(const std::string& name) {
  return with_option("--strategy", name, [&] { return parse_strategy(name); });
}

ReductionOrder parse_order(const std::string& chunk, const std::string& branches) {
  ReductionOrder order;
  order.chunk_tokens = parse_count_or("--chunk", chunk, 64, 1 << 30, 256, 64);
  order.branches = parse_branches(branches, 256);
  return order;
}

std::vector<Strategy> parse_strategies(const std::string& list) {
  std::vector<Strategy> out;
  for (const std::string& name : split_list(list)) {
    const Strategy strategy = parse_strategy_option(name);
    base::require(std::find(out.begin(), out.end(), strategy) == out.end(),
                  "--strategy names \"{}\" twice; accepted: each once", name);
    out.push_back(strategy);
  }
  return out;
}

DType parse_dtype_option(std::string_view option, const std::string& text, bool quantised) {
  const char* accepted = quantised ? "float32 (f32), float16 (f16), bfloat16 (bf16), int8, fp8"
                                   : "float32 (f32), float16 (f16), bfloat16 (bf16)";
  try {
    const DType dtype = parse_dtype(text);
    if (quantised || !kernels::has_scales(dtype)) return dtype;
  } catch (const InvalidArgument&) {
  }
  base::throw_invalid("{} is \"{}\"; accepted: {}", option, text, accepted);
}

DType default_q_dtype(DType kv_dtype) { return kernels::has_scales(kv_dtype) ? DType::kFloat32 : kv_dtype; }

std::int64_t Shape::length(std::int64_t sequence) const {
  if (shortest == 0 || batch == 1) return tokens;
  const std::int64_t place = sequence % 2 == 0 ? sequence / 2 : batch - 1 - sequence / 2;
  const double first = static_cast<double>(shortest), last = static_cast<double>(tokens);
  const double share = static_cast<double>(place) / static_cast<double>(batch - 1);
  return std::llround(first * std::pow(last / first, share));
}

std::int64_t Shape::all_tokens() const {
  if (shortest == 0) return batch * tokens;
  std::int64_t sum = 0;
  for (std::int64_t b = 0; b < batch; ++b) sum += length(b);
  return sum;
}

namespace {

std::size_t rows_bytes(const Shape& shape, bool scales) {
  const std::size_t row =
      static_cast<std::size_t>(shape.head_dim) * dtype_size(shape.dtype) + (scales ? sizeof(float) : 0);
  return product({2, shape.all_tokens(), shape.kv_heads, static_cast<std::int64_t>(row)});
}

}  // namespace

std::size_t Shape::kv_bytes() const { return rows_bytes(*this, dtype == DType::kInt8); }

std::size_t Shape::cache_bytes() const { return rows_bytes(*this, kernels::has_scales(dtype)); }

std::size_t Shape::q_bytes() const { return product({batch, queries, heads, head_dim}) * dtype_size(q_dtype); }

std::size_t Shape::out_bytes() const { return product({batch, queries, heads, head_dim}) * sizeof(float); }

double Shape::visible_pairs() const {
  const double all = static_cast<double>(queries) * static_cast<double>(all_tokens());
  // Query i is token length - queries + i; the later ones are hidden from it.
  const double hidden = causal ? static_cast<double>(queries) * static_cast<double>(queries - 1) / 2 : 0;
  return all - static_cast<double>(batch) * hidden;
}

void ShapeOptions::add_to(CommandLine& app, const char* default_tokens) {
  app.add_option("--heads", heads, "Query heads (default 16)")->type_name("N")->group(kGroup);
  app.add_option("--kv-heads", kv_heads, "Heads of K and V; a list is measured one by one (default: as --heads)")
      ->type_name("LIST")
      ->group(kGroup);
  app.add_option("--head-dim", head_dim, "Elements of a head, 16 to 256 in steps of 8 (default 128)")
      ->type_name("N")
      ->group(kGroup);
  app.add_option("--dtype", dtype, "Type of K and V, or a list: float32 float16 bfloat16 int8 fp8 (default bfloat16)")
      ->type_name("LIST")
      ->group(kGroup);
  app.add_option("--tokens", tokens,
                 fmt::format("Keys in the cache, or a list; 128k is 131072 (default {})", default_tokens))
      ->type_name("LIST")
      ->group(kGroup);
  app.add_option("--batch", batch, "Sequences (default 1)")->type_name("N")->group(kGroup);
  app.add_option("--queries", queries, "Query tokens per sequence: 1 is decode, many is prefill (default 1)")
      ->type_name("N")
      ->group(kGroup);
  app.add_option("--q-dtype", q_dtype, "Type of the queries (default: as --dtype; float32 for int8 and fp8)")
      ->type_name("TYPE")
      ->group(kGroup);
}

void ShapeOptions::add_layout_to(CommandLine& app) {
  app.add_option("--layout", layout, "Of K and V: tokens_first or heads_first (default tokens_first)")
      ->type_name("NAME")
      ->group(kGroup);
  app.add_option("--page", page, "K and V in pages of so many tokens, in random order (default: in one piece)")
      ->type_name("N")
      ->group(kGroup);
  app.add_option("--lengths", lengths,
                 "Sequences of mixed lengths instead of --tokens, evenly spread over the logarithm; needs --page")
      ->type_name("MIN:MAX")
      ->group(kGroup);
  app.add_flag("--causal", causal, "Hide later keys; the queries are the last tokens")->group(kGroup);
}

bool ShapeOptions::any() const {
  for (const std::string* text :
       {&heads, &kv_heads, &head_dim, &dtype, &tokens, &batch, &queries, &q_dtype, &layout, &lengths, &page}) {
    if (!text->empty()) return true;
  }
  return causal;
}

std::vector<Shape> ShapeOptions::shapes() const {
  const auto or_else = [](const std::string& text, const char* other) { return text.empty() ? other : text; };
  Shape shape;
  shape.heads = parse_count("--heads", or_else(heads, "16"), 1, kMostHeads);
  shape.head_dim = parse_count("--head-dim", or_else(head_dim, "128"), kernels::kLeastHeadDim, kernels::kMostHeadDim,
                               kernels::kHeadDimStep);
  shape.batch = parse_count("--batch", or_else(batch, "1"), 1, kMostHeads);
  shape.queries = parse_count("--queries", or_else(queries, "1"), 1, kMostTokens);
  shape.layout = parse_layout(layout);
  shape.causal = causal;
  shape.page_tokens = page.empty() ? 0 : parse_count("--page", page, 1, kMostTokens);
  std::string longest = or_else(tokens, "8192");
  if (!lengths.empty()) {
    base::require(tokens.empty(), "--lengths is \"{}\" with --tokens {}; accepted: one of them", lengths, tokens);
    const std::size_t colon = lengths.find(':');
    base::require(colon != std::string::npos, "--lengths is \"{}\"; accepted: MIN:MAX, as 1k:128k", lengths);
    longest = lengths.substr(colon + 1);
    shape.shortest = parse_count("the MIN of --lengths", lengths.substr(0, colon), 1, kMostTokens);
    parse_count("the MAX of --lengths", longest, shape.shortest, kMostTokens);
  }
  std::vector<Shape> out;
  for (const std::string& kv : split_list(kv_heads.empty() ? std::to_string(shape.heads) : kv_heads)) {
    shape.kv_heads = parse_count("--kv-heads", kv, 1, kMostHeads);
    for (const std::string& type : split_list(or_else(dtype, "bfloat16"))) {
      shape.dtype = parse_dtype_option("--dtype", type, true);
      shape.q_dtype = q_dtype.empty() ? default_q_dtype(shape.dtype) : parse_dtype_option("--q-dtype", q_dtype, false);
      for (const std::string& count : split_list(longest)) {
        shape.tokens = parse_count("--tokens", count, 1, kMostTokens);
        check(shape);
        out.push_back(shape);
      }
    }
  }
  return out;
}

}  // namespace treeattn::tools
