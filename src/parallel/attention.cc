// SPDX-License-Identifier: Apache-2.0
// Attention on one machine: check, compute the states, finalize.
#include "treeattn/attention.h"

#include "base/buffer.h"
#include "base/check.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/problem.h"
#include "parallel/finalize.h"
#include "treeattn/state.h"

namespace treeattn {
namespace {

using base::require;

// Rows of the result, of sizes that are checked.
std::size_t checked_rows(const AttentionInput& in) {
  kernels::check_sizes(in);
  return static_cast<std::size_t>(in.q.batch * in.q.queries * in.q.heads);
}

}  // namespace

void attention(const AttentionInput& in, const AttentionOptions& options, std::span<float> out, std::span<float> lse,
               ThreadPool& pool) {
  const std::size_t rows = checked_rows(in);
  const std::size_t out_floats = rows * static_cast<std::size_t>(in.v.head_dim);
  require(out.size() == out_floats, "out holds {} floats; accepted: batch * queries * heads * v.head_dim = {}",
          out.size(), out_floats);
  require(lse.empty() || lse.size() == rows, "lse holds {} floats; accepted: 0 or batch * queries * heads = {}",
          lse.size(), rows);
  base::require_address("out", out);
  base::require_address("lse", lse);
  base::require_apart<float>("out", out, "lse", lse);
  const kernels::Problem problem = kernels::make_problem(in, options);
  const std::size_t floats = rows * state_floats(in.v.head_dim);
  base::Buffer states(floats * sizeof(float));
  kernels::attention_states_on(kernels::active_target(), problem, states.as<float>(), pool);
  parallel::finalize_on(pool, {states.as<float>(), floats}, in.v.head_dim, problem.sinks, out, lse);
}

void attention_states(const AttentionInput& in, const AttentionOptions& options, std::span<float> states,
                      ThreadPool& pool) {
  const std::size_t floats = checked_rows(in) * state_floats(in.v.head_dim);
  require(states.size() == floats, "states holds {} floats; accepted: batch * queries * heads * (v.head_dim + 2) = {}",
          states.size(), floats);
  base::require_address("states", states);
  const kernels::Problem problem = kernels::make_problem(in, options);
  require(options.sinks.empty(), "sinks holds {} logits; accepted: none here, pass them to finalize_states once",
          options.sinks.size());
  kernels::attention_states_on(kernels::active_target(), problem, states.data(), pool);
}

std::vector<std::string_view> available_isas() {
  std::vector<std::string_view> names;
  for (const kernels::CpuTarget* target : kernels::cpu_targets()) names.emplace_back(target->name);
  return names;
}

std::string_view active_isa() { return kernels::active_target().name; }

}  // namespace treeattn
