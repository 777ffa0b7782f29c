// SPDX-License-Identifier: Apache-2.0
// In place of the CUDA files in a build without them.
#include <string>

#include "kernels/model_ops.h"
#include "treeattn/cuda.h"
#include "treeattn/error.h"

namespace treeattn::kernels {

std::unique_ptr<ModelOps> cuda_model_ops(int gpu) {
  throw Unavailable("GPU " + std::to_string(gpu) + ": " + cuda_problem());
}

}  // namespace treeattn::kernels
