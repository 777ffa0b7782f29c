// SPDX-License-Identifier: Apache-2.0
#include "merge/rows.h"

#include <vector>

#include "base/check.h"
#include "treeattn/state.h"

// Without this, std::fma on a baseline x86-64 build is a library call per element. The clones give the same bits: the
// fused multiply-adds are explicit and nothing is reassociated. Named by what they need: one that is named by a
// processor is chosen on just that model, and all later ones are left with the calls.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define TREEATTN_FMA_CLONES __attribute__((target_clones("default", "fma", "avx512f"), flatten))
#else
#define TREEATTN_FMA_CLONES
#endif

namespace treeattn::merge {

void clear_rows(float* rows, std::size_t count, std::size_t row_floats) {
  for (std::size_t r = 0; r < count; ++r) {
    float* row = rows + r * row_floats;
    row[0] = kEmptyMax;
    for (std::size_t i = 1; i < row_floats; ++i) row[i] = 0.0f;
  }
}

TREEATTN_FMA_CLONES void merge_rows(float* lower, const float* higher, std::size_t count, std::size_t row_floats) {
  for (std::size_t r = 0; r < count; ++r) merge_row(lower + r * row_floats, higher + r * row_floats, row_floats);
}

}  // namespace treeattn::merge

namespace treeattn {
namespace {

using base::require;

std::size_t count_rows(std::span<const float> states, std::int64_t v_dim, const char* what) {
  require(v_dim >= 1, "v_dim = {}; accepted: 1 or more", v_dim);
  const std::size_t row = state_floats(v_dim);
  require(states.size() % row == 0, "{} holds {} floats; accepted: a multiple of v_dim + 2 = {}", what, states.size(),
          row);
  base::require_address(what, states);
  return states.size() / row;
}

}  // namespace

void identity_states(std::span<float> states, std::int64_t v_dim) {
  merge::clear_rows(states.data(), count_rows(states, v_dim, "states"), state_floats(v_dim));
}

void merge_states(std::span<float> lower, std::span<const float> higher, std::int64_t v_dim) {
  require(lower.size() == higher.size(), "lower holds {} floats and higher {}; accepted: equal sizes", lower.size(),
          higher.size());
  const std::size_t rows = count_rows(lower, v_dim, "lower");
  base::require_address("higher", higher);
  base::require_apart<float>("lower", lower, "higher", higher);
  merge::merge_rows(lower.data(), higher.data(), rows, state_floats(v_dim));
}

void finalize_states(std::span<const float> states, std::int64_t v_dim, std::span<const float> sinks,
                     std::span<float> out, std::span<float> lse) {
  const std::size_t rows = count_rows(states, v_dim, "states");
  const std::size_t dim = static_cast<std::size_t>(v_dim);
  const std::size_t row_floats = state_floats(v_dim);
  require(out.size() == rows * dim, "out holds {} floats; accepted: rows * v_dim = {}", out.size(), rows * dim);
  require(lse.empty() || lse.size() == rows, "lse holds {} floats; accepted: 0 or rows = {}", lse.size(), rows);
  require(sinks.empty() || rows % sinks.size() == 0, "sinks holds {} logits; accepted: a divisor of rows = {}",
          sinks.size(), rows);
  base::require_address("out", out);
  base::require_address("lse", lse);
  base::require_address("sinks", sinks);
  base::require_apart<float>("out", out, "lse", lse);
  base::require_apart<float>("out", out, "states", states);
  base::require_apart<float>("lse", lse, "states", states);
  base::require_apart<float>("out", out, "sinks", sinks);
  base::require_apart<float>("lse", lse, "sinks", sinks);
  if (rows == 0) return;  // v_dim may then be more than memory has room for
  // A sink is the state of one key whose value is zero.
  std::vector<float> with_sink, sink_state(row_floats, 0.0f);
  for (std::size_t r = 0; r < rows; ++r) {
    const float* row = states.data() + r * row_floats;
    if (!sinks.empty()) {
      with_sink.assign(row, row + row_floats);
      const float logit = sinks[r % sinks.size()] * merge::kLog2E;
      sink_state[0] = logit;
      sink_state[1] = merge::state_weight(logit, logit);  // 1; NaN if the logit is no number, keys or no keys
      merge::merge_row(with_sink.data(), sink_state.data(), row_floats);
      row = with_sink.data();
    }
    const float row_lse = merge::finalize_row(row, dim, out.data() + r * dim);
    if (!lse.empty()) lse[r] = row_lse;
  }
}

}  // namespace treeattn
