// SPDX-License-Identifier: Apache-2.0
// The rows of weights that one row of x meets, dealt out to the threads.
//
// Every thread has a part of its own, which it reads from end to end, mostly as four streams, as one leaves a fifth of
// the read bandwidth unused (but not of a Neoverse N1: LinearOps::streams). A new place in memory costs one or two
// microseconds until its streams are at full speed again, as much as 64 KiB of weights (docs/cpu_notes.md). A thread
// claims its part block by block, so that one that is done goes on with what others have left of theirs.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>

#include "kernels/model_ops.h"

namespace treeattn::kernels {

class RowParts {
 public:
  // Rows of a map to work on at once, as LinearArgs has them.
  struct Rows {
    std::int64_t begin = 0, end = 0, stream = 0;
  };

  // The maps have the same type and number of columns. streams: LinearOps::streams.
  RowParts(std::span<const Projection> maps, int streams, int threads);

  // How many threads there is work for.
  int seats() const { return seats_; }

  // Calls body(map, rows) until all rows of all maps are claimed, by those who call this with another seat, too.
  template <class Body>
  void work(int seat, const Body& body) {
    for (int i = 0; i < seats_; ++i) {
      for (std::size_t m = 0; m < maps_.size(); ++m) {
        Part& part = part_of(m, (seat + i) % seats_);
        for (std::int64_t block; (block = part.next.fetch_add(1, std::memory_order_relaxed)) < part.blocks;) {
          body(maps_[m], rows_of(part, block));
        }
      }
    }
  }

 private:
  struct alignas(64) Part {
    std::int64_t begin = 0, end = 0;  // rows
    std::int64_t length = 0;          // rows of each stream; what is left over is a block of its own
    std::int64_t blocks = 0;
    std::atomic<std::int64_t> next = 0;
  };

  Part& part_of(std::size_t map, int seat) {
    return parts_[map * static_cast<std::size_t>(seats_) + static_cast<std::size_t>(seat)];
  }
  Rows rows_of(const Part& part, std::int64_t block) const;

  const std::span<const Projection> maps_;
  const int streams_;
  int seats_ = 1;
  std::int64_t block_ = 1;  // rows of a block, in each stream
  std::unique_ptr<Part[]> parts_;
};

}  // namespace treeattn::kernels
