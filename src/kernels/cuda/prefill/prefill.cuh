// SPDX-License-Identifier: Apache-2.0
// Prefill on Hopper's tensor cores. A block takes items, 128 queries of one head over one node of the tree, until none
// is left. One warp brings K and V, 128 keys at a time, leaf by leaf; two warpgroups work on 64 rows each. The logits
// of a tile are multiplied while the last tile's weights meet their values.
//
// A leaf has a state of its own, which lies in registers. At its end it is merged with the states that waited for it,
// or waits itself: every thread keeps its own part of what waits, so nobody has to wait for a barrier. What waits for
// the very next leaf lies in shared memory, the rest in the workspace.
#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/cuda/merge_tail.cuh"
#include "kernels/cuda/piece_copy.cuh"
#include "kernels/cuda/prefill/warpgroup.cuh"
#include "kernels/cuda/weights.cuh"

namespace treeattn::kernels::cuda {

inline constexpr int kPrefillTile = 128;  // keys of a tile, on a grid of positions inside the chunk
inline constexpr int kPrefillBox = 64;    // keys of a tensor copy
inline constexpr int kPrefillThreads = 3 * 128;

// What all threads have to know of an item.
struct PrefillItem {
  WorkItem item;
  int number;  // -1: no more work
  int node;
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

// The shared memory of a block.
template <int kDim>
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
  static constexpr int kMarks = kBarriers + (4 * kStages + 2) * 8;  // a float of every thread
  static constexpr int kBytes = kMarks + 2 * 128 * static_cast<int>(sizeof(float));
  static_assert(kPrefillTile == kPrefillRows);
};

// Between the warp that brings q, K and V and the warps that use them: one item's q, and a ring of tiles.
template <int kDim>
struct PrefillRing {
  using Layout = PrefillLayout<kDim>;
  std::uint32_t memory;
  PrefillNote* notes;
  PrefillItem* items;  // this one and the next, or the last, by turns
  StageBarriers keys_there, values_there, queries_there, keys_free, values_free, queries_free;

  __device__ explicit PrefillRing(std::byte* shared)
      : memory(shared_address(shared)),
        notes(reinterpret_cast<PrefillNote*>(shared + Layout::kNotes)),
        items(reinterpret_cast<PrefillItem*>(shared + Layout::kItems)),
        keys_there{memory + Layout::kBarriers},
        values_there{keys_there.address + 8 * Layout::kStages},
        queries_there{values_there.address + 8 * Layout::kStages},
        keys_free{queries_there.address + 8},
        values_free{keys_free.address + 8 * Layout::kStages},
        queries_free{values_free.address + 8 * Layout::kStages} {}

  // By one thread.
  __device__ void init() const {
    for (int i = 0; i < 4 * Layout::kStages + 2; ++i) {
      const int arrivals = i <= 2 * Layout::kStages ? 1 : 8;  // the copying thread; the warps that read
      asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(keys_there.address + 8 * i), "r"(arrivals));
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
};

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

// The warp that brings q, K and V: one thread of it.
template <int kDim>
class PrefillSupply {
 public:
  using Layout = PrefillLayout<kDim>;
  __device__ PrefillSupply(const AttentionParams& params, const PrefillRing<kDim>& to) : p(params), ring(to) {}

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

  __device__ void bring_item(int number) {
    const WorkItem item = p.items[number];
    const ItemKeys keys = ItemKeys::of_many(p, item);
    const RowSource k_rows(p.k, item, 2), v_rows(p.v, item, 2);
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
      bring_tile(ring.keys(at.stage), ring.keys_there.address + 8 * at.stage, p.k_map, k_rows, item.kv_head, piece);
      ring.values_free.wait(at.stage, at.phase ^ 1);
      bring_tile(ring.values(at.stage), ring.values_there.address + 8 * at.stage, p.v_map, v_rows, item.kv_head, piece);
      at.advance();
      piece = after;
    }
  }
  __device__ void bring_queries(const WorkItem& item, int number, bool empty) {
    ring.queries_free.wait(0, item_phase ^ 1);
    PrefillItem& to = ring.items[item_phase];
    to.item = item;
    to.number = number;
    to.node = p.groups[item.group].node;
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
    expect(barrier, boxes * Layout::kParts * kBoxBytes);
    for (int box = 0; box < kBoxes; ++box) {
      if (!needed(box)) continue;
      const MapPlace place(rows, piece.first + box * kPrefillBox);
#pragma unroll
      for (int part = 0; part < Layout::kParts; ++part) {
        start_box(to + part * Layout::kPartBytes + box * kBoxBytes, barrier, map, place, head, part * 64);
      }
    }
  }
  __device__ static void expect(std::uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
  }

