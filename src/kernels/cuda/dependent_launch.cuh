// SPDX-License-Identifier: Apache-2.0
// Kernels that follow one another without a gap: the next one is started while the last one is still running, does what
// does not depend on it, and then waits.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch_config.h"

namespace treeattn::kernels::cuda {

// Until the kernels before this one are done and what they wrote can be seen. Every thread of a kernel started by
// start_dependent calls it before it ends: those that come later take its end for the end of everything before.
__device__ inline void wait_for_earlier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may be started as soon as every block has said so.
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// overlaps: whether this GPU can; the kernel calls wait_for_earlier. What fails is this launch: cudaGetLastError after
// <<<>>> would tell of a call before it as well, whoever made that.
template <class... Parameters, class... Arguments>
void start_dependent_with(void (*kernel)(Parameters...), dim3 blocks, unsigned threads, std::size_t shared_bytes,
                          bool overlaps, cudaStream_t stream, const char* what, Arguments&&... arguments) {
  const LaunchConfig config(blocks, threads, shared_bytes, overlaps, stream);
  check(cudaLaunchKernelEx(config.get(), kernel, Parameters(arguments)...), what);
}

template <class... Parameters, class... Arguments>
void start_dependent(void (*kernel)(Parameters...), dim3 blocks, unsigned threads, bool overlaps, cudaStream_t stream,
                     const char* what, Arguments&&... arguments) {
  start_dependent_with(kernel, blocks, threads, 0, overlaps, stream, what, arguments...);
}

}  // namespace treeattn::kernels::cuda
