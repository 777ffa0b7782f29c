// SPDX-License-Identifier: Apache-2.0
// What a linear map does to a row of activations before it meets the weights.
#pragma once

#include <cstdint>

namespace treeattn::kernels {

enum class Activations : std::uint8_t {
  kFloat32,     // nothing
  kBFloat16,    // each element rounded to nearest
  kInt8Groups,  // each group of kWeightGroup quantised to int8 with a float32 scale (base::quantize_row_int8)
};

}  // namespace treeattn::kernels
