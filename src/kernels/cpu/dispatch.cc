// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/dispatch.h"

#include <cstdlib>
#include <string>
#include <type_traits>
#include <vector>

#include <fmt/format.h>

#include "kernels/cpu/cpu_features.h"
#include "kernels/cpu/targets.h"
#include "treeattn/error.h"

namespace treeattn::kernels {
namespace {

// The table of a Highway target with the entries that newer instructions improve: each `use` takes the tile operations
// or the linear maps. One object for each list of them.
template <auto... use>
const CpuTarget* improved_target(const CpuTarget& plain, const char* name, bool (*supported)()) {
  static ModelKernels model = *plain.model;
  static const CpuTarget target = [&] {
    CpuTarget improved = plain;
    improved.name = name;
    improved.supported = supported;
    improved.plain = &plain;
    improved.model = &model;
    const auto apply = [&](auto change) {
      if constexpr (std::is_invocable_v<decltype(change), CpuTarget&>) {
        change(improved);
      } else {
        change(model);
      }
    };
    (apply(use), ...);
    return improved;
  }();
  return &target;
}

// Those that this processor has of the tables that stand ahead of a Highway target, best first.
std::vector<const CpuTarget*> improved_targets(const CpuTarget& plain) {
  const std::string_view name = plain.name;
  std::vector<const CpuTarget*> all;
  if (name == "NEON") {
    all = {improved_target<use_neon_bf16, use_neon_bf16_prefill, use_neon_f32_prefill, use_neon_f16, use_neon_int8,
                           use_neon_linear_bf16, use_neon_linear_int8>(plain, "NEON_BF16", has_neon_bf16),
           improved_target<use_neon_f32_prefill, use_neon_dot_widen, use_neon_dot_int8, use_neon_dot_linear_floats,
                           use_neon_dot_linear_int8>(plain, "NEON_DOT", has_neon_dot)};
  }
  if (name == "AVX512") {
    const auto amx = [&](bool (*supported)()) {
      return improved_target<use_amx_int8, use_amx_bf16_prefill, use_amx_linear_bf16, use_amx_linear_int8>(plain, "AMX",
                                                                                                           supported);
    };
    all = {improved_target<use_amx_int8, use_avx512_linear_bf16, use_avx512_linear_int8>(plain, "AVX512_BF16",
                                                                                         has_avx512_bf16),
           improved_target<use_avx512_int8, use_avx512_linear_int8>(plain, "AVX512_VNNI", has_avx512_vnni)};
#ifdef TREEATTN_SOFTWARE_TILES
    all.push_back(amx(has_avx512_vnni));  // slow: only who asks for it
#else
    all.insert(all.begin(), amx(has_amx));
#endif
  }
  std::erase_if(all, [](const CpuTarget* target) { return !target->supported(); });
  return all;
}

std::vector<const CpuTarget*> find_usable() {
  std::vector<const CpuTarget*> improved, usable;
  for (const CpuTarget* target : highway_targets()) {
    if (!target->supported()) continue;
    usable.push_back(target);
    // NEON's stand even ahead of SVE: its matrix instructions beat what Highway makes of SVE here.
    for (const CpuTarget* better : improved_targets(*target)) improved.push_back(better);
  }
  usable.insert(usable.begin(), improved.begin(), improved.end());
  return usable;
}

}  // namespace

std::span<const CpuTarget* const> cpu_targets() {
  static const std::vector<const CpuTarget*> targets = find_usable();
  return targets;
}

const CpuTarget& find_target(std::string_view name) {
  std::string accepted;
  for (const CpuTarget* target : cpu_targets()) {
    if (name == target->name) return *target;
    accepted += accepted.empty() ? target->name : fmt::format(", {}", target->name);
  }
  throw Unavailable(fmt::format("instruction set \"{}\" is not available here; accepted: {}", name, accepted));
}

const CpuTarget& active_target() {
  const char* forced = std::getenv("TREEATTN_ISA");
  return forced && *forced ? find_target(forced) : *cpu_targets().front();
}

ErrorModel error_model(const CpuTarget& target, const Problem& problem) {
  const TileOps& k = target.ops[static_cast<int>(problem.k.dtype)];
  const TileOps& v = target.ops[static_cast<int>(problem.v.dtype)];
  ErrorModel model;
  model.unit_roundoff = k.unit_roundoff > v.unit_roundoff ? k.unit_roundoff : v.unit_roundoff;
  model.weight_error = 0x1p-22 + v.weight_error;
  model.query_error = k.query_error;
  model.weight_floor = v.weight_floor;
  model.logit_floor = k.logit_floor;
  model.product_floor = v.product_floor;
  model.additions_per_key = v.additions_per_key;
  model.serial_terms = kTileTokens;
  return model;
}

double prefill_burst(const CpuTarget& target, DType kv_dtype, long iterations) {
  const TileOps* ops = target.many_rows[static_cast<int>(kv_dtype)];
  return ops && ops->product_burst ? ops->product_burst(iterations) : target.fma_burst(iterations);
}

}  // namespace treeattn::kernels
