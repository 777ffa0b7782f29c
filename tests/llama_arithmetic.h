// SPDX-License-Identifier: Apache-2.0
// Who computes a Llama, and what is rounded to what on the way.
#pragma once

#include <bit>
#include <cstdint>
#include <functional>

#include "kernels/cpu/dispatch.h"
#include "kernels/reference/model_reference.h"
#include "kernels/reference/reference.h"

namespace treeattn::testing_model {

// Half the spacing of numbers with so many significant bits, around x: 2^-bits of the power of two at or below |x|.
inline double half_spacing(double x, int bits) {
  constexpr std::uint64_t kExponent = 0x7ff0000000000000ull;
  const auto power = std::bit_cast<double>(std::bit_cast<std::uint64_t>(x) & kExponent);
  return power * std::bit_cast<double>(static_cast<std::uint64_t>(1023 - bits) << 52);
}

struct Arithmetic {
  std::function<kernels::LinearModel(DType weights)> linear;
  kernels::ErrorModel attention;
  int kept_bits = 24;           // significant bits of what one operation hands to the next
  int cached_bits = 24;         // of keys and values
  int query_bits = 24;          // of queries when they meet them
  bool float32_angles = false;  // frequency * position, and the frequencies too

  double kept(double x) const { return half_spacing(x, kept_bits); }
};

// Significant bits of a type of the cache.
inline int bits_of(DType type) { return type == DType::kBFloat16 ? 8 : type == DType::kFloat16 ? 11 : 24; }

// This library on the instruction set that is active.
inline Arithmetic our_arithmetic(DType cache) {
  Arithmetic result;
  const kernels::CpuTarget& target = kernels::active_target();
  result.linear = [&target](DType weights) -> kernels::LinearModel {
    const kernels::LinearOps& ops = target.model->linear[static_cast<int>(weights)];
    return {ops.activations, ops.unit_roundoff, ops.flushes_subnormals};
  };
  kernels::Problem problem;
  problem.k.dtype = problem.v.dtype = cache;
  result.attention = kernels::error_model(target, problem);
  result.cached_bits = bits_of(cache);
  return result;
}

// transformers with its eager attention in float64 (53 bits), float32 (24) or bfloat16 (8). In all three norms, softmax
// and angles are float32, and bfloat16 products are added in float32.
inline Arithmetic transformers_arithmetic(int bits) {
  const double unit = bits == 53 ? 0x1p-53 : 0x1p-23;  // 2^-23: BF16 instructions
  Arithmetic result;
  result.linear = [unit](DType) -> kernels::LinearModel { return {kernels::Activations::kFloat32, unit, false}; };
  result.attention.unit_roundoff = unit;
  result.kept_bits = result.cached_bits = result.query_bits = bits;
  result.float32_angles = true;
  return result;
}

}  // namespace treeattn::testing_model