  const AttentionParams& p;
  const PrefillRing<kDim>& ring;
  RingPlace<Layout::kStages> at;
  unsigned item_phase = 0;
};

// One warpgroup: 64 rows. A thread has rows 16 warp + lane / 4 and that plus 8.
template <class T, int kDim>
class PrefillGroup {
 public:
  using Layout = PrefillLayout<kDim>;

  __device__ __forceinline__ PrefillGroup(const AttentionParams& params, const PrefillRing<kDim>& from,
                                          std::byte* shared, int number)
      : p(params),
        ring(from),
        group(number),
        thread(static_cast<int>(threadIdx.x) % 128),
        lane(static_cast<int>(threadIdx.x) % 32),
        queries(ring.memory + number * 64 * 128),
        log2_scale(params.scale * 0x1.715476p+0f),
        next_leaf(reinterpret_cast<float4*>(shared + Layout::kWaiting) + number * kUnits * 128 + thread) {}

  __device__ __forceinline__ void run() {
    if (kTurns && group == 1) barrier_arrive(kTurn, 256);  // group 0 begins
    for (unsigned phase = 0;; phase ^= 1) {
      ring.queries_there.wait(0, phase);
      item = ring.items + phase;
      if (item->number < 0) return;
      if (item->empty) {
        release(ring.queries_free, 0);
        m[0] = m[1] = merge::kEmptyMax;
        l[0] = l[1] = 0.0f;
#pragma unroll
        for (int i = 0; i < kDim / 2; ++i) o[i] = 0.0f;
      } else {
        attend();
      }
      store();
    }
  }

 private:
  static constexpr int kUnits = kDim / 8;  // of four floats, of o in a thread
  static constexpr int kSteps = kPrefillTile / 16;
  // The groups start their products by turns, so that one makes weights while the other multiplies. Measured to pay
  // with 128 columns.
  static constexpr bool kTurns = kDim == 128;
  static constexpr int kOwn = 1, kTurn = 3;  // barriers, of group 0; group 1 has the next

  __device__ __forceinline__ int row_of(int half) const { return group * 64 + thread / 32 * 16 + lane / 4 + half * 8; }

  // Waits for the keys of the next tile.
  __device__ __forceinline__ const PrefillNote* take_keys() const {
    ring.keys_there.wait(at.stage, at.phase);
    return &ring.note(at);
  }
  // This warp needs a stage no more.
  __device__ __forceinline__ void release(const StageBarriers& barriers, int stage) const {
    __syncwarp();
    if (lane == 0) {
      asm volatile("mbarrier.arrive.shared.b64 _, [%0];\n" ::"r"(barriers.address + 8 * stage) : "memory");
    }
  }

