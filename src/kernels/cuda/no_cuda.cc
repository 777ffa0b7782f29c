// SPDX-License-Identifier: Apache-2.0
// In place of the CUDA files in a build without them.
#include "treeattn/cuda.h"
#include "treeattn/error.h"

namespace treeattn {

struct CudaPlan::Impl {};

CudaPlan::CudaPlan(int, const AttentionInput&, const AttentionOptions&) { throw Unavailable(cuda_problem()); }
CudaPlan::~CudaPlan() = default;
CudaPlan::CudaPlan(CudaPlan&&) noexcept = default;
CudaPlan& CudaPlan::operator=(CudaPlan&&) noexcept = default;
void CudaPlan::attention(float*, float*, void*) {}
void CudaPlan::attention_states(float*, void*) {}
std::size_t CudaPlan::workspace_bytes() const { return 0; }
std::string CudaPlan::kernel() const { return ""; }

std::vector<CudaDevice> cuda_devices() { return {}; }
std::size_t cuda_free_bytes(int) { throw Unavailable(cuda_problem()); }
std::string cuda_problem() { return "built without CUDA (TREEATTN_CUDA=ON builds with it)"; }

}  // namespace treeattn
