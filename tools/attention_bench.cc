// SPDX-License-Identifier: Apache-2.0
#include "attention_bench.h"

namespace treeattn::tools {
namespace {

constexpr std::int64_t kDecodeQueries = 16;  // up to this many query tokens a call is limited by memory

// The paper's 2btd + 2bd + 2b n_h elements of the cache's type, for b sequences of t tokens: 2btd is K and V, and there
// d is kv_heads * head_dim; 2bd is q and out, with d = heads * head_dim; 2b n_h is max and sum. With several query
// tokens the last two are per query.
std::size_t formula_bytes(const Shape& s) {
  const std::int64_t kv = 2 * s.all_tokens() * s.kv_heads * s.head_dim;
  const std::int64_t rows = 2 * s.batch * s.queries * s.heads;
  return static_cast<std::size_t>(kv + rows * s.head_dim + rows) * dtype_size(s.dtype);
}

}  // namespace

bool is_prefill(const Shape& shape) { return shape.queries > kDecodeQueries; }

void AttentionLine::fill_in(double seconds, double read_gb_s, double multiply_add_gflops) {
  formula_bytes = tools::formula_bytes(shape);
  ms = 1e3 * seconds;
  gb_s = 1e-9 * static_cast<double>(shape.kv_bytes()) / seconds;
  limit_gb_s = read_gb_s;
  ratio = gb_s / limit_gb_s;
  if (!is_prefill(shape)) return;
  const double pairs = shape.visible_pairs() * static_cast<double>(shape.heads);
  gflops = 1e-9 * 4 * pairs * static_cast<double>(shape.head_dim) / seconds;
  peak_gflops = multiply_add_gflops;
  ratio = *gflops / peak_gflops;
}

}  // namespace treeattn::tools
