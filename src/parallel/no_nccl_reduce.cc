// SPDX-License-Identifier: Apache-2.0
#include "parallel/device_reduce.h"
#include "treeattn/error.h"
#include "treeattn/parallel_attention.h"

namespace treeattn {

bool nccl_available() { return false; }

namespace parallel {

std::unique_ptr<DeviceReducer> nccl_reducer() {
  throw Unavailable(
      "link = nccl: this build has no NCCL; accepted: a build with TREEATTN_CUDA=ON and TREEATTN_NCCL=ON");
}

}  // namespace parallel
}  // namespace treeattn
