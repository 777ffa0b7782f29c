// SPDX-License-Identifier: Apache-2.0
// The cases: each group walks one axis of the operator and lets the others rotate.
#include "kernels/case_list.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <random>
#include <set>
#include <string_view>

namespace treeattn::kernels {

namespace {

constexpr DType kQueryTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr Layout kLayouts[] = {Layout::kTokensFirst, Layout::kHeadsFirst, Layout::kPaged};
constexpr std::int64_t kHeadDims[] = {16, 24, 32, 40, 64, 72, 80, 96, 120, 128, 136, 192, 256};
constexpr std::int64_t kLengths[] = {1, 2, 3, 63, 64, 65, 255, 256, 257, 1000, 1537};
constexpr std::int64_t kQueryCounts[] = {1, 2, 3, 5, 17, 64, 130};

std::string layout_name(Layout layout, std::int64_t page_tokens) {
  switch (layout) {
    case Layout::kTokensFirst:
      return "tokens_first";
    case Layout::kHeadsFirst:
      return "heads_first";
    case Layout::kPaged:
      return fmt::format("pages_of_{}", page_tokens);
  }
  return "?";
}

std::string_view data_name(DataKind data) {
  switch (data) {
    case DataKind::kNormal:
      return "normal";
    case DataKind::kLargeLogits:
      return "large_logits";
    case DataKind::kPeaked:
      return "peaked";
    case DataKind::kConstant:
      return "constant";
  }
  return "?";
}

// Everything that tells a case from another, so that a failure can be rebuilt from its name.
std::string describe(const Case& c) {
  std::string text = fmt::format("{}-{}-{} b{} q{} h{}:{} t{} d{}:{} {}", dtype_name(c.q_type), dtype_name(c.k_type),
                                 dtype_name(c.v_type), c.batch, c.queries, c.heads, c.kv_heads, c.tokens, c.head_dim,
                                 c.v_dim, layout_name(c.k_layout, c.page_tokens));
  if (c.v_layout != c.k_layout) text += ":" + layout_name(c.v_layout, c.page_tokens);
  const bool fp8 = c.k_type == DType::kFp8E4M3 || c.v_type == DType::kFp8E4M3;
  if (fp8 && c.fp8_scales) text += " fp8_scales";
  if (c.row_padding > 0) text += fmt::format(" padding{}", c.row_padding);
  if (!c.lengths.empty()) text += fmt::format(" lengths{}", c.lengths);
  if (c.first_key != 0) text += fmt::format(" first_key{}", c.first_key);
  if (!c.first_query.empty()) text += fmt::format(" first_query{}", c.first_query);
  if (c.causal) text += " causal";
  if (c.window > 0) text += fmt::format(" window{}", c.window);
  if (c.softcap > 0) text += fmt::format(" softcap{}", c.softcap);
  if (c.alibi) text += " alibi";
  if (c.sinks) text += " sinks";
  if (c.scale != 1.0f) text += fmt::format(" scale{}", c.scale);
  if (c.order != ReductionOrder{}) {
    text += fmt::format(" chunk{} branches{}", c.order.chunk_tokens, c.order.branches);
    if (c.order.placement == Placement::kContiguous) text += fmt::format(" of {}", c.order.branch_tokens);
  }
  if (c.data != DataKind::kNormal) text += fmt::format(" {}", data_name(c.data));
  return text;
}

// Collects cases; rotates through types and layouts so that every group meets all of them sooner or later.
class Builder {
 public:
  Case next() {
    Case c;
    c.q_type = kQueryTypes[turn_ % std::size(kQueryTypes)];
    c.k_type = c.v_type = kAllDTypes[turn_ % std::size(kAllDTypes)];
    c.k_layout = c.v_layout = kLayouts[turn_ % std::size(kLayouts)];
    c.fp8_scales = turn_ % 2 == 0;
    ++turn_;
    return c;
  }
  void add(std::string_view group, Case c) {
    c.name = fmt::format("{}/{}", group, describe(c));
    if (names_.insert(c.name).second) cases_.push_back(std::move(c));
  }
  std::vector<Case> take() { return std::move(cases_); }

