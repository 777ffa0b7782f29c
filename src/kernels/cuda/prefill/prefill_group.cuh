// SPDX-License-Identifier: Apache-2.0
// A warpgroup of a prefill block: tile by tile, queries and keys become logits, logits weights, and weights and values
// the state of a leaf.
#pragma once

#include "kernels/cuda/prefill/prefill_elements.cuh"
#include "kernels/cuda/prefill/prefill_ring.cuh"
#include "kernels/cuda/prefill/prefill_state.cuh"
#include "kernels/cuda/prefill/warpgroup.cuh"

namespace treeattn::kernels::cuda {

// One warpgroup: 64 rows. A thread has rows 16 warp + lane / 4 and that plus 8.
template <class Elements, int kDim>
class PrefillGroup {
 public:
  using T = typename Elements::Type;
  using Ring = PrefillRing<Elements, kDim>;
  using Layout = typename Ring::Layout;

  __device__ __forceinline__ PrefillGroup(const AttentionParams& params, const Ring& from, std::byte* shared,
                                          int number)
      : p(params),
        ring(from),
        group(number),
        thread(static_cast<int>(threadIdx.x) % 128),
        lane(static_cast<int>(threadIdx.x) % 32),
        queries(ring.memory + number * 64 * 128),
        log2_scale(params.scale * merge::kLog2E),
        state(params, shared, number) {}

  __device__ __forceinline__ void run() {
    if (kTurns && group == 1) barrier_arrive(kTurn, 256);  // group 0 begins
    for (unsigned phase = 0;; phase ^= 1) {
      ring.queries_there.wait(0, phase);
      item = ring.items + phase;
      if (item->number < 0) return;
      if (item->empty) {
        arrive(ring.queries_free, 0);
        state.clear();
#pragma unroll
        for (int i = 0; i < kDim / 2; ++i) state.o[i] = 0.0f;
      } else {
        attend();
      }
      state.store(*item);
    }
  }

 private:
  static constexpr int kSteps = kPrefillTile / 16;
  // The groups start their products by turns, so that one makes weights while the other multiplies. Measured to pay
  // with 128 columns.
  static constexpr bool kTurns = kDim == 128;
  static constexpr int kOwn = 1, kTurn = 3;  // barriers, of group 0; group 1 has the next

  // Waits for the keys of the next tile.
  __device__ __forceinline__ const PrefillNote* take_keys() const {
    ring.keys_there.wait(at.stage, at.phase);
    return &ring.note(at);
  }

  // The states of the item.
  __device__ __forceinline__ void attend() {
    const PrefillNote* note = take_keys();
    float s[kPrefillTile / 2];
    std::uint32_t weights[kPrefillTile / 4];
    state.clear();
    state.waiting = 0;
    products_begin();
    start_logits(s, at.stage);
    products_commit();
    products_wait<0>();
    pin(s);
    arrive(ring.keys_free, at.stage);
    if (note->next < 0) arrive(ring.queries_free, 0);
    float shrink[2];
    weigh(s, *note, shrink);
    round_weights(s, weights);
    bool fresh = true;  // o is of no leaf yet
    while (note->next >= 0) {
      const int stage = at.stage;
      take_values(*note);
      at.advance();
      const PrefillNote* const after = take_keys();
      if (kTurns) barrier_sync(kTurn + group, 256);
      products_begin();
      start_logits(s, at.stage);
      products_commit();
      start_values(weights, stage, !fresh);
      products_commit();
      if (kTurns) barrier_arrive(kTurn + 1 - group, 256);
      products_wait<1>();
      pin(s);
      arrive(ring.keys_free, at.stage);
      if (after->next < 0) arrive(ring.queries_free, 0);
      const float done_m[2] = {state.m[0], state.m[1]}, done_l[2] = {state.l[0], state.l[1]};
      fresh = note->next != note->leaf;
      if (fresh) state.clear();
      weigh(s, *after, shrink);
      mark(state.l[0] + state.l[1]);
      products_wait<0>();
      pin(state.o);
      arrive(ring.values_free, stage);
      if (fresh) {
        const float new_m[2] = {state.m[0], state.m[1]}, new_l[2] = {state.l[0], state.l[1]};
        state.set_sums(done_m, done_l);
        state.end_leaf(*note);
        state.set_sums(new_m, new_l);
      } else {
        state.rescale(shrink);
      }
      round_weights(s, weights);
      note = after;
    }
    take_values(*note);
    products_begin();
    start_values(weights, at.stage, !fresh);
    products_commit();
    products_wait<0>();
    pin(state.o);
    arrive(ring.values_free, at.stage);
    at.advance();
    state.end_leaf(*note);
  }

