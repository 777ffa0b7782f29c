// SPDX-License-Identifier: Apache-2.0
// In place of the CUDA files in a build without them.
#include "kernels/cuda/ranks/lent_memory.h"
#include "treeattn/cuda.h"
#include "treeattn/error.h"

namespace treeattn::kernels::cuda {

struct LentMemory::Impl {};

LentMemory::LentMemory(int, std::size_t, Others) { throw Unavailable(cuda_problem()); }
LentMemory::~LentMemory() = default;
LentMemory::Address LentMemory::address() const { return {}; }
void LentMemory::connect(std::span<const Address>) {}
void LentMemory::disconnect() {}
void LentMemory::take_back() {}
bool LentMemory::is_of_this_process(const Address&) { return false; }
bool LentMemory::share_a_gpu(std::span<const Address>) { return false; }
std::byte* LentMemory::own() const { return nullptr; }
std::byte* LentMemory::of(std::size_t) const { return nullptr; }
void LentMemory::mark(unsigned, void*) {}
void LentMemory::wait_for_marks(unsigned, void*) const {}

}  // namespace treeattn::kernels::cuda
