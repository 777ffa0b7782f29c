// SPDX-License-Identifier: Apache-2.0
// The warps of a prefill block that widen bytes of K and V to 16-bit numbers, and bring the scales. A row of bytes
// arrives where the first part of its row of 16-bit numbers is to lie, and is exchanged alike (piece_copy.cuh): unit u
// of 16 bytes becomes units 2 (u % 4) and one more of part u / 4. So one warp can widen a row by itself, in place, once
// all of its lanes have read; there is no other room for bytes.
#pragma once

#include "kernels/cuda/prefill/prefill_elements.cuh"
#include "kernels/cuda/prefill/prefill_ring.cuh"

namespace treeattn::kernels::cuda {

// Three warps, behind the one that brings the bytes.
template <class Elements, int kDim>
class PrefillWidening {
 public:
  using Ring = PrefillRing<Elements, kDim>;
  using Layout = typename Ring::Layout;

  // Of every eight rows a lane has unit lane % 4 and that plus 4 of one. The two rows that eight lanes read at a time,
  // r and r ^ 5, lie so that neither the units they read nor the units they write share banks.
  __device__ PrefillWidening(const AttentionParams& params, const Ring& of)
      : p(params),
        ring(of),
        warp(static_cast<int>(threadIdx.x) / 32 - 1),
        lane(static_cast<int>(threadIdx.x) % 32),
        row(lane / 8 ^ lane / 4 % 2 * 5),
        from(row * 128 + (lane % 4 ^ row) * 16),
        to(row * 128 + (lane % 4 * 2 ^ row) * 16) {}

  __device__ void run() {
    if (warp == kScaleWarp) PrefillScales(p, WorkItem{}, ring.scales(0), Layout::kStages);  // rows that have none: 1
    for (unsigned phase = 0;; phase ^= 1) {
      ring.queries_there.wait(0, phase);
      const PrefillItem& next = ring.items[phase];
      if (next.number < 0) return;
      const WorkItem item = next.item;
      const bool empty = next.empty;
      arrive(ring.queries_free, 0);
      if (!empty) widen_item(item);
    }
  }

 private:
  static constexpr int kWarps = kPrefillWideners / 32, kScaleWarp = kWarps - 1;
  static constexpr int kUnits = Layout::kParts;  // that a lane has of a row
  static constexpr int kRows = 16;  // at a time; two or three times, the fewer for the warp with the scales

  __device__ void widen_item(const WorkItem& item) {
    const PrefillScales scales(p, item, ring.scales(0), 0);
    bool more = true;
    while (more) {
      ring.keys_brought.wait(at.stage, at.phase);
      const PrefillNote& note = ring.note(at);
      more = note.next >= 0;
      if (warp == kScaleWarp) {
        ring.scales_free.wait(at.stage, at.phase ^ 1);
        scales.start(at.stage, {note.leaf, note.first, note.begin, note.end}, lane);
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(ring.keys_there.address + 8 * at.stage)
                     : "memory");
      }
      widen(ring.keys(at.stage), 0, kPrefillTile);
      hand_over(ring.keys_there);
      ring.values_brought.wait(at.stage, at.phase);
      widen(ring.values(at.stage), note.begin - note.first, note.end - note.first);
      hand_over(ring.values_there);
      at.advance();
    }
  }

  // Rows outside [begin, end) become zeros: a weight of zero times garbage may not be zero.
  __device__ void widen(std::uint32_t tile, int begin, int end) const {
#pragma unroll 1
    for (int first = warp * kRows; first < kPrefillTile; first += kWarps * kRows) {
      std::uint32_t bytes[kRows / 8][kUnits][4];
#pragma unroll
      for (int eight = 0; eight < kRows / 8; ++eight) {
        const int mine = first + eight * 8 + row;
        const bool kept = mine >= begin && mine < end;
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
          load_shared<16>(bytes[eight][i], tile + (first + eight * 8) * 128 + (from ^ i * 64));
#pragma unroll
          for (int j = 0; j < 4; ++j) bytes[eight][i][j] = kept ? bytes[eight][i][j] : 0;
        }
      }
      __syncwarp();
#pragma unroll
      for (int eight = 0; eight < kRows / 8; ++eight) {
        const std::uint32_t rows = tile + (first + eight * 8) * 128;
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
          widen_half(rows + i * Layout::kPartBytes + to, bytes[eight][i][0], bytes[eight][i][1]);
          widen_half(rows + i * Layout::kPartBytes + (to ^ 16), bytes[eight][i][2], bytes[eight][i][3]);
        }
      }
    }
  }
  __device__ void widen_half(std::uint32_t address, std::uint32_t low, std::uint32_t high) const {
    std::uint32_t pairs[4];
    elements.widen(low, pairs[0], pairs[1]);
    elements.widen(high, pairs[2], pairs[3]);
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(pairs[0]), "r"(pairs[1]),
                 "r"(pairs[2]), "r"(pairs[3])
                 : "memory");
  }
  // What this thread wrote may be read by products, and the place filled by tensor copies after these.
  __device__ void hand_over(const StageBarriers& barriers) const {
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
    arrive(barriers, at.stage);
  }

  const AttentionParams& p;
  const Ring& ring;
  const int warp, lane;
  const int row;                 // of eight, that this lane works on
  const std::uint32_t from, to;  // where its first unit is read and written, from the first of eight rows
  const Elements elements{};
  RingPlace<Layout::kStages> at;
};

}  // namespace treeattn::kernels::cuda
