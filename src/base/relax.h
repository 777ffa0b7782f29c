// SPDX-License-Identifier: Apache-2.0
// The body of a loop that waits for another core.
#pragma once

namespace treeattn::base {

// Tells the core that this is a spin loop. On Arm `isb` and not `yield`, which is a no-op on every server core.
inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

}  // namespace treeattn::base
