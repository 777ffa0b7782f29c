// SPDX-License-Identifier: Apache-2.0
// The kernel of peer_exchange.h, as the host calls it.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/ranks/peer_exchange.h"

namespace treeattn::kernels::cuda {

inline constexpr int kMostPeers = 64;
inline constexpr int kPeerRowsAtOnce = 4;                   // of a block: a warp to each
inline constexpr int kPeerBlocks = 64, kMergeBlocks = 128;  // at most
inline constexpr int kPeerWarps = kPeerBlocks * kPeerRowsAtOnce;

struct PeerParams {
  // Blocks of all ranks: where nobody is waited for, on this GPU.
  float* states = nullptr;
  // Else [ranks] of each rank: words of all blocks, then [ranks, kPeerWarps, 2] by which ranks without blocks say that
  // they are there. That is the mailbox of even turns, and behind it there is one for odd ones.
  PeerWord* mailbox[kMostPeers] = {};
  std::int64_t mailbox_words = 0;
  int first_block[kMostPeers + 1] = {};  // [ranks + 1] where the blocks of a rank begin
  bool some_have_none = false;
  const float* own = nullptr;  // this rank's blocks
  // On this GPU, [kPeerWarps]: how many turns each warp has done, as a call that is recorded and repeated is another
  // one every time. Then [1]: set where one has waited in vain, and all that follow wait for nobody.
  unsigned* turns = nullptr;
  int rank = 0;
  int ranks = 0;      // 0: nobody is waited for
  bool push = true;   // writes its own to all
  bool merge = true;  // waits for all, and merges
  int all_blocks = 0;
  const int* merges = nullptr;  // [merge_count, 2] on this GPU
  int merge_count = 0;
  int root = 0;              // the block that holds the root in the end
  float* scratch = nullptr;  // all_blocks, on this GPU: to merge in where shared memory has no room
  float* result = nullptr;   // [rows] or null: the root's block goes here, in the host's memory
  float* kept = nullptr;     // [rows] or null: and here, on this GPU
  FinishedRows out;          // and what it comes to
  std::int64_t rows = 0;
  int row_floats = 0;
  std::uint64_t nanoseconds = 0;  // to wait for others
  unsigned* missing = nullptr;    // [ranks] set where a rank was not heard from; in the host's memory
  unsigned* finished = nullptr;   // [exchange_blocks] or null: `turn`, once a block's rows of the result are there
  unsigned turn = 0;
};

inline int exchange_blocks(const PeerParams& p) {
  const int most = p.ranks > 0 ? kPeerBlocks : kMergeBlocks;
  return static_cast<int>(std::clamp<std::int64_t>((p.rows + kPeerRowsAtOnce - 1) / kPeerRowsAtOnce, 1, most));
}

// overlaps: as in start_dependent.
void start_exchange(const PeerParams& params, bool overlaps, cudaStream_t stream);
// Loads the kernel: to be done while no kernel waits for another.
void load_exchange();

}  // namespace treeattn::kernels::cuda
