// SPDX-License-Identifier: Apache-2.0
// What lies in the shared memory of a prefill block: q of an item, a ring of tiles of K and V, and what the warp that
// brings them tells the warps that use them. Where K and V are bytes, warps in between widen them: a row arrives in the
// first 128 bytes of the room for a row of 16-bit numbers, and is widened there.
#pragma once

#include "kernels/cuda/params.h"
#include "kernels/cuda/piece_copy.cuh"
#include "kernels/cuda/piece_scales.cuh"

namespace treeattn::kernels::cuda {

inline constexpr int kPrefillTile = 128;  // keys of a tile, on a grid of positions inside the chunk
inline constexpr int kPrefillBox = 64;    // keys of a tensor copy

// What all threads have to know of an item.
struct PrefillItem {
  WorkItem item;
  int number;        // -1: no more work
  int length;        // of the sequence
  std::int64_t own;  // where its first query stands, as a local key index
  bool empty;        // it has no keys, so no tiles
};

// What a tile is: its keys are [max(first, begin), min(first + kPrefillTile, end)).
struct PrefillNote {
  int first;
  int begin, end;
  int leaf;    // of the item
  int next;    // leaf of the next tile of the item; -1: there is none
  int level;   // at which neighbouring leaves with keys meet
  int masked;  // some rows do not see some of its keys
  int unused;

  __device__ bool cut() const { return first < begin || first + kPrefillTile > end; }
};

inline constexpr int kPrefillUsers = 2 * 128;    // threads that multiply
inline constexpr int kPrefillWideners = 3 * 32;  // threads that widen bytes; the last warp brings the scales, too

// The scales of a tile: of its keys, then of its values.
using PrefillScales = PieceScales<kPrefillTile, 1>;

// The shared memory of a block.
template <class Elements, int kDim>
struct PrefillLayout {
  static constexpr int kParts = (2 * kDim + 127) / 128;
  static constexpr int kStages = kParts == 1 ? 4 : 2;
  static constexpr int kPartBytes = kPrefillTile * 128;  // of a tile, and of q
  static constexpr int kTileBytes = kParts * kPartBytes;
  static constexpr int kKeys = kTileBytes;  // q comes first
  static constexpr int kValues = kKeys + kStages * kTileBytes;
  static constexpr int kWaiting = kValues + kStages * kTileBytes;
  static constexpr int kNotes = kWaiting + kPrefillRows * kDim * static_cast<int>(sizeof(float));
  static constexpr int kItems = kNotes + 2 * kStages * static_cast<int>(sizeof(PrefillNote));
  static constexpr int kBarriers = kItems + 2 * static_cast<int>(sizeof(PrefillItem));
  static constexpr int kBarrierCount = (Elements::kWidened ? 7 : 4) * kStages + 2;
  static constexpr int kScales = kBarriers + kBarrierCount * 8;
  static constexpr int kMarks = kScales + (Elements::kWidened ? kStages * PrefillScales::kBytes : 0);
  static constexpr int kMarkBytes = Elements::kWidened ? 1 : 4;  // of every thread that multiplies
  static constexpr int kBytes = kMarks + kPrefillUsers * kMarkBytes;
  static_assert(kPrefillTile == kPrefillRows);
  static_assert(kBytes <= 227 * 1024);
};

// Between the warp that brings q, K and V and the warps that use them: one item's q, and a ring of tiles.
template <class Elements, int kDim>
struct PrefillRing {
  using Layout = PrefillLayout<Elements, kDim>;
  std::uint32_t memory;
  PrefillNote* notes;
  PrefillItem* items;  // this one and the next, or the last, by turns
  StageBarriers keys_there, values_there, queries_there, keys_free, values_free, queries_free;
  StageBarriers keys_brought, values_brought;  // by tensor copies: the same, or still to be widened
  StageBarriers scales_free;                   // of a tile's keys and values; they come with its keys

  __device__ explicit PrefillRing(std::byte* shared)
      : memory(shared_address(shared)),
        notes(reinterpret_cast<PrefillNote*>(shared + Layout::kNotes)),
        items(reinterpret_cast<PrefillItem*>(shared + Layout::kItems)),
        keys_there{memory + Layout::kBarriers},
        values_there{keys_there.address + 8 * Layout::kStages},
        queries_there{values_there.address + 8 * Layout::kStages},
        keys_free{queries_there.address + 8},
        values_free{keys_free.address + 8 * Layout::kStages},
        queries_free{values_free.address + 8 * Layout::kStages},
        keys_brought{Elements::kWidened ? queries_free.address + 8 : keys_there.address},
        values_brought{Elements::kWidened ? keys_brought.address + 8 * Layout::kStages : values_there.address},
        scales_free{values_brought.address + 8 * Layout::kStages} {}

  // By one thread.
  __device__ void init() const {
    constexpr int kStages = Layout::kStages, kUsers = kPrefillUsers, kWideners = kPrefillWideners;
    const auto set = [](const StageBarriers& barriers, int stages, int arrivals) {
      for (int i = 0; i < stages; ++i) {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(barriers.address + 8 * i), "r"(arrivals));
      }
    };
    set(keys_there, kStages, Elements::kWidened ? kWideners + 32 : 1);  // a warp brings scales; or the copying thread
    set(values_there, kStages, Elements::kWidened ? kWideners : 1);
    set(queries_there, 1, 1);
    set(keys_free, kStages, kUsers);
    set(values_free, kStages, kUsers);
    set(queries_free, 1, Elements::kWidened ? kUsers + kWideners : kUsers);
    if constexpr (Elements::kWidened) {
      set(keys_brought, kStages, 1);
      set(values_brought, kStages, 1);
      set(scales_free, kStages, kUsers);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
  }
  // A note is needed until the values of its tile have been used, when its stage may have other keys already: there are
  // twice as many.
  template <class Place>
  __device__ PrefillNote& note(const Place& at) const {
    return notes[at.stage + at.phase * Layout::kStages];
  }
  __device__ std::uint32_t keys(int stage) const { return memory + Layout::kKeys + stage * Layout::kTileBytes; }
  __device__ std::uint32_t values(int stage) const { return memory + Layout::kValues + stage * Layout::kTileBytes; }
  __device__ std::uint32_t scales(int stage) const { return memory + Layout::kScales + stage * PrefillScales::kBytes; }
};

// This thread needs a stage no more, or has written its part of it. Every thread says so for itself: what one of a warp
// says for all others is in order too, but racecheck does not see that.
__device__ __forceinline__ void arrive(const StageBarriers& barriers, int stage) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];\n" ::"r"(barriers.address + 8 * stage) : "memory");
}

// A place in the ring: stages in turn, each time with the other phase.
template <int kStages>
struct RingPlace {
  int stage = 0;
  unsigned phase = 0;
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace treeattn::kernels::cuda
