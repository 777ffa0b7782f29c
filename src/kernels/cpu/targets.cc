// SPDX-License-Identifier: Apache-2.0
// Compiles the tile operations once per instruction set Highway knows here, and lists them.
#include "kernels/cpu/targets.h"

#include "kernels/cpu/cpu_features.h"
#include "kernels/cpu/disabled_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/targets.cc"
#include "hwy/foreach_target.h"  // must come before highway.h
#include "hwy/highway.h"
#include "kernels/cpu/accumulate-inl.h"
#include "kernels/cpu/dot-inl.h"
#include "kernels/cpu/packed_rows-inl.h"
#include "kernels/cpu/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace treeattn::kernels {
namespace HWY_NAMESPACE {

std::size_t packed_query_bytes(int rows, int dim) {
  return sizeof(float) * static_cast<std::size_t>(rows) * static_cast<std::size_t>(dim);
}

// The queries are used as they are, in float32.
template <class T>
void pack_queries(const float* q, DType, int rows, int dim, void* packed) {
  with_lanes_for(dim, [&](auto df) HWY_ATTR {
    for (int r = 0; r < rows; ++r) in_pairs<T>(df, q + r * dim, dim, static_cast<float*>(packed) + r * dim);
  });
}

int sum_floats(int dim) { return dim; }
template <class T>
void unpack_sums(const float* sums, int, int, int dim, float* out) {
  with_lanes_for(dim, [&](auto df) HWY_ATTR { from_pairs<T>(df, sums, dim, out); });
}

// Twelve independent sums, what the registers of every target hold, and sixteen on Arm, where four pipes take four
// cycles each. Added in place, as the compiler then needs no moves. The factors are loaded in every round, as a kernel
// does: Neoverse V1 came to half the rate with factors that stay in registers with low numbers.
double fma_burst(long iterations) {
  const hn::ScalableTag<float> df;
  auto a0 = hn::Iota(df, 1.0f), a1 = hn::Iota(df, 2.0f), a2 = hn::Iota(df, 3.0f), a3 = hn::Iota(df, 4.0f);
  auto a4 = hn::Iota(df, 5.0f), a5 = hn::Iota(df, 6.0f), a6 = hn::Iota(df, 7.0f), a7 = hn::Iota(df, 8.0f);
  auto a8 = hn::Iota(df, 9.0f), a9 = hn::Iota(df, 10.0f), a10 = hn::Iota(df, 11.0f), a11 = hn::Iota(df, 12.0f);
  constexpr int kSums = HWY_ARCH_ARM_A64 ? 16 : 12;
#if HWY_ARCH_ARM_A64
  auto a12 = hn::Iota(df, 13.0f), a13 = hn::Iota(df, 14.0f), a14 = hn::Iota(df, 15.0f), a15 = hn::Iota(df, 16.0f);
#endif
  alignas(64) float factors[2 * HWY_MAX_BYTES / sizeof(float)];
  const std::size_t lanes = hn::Lanes(df);
  hn::Store(hn::Set(df, 0.5f), df, factors);
  hn::Store(hn::Set(df, 0x1p-20f), df, factors + lanes);
  for (long i = 0; i < iterations; ++i) {
    const float* loaded = factors;
    asm volatile("" : "+r"(loaded) : : "memory");  // somewhere the compiler does not know
    const auto b = hn::Load(df, loaded), c = hn::Load(df, loaded + lanes);
    a0 = hn::MulAdd(b, c, a0), a1 = hn::MulAdd(b, c, a1), a2 = hn::MulAdd(b, c, a2), a3 = hn::MulAdd(b, c, a3);
    a4 = hn::MulAdd(b, c, a4), a5 = hn::MulAdd(b, c, a5), a6 = hn::MulAdd(b, c, a6), a7 = hn::MulAdd(b, c, a7);
    a8 = hn::MulAdd(b, c, a8), a9 = hn::MulAdd(b, c, a9), a10 = hn::MulAdd(b, c, a10), a11 = hn::MulAdd(b, c, a11);
#if HWY_ARCH_ARM_A64
    a12 = hn::MulAdd(b, c, a12), a13 = hn::MulAdd(b, c, a13);
    a14 = hn::MulAdd(b, c, a14), a15 = hn::MulAdd(b, c, a15);
#endif
  }
  a0 = hn::Add(hn::Add(hn::Add(a0, a1), hn::Add(a2, a3)), hn::Add(hn::Add(a4, a5), hn::Add(a6, a7)));
  a0 = hn::Add(hn::Add(a0, hn::Add(a8, a9)), hn::Add(a10, a11));
#if HWY_ARCH_ARM_A64
  a0 = hn::Add(a0, hn::Add(hn::Add(a12, a13), hn::Add(a14, a15)));
#endif
  // The sum is positive: adding nothing, but the compiler cannot know and must keep the loop.
  const double nothing = hn::GetLane(hn::SumOfLanes(df, a0)) > 0.0f ? 0.0 : 1.0;
  return 2.0 * kSums * static_cast<double>(lanes) * static_cast<double>(iterations) + nothing;
}

template <class T>
constexpr TileOps ops_for() {
  TileOps ops = {packed_query_bytes, pack_queries<T>, dot<T>, accumulate<T>, sum_floats, unpack_sums<T>,
                 promote<T>,         0x1p-24,         0.0,    0.0,           0.0};
  ops.streams = kStreams;
  ops.streams_of_short_rows = kStreamsOfShortRows;
  return ops;
}

#if HWY_TARGET == HWY_AVX3
#define TREEATTN_TARGET "AVX512", has_avx512
#elif HWY_TARGET == HWY_AVX2
#define TREEATTN_TARGET "AVX2", has_avx2
#elif HWY_TARGET == HWY_SSE4
#define TREEATTN_TARGET "SSE4", has_sse4
#elif HWY_TARGET == HWY_SVE_256
#define TREEATTN_TARGET "SVE_256", has_sve_256
#elif HWY_TARGET == HWY_SVE
#define TREEATTN_TARGET "SVE", has_sve
#elif HWY_TARGET == HWY_NEON
#define TREEATTN_TARGET "NEON", has_neon
#else
#define TREEATTN_TARGET "GENERIC", always_available  // plain C++, 128 bits at a time
#endif

#if TREEATTN_PACKS_ROWS
constexpr TileOps kPackedRows = packed_rows(ops_for<float>());
constexpr const TileOps* kManyRowsFloat32 = &kPackedRows;
#else
constexpr const TileOps* kManyRowsFloat32 = nullptr;
#endif

extern const ModelKernels kModelKernels;  // model_kernels.cc
extern const CpuTarget kTarget;
const CpuTarget kTarget = {
    TREEATTN_TARGET,
    {ops_for<float>(), ops_for<hwy::float16_t>(), ops_for<hwy::bfloat16_t>(), ops_for<std::int8_t>(), ops_for<Fp8>()},
    {kManyRowsFloat32},
    softmax,
    fma_burst,
    &kModelKernels,
    nullptr};
#undef TREEATTN_TARGET

}  // namespace HWY_NAMESPACE
}  // namespace treeattn::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace treeattn::kernels {

std::span<const CpuTarget* const> highway_targets() {
  static const CpuTarget* const kTargets[] = {
#if HWY_TARGETS & HWY_AVX3
    &N_AVX3::kTarget,
#endif
#if HWY_TARGETS & HWY_AVX2
    &N_AVX2::kTarget,
#endif
#if HWY_TARGETS & HWY_SSE4
    &N_SSE4::kTarget,
#endif
#if HWY_TARGETS & HWY_SVE_256
    &N_SVE_256::kTarget,
#endif
#if HWY_TARGETS & HWY_SVE
    &N_SVE::kTarget,
#endif
#if HWY_TARGETS & HWY_NEON
    &N_NEON::kTarget,
#endif
#if HWY_TARGETS & HWY_EMU128
    &N_EMU128::kTarget,
#endif
#if HWY_TARGETS & HWY_SCALAR
    &N_SCALAR::kTarget,
#endif
  };
  return kTargets;
}

}  // namespace treeattn::kernels
#endif
