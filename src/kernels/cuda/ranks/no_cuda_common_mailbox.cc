// SPDX-License-Identifier: Apache-2.0
// In place of the CUDA files in a build without them.
#include "kernels/cuda/ranks/common_mailbox.h"
#include "treeattn/cuda.h"
#include "treeattn/error.h"

namespace treeattn::kernels::cuda {

struct CommonMailbox::Impl {
  ExchangePlan plan;
};

CommonMailbox::CommonMailbox(int, ExchangePlan) { throw Unavailable(cuda_problem()); }
CommonMailbox::~CommonMailbox() = default;
const ExchangePlan& CommonMailbox::plan() const { return impl_->plan; }
float* CommonMailbox::place(int) const { return nullptr; }
std::uint64_t CommonMailbox::arrive(void*) { return 0; }
const float* CommonMailbox::wait(std::uint64_t, void*) const { return nullptr; }
const float* CommonMailbox::follow(void*) const { return nullptr; }

}  // namespace treeattn::kernels::cuda
