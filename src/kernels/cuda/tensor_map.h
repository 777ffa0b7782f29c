// SPDX-License-Identifier: Apache-2.0
// Descriptions of K and V for the copy engine of Hopper and later.
#pragma once

#include "kernels/cuda/params.h"
#include "treeattn/views.h"

namespace treeattn::kernels::cuda {

// Boxes of 128 bytes, or 64 where a row is no longer and whole_lines is false, of `tile` tokens of one head; what is
// behind a row becomes zeros. False where the driver, the code for this GPU or the layout has none: pieces of `tile`
// tokens by global position must not cross pages.
bool make_tensor_map(const KvView& view, std::int64_t first_key, int tile, bool whole_lines, TensorMap& map);

}  // namespace treeattn::kernels::cuda