  // The states of the item.
  __device__ __forceinline__ void attend() {
    const PrefillNote* note = take_keys();
    float s[kPrefillTile / 2];
    std::uint32_t weights[kPrefillTile / 4];
    m[0] = m[1] = merge::kEmptyMax;
    l[0] = l[1] = 0.0f;
    waiting = 0;
    products_begin();
    start_logits(s, at.stage);
    products_commit();
    products_wait<0>();
    pin(s);
    release(ring.keys_free, at.stage);
    if (note->next < 0) release(ring.queries_free, 0);
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
      release(ring.keys_free, at.stage);
      if (after->next < 0) release(ring.queries_free, 0);
      const float done_m[2] = {m[0], m[1]}, done_l[2] = {l[0], l[1]};
      fresh = note->next != note->leaf;
      if (fresh) {
        m[0] = m[1] = merge::kEmptyMax;
        l[0] = l[1] = 0.0f;
      }
      weigh(s, *after, shrink);
      // Nobody reads this, but it keeps the assembler from putting the wait before the weights, which are to be made
      // while the values are multiplied.
      asm volatile("st.shared.f32 [%0], %1;\n" ::"r"(ring.memory + Layout::kMarks + 4 * (group * 128 + thread)),
                   "f"(l[0] + l[1])
                   : "memory");
      products_wait<0>();
      pin(o);
      release(ring.values_free, stage);
      if (fresh) {
        const float new_m[2] = {m[0], m[1]}, new_l[2] = {l[0], l[1]};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          m[half] = done_m[half];
          l[half] = done_l[half];
        }
        end_leaf(*note);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          m[half] = new_m[half];
          l[half] = new_l[half];
        }
      } else {
        rescale(shrink);
      }
      round_weights(s, weights);
      note = after;
    }
    take_values(*note);
    products_begin();
    start_values(weights, at.stage, !fresh);
    products_commit();
    products_wait<0>();
    pin(o);
    release(ring.values_free, at.stage);
    at.advance();
    end_leaf(*note);
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
      Products<T, kDim>::start_values(o, weights + 4 * step, v + step * (16 * 128 / 16), step > 0 || add);
    }
  }
  // Waits for the values of a tile. Those that are not its keys become zeros: a weight of zero times garbage may not
  // be zero.
  __device__ __forceinline__ void take_values(const PrefillNote& note) const {
    ring.values_there.wait(at.stage, at.phase);
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
    if (note.masked != 0) hide(s, note);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = s[2 * half];
#pragma unroll
      for (int j = 0; j < kPrefillTile / 8; ++j) top = fmaxf(top, fmaxf(s[4 * j + 2 * half], s[4 * j + 2 * half + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      top = fmaxf(top * log2_scale, m[half]);
      const float reference = top == merge::kEmptyMax ? 0.0f : top - kWeightShift<T>;
      shrink[half] = m[half] == top ? 1.0f : exp2_fast(m[half] - top);
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
      l[half] = __fmaf_rn(l[half], shrink[half], sums[0] + sums[1]);
      m[half] = top;
    }
  }
  __device__ __forceinline__ void hide(float (&s)[kPrefillTile / 2], const PrefillNote& note) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Range range = range_at(p, item->own + row_of(half), item->length);
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
  __device__ __forceinline__ static void round_weights(const float (&s)[kPrefillTile / 2],
                                                       std::uint32_t (&weights)[kPrefillTile / 4]) {
#pragma unroll
    for (int i = 0; i < kPrefillTile / 4; ++i) weights[i] = pack<T>(s[2 * i], s[2 * i + 1]);
  }
  __device__ __forceinline__ void rescale(const float (&shrink)[2]) {
    if (!__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) o[i] *= shrink[i / 2 % 2];
  }

  // The state is that of a whole leaf: it is merged with what waited for it, and waits for the next.
  __device__ __forceinline__ void end_leaf(const PrefillNote& note) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      l[half] += __shfl_xor_sync(~0u, l[half], 1);
      l[half] += __shfl_xor_sync(~0u, l[half], 2);
    }
    if constexpr (kWeightShift<T> != 0.0f) {
      constexpr float kUnit = 0x1p-14f;
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) o[i] *= kUnit;
      l[0] *= kUnit;
      l[1] *= kUnit;
    }
    // Where this leaf and the next meet. What waits meets this leaf at the level of its bit, and is merged as soon as
    // no later leaf belongs between the two (merge_tail.cuh, waits).
    const int meeting = note.next < 0 ? 32 : 32 - __clz(note.leaf ^ note.next);
    while (waiting != 0 && __ffs(static_cast<int>(waiting)) <= meeting) {
      const int level = __ffs(static_cast<int>(waiting));
      if (level == note.level) {
        merge_with(next_leaf, next_leaf_sums);
      } else {
        const float4* from = slot(level);
        merge_with(from, from[kUnits * 128]);
      }
      waiting &= waiting - 1;
    }
    if (note.next < 0) return;
    if (meeting == note.level) {
      next_leaf_sums = make_float4(m[0], m[1], l[0], l[1]);
      push(next_leaf);
    } else {
      float4* to = slot(meeting);
      to[kUnits * 128] = make_float4(m[0], m[1], l[0], l[1]);
      push(to);
    }
    waiting |= 1u << (meeting - 1);
  }
  // Where this thread's part of the state that waits at a level lies.
  __device__ __forceinline__ float4* slot(int level) const {
    static_assert(waiting_floats(kDim) == 2 * 128 * 4 * (kUnits + 1));
    const int index = static_cast<int>(blockIdx.x) * p.waiting_levels + __popc(waiting >> level);
    return reinterpret_cast<float4*>(p.waiting + static_cast<std::int64_t>(index) * waiting_floats(kDim)) +
           group * (kUnits + 1) * 128 + thread;
  }
  __device__ __forceinline__ void push(float4* to) const {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) to[i * 128] = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
  }
  __device__ __forceinline__ void merge_with(const float4* lower, const float4& sums) {
    float tops[2];
    const MergeWeights first = MergeWeights::of(sums.x, m[0], tops[0]);
    const MergeWeights second = MergeWeights::of(sums.y, m[1], tops[1]);
    m[0] = tops[0];
    m[1] = tops[1];
    l[0] = first.merged(sums.z, l[0]);
    l[1] = second.merged(sums.w, l[1]);
    constexpr int kBatch = kUnits % 8 == 0 ? 8 : kUnits % 4 == 0 ? 4 : 2;  // loads on their way
#pragma unroll
    for (int i = 0; i < kUnits; i += kBatch) {
      float4 low[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) low[j] = lower[(i + j) * 128];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int at_o = 4 * (i + j);
        o[at_o] = first.merged(low[j].x, o[at_o]);
        o[at_o + 1] = first.merged(low[j].y, o[at_o + 1]);
        o[at_o + 2] = second.merged(low[j].z, o[at_o + 2]);
        o[at_o + 3] = second.merged(low[j].w, o[at_o + 3]);
      }
    }
  }

  // The item is done.
  __device__ __forceinline__ void store() const {
    bool finite[2] = {isfinite(l[0]), isfinite(l[1])};
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) finite[i / 2 % 2] = finite[i / 2 % 2] && isfinite(o[i]);
    std::int64_t to[2];
    bool there[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(half);
      there[half] = row < item->item.queries;
      to[half] = global_row(p, item->item, there[half] ? row : 0);
      unsigned bad = __ballot_sync(~0u, !finite[half] && there[half]);
      bad |= bad >> 1;
      bad |= bad >> 2;
      if (lane == 0) p.bad_rows[item->number * (kPrefillRows / 8) + row / 8] = bad & 0x11111111u;
    }
    // By way of shared memory, so that this code is there once and not for every column. Neighbours exchange pairs of
    // columns, so that each has four in a row.
    push(next_leaf);
    const bool odd = lane % 2 != 0;
