// SPDX-License-Identifier: Apache-2.0
// Sizes and names of the element types.
#include "treeattn/dtype.h"

#include "base/check.h"

namespace treeattn {

std::size_t dtype_size(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kInt8:
    case DType::kFp8E4M3:
      return 1;
  }
  base::throw_invalid("dtype = {}; accepted: float32, float16, bfloat16, int8, fp8", static_cast<int>(dtype));
}

std::string_view dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kInt8:
      return "int8";
    case DType::kFp8E4M3:
      return "fp8";
  }
  base::throw_invalid("dtype = {}; accepted: float32, float16, bfloat16, int8, fp8", static_cast<int>(dtype));
}

DType parse_dtype(std::string_view name) {
  for (const DType dtype : kAllDTypes) {
    if (name == dtype_name(dtype)) return dtype;
  }
  if (name == "f32") return DType::kFloat32;
  if (name == "f16") return DType::kFloat16;
  if (name == "bf16") return DType::kBFloat16;
  base::throw_invalid("dtype = \"{}\"; accepted: float32 (f32), float16 (f16), bfloat16 (bf16), int8, fp8", name);
}

}  // namespace treeattn
