// SPDX-License-Identifier: Apache-2.0
// Which of Highway's targets are not compiled. Every file that is compiled once per target includes this first, so that
// all have the same targets.
//
// SVE2 and AVX-512 DL add nothing these kernels use over SVE and AVX-512; SSSE3 is covered by SSE4 and the fallback.
// GCC 12 crashes on SVE types under the address sanitizer. Threads do the same whatever a kernel computes with: their
// sanitizer sees one target of Highway's on Arm, in half of the compiler's time.
#pragma once

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define HWY_DISABLED_TARGETS (HWY_SVE2 | HWY_SVE2_128 | HWY_AVX3_DL | HWY_SSSE3 | HWY_SVE | HWY_SVE_256)
#else
#define HWY_DISABLED_TARGETS (HWY_SVE2 | HWY_SVE2_128 | HWY_AVX3_DL | HWY_SSSE3)
#endif
