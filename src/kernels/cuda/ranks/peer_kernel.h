// SPDX-License-Identifier: Apache-2.0
// The kernel of peer_exchange.h, as the host calls it.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace treeattn::kernels::cuda {

inline constexpr int kMostPeers = 64;
// At most. Few, so that those of several ranks on one GPU run at the same time; a merge that waits for nobody may have
// more.
inline constexpr int kPeerBlocks = 8, kMergeBlocks = 128;
inline constexpr int kPeerRowsAtOnce = 4;  // of a block

struct PeerParams {
  float* mailbox[kMostPeers] = {};   // [ranks] of each rank, of this turn: all blocks of all ranks
  unsigned* flags[kMostPeers] = {};  // [ranks] of each rank: [ranks, kPeerBlocks], who has come how often
  int rank = 0;
  int ranks = 0;      // 0: nobody is waited for
  unsigned turn = 0;  // counts the calls, from 1
  bool push = true;   // writes its own to all
  bool merge = true;  // waits for all, and merges
  const float* own = nullptr;
  int first_block = 0, blocks = 0;  // of this rank
  int all_blocks = 0;               // of all ranks
  const int* merges = nullptr;      // [merge_count, 2] on this GPU
  int merge_count = 0;
  int root = 0;             // the block that holds the root in the end
  float* result = nullptr;  // [rows] the root's block goes here, in the host's memory
  float* kept = nullptr;    // [rows] or null: and here, on this GPU
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

void start_exchange(const PeerParams& params, cudaStream_t stream);
// Loads the kernel: to be done while no kernel waits for another.
void load_exchange();

}  // namespace treeattn::kernels::cuda
