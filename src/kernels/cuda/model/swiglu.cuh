// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace treeattn::kernels::cuda {

__device__ inline float swiglu(float gate, float up) { return gate / (1.0f + expf(-gate)) * up; }

}  // namespace treeattn::kernels::cuda