#pragma unroll 1
    for (int j = 0; j < kUnits; j += 2) {
      const float4 a = next_leaf[j * 128], b = next_leaf[(j + 1) * 128];
      const float4 give = odd ? a : b, keep = odd ? b : a;
      const float4 got = make_float4(__shfl_xor_sync(~0u, give.x, 1), __shfl_xor_sync(~0u, give.y, 1),
                                     __shfl_xor_sync(~0u, give.z, 1), __shfl_xor_sync(~0u, give.w, 1));
      const float4 low = odd ? got : keep, high = odd ? keep : got;
      const int column = 8 * (j + (odd ? 1 : 0)) + lane % 4 / 2 * 4;
      if (there[0]) store_result(p, item->node, to[0], column, m[0], l[0], make_float4(low.x, low.y, high.x, high.y));
      if (there[1]) store_result(p, item->node, to[1], column, m[1], l[1], make_float4(low.z, low.w, high.z, high.w));
    }
  }

  const AttentionParams& p;
  const PrefillRing<kDim>& ring;
  const int group, thread, lane;
  const std::uint32_t queries;
  const float log2_scale;
  const PrefillItem* item;
  float4* const next_leaf;  // what waits for the next leaf; its m and l:
  float4 next_leaf_sums;
  RingPlace<Layout::kStages> at;
  unsigned waiting = 0;  // bit i: a state waits for one that it meets at level i + 1
  float o[kDim / 2];
  float m[2], l[2];  // l: this thread's keys only, until the leaf ends
};

template <class T, int kDim>
__global__ void __launch_bounds__(kPrefillThreads, 1) prefill_kernel(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(1024) std::byte memory[];  // tensor copies exchange units by address
  const PrefillRing<kDim> ring(memory);
  if (threadIdx.x == 0) ring.init();
  __syncthreads();
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  if (group == 0) {
    give_registers<40>();
    if (threadIdx.x == 0) PrefillSupply<kDim>(p, ring).run();
  } else {
    take_registers<232>();
    PrefillGroup<T, kDim>(p, ring, memory, group - 1).run();
  }
}

// The kernel for elements of T and a head dim; null where there is none. Each type is compiled in a file of its own.
template <class T>
Launch prefill_launch(int dim) {
  const auto launch = [](void (*kernel)(AttentionParams), int bytes) {
    Launch out{kernel, kPrefillThreads, static_cast<std::size_t>(bytes), "prefill", {}, kPrefillBox};
    out.takes_items = true;
    return out;
  };
  switch (dim) {
    case 64:
      return launch(prefill_kernel<T, 64>, PrefillLayout<64>::kBytes);
    case 80:
      return launch(prefill_kernel<T, 80>, PrefillLayout<80>::kBytes);
    case 96:
      return launch(prefill_kernel<T, 96>, PrefillLayout<96>::kBytes);
    case 128:
      return launch(prefill_kernel<T, 128>, PrefillLayout<128>::kBytes);
    default:
      return {};
  }
}

}  // namespace treeattn::kernels::cuda