 private:
  std::size_t turn_ = 0;
  std::vector<Case> cases_;
  std::set<std::string> names_;
};

void add_types(Builder& list) {
  for (const DType q : kQueryTypes) {
    for (const DType kv : kAllDTypes) {
      for (const Layout layout : kLayouts) {
        Case c = list.next();
        c.q_type = q;
        c.k_type = c.v_type = kv;
        c.k_layout = c.v_layout = layout;
        c.head_dim = c.v_dim = layout == Layout::kHeadsFirst ? 128 : 64;
        c.queries = layout == Layout::kPaged ? 3 : 1;
        c.heads = 8;
        list.add("types", c);
      }
    }
  }
  constexpr DType kPairs[][2] = {{DType::kInt8, DType::kFp8E4M3},     {DType::kFp8E4M3, DType::kInt8},
                                 {DType::kFloat16, DType::kBFloat16}, {DType::kBFloat16, DType::kFloat32},
                                 {DType::kInt8, DType::kBFloat16},    {DType::kFloat32, DType::kFp8E4M3}};
  for (const auto& pair : kPairs) {
    Case c = list.next();
    c.k_type = pair[0];
    c.v_type = pair[1];
    c.v_layout = Layout::kTokensFirst;
    list.add("mixed_types", c);
  }
}

void add_shapes(Builder& list) {
  for (const std::int64_t group : {1, 2, 3, 4, 5, 6, 7, 8, 16}) {
    for (const std::int64_t queries : {1, 3}) {
      Case c = list.next();
      c.kv_heads = queries == 1 ? 3 : 2;
      c.heads = group * c.kv_heads;
      c.queries = queries;
      c.tokens = 130;
      c.causal = queries > 1;
      list.add("groups", c);
    }
  }
  for (const std::int64_t dim : kHeadDims) {
    for (const std::int64_t queries : {1, 2, 9}) {
      Case c = list.next();
      c.head_dim = c.v_dim = dim;
      c.queries = queries;
      c.tokens = 100;
      list.add("head_dims", c);
    }
  }
  constexpr std::int64_t kUnequal[][2] = {{64, 128}, {128, 64}, {192, 128}, {256, 16},
                                          {16, 256}, {40, 24},  {72, 80},   {96, 136}};
  for (const auto& dims : kUnequal) {
    Case c = list.next();
    c.head_dim = dims[0];
    c.v_dim = dims[1];
    c.queries = 2;
    list.add("v_dims", c);
  }
  for (const std::int64_t queries : kQueryCounts) {
    for (const bool causal : {false, true}) {
      Case c = list.next();
      c.queries = queries;
      c.causal = causal;
      c.tokens = 300;
      c.head_dim = c.v_dim = queries > 20 ? 32 : 64;
      list.add("queries", c);
    }
  }
  for (const std::int64_t tokens : kLengths) {
    for (const std::int64_t queries : {1, 5}) {
      Case c = list.next();
      c.tokens = tokens;
      c.queries = queries;
      c.causal = queries > 1;  // fewer keys than queries: the first ones see nothing
      list.add("lengths", c);
    }
  }
}

void add_batches(Builder& list) {
  const std::vector<std::int64_t> kBatches[] = {{0}, {1}, {0, 0}, {257, 0, 1, 100}, {1, 2, 3, 256, 0}, {64, 65}};
  for (const auto& lengths : kBatches) {
    for (const Layout layout : kLayouts) {
      Case c = list.next();
      c.batch = static_cast<std::int64_t>(lengths.size());
      c.lengths = lengths;
      c.k_layout = c.v_layout = layout;
      c.queries = layout == Layout::kPaged ? 4 : 1;
      c.causal = layout == Layout::kPaged;
      c.sinks = layout == Layout::kHeadsFirst;
      list.add("batches", c);
    }
  }
  Case none = list.next();
  none.tokens = 0;
  list.add("batches", none);
  none.batch = 3;
  none.sinks = true;
  list.add("batches", none);
  for (const std::int64_t page_tokens : {1, 3, 16, 64, 256, 300}) {
    Case c = list.next();
    c.k_layout = Layout::kPaged;
    c.v_layout = page_tokens == 3 ? Layout::kHeadsFirst : Layout::kPaged;
    c.page_tokens = page_tokens;
    c.batch = 2;
    c.lengths = {257, 130};
    list.add("pages", c);
  }
  for (const Layout layout : kLayouts) {
    for (const std::int64_t padding : {1, 8, 24}) {
      Case c = list.next();
      c.k_layout = c.v_layout = layout;
      c.row_padding = padding;
      c.batch = 2;
      c.queries = 2;
      c.lengths = {200, 77};
      list.add("padding", c);
    }
  }
}

void add_options(Builder& list) {
  for (const std::int64_t window : {1, 2, 64, 100, 1000}) {
    for (const bool causal : {false, true}) {
      Case c = list.next();
      c.window = window;
      c.causal = causal;
      c.queries = 7;
      list.add("windows", c);
    }
  }
  for (const float cap : {2.0f, 30.0f, 1e4f, 1e8f}) {
    for (const DataKind data : {DataKind::kNormal, DataKind::kLargeLogits}) {
      Case c = list.next();
      c.softcap = cap;
      c.data = data;
      list.add("softcap", c);
    }
  }
  for (int bits = 1; bits < 16; ++bits) {
    Case c = list.next();
    c.alibi = (bits & 1) != 0;
    c.sinks = (bits & 2) != 0;
    c.softcap = (bits & 4) != 0 ? 20.0f : 0.0f;
    c.window = (bits & 8) != 0 ? 70 : 0;
    c.causal = bits % 3 == 0;
    c.queries = 3;
    c.scale = bits % 2 == 0 ? 0.7f : 1.0f;
    list.add("options", c);
  }
  for (const float scale : {-1.0f, -0.3f, 0.0f}) {
    for (const float cap : {0.0f, 20.0f}) {
      Case c = list.next();
      c.scale = scale;
      c.softcap = cap;
      c.queries = 3;
      c.causal = true;
      list.add("scales", c);
    }
  }
  // Positions that are not local indices: keys that begin later, queries before, inside and after them.
  for (const std::int64_t first_query : {-5, 0, 290, 400, 555, 1000000}) {
    Case c = list.next();
    c.first_key = 300;
    c.batch = 2;
    c.queries = 4;
    c.first_query = {first_query, first_query + 2};
    c.lengths = {257, 200};
    c.causal = first_query % 2 == 0;
    c.window = first_query == 400 ? 33 : 0;
    c.alibi = true;
    list.add("positions", c);
  }
}

void add_orders(Builder& list) {
  constexpr auto kPieces = Placement::kContiguous;
  const ReductionOrder orders[] = {{64, 1},
                                   {64, 2},
                                   {64, 4},
                                   {64, 8},
                                   {64, 64},
                                   {128, 4},
                                   {256, 1},
                                   {512, 2},
                                   {1024, 16},
                                   {64, 65536},
                                   {64, 4, kPieces, 256},
                                   {128, 16, kPieces, 128},
                                   {64, 2, kPieces, 64},
                                   {256, 65536, kPieces, 256}};
  for (const ReductionOrder& order : orders) {
    Case c = list.next();
    c.order = order;
    c.tokens = 900;
    c.queries = order.chunk_tokens == 64 ? 2 : 1;
    c.causal = true;
    c.first_key = order.branches == 4 ? 77 : 0;
    list.add("orders", c);
  }
}

void add_data(Builder& list) {
  for (const DataKind data : {DataKind::kLargeLogits, DataKind::kPeaked, DataKind::kConstant}) {
    for (const DType kv : kAllDTypes) {
      Case c = list.next();
      c.k_type = c.v_type = kv;
      c.data = data;
      c.queries = 2;
      c.head_dim = c.v_dim = kv == DType::kInt8 ? 128 : 64;
      c.sinks = kv == DType::kFloat16;
      c.alibi = kv == DType::kBFloat16;
      c.order = {64, 4};
      list.add("data", c);
    }
  }
}

// Many rows to a head go another way through the kernels: 27, 72 and 129 of them, and head dims that fill blocks or do
// not.
void add_many_rows(Builder& list) {
  using enum DType;
  constexpr struct {
    DType q, kv;
    std::int64_t head_dim, v_dim, queries;
  } kShapes[] = {{kBFloat16, kBFloat16, 64, 64, 43}, {kFloat16, kBFloat16, 24, 200, 24},
                 {kFloat32, kBFloat16, 256, 40, 9},  {kFloat16, kFloat16, 40, 72, 24},
                 {kFloat32, kFloat32, 80, 16, 43},   {kBFloat16, kInt8, 72, 128, 9},
                 {kFloat16, kFp8E4M3, 16, 256, 24}};
  for (const auto& shape : kShapes) {
    Case c = list.next();
    c.q_type = shape.q;
    c.k_type = c.v_type = shape.kv;
    c.head_dim = shape.head_dim;
    c.v_dim = shape.v_dim;
    c.queries = shape.queries;
    c.heads = 6;
    c.tokens = 205;
    c.causal = true;
    c.sinks = shape.kv == kFloat32;
    c.order = {128, 2};
    list.add("many_rows", c);
  }
}

}  // namespace

std::vector<Case> case_list() {
  Builder list;
  add_types(list);
  add_shapes(list);
  add_batches(list);
  add_options(list);
  add_orders(list);
  add_data(list);
  add_many_rows(list);
  return list.take();
}

std::vector<Case> random_cases(std::uint64_t seed, std::size_t n) {
  std::mt19937_64 engine(seed);
  const auto below = [&](std::int64_t limit) {
    return static_cast<std::int64_t>(engine() % static_cast<std::uint64_t>(limit));
  };
  const auto one_in = [&](std::int64_t odds) { return below(odds) == 0; };
  std::vector<Case> cases;
  for (std::size_t i = 0; i < n; ++i) {
    Case c;
    c.batch = one_in(3) ? 1 + below(4) : 1;
    c.queries = one_in(8) ? 1 + below(80) : one_in(2) ? 1 + below(6) : 1;
    c.kv_heads = 1 + below(3);
    c.heads = c.kv_heads * (c.queries > 6 ? 1 + below(3) : 1 + below(9));
    c.head_dim = 16 + 8 * below(one_in(3) ? 31 : 15);
    c.v_dim = one_in(4) ? 16 + 8 * below(31) : c.head_dim;
    // Long sequences only where there are few rows: the reference is plain loops.
    c.tokens = below(std::clamp<std::int64_t>(12000 / (c.batch * c.queries * c.heads), 20, 1600));
    c.q_type = kQueryTypes[below(std::ssize(kQueryTypes))];
    c.k_type = kAllDTypes[below(std::ssize(kAllDTypes))];
    c.v_type = one_in(3) ? kAllDTypes[below(std::ssize(kAllDTypes))] : c.k_type;
    c.fp8_scales = one_in(2);
    c.k_layout = kLayouts[below(std::ssize(kLayouts))];
    c.v_layout = one_in(4) ? kLayouts[below(std::ssize(kLayouts))] : c.k_layout;
    c.page_tokens = one_in(3) ? 1 + below(40) : std::int64_t{1} << below(8);
    c.row_padding = one_in(4) ? 1 + below(30) : 0;
    for (std::int64_t b = 0; b < c.batch && one_in(b == 0 ? 2 : 1); ++b) c.lengths.push_back(below(c.tokens + 1));
    c.first_key = one_in(3) ? below(3000) : 0;
    for (std::int64_t b = 0; b < c.batch && one_in(b == 0 ? 3 : 1); ++b) {
      c.first_query.push_back(c.first_key + below(c.tokens + 40) - 20);
    }
    c.causal = one_in(2);
    c.window = one_in(3) ? 1 + below(c.tokens + 50) : 0;
    c.softcap = one_in(4) ? 1.0f + static_cast<float>(below(60)) : 0.0f;
    c.alibi = one_in(4);
    c.sinks = one_in(4);
    c.scale = !one_in(3) ? 1.0f : one_in(3) ? -0.7f : 0.7f;
    c.order.chunk_tokens = 64 * (1 + below(6));
    c.order.branches = 1 << below(9);
    if (below(4) == 0) {
      c.order.placement = Placement::kContiguous;
      c.order.branch_tokens = c.order.chunk_tokens * (1 + below(4));
    }
    c.data = one_in(3) ? static_cast<DataKind>(below(4)) : DataKind::kNormal;
    c.name = fmt::format("random {} of seed {}/{}", i, seed, describe(c));
    cases.push_back(std::move(c));
  }
  return cases;
}

}  // namespace treeattn::kernels
