// SPDX-License-Identifier: Apache-2.0
// The calls of treeattn/state.h for packed rows in the memory of a GPU, as work on a stream (a cudaStream_t of the
// current GPU). Nothing waits. CudaPlan::attention_states makes such rows. Throw InvalidArgument as those do,
// Unavailable in a build without CUDA or when the GPU says no.
#pragma once

#include <cstddef>
#include <cstdint>

namespace treeattn {

// rows packed rows become the identity.
void cuda_identity_states(float* states, std::size_t rows, std::int64_t v_dim, void* stream);

// lower = merge(lower, higher), row by row, with the bits of merge_states.
void cuda_merge_states(float* lower, const float* higher, std::size_t rows, std::int64_t v_dim, void* stream);

// out [rows, v_dim] with the bits of finalize_states; lse [rows] or null. sinks [heads] in the GPU's memory, or null
// with heads = 0; row r gets sinks[r % heads].
void cuda_finalize_states(const float* states, std::size_t rows, std::int64_t v_dim, const float* sinks,
                          std::size_t heads, float* out, float* lse, void* stream);

}  // namespace treeattn
