// SPDX-License-Identifier: Apache-2.0
// States from every GPU to every GPU of a machine in one kernel: each rank writes its own into the mailboxes of the
// others, raises a flag there, and merges what has come into its own mailbox. This header needs no CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/cuda/ranks/lent_memory.h"

namespace treeattn::kernels::cuda {

// A number of a mailbox: the bits of a float, and above them the turn it is of. It arrives as one, so that who has seen
// the turn has the float: no flags, and nothing that has to be there before something else.
using PeerWord = unsigned long long;

// What a call exchanges, the same on every rank.
struct ExchangePlan {
  std::vector<int> first_block;             // [ranks + 1] where the blocks of a rank begin
  std::vector<std::pair<int, int>> merges;  // (lower, higher) blocks, one after the other
  std::size_t rows = 0;
  std::size_t row_floats = 0;
  int root = 0;  // the block that holds the root in the end

  std::size_t block_floats() const { return rows * row_floats; }
  bool operator==(const ExchangePlan&) const = default;
};

// Where the result goes on this GPU.
struct FinishedRows {
  float* values = nullptr;           // [rows, row_floats - 2]
  std::uint16_t* rounded = nullptr;  // the same in bfloat16, or null
};

// Made by all ranks together: construct, connect everybody's mailbox(). Then exchange() on all, in the same order.
// Throws Unavailable naming what failed.
class PeerExchange {
 public:
  PeerExchange(int gpu, int rank, ExchangePlan plan);
  ~PeerExchange();
  PeerExchange(const PeerExchange&) = delete;
  PeerExchange& operator=(const PeerExchange&) = delete;

  const ExchangePlan& plan() const;
  LentMemory& mailbox();

  // Where this rank's blocks go before each call, on its GPU. There are none: any address but null.
  float* own() const;
  // Puts the exchange on the stream. out.values null: the root's block goes to root() instead. A rank that does not
  // hear from another within the time ends all the same, and so does all that follows: see missing(). May be recorded
  // and repeated. Not for ranks that share a GPU of one process: the kernel of one that waits may keep another from
  // being started at all.
  void exchange(double seconds, FinishedRows out, void* stream);
  // Whether what is put on the stream now is being recorded.
  static bool is_recorded(void* stream);
  // The two halves of it, as kernels of their own, for these: push() on all, a barrier of the host's threads, then
  // merge(). It is not started before the threads of this process have pushed; what waits for them is no kernel, so it
  // takes nothing from theirs. Not to be recorded.
  void push(void* stream);
  void merge(double seconds, FinishedRows out, void* stream);
  // The root's block of the last call when the stream is done, in the host's memory.
  const float* root() const;
  // Once the stream is done: the ranks that were not heard from; results are good when there are none. After that the
  // mailboxes are out of step and must be made anew.
  std::vector<int> missing() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace treeattn::kernels::cuda
