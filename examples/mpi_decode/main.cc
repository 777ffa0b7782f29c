// SPDX-License-Identifier: Apache-2.0
// A decoding loop over the processes of mpirun: a prompt of 1000 tokens, then 20 steps. Every process makes the same
// calls, keeps its share of the cache, and gets the same output, bit for bit, however many there are.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <vector>

#include "treeattn/error.h"
#include "treeattn/parallel_attention.h"

namespace {

constexpr std::int64_t kHeads = 8, kKvHeads = 2, kDim = 64, kPrompt = 1000, kSteps = 20;

// Stands for a model: `rows` rows of kDim numbers that depend on the last output.
std::vector<float> project(std::int64_t rows, std::int64_t first_seed, const std::vector<float>& last) {
  std::vector<float> data(static_cast<std::size_t>(rows * kDim));
  std::uint32_t seed = static_cast<std::uint32_t>(first_seed);
  for (std::size_t i = 0; i < data.size(); ++i) {
    seed = seed * 1664525u + 1013904223u;
    data[i] = static_cast<float>(seed >> 8) * 0x1p-23f - 1.0f + last[i % last.size()];
  }
  return data;
}

std::vector<float> decode_all(const std::shared_ptr<treeattn::Communicator>& world) {
  using treeattn::DType, treeattn::KvView;
  treeattn::ThreadPool pool(treeattn::take_own_cores(*world));
  treeattn::KvCache cache(world, {.kv_heads = kKvHeads, .k_dim = kDim, .v_dim = kDim});
  treeattn::ParallelAttention attention(world);
  const treeattn::SequenceId sequence = cache.add_sequence();
  std::vector<float> out(kHeads * kDim, 0.0f);
  for (std::int64_t step = 0; step <= kSteps; ++step) {
    const std::int64_t tokens = step == 0 ? kPrompt : 1;
    const std::vector<float> k = project(tokens * kKvHeads, 3 * step, out);
    const std::vector<float> v = project(tokens * kKvHeads, 3 * step + 1, out);
    const std::vector<float> q = project(kHeads, 3 * step + 2, out);
    cache.append(sequence, KvView::tokens_first(k.data(), DType::kFloat32, 1, tokens, kKvHeads, kDim),
                 KvView::tokens_first(v.data(), DType::kFloat32, 1, tokens, kKvHeads, kDim));
    attention.decode(cache, 0, {&sequence, 1},
                     treeattn::QueryView::dense(q.data(), DType::kFloat32, 1, 1, kHeads, kDim), {}, out, {}, pool);
  }
  return out;
}

}  // namespace

int main() {
  try {
    const auto world = treeattn::mpi_communicator();
    const std::vector<float> out = decode_all(world);
    std::uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a of the bits
    for (const std::byte byte : std::as_bytes(std::span(out))) {
      hash = (hash ^ static_cast<std::uint64_t>(byte)) * 0x100000001b3u;
    }
    if (world->rank() == 0) std::printf("last output: %016llx\n", static_cast<unsigned long long>(hash));
    return std::isfinite(out[0]) ? 0 : 1;
  } catch (const treeattn::LostRanks& error) {
    std::fprintf(stderr, "mpi_decode: %s\n", error.what());  // here a program could shrink() and go on
    return 4;
  } catch (const treeattn::Unavailable& error) {
    std::fprintf(stderr, "mpi_decode: %s\n", error.what());
    return 3;
  }
}
