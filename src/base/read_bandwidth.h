// SPDX-License-Identifier: Apache-2.0
// How fast this machine reads memory: the limit that decode attention is held against.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/buffer.h"
#include "treeattn/thread_pool.h"

namespace treeattn::base {

// Keeps its buffer, so that a benchmark can measure again right beside each figure: a shared machine does not stay the
// same from one minute to the next.
class ReadBandwidthProbe {
 public:
  static constexpr std::size_t kDefaultBytes = std::size_t{1} << 30;

  // Fills the buffer with the pool's threads. Takes less than `bytes` when that is more than half of the memory
  // available, or more than this process may have. Requires bytes >= 1 MiB; a figure means memory only when the buffer
  // is far larger than the last cache.
  explicit ReadBandwidthProbe(ThreadPool& pool, std::size_t bytes = kDefaultBytes);

  // Reads the whole buffer in each way once and then in the fastest, so that this one has `repeats` passes (at least
  // one), with this pool, which need not be the one that filled it. The best, in GB/s, 1 GB = 1e9 bytes.
  double measure(ThreadPool& pool, int repeats);
  // How many passes that makes, of all ways together.
  static int passes(int repeats);

  std::size_t bytes() const { return buffer_.bytes(); }

 private:
  Buffer buffer_;
  std::uint64_t sink_ = 0;  // what was read, so that the reading cannot be optimised away
};

// The best of `repeats` over a buffer made for the purpose.
double read_bandwidth(ThreadPool& pool, std::size_t bytes, int repeats);

}  // namespace treeattn::base
