// SPDX-License-Identifier: Apache-2.0
// One decoding step on one machine: a query of 8 heads attends to 1000 cached tokens of 2 KV heads.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "treeattn/treeattn.h"

namespace {

// Numbers in [-1, 1) that look random and are the same everywhere.
std::vector<float> make_data(std::size_t size, std::uint32_t seed) {
  std::vector<float> data(size);
  for (float& x : data) {
    seed = seed * 1664525u + 1013904223u;
    x = static_cast<float>(seed >> 8) * 0x1p-23f - 1.0f;
  }
  return data;
}

}  // namespace

int main() {
  constexpr std::int64_t kTokens = 1000, kHeads = 8, kKvHeads = 2, kHeadDim = 64;
  const std::vector<float> q = make_data(kHeads * kHeadDim, 1);
  const std::vector<float> k = make_data(kTokens * kKvHeads * kHeadDim, 2);
  const std::vector<float> v = make_data(kTokens * kKvHeads * kHeadDim, 3);
  std::vector<float> out(kHeads * kHeadDim), lse(kHeads);

  try {
    treeattn::ThreadPool pool(treeattn::ThreadPool::available_cores());
    treeattn::AttentionInput in;
    in.q = treeattn::QueryView::dense(q.data(), treeattn::DType::kFloat32, 1, 1, kHeads, kHeadDim);
    in.k = treeattn::KvView::tokens_first(k.data(), treeattn::DType::kFloat32, 1, kTokens, kKvHeads, kHeadDim);
    in.v = treeattn::KvView::tokens_first(v.data(), treeattn::DType::kFloat32, 1, kTokens, kKvHeads, kHeadDim);
    treeattn::attention(in, {}, out, lse, pool);
  } catch (const treeattn::Error& error) {
    std::fprintf(stderr, "single_machine: %s\n", error.what());
    return 1;
  }

  std::printf("treeattn %s\n", treeattn::kVersion);
  bool finite = true;
  for (std::size_t head = 0; head < kHeads; ++head) {
    const float* row = &out[head * kHeadDim];
    std::printf("head %zu: out %9.6f %9.6f %9.6f ...  lse %.6f\n", head, static_cast<double>(row[0]),
                static_cast<double>(row[1]), static_cast<double>(row[2]), static_cast<double>(lse[head]));
    finite = finite && std::isfinite(lse[head]);
  }
  return finite ? 0 : 1;
}
