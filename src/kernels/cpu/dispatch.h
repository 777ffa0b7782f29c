// SPDX-License-Identifier: Apache-2.0
// The CPU backend: which instruction sets are compiled in, which one to use, and attention on one of them.
#pragma once

#include <memory>
#include <span>
#include <string_view>

#include "kernels/cpu/tile_ops.h"
#include "kernels/model_ops.h"
#include "kernels/problem.h"
#include "kernels/reference/reference.h"
#include "treeattn/thread_pool.h"

namespace treeattn::kernels {

// What this processor can run of what is compiled in, best first; never empty.
std::span<const CpuTarget* const> cpu_targets();

// By name. Throws Unavailable, naming what is accepted.
const CpuTarget& find_target(std::string_view name);
// The best one, or what TREEATTN_ISA names.
const CpuTarget& active_target();

// states [problem.nodes, batch, queries, heads, v_dim + 2], with the canonical order's bits whatever the pool.
void attention_states_on(const CpuTarget& target, const Problem& problem, float* states, ThreadPool& pool);

// As cpu_model_ops, which takes the active target. The pool must outlive it.
std::unique_ptr<ModelOps> cpu_model_ops_on(const CpuTarget& target, ThreadPool& pool);

// What the error bound has to know of a target.
ErrorModel error_model(const CpuTarget& target, const Problem& problem);

// Runs the multiply-adds that a prefill over K and V of this type is made of, at full rate on the calling thread;
// returns the flops done. A weight in two limbs is multiplied twice and counts once.
double prefill_burst(const CpuTarget& target, DType kv_dtype, long iterations);

}  // namespace treeattn::kernels
