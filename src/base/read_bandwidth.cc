// SPDX-License-Identifier: Apache-2.0
// Four streams per thread. One stream leaves a fifth of the bandwidth unused: its prefetcher stops at each page, and
// with four there are three others under way meanwhile.
#include "base/read_bandwidth.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <vector>

#include "base/machine.h"

namespace treeattn::base {
namespace {

typedef std::uint64_t Vec __attribute__((vector_size(16)));

constexpr std::size_t kStreams = 4;
constexpr std::size_t kVecsPerLine = 64 / sizeof(Vec);
constexpr std::size_t kPiecesPerThread = 4;  // so that a thread disturbed by a neighbour does not hold up the rest
constexpr std::size_t kMinBytes = std::size_t{1} << 20;

std::size_t affordable(std::size_t bytes) {
  const std::size_t available = available_memory();
  if (available != 0) bytes = std::min(bytes, available / 2);
  return std::max(bytes, kMinBytes);
}

// Cheap noise: memory that reads as zeros may be one shared page, and equal lines may be compressed on their way.
void fill(std::uint64_t* words, std::size_t count, std::uint64_t seed) {
  for (std::size_t i = 0; i < count; ++i) words[i] = (i + seed) * 0x9e3779b97f4a7c15ull ^ (i << 17);
}

// XOR of `lines` cache lines from each of four places. Eight accumulators hide the latency of the XOR.
std::uint64_t read_streams(const Vec* data, std::size_t lines) {
  const Vec* a = data;
  const Vec* b = a + lines * kVecsPerLine;
  const Vec* c = b + lines * kVecsPerLine;
  const Vec* d = c + lines * kVecsPerLine;
  Vec x0{}, x1{}, x2{}, x3{}, y0{}, y1{}, y2{}, y3{};
  for (std::size_t i = 0; i < lines * kVecsPerLine; i += kVecsPerLine) {
    x0 ^= a[i], x1 ^= a[i + 1], x2 ^= a[i + 2], x3 ^= a[i + 3];
    y0 ^= b[i], y1 ^= b[i + 1], y2 ^= b[i + 2], y3 ^= b[i + 3];
    x0 ^= c[i], x1 ^= c[i + 1], x2 ^= c[i + 2], x3 ^= c[i + 3];
    y0 ^= d[i], y1 ^= d[i + 1], y2 ^= d[i + 2], y3 ^= d[i + 3];
  }
  const Vec all = ((x0 ^ x1) ^ (x2 ^ x3)) ^ ((y0 ^ y1) ^ (y2 ^ y3));
  return all[0] ^ all[1];
}

}  // namespace

ReadBandwidthProbe::ReadBandwidthProbe(ThreadPool& pool, std::size_t bytes) : buffer_(affordable(bytes)) {
  constexpr std::size_t kPiece = std::size_t{1} << 17;  // words
  auto* words = buffer_.as<std::uint64_t>();
  const std::size_t count = buffer_.bytes() / sizeof(std::uint64_t);
  pool.run((count + kPiece - 1) / kPiece, [&](std::size_t task, int) {
    const std::size_t begin = task * kPiece;
    fill(words + begin, std::min(kPiece, count - begin), begin);
  });
}

Bandwidth ReadBandwidthProbe::measure(ThreadPool& pool, int repeats) {
  const std::size_t pieces = kPiecesPerThread * static_cast<std::size_t>(pool.size());
  const std::size_t lines = buffer_.bytes() / 64 / pieces / kStreams;  // of one stream of one piece
  const Vec* data = buffer_.as<Vec>();
  std::atomic<std::uint64_t> sum{0};
  std::vector<double> rates;
  for (int repeat = 0; repeat < std::max(repeats, 1); ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    pool.run(pieces, [&](std::size_t piece, int) {
      sum.fetch_xor(read_streams(data + piece * kStreams * lines * kVecsPerLine, lines), std::memory_order_relaxed);
    });
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    rates.push_back(static_cast<double>(pieces * kStreams * lines * 64) / took.count() * 1e-9);
  }
  sink_ ^= sum.load();
  std::sort(rates.begin(), rates.end());
  return {rates.back(), rates[rates.size() / 2]};
}

double read_bandwidth(ThreadPool& pool, std::size_t bytes, int repeats) {
  return ReadBandwidthProbe(pool, bytes).measure(pool, repeats).best;
}

}  // namespace treeattn::base