  // s = q K^T, started.
  __device__ __forceinline__ void start_logits(float (&s)[kPrefillTile / 2], int stage) const {
    const std::uint64_t q = matrix_at(queries, 16), k = matrix_at(ring.keys(stage), 16);
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      const int offset = (step / 4 * Layout::kPartBytes + step % 4 * 32) / 16;
      Products<T, kPrefillTile>::start_logits(s, q + offset, k + offset, step > 0);
    }
  }
  // o (+)= weights V, started.
  __device__ __forceinline__ void start_values(const std::uint32_t (&weights)[kPrefillTile / 4], int stage, bool add) {
    const std::uint64_t v = matrix_at(ring.values(stage), Layout::kPartBytes);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Products<T, kDim>::start_values(state.o, weights + 4 * step, v + step * (16 * 128 / 16), step > 0 || add);
    }
  }
  // Waits for the values of a tile.
  __device__ __forceinline__ void take_values(const PrefillNote& note) const {
    ring.values_there.wait(at.stage, at.phase);
    if constexpr (!Elements::kWidened) clear_others(note);
  }
  // Values that are not those of its keys become zeros: a weight of zero times garbage may not be zero.
  __device__ __forceinline__ void clear_others(const PrefillNote& note) const {
    if (!note.cut()) return;
    for (int i = thread; i < Layout::kParts * kPrefillTile * 8; i += 128) {
      const int token = note.first + i / 8 % kPrefillTile;
      if (token < note.begin || token >= note.end) {
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};\n" ::"r"(ring.values(at.stage) + i * 16), "r"(0)
                     : "memory");
      }
    }
    // What all threads of the group wrote may be read by products.
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
    barrier_sync(kOwn + group, 128);
  }

  // Logits become weights; m and l move to the new maximum, o has to shrink likewise.
  __device__ __forceinline__ void weigh(float (&s)[kPrefillTile / 2], const PrefillNote& note, float (&shrink)[2]) {
    if constexpr (Elements::kWidened) multiply_columns(s, ring.scales(at.stage));
    if (note.masked != 0) hide(s, note);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = s[2 * half];
#pragma unroll
      for (int j = 0; j < kPrefillTile / 8; ++j) top = fmaxf(top, fmaxf(s[4 * j + 2 * half], s[4 * j + 2 * half + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      top = fmaxf(top * log2_scale, state.m[half]);
      const float reference = top == merge::kEmptyMax ? 0.0f : top - Elements::kShift;
      shrink[half] = state.m[half] == top ? 1.0f : exp2_fast(state.m[half] - top);
      float sums[2] = {0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < kPrefillTile / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& weight = s[4 * j + 2 * half + i];
          weight = exp2_fast(__fmaf_rn(weight, log2_scale, -reference));  // 0 for a hidden key
          sums[i] += weight;
        }
      }
      state.l[half] = __fmaf_rn(state.l[half], shrink[half], sums[0] + sums[1]);
      state.m[half] = top;
    }
    if constexpr (Elements::kWidened) {
      multiply_columns(s, ring.scales(at.stage) + PrefillScales::kCount * 4);
      arrive(ring.scales_free, at.stage);
    }
  }
  // Each column times the scale of its key, or of its value.
  __device__ __forceinline__ void multiply_columns(float (&s)[kPrefillTile / 2], std::uint32_t scales) const {
#pragma unroll
    for (int j = 0; j < kPrefillTile / 8; ++j) {
      std::uint32_t pair[2];
      load_shared<8>(pair, scales + PrefillScales::offset(j, 0) + lane % 4 * 8);
#pragma unroll
      for (int i = 0; i < 4; ++i) s[4 * j + i] *= __uint_as_float(pair[i % 2]);
    }
  }
  __device__ __forceinline__ void hide(float (&s)[kPrefillTile / 2], const PrefillNote& note) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Range range = range_at(p, item->own + state.row_of(half), item->length);
      const int origin = note.first + lane % 4 * 2;
      const int begin =
          static_cast<int>(min(max(range.begin, std::int64_t{note.begin}), std::int64_t{note.end})) - origin;
      const int end = static_cast<int>(max(min(range.end, std::int64_t{note.end}), std::int64_t{note.begin})) - origin;
#pragma unroll
      for (int j = 0; j < kPrefillTile / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (8 * j + i < begin || 8 * j + i >= end) s[4 * j + 2 * half + i] = merge::kEmptyMax;
        }
      }
    }
  }
  // Nobody reads this, but it keeps the assembler from putting the wait before the weights, which are to be made while
  // the values are multiplied. Where scales take the room a byte has to do.
  __device__ __forceinline__ void mark(float made) const {
    const std::uint32_t to = ring.memory + Layout::kMarks + Layout::kMarkBytes * (group * 128 + thread);
    if constexpr (Layout::kMarkBytes == 1) {
      asm volatile("st.shared.u8 [%0], %1;\n" ::"r"(to), "r"(__float_as_uint(made)) : "memory");
    } else {
      asm volatile("st.shared.f32 [%0], %1;\n" ::"r"(to), "f"(made) : "memory");
    }
  }
  __device__ __forceinline__ static void round_weights(const float (&s)[kPrefillTile / 2],
                                                       std::uint32_t (&weights)[kPrefillTile / 4]) {
#pragma unroll
    for (int i = 0; i < kPrefillTile / 4; ++i) weights[i] = pack<T>(s[2 * i], s[2 * i + 1]);
  }

  const AttentionParams& p;
  const Ring& ring;
  const int group, thread, lane;
  const std::uint32_t queries;
  const float log2_scale;
  const PrefillItem* item;
  PrefillState<Elements, kDim> state;
  RingPlace<Layout::kStages> at;
};

}  // namespace treeattn::kernels::cuda
