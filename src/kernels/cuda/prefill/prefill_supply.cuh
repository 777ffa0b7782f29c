// SPDX-License-Identifier: Apache-2.0
// The warp of a prefill block that takes items and brings q, K and V by tensor copies.
#pragma once

#include "kernels/cuda/prefill/prefill_ring.cuh"

namespace treeattn::kernels::cuda {

// The warp that brings q, K and V: one thread of it.
template <class Elements, int kDim>
class PrefillSupply {
 public:
  using Ring = PrefillRing<Elements, kDim>;
  using Layout = typename Ring::Layout;
  __device__ PrefillSupply(const AttentionParams& params, const Ring& to) : p(params), ring(to) {}

  __device__ void run() {
    // The first item is given, the others go to whoever comes first.
    unsigned number = blockIdx.x;
    while (number < static_cast<unsigned>(p.item_count)) {
      bring_item(static_cast<int>(number));
      number = gridDim.x + atomicAdd(p.arrived, 1u);
    }
    ring.queries_free.wait(0, item_phase ^ 1);
    ring.items[item_phase].number = -1;
    expect(ring.queries_there.address, 0);
    // For the next call.
    if (atomicAdd(p.arrived + 1, 1u) + 1 == gridDim.x) p.arrived[0] = p.arrived[1] = 0;
  }

 private:
  static constexpr int kBoxBytes = kPrefillBox * 128;
  static constexpr int kKvParts = Elements::kWidened ? 1 : Layout::kParts;  // as they come

  __device__ void bring_item(int number) {
    const WorkItem item = p.items[number];
    const ItemKeys keys = ItemKeys::of_many(p, item);
    const RowSource k_rows(p.k, item, Elements::kBytes), v_rows(p.v, item, Elements::kBytes);
    const int level = 32 - __clz(keys.leaf_step);
    PieceWalk<kPrefillTile, 1> walk(LeafWalk(keys), 0);
    Piece piece = walk.next(keys);
    bring_queries(item, number, piece.leaf < 0);
    while (piece.leaf >= 0) {
      const Piece after = walk.next(keys);
      PrefillNote note = {piece.first, piece.begin, piece.end, piece.leaf, after.leaf, level, 0, 0};
      note.masked = note.cut() || note.first < keys.all_begin || note.first + kPrefillTile > keys.all_end;
      ring.keys_free.wait(at.stage, at.phase ^ 1);
      ring.note(at) = note;
      bring_tile(ring.keys(at.stage), ring.keys_brought.address + 8 * at.stage, p.k_map, k_rows, item.kv_head, piece);
      ring.values_free.wait(at.stage, at.phase ^ 1);
      bring_tile(ring.values(at.stage), ring.values_brought.address + 8 * at.stage, p.v_map, v_rows, item.kv_head,
                 piece);
      at.advance();
      piece = after;
    }
  }
  __device__ void bring_queries(const WorkItem& item, int number, bool empty) {
    ring.queries_free.wait(0, item_phase ^ 1);
    PrefillItem& to = ring.items[item_phase];
    to.item = item;
    to.number = number;
    to.length = static_cast<int>(p.lengths[item.batch]);
    to.own = p.first_query[item.batch] + item.query0 - p.first_key;
    to.empty = empty;
    item_phase ^= 1;
    expect(ring.queries_there.address, Layout::kTileBytes);
    for (int box = 0; box < kPrefillRows / kPrefillBox; ++box) {
#pragma unroll
      for (int part = 0; part < Layout::kParts; ++part) {
        start_box(ring.memory + part * Layout::kPartBytes + box * kBoxBytes, ring.queries_there.address, p.q_map,
                  MapPlace(item.query0 + box * kPrefillBox, item.batch), head_of(p, item, 0), part * 64);
      }
    }
  }
  __device__ void bring_tile(std::uint32_t to, std::uint32_t barrier, const TensorMap& map, const RowSource& rows,
                             int head, const Piece& piece) const {
    // Boxes without keys of the piece may lie on pages that are not there.
    const auto needed = [&](int box) {
      const int first = piece.first + box * kPrefillBox;
      return first < piece.end && first + kPrefillBox > piece.begin;
    };
    constexpr int kBoxes = kPrefillTile / kPrefillBox;
    int boxes = 0;
    for (int box = 0; box < kBoxes; ++box) boxes += needed(box) ? 1 : 0;
    expect(barrier, boxes * kKvParts * kBoxBytes);
    for (int box = 0; box < kBoxes; ++box) {
      if (!needed(box)) continue;
      const MapPlace place(rows, piece.first + box * kPrefillBox);
#pragma unroll
      for (int part = 0; part < kKvParts; ++part) {
        start_box(to + part * Layout::kPartBytes + box * kBoxBytes, barrier, map, place, head, part * 64);
      }
    }
  }
  __device__ static void expect(std::uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
  }

  const AttentionParams& p;
  const Ring& ring;
  RingPlace<Layout::kStages> at;
  unsigned item_phase = 0;
};

}  // namespace treeattn::kernels::cuda
