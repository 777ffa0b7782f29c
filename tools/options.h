// SPDX-License-Identifier: Apache-2.0
// The shape of an attention call as options that the bench commands share.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "treeattn/communicator.h"
#include "treeattn/dtype.h"
#include "treeattn/order.h"
#include "treeattn/strategy.h"

namespace treeattn::tools {

class CommandLine;

enum class Layout { kTokensFirst, kHeadsFirst };

// One attention call.
struct Shape {
  std::int64_t batch = 1;
  std::int64_t heads = 16;
  std::int64_t kv_heads = 16;
  std::int64_t head_dim = 128;
  std::int64_t tokens = 8192;
  std::int64_t queries = 1;
  DType dtype = DType::kBFloat16;  // of K and V
  DType q_dtype = DType::kBFloat16;
  bool causal = false;
  Layout layout = Layout::kTokensFirst;
  std::int64_t shortest = 0;     // sequences of mixed lengths, from this to `tokens`; 0: all have `tokens`
  std::int64_t page_tokens = 0;  // K and V in pages of so many tokens, shuffled; 0: each sequence in one piece

  // Tokens of a sequence; mixed ones are spread evenly over the logarithm, long and short in turns.
  std::int64_t length(std::int64_t sequence) const;
  // Of the whole batch.
  std::int64_t all_tokens() const;
  // Bytes of K and V together, with the row scales that int8 needs.
  std::size_t kv_bytes() const;
  // The same in a KvCache, which has them for fp8, too.
  std::size_t cache_bytes() const;
  std::size_t q_bytes() const;
  std::size_t out_bytes() const;
  // Pairs of query and key, per head and summed over the batch, that the mask lets through.
  double visible_pairs() const;
};

// The text given for each option; empty means not given. Text and not numbers, so that every message can name the value
// and what is accepted, and so that tokens can be written as 128k.
struct ShapeOptions {
  std::string heads;
  std::string kv_heads;  // list
  std::string head_dim;
  std::string dtype;   // list
  std::string tokens;  // list
  std::string batch;
  std::string queries;
  std::string q_dtype;
  std::string layout;
  std::string lengths;
  std::string page;
  bool causal = false;

  void add_to(CommandLine& app, const char* default_tokens = "8192");
  // --layout, --lengths, --page and --causal, for a call on one machine.
  void add_layout_to(CommandLine& app);
  // Whether any was given.
  bool any() const;
  // The product of the lists, checked. Throws InvalidArgument.
  std::vector<Shape> shapes() const;
};

// --branches, checked; `otherwise` where it was not given. Throws InvalidArgument.
int parse_branches(const std::string& text, int otherwise);
// --chunk and --branches, checked; empty: not given. Throws InvalidArgument.
ReductionOrder parse_order(const std::string& chunk, const std::string& branches);

// The strategy of this name. Throws InvalidArgument.
Strategy parse_strategy_option(const std::string& name);
// The strategies of a list, none of them twice. Throws InvalidArgument.
std::vector<Strategy> parse_strategies(const std::string& list);

// The type that an option names; quantised: also int8 and fp8. Throws InvalidArgument.
DType parse_dtype_option(std::string_view option, const std::string& text, bool quantised);

// float32, float16 and bfloat16 serve as they are; a quantised cache is read with float32 queries.
DType default_q_dtype(DType kv_dtype);

// "a,b" -> {"a", "b"}.
std::vector<std::string> split_list(const std::string& list);

// A whole number from least to most, a multiple of step, with k and m for 1024 and 1024^2. `option` is for the message.
std::int64_t parse_count(std::string_view option, std::string_view text, std::int64_t least, std::int64_t most,
                         std::int64_t step = 1);
// The same; `otherwise` where the option was not given.
int parse_count_or(std::string_view option, std::string_view text, int least, int most, int otherwise, int step = 1);
// The number that a text is, all of it.
std::optional<double> parse_number(std::string_view text);
// A number from least to most. `option` is for the message.
double parse_real(const char* option, const std::string& text, double least, double most);
Seconds parse_deadline(const std::string& text, Seconds otherwise);

}  // namespace treeattn::tools
