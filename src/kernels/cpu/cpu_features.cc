// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu_features.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#include <sys/prctl.h>

#include <cstdint>
#elif defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace treeattn::kernels {

bool always_available() { return true; }

#if defined(__aarch64__)
namespace {

// Bit numbers of the kernel's user interface (asm/hwcap.h); older headers lack the later names.
bool hwcap(int bit) { return (getauxval(AT_HWCAP) >> bit) & 1; }
bool hwcap2(int bit) { return (getauxval(AT_HWCAP2) >> bit) & 1; }

}  // namespace

bool has_neon() { return hwcap(1) && hwcap(3); }  // ASIMD, AES
bool has_sve() { return hwcap(22) && has_neon(); }
bool has_sve_256() {
  if (!has_sve()) return false;
  constexpr int kSveGetVectorLength = 51;  // PR_SVE_GET_VL
  const int answer = prctl(kSveGetVectorLength);
  return answer >= 0 && (answer & 0xffff) == 32;
}
bool has_neon_dot() { return has_neon() && hwcap(20) && hwcap(10); }                      // ASIMDDP, ASIMDHP
bool has_neon_bf16() { return has_neon_dot() && hwcap2(14) && hwcap2(13) && hwcap(23); }  // BF16, I8MM, ASIMDFHM
bool has_amx() { return false; }
bool has_avx512_bf16() { return false; }
bool has_avx512_vnni() { return false; }
bool has_avx512() { return false; }
bool has_avx2() { return false; }
bool has_sse4() { return false; }

#elif defined(__x86_64__)

bool has_sse4() {
  return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("aes") && __builtin_cpu_supports("pclmul");
}
bool has_avx2() {
  return has_sse4() && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_avx512_bf16() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }
bool has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kTile = 1u << 24, kBf16 = 1u << 22, kInt8 = 1u << 25, kAll = kTile | kBf16 | kInt8;
  if (!has_avx512_bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAll) != kAll) return false;
  // The tiles' registers are 8 KiB, which Linux saves only for processes that have asked for them. It refuses where it
  // is too old, where a virtual machine hides them, or where a thread's signal stack has no room.
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM; older headers lack the name
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
bool has_neon() { return false; }
bool has_sve() { return false; }
bool has_sve_256() { return false; }
bool has_neon_dot() { return false; }
bool has_neon_bf16() { return false; }

#else

bool has_sse4() { return false; }
bool has_avx2() { return false; }
bool has_avx512() { return false; }
bool has_avx512_vnni() { return false; }
bool has_avx512_bf16() { return false; }
bool has_amx() { return false; }
bool has_neon() { return false; }
bool has_sve() { return false; }
bool has_sve_256() { return false; }
bool has_neon_dot() { return false; }
bool has_neon_bf16() { return false; }

#endif

}  // namespace treeattn::kernels
