// SPDX-License-Identifier: Apache-2.0
// The element types of q, K and V. Arithmetic is float32 whatever the storage.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace treeattn {

enum class DType : std::uint8_t {
  kFloat32,
  kFloat16,
  kBFloat16,
  kInt8,     // K and V only; needs one float32 scale per token and head
  kFp8E4M3,  // K and V only; "e4m3fn": no infinities, 0x7f and 0xff are NaN, scale optional
};

inline constexpr DType kAllDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kInt8,
                                       DType::kFp8E4M3};

// Bytes of one element. Throws InvalidArgument for a value that is none of these.
std::size_t dtype_size(DType dtype);

// "float32", "float16", "bfloat16", "int8", "fp8". Throws InvalidArgument for any other value.
std::string_view dtype_name(DType dtype);

// Accepts the names above and f32, f16, bf16. Throws InvalidArgument for anything else.
DType parse_dtype(std::string_view name);

}  // namespace treeattn
