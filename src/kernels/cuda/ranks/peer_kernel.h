// SPDX-License-Identifier: Apache-2.0
// The kernel of peer_exchange.h, as the host calls it.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/ranks/peer_exchange.h"

namespace treeattn::kernels::cuda {

inline constexpr int kMostPeers = 64;
// At most. Few, so that those of several ranks on one GPU run at the same time; a merge that waits for nobody may have
// more.
inline constexpr int kPeerBlocks = 8, kMergeBlocks = 128;
inline constexpr int kPeerRowsAtOnce = 4;  // of a block

inline constexpr int kPeerCounters = kPeerBlocks + 1;

struct PeerParams {
  float* mailbox[kMostPeers] = {};   // [ranks] of each rank, for even turns: all blocks of all ranks
  std::int64_t odd_turns = 0;        // floats from there to the one for odd turns
  unsigned* flags[kMostPeers] = {};  // [ranks] of each rank: [ranks, kPeerBlocks], who has come how often
  int rank = 0;
  int ranks = 0;      // 0: nobody is waited for
  unsigned turn = 0;  // counts the calls, from 1
  // Instead, on this GPU: [kPeerBlocks] how many calls each block has done. A call that is recorded and repeated is
  // another one every time. Then [1]: set where one has waited in vain, and all that follow do nothing.
  unsigned* turns = nullptr;
  bool push = true;   // writes its own to all
  bool merge = true;  // waits for all, and merges
  const float* own = nullptr;
  int first_block = 0, blocks = 0;  // of this rank
  int all_blocks = 0;               // of all ranks
  const int* merges = nullptr;      // [merge_count, 2] on this GPU
  int merge_count = 0;
  int root = 0;             // the block that holds the root in the end
  float* result = nullptr;  // [rows] or null: the root's block goes here, in the host's memory
  float* kept = nullptr;    // [rows] or null: and here, on this GPU
  FinishedRows out;         // and what it comes to
  std::int64_t rows = 0;
  int row_floats = 0;
  std::uint64_t nanoseconds = 0;  // to wait for others
  unsigned* missing = nullptr;    // [ranks] set where a rank was not heard from; in the host's memory
  unsigned* finished = nullptr;   // [exchange_blocks] or null: the turn, once a block's rows of the result are there
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
