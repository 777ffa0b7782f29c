// SPDX-License-Identifier: Apache-2.0
// The merge operator over arrays of packed rows.
#pragma once

#include <cstddef>

#include "merge/operator.h"

namespace treeattn::merge {

// Every row becomes the identity.
void clear_rows(float* rows, std::size_t count, std::size_t row_floats);

// lower[r] = merge(lower[r], higher[r]) for count rows of row_floats each.
void merge_rows(float* lower, const float* higher, std::size_t count, std::size_t row_floats);

}  // namespace treeattn::merge
