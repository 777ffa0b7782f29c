// SPDX-License-Identifier: Apache-2.0
// In place of the CUDA files in a build without them: the constructor throws, so nothing else is ever called.
#include "kernels/cuda/device_case.h"
#include "treeattn/cuda.h"
#include "treeattn/error.h"

namespace treeattn::kernels::cuda {

struct DeviceCase::Impl {
  AttentionInput in;
};

DeviceCase::DeviceCase(const CaseData&, int) { throw Unavailable(cuda_problem()); }
DeviceCase::~DeviceCase() = default;
const AttentionInput& DeviceCase::input() const { return impl_->in; }
DeviceOutput DeviceCase::run() const { return {}; }

}  // namespace treeattn::kernels::cuda
