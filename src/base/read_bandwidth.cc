// SPDX-License-Identifier: Apache-2.0
// One, four or eight streams per thread, whichever is fastest. On a Neoverse V1 a single stream leaves a fifth of the
// bandwidth unused: its prefetcher stops at each page, and with four there are three others under way meanwhile. On a
// Neoverse N1 a single one is faster by 45 %.
#include "base/read_bandwidth.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <new>

#include "base/available_memory.h"
#include "base/round_up.h"
#include "base/timing.h"

namespace treeattn::base {
namespace {

typedef std::uint64_t Vec __attribute__((vector_size(16)));

constexpr std::size_t kVecsPerLine = 64 / sizeof(Vec);
constexpr std::size_t kPiecesPerThread = 4;  // so that a thread disturbed by a neighbour does not hold up the rest
constexpr std::size_t kMinBytes = std::size_t{1} << 20;

// As much of this as there is memory for. The process may have less than the machine (ulimit -v).
Buffer affordable(std::size_t bytes) {
  if (const auto available = available_memory()) bytes = std::min(bytes, *available / 2);
  for (; bytes > kMinBytes; bytes /= 2) {
    try {
      return Buffer(bytes);
    } catch (const std::bad_alloc&) {
    }
  }
  return Buffer(kMinBytes);
}

// Cheap noise: memory that reads as zeros may be one shared page, and equal lines may be compressed on their way.
void fill(std::uint64_t* words, std::size_t count, std::uint64_t seed) {
  for (std::size_t i = 0; i < count; ++i) words[i] = (i + seed) * 0x9e3779b97f4a7c15ull ^ (i << 17);
}

// XOR of `lines` cache lines from each of kStreams places. Eight accumulators hide the latency of the XOR.
template <std::size_t kStreams>
std::uint64_t read_streams(const Vec* data, std::size_t lines) {
  Vec x[8] = {};
  for (std::size_t i = 0; i < lines * kVecsPerLine; i += kVecsPerLine) {
#pragma GCC unroll 8
    for (std::size_t s = 0; s < kStreams; ++s) {
      const Vec* line = data + s * lines * kVecsPerLine + i;
      Vec* to = x + s % 2 * 4;
      to[0] ^= line[0], to[1] ^= line[1], to[2] ^= line[2], to[3] ^= line[3];
    }
  }
  const Vec all = ((x[0] ^ x[1]) ^ (x[2] ^ x[3])) ^ ((x[4] ^ x[5]) ^ (x[6] ^ x[7]));
  return all[0] ^ all[1];
}

struct Way {
  std::size_t streams;
  std::uint64_t (*read)(const Vec* data, std::size_t lines);
};
constexpr Way kWays[] = {{1, read_streams<1>}, {4, read_streams<4>}, {8, read_streams<8>}};

}  // namespace

ReadBandwidthProbe::ReadBandwidthProbe(ThreadPool& pool, std::size_t bytes) : buffer_(affordable(bytes)) {
  constexpr std::size_t kPiece = std::size_t{1} << 17;  // words
  auto* words = buffer_.as<std::uint64_t>();
  const std::size_t count = buffer_.bytes() / sizeof(std::uint64_t);
  pool.run(divide_up(count, kPiece), [&](std::size_t task, int) {
    const std::size_t begin = task * kPiece;
    fill(words + begin, std::min(kPiece, count - begin), begin);
  });
}

double ReadBandwidthProbe::measure(ThreadPool& pool, int repeats) {
  const std::size_t pieces = kPiecesPerThread * static_cast<std::size_t>(pool.size());
  const Vec* data = buffer_.as<Vec>();
  std::atomic<std::uint64_t> sum{0};
  const auto rate_of = [&](const Way& way) {
    const std::size_t lines = buffer_.bytes() / 64 / pieces / way.streams;  // of one stream of one piece
    const std::size_t piece_vecs = way.streams * lines * kVecsPerLine;
    const auto start = Clock::now();
    pool.run(pieces, [&](std::size_t piece, int) {
      sum.fetch_xor(way.read(data + piece * piece_vecs, lines), std::memory_order_relaxed);
    });
    return static_cast<double>(pieces * piece_vecs * sizeof(Vec)) / seconds_since(start) * 1e-9;
  };
  const Way* fastest = kWays;
  double best = 0;
  for (const Way& way : kWays) {
    const double rate = rate_of(way);
    if (rate > best) fastest = &way, best = rate;
  }
  for (int repeat = 1; repeat < repeats; ++repeat) best = std::max(best, rate_of(*fastest));
  sink_ ^= sum.load();
  return best;
}

int ReadBandwidthProbe::passes(int repeats) { return static_cast<int>(std::size(kWays)) + std::max(repeats, 1) - 1; }

double read_bandwidth(ThreadPool& pool, std::size_t bytes, int repeats) {
  return ReadBandwidthProbe(pool, bytes).measure(pool, repeats);
}

}  // namespace treeattn::base
