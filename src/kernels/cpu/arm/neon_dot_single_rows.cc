// SPDX-License-Identifier: Apache-2.0
// Decode of bfloat16 and float16 with one query row a head, where as many instructions widen as multiply. ZIP takes two
// cycles and FMLA four, and two that would end at once wait for each other; by turns, two or four of each, they do not.
// So elements are multiplied one step after they were widened, from one head to the next without a pause. The order is
// pinned, and GCC told not to schedule (src/CMakeLists.txt).
//
// Compiled with flags of its own: no inline function of a shared header may be instantiated here, or the linker could
// give this copy to everybody.
#include "kernels/cpu/arm/neon_widen.h"

namespace treeattn::kernels::neon {
namespace {

// Keeps the compiler from moving what gave x to where x is used.
TREEATTN_FORCE_INLINE inline Floats8 pinned(Floats8 x) {
  asm volatile("" : "+w"(x.low), "+w"(x.high));
  return x;
}

// The first elements of four rows.
template <class T>
TREEATTN_FORCE_INLINE inline void begin_rows(const TileRows& from, int t, const std::byte* (&rows)[kTokenBlock],
                                             Floats8 (&x)[kTokenBlock], typename T::Watch& watch) {
  TREEATTN_UNROLL
  for (int i = 0; i < kTokenBlock; ++i) {
    rows[i] = from.rows[t + i];
    x[i] = T::widen(T::load(rows[i]), i, watch);
  }
}

// Calls step(first element, bytes from the rows to those that follow, what is seen on the way) for a head, 8 elements
// at a time. The last ones are followed by the next head's, which the rows then are. Returns what was seen of the head.
template <class T, class Step>
TREEATTN_FORCE_INLINE inline typename T::Watch for_each_step(int dim, std::ptrdiff_t to_next_head,
                                                             const std::byte* (&rows)[kTokenBlock],
                                                             typename T::Watch& watch, const Step& step) {
  std::ptrdiff_t d = 0;
  for (; d + 8 < dim; d += 8) step(d, (d + 8) * T::kBytes, watch);
  const typename T::Watch seen = watch;
  watch = {};
  step(d, to_next_head, watch);
  TREEATTN_UNROLL
  for (int i = 0; i < kTokenBlock; ++i) rows[i] += to_next_head;
  return seen;
}

}  // namespace

template <class T>
void dot_single_rows(const DotArgs& args, int t, const Stream& stream) {
  const std::byte* k[kTokenBlock];
  Floats8 y[kTokenBlock];
  typename T::Watch watch;
  begin_rows<T>(args.k, t, k, y, watch);
  const int dim = args.dim, heads = args.heads;
  const std::ptrdiff_t head_bytes = args.k.head_bytes;
  const std::byte* packed = args.q;
  float* logits = args.logits + t;
  for (int h = 0; h < heads; ++h) {
    const float* q = reinterpret_cast<const float*>(packed);
    Coming coming = stream.with_head(h);
    float32x4_t sums[kTokenBlock];
    TREEATTN_UNROLL
    for (int i = 0; i < kTokenBlock; ++i) sums[i] = vdupq_n_f32(0.0f);
    const auto step = [&](std::ptrdiff_t d, std::ptrdiff_t then, typename T::Watch& seen) TREEATTN_FORCE_INLINE {
      coming.fetch<8 * T::kBytes>();
      typename T::Loaded next[kTokenBlock];
      TREEATTN_UNROLL
      for (int i = 0; i < kTokenBlock; ++i) next[i] = T::load(k[i] + then);
      const Floats8 x = load_floats8(q + d);
      TREEATTN_UNROLL
      for (int i = 0; i < kTokenBlock; i += 2) {
        sums[i] = vfmaq_f32(sums[i], x.low, y[i].low);
        sums[i + 1] = vfmaq_f32(sums[i + 1], x.low, y[i + 1].low);
        sums[i] = vfmaq_f32(sums[i], x.high, y[i].high);
        sums[i + 1] = vfmaq_f32(sums[i + 1], x.high, y[i + 1].high);
        settle(sums[i]), settle(sums[i + 1]);
        y[i] = pinned(T::widen(next[i], i, seen));
        y[i + 1] = pinned(T::widen(next[i + 1], i + 1, seen));
      }
    };
    const typename T::Watch seen = for_each_step<T>(dim, h + 1 < heads ? head_bytes : 0, k, watch, step);
    const float32x4_t all = vpaddq_f32(vpaddq_f32(sums[0], sums[1]), vpaddq_f32(sums[2], sums[3]));
    vst1q_f32(logits, T::logits(all, T::kScaledQueries ? q[dim] : 1.0f, seen));
    packed += args.q_head_bytes;
    logits += kTileTokens;
  }
}

template <class T>
void accumulate_single_rows(const AccumulateArgs& args, int t, const Stream& stream) {
  const std::byte* v[kTokenBlock];
  Floats8 x[kTokenBlock];
  typename T::Watch watch;
  begin_rows<T>(args.v, t, v, x, watch);
  const int dim = args.dim, heads = args.heads;
  const std::ptrdiff_t head_bytes = args.v.head_bytes;
  const float* weights = args.weights + t;
  float* o = args.o;
  for (int h = 0; h < heads; ++h) {
    Coming coming = stream.with_head(h);
    float32x4_t w = T::weights(vld1q_f32(weights));
    const auto step = [&](std::ptrdiff_t d, std::ptrdiff_t then, typename T::Watch& seen) TREEATTN_FORCE_INLINE {
      coming.fetch<8 * T::kBytes>();
      typename T::Loaded next[kTokenBlock];
      TREEATTN_UNROLL
      for (int i = 0; i < kTokenBlock; ++i) next[i] = T::load(v[i] + then);
      asm("" : "+w"(w));  // as if it changed: GCC 12 copies the lanes before the loop
      Floats8 sum = load_floats8(o + d);
      const auto take = [&]<int kToken>() TREEATTN_FORCE_INLINE {
        sum.low = vfmaq_laneq_f32(sum.low, x[kToken].low, w, kToken);
        sum.high = vfmaq_laneq_f32(sum.high, x[kToken].high, w, kToken);
        settle(sum.low), settle(sum.high);
        x[kToken] = pinned(T::widen(next[kToken], kToken, seen));
      };
      take.template operator()<0>();
      take.template operator()<1>();
      take.template operator()<2>();
      take.template operator()<3>();
      vst1q_f32(o + d, sum.low);
      vst1q_f32(o + d + 4, sum.high);
    };
    const typename T::Watch seen = for_each_step<T>(dim, h + 1 < heads ? head_bytes : 0, v, watch, step);
    T::mark(seen, 1, dim, o);
    weights += kTileTokens;
    o += dim;
  }
}

template void dot_single_rows<BFloat16>(const DotArgs&, int, const Stream&);
template void dot_single_rows<Float16>(const DotArgs&, int, const Stream&);
template void accumulate_single_rows<BFloat16>(const AccumulateArgs&, int, const Stream&);
template void accumulate_single_rows<Float16>(const AccumulateArgs&, int, const Stream&);

}  // namespace treeattn::kernels::neon
