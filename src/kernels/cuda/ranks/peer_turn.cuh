// SPDX-License-Identifier: Apache-2.0
// Rows of states on their way from GPU to GPU, in the hands of one warp.
#pragma once

#include "kernels/cuda/ranks/peer_kernel.h"
#include "kernels/cuda/ranks/warp_rows.cuh"

namespace treeattn::kernels::cuda {

inline constexpr int kMostPairs = 5;  // of floats of a row, of a lane: heads have up to 256 columns, in steps of 8
static_assert(2 * kMostPairs * kLanes >= 256 + 2);

__device__ inline std::uint64_t now() {
  std::uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

__device__ inline int warp_lane() { return static_cast<int>(threadIdx.x) % kLanes; }
// Of all warps of the kernel. Warp w takes every n-th row of all states, from its own rank's to the merged ones, and
// waits for warp w of the other ranks alone.
__device__ inline int kernel_warp() {
  return static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) * (static_cast<int>(threadIdx.x) / kLanes);
}
__device__ inline int kernel_warps() { return static_cast<int>(gridDim.x) * kPeerRowsAtOnce; }

// Two words side by side. Each arrives by itself.
struct WordPair {
  PeerWord first, second;

  __device__ bool is_of(unsigned turn) const { return first >> 32 == turn && second >> 32 == turn; }
  __device__ float2 floats() const {
    return {__uint_as_float(static_cast<unsigned>(first)), __uint_as_float(static_cast<unsigned>(second))};
  }
};
__device__ inline PeerWord word_of(float value, unsigned turn) { return PeerWord{turn} << 32 | __float_as_uint(value); }
__device__ inline WordPair pair_of(float2 value, unsigned turn) {
  return {word_of(value.x, turn), word_of(value.y, turn)};
}
__device__ inline void put(PeerWord* to, const WordPair& pair) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(pair.first), "l"(pair.second) : "memory");
}
__device__ inline WordPair look_at(const PeerWord* from) {
  WordPair pair;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(pair.first), "=l"(pair.second)
               : "l"(from)
               : "memory");
  return pair;
}

// A turn of this warp.
class Turn {
 public:
  __device__ Turn(const PeerParams& params, unsigned number)
      : p(params), number_(number), box_(number % 2 * params.mailbox_words) {}

  // A row of this rank's states to all others.
  __device__ void push_row(std::int64_t row) const {
    const int pairs = p.row_floats / 2;
    for (int block = p.first_block[p.rank]; block < p.first_block[p.rank + 1]; ++block) {
      float2 value[kMostPairs];
#pragma unroll
      for (int i = 0; i < kMostPairs; ++i) {
        if (warp_lane() + i * kLanes < pairs) value[i] = own_pair(block, row, warp_lane() + i * kLanes);
      }
      for (int peer = 1; peer < p.ranks; ++peer) {
        PeerWord* to = p.mailbox[(p.rank + peer) % p.ranks] + word_of_row(block, row);  // not all to the same one first
#pragma unroll
        for (int i = 0; i < kMostPairs; ++i) {
          const int pair = warp_lane() + i * kLanes;
          if (pair < pairs) put(to + 2 * pair, pair_of(value[i], number_));
        }
      }
    }
  }

  // A rank that has no blocks says that it is there, so that nobody is two turns ahead of it.
  __device__ void say_that_it_is_there() const {
    if (has_blocks(p.rank)) return;
    for (int other = warp_lane(); other < p.ranks; other += kLanes) {
      if (other != p.rank) put(p.mailbox[other] + word_of_silent(p.rank), pair_of({}, number_));
    }
  }
  __device__ bool wait_for_silent() {
    if (!p.some_have_none) return true;
    for (int rank = warp_lane(); rank < p.ranks; rank += kLanes) {
      if (rank != p.rank && !has_blocks(rank)) wait_for(rank, p.mailbox[p.rank] + word_of_silent(rank));
    }
    return all_came();
  }

  // The row of all blocks, `stride` floats apart. False where some did not come.
  __device__ bool receive_row(std::int64_t row, float* states, std::int64_t stride) {
    constexpr int kAtOnce = 8;
    Place next(p.row_floats / 2);
    while (next.block < p.all_blocks) {
      WordPair found[kAtOnce];
      Place place = next;
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k, next.advance()) {
        if (next.block >= p.all_blocks) continue;
        found[k] = is_own(next.block) ? pair_of(own_pair(next.block, row, next.pair), number_)
                                      : look_at(p.mailbox[p.rank] + word_of_row(next.block, row) + 2 * next.pair);
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k, place.advance()) {
        if (place.block >= p.all_blocks) continue;
        if (!found[k].is_of(number_)) {
          found[k] = wait_for(rank_of(place.block), p.mailbox[p.rank] + word_of_row(place.block, row) + 2 * place.pair);
        }
        *reinterpret_cast<float2*>(states + place.block * stride + 2 * place.pair) = found[k].floats();
      }
    }
    return all_came();
  }

 private:
  // A pair of a row of all blocks: those of a lane are kLanes apart.
  struct Place {
    int pairs, block = 0, pair = warp_lane();
    __device__ explicit Place(int of_row) : pairs(of_row) { settle(); }
    __device__ void advance() {
      pair += kLanes;
      settle();
    }
    __device__ void settle() {
      for (; pair >= pairs; ++block) pair -= pairs;
    }
  };

  __device__ bool has_blocks(int rank) const { return p.first_block[rank] < p.first_block[rank + 1]; }
  __device__ bool is_own(int block) const {
    return block >= p.first_block[p.rank] && block < p.first_block[p.rank + 1];
  }
  __device__ int rank_of(int block) const {
    int rank = 0;
    while (block >= p.first_block[rank + 1]) ++rank;
    return rank;
  }
  __device__ float2 own_pair(int block, std::int64_t row, int pair) const {
    const std::int64_t at = (block - p.first_block[p.rank]) * p.rows + row;
    return reinterpret_cast<const float2*>(p.own + at * p.row_floats)[pair];
  }
  __device__ std::int64_t word_of_row(int block, std::int64_t row) const {
    return box_ + (block * p.rows + row) * p.row_floats;
  }
  __device__ std::int64_t word_of_silent(int rank) const {
    return box_ + p.all_blocks * p.rows * p.row_floats + (std::int64_t{rank} * kPeerWarps + kernel_warp()) * 2;
  }

  __device__ WordPair wait_for(int rank, const PeerWord* from) {
    for (;;) {
      const WordPair found = look_at(from);
      if (found.is_of(number_)) return found;
      if (end_ == 0) end_ = now() + p.nanoseconds;
      if (now() < end_) continue;
      p.missing[rank] = 1;
      came_ = false;
      return found;
    }
  }
  __device__ bool all_came() const { return __all_sync(~0u, came_); }

  const PeerParams& p;
  unsigned number_;
  std::int64_t box_;
  std::uint64_t end_ = 0;  // of patience, once there was something to wait for
  bool came_ = true;
};

}  // namespace treeattn::kernels::cuda
