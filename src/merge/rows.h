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

// merge(row, the state of one attention sink): a logit (natural units) whose value is zero.
void merge_sink(float* row, std::size_t row_floats, float sink);

}  // namespace treeattn::merge
