// SPDX-License-Identifier: Apache-2.0
// In place of the CUDA files in a build without them.
#include "treeattn/cuda.h"
#include "treeattn/cuda_states.h"
#include "treeattn/error.h"

namespace treeattn {

void cuda_identity_states(float*, std::size_t, std::int64_t, void*) { throw Unavailable(cuda_problem()); }
void cuda_merge_states(float*, const float*, std::size_t, std::int64_t, void*) { throw Unavailable(cuda_problem()); }
void cuda_finalize_states(const float*, std::size_t, std::int64_t, const float*, std::size_t, float*, float*, void*) {
  throw Unavailable(cuda_problem());
}

}  // namespace treeattn
