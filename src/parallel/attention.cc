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

std::size_t state_count(const kernels::Problem& problem) {
  return static_cast<std::size_t>(problem.rows()) * state_floats(problem.v.head_dim);
}

}  // namespace

void attention(const AttentionInput& in, const AttentionOptions& options, std::span<float> out, std::span<float> lse,
               ThreadPool& pool) {
  const kernels::Problem problem = kernels::make_problem(in, options);
  const std::size_t rows = static_cast<std::size_t>(problem.rows());
  const std::size_t out_floats = rows * static_cast<std::size_t>(problem.v.head_dim);
  require(out.size() == out_floats, "out holds {} floats; accepted: batch * queries * heads * v.head_dim = {}",
          out.size(), out_floats);
  require(lse.empty() || lse.size() == rows, "lse holds {} floats; accepted: 0 or batch * queries * heads = {}",
          lse.size(), rows);
  base::require_address("out", out);
  base::require_address("lse", lse);
  base::require_apart<float>("out", out, "lse", lse);
  base::Buffer states(state_count(problem) * sizeof(float));
  kernels::attention_states_on(kernels::active_target(), problem, states.as<float>(), pool);
  parallel::finalize_on(pool, {states.as<float>(), state_count(problem)}, problem.v.head_dim, problem.sinks, out, lse);
}

void attention_states(const AttentionInput& in, const AttentionOptions& options, std::span<float> states,
                      ThreadPool& pool) {
  const kernels::Problem problem = kernels::make_problem(in, options);
  require(options.sinks.empty(), "sinks holds {} logits; accepted: none here, pass them to finalize_states once",
          options.sinks.size());
  require(states.size() == state_count(problem),
          "states holds {} floats; accepted: batch * queries * heads * (v.head_dim + 2) = {}", states.size(),
          state_count(problem));
  base::require_address("states", states);
  kernels::attention_states_on(kernels::active_target(), problem, states.data(), pool);
}

std::vector<std::string_view> available_isas() {
  std::vector<std::string_view> names;
  for (const kernels::CpuTarget* target : kernels::cpu_targets()) names.emplace_back(target->name);
  return names;
}

std::string_view active_isa() { return kernels::active_target().name; }

}  // namespace treeattn
