// SPDX-License-Identifier: Apache-2.0
// Causal prefill on the GPU: TFLOP/s, counted as 4 heads tokens^2 dim / 2. Beside it, other libraries on the same
// shapes: bench/peers/gpu_prefill_peers.py, which runs this program first.
#include "gpu_bench.cuh"
#include "treeattn/cuda.h"

namespace {

using namespace treeattn;
using bench::check;

struct Shape {
  std::int64_t heads, kv_heads, dim, tokens;
};

}  // namespace

int main(int argc, char** argv) {
  const int branches = argc > 1 ? std::atoi(argv[1]) : ReductionOrder{}.branches;
  const int only = argc > 2 ? std::atoi(argv[2]) : -1;  // one line of the table
  if (!cuda_problem().empty()) {
    std::printf("SKIPPED: %s\n", cuda_problem().c_str());
    return 77;
  }
  const Shape shapes[] = {{16, 16, 128, 4096}, {16, 16, 128, 16384}, {16, 16, 128, 65536}, {32, 8, 128, 16384},
                          {32, 8, 64, 16384},  {32, 8, 72, 16384},   {32, 8, 112, 16384}};
  std::printf("%-14s %8s %9s %9s %s\n", "heads x dim", "tokens", "ms", "TFLOP/s", "kernel");
  for (const Shape& s : shapes) {
    if (only >= 0 && &s != shapes + only) continue;
    const auto q_count = static_cast<std::size_t>(s.tokens * s.heads * s.dim);
    const auto kv_count = static_cast<std::size_t>(s.tokens * s.kv_heads * s.dim);
    unsigned short* numbers = nullptr;
    float* out = nullptr;
    check(cudaMalloc(&numbers, (q_count + 2 * kv_count) * sizeof(unsigned short)), "q, K and V");
    check(cudaMalloc(&out, (q_count + static_cast<std::size_t>(s.tokens * s.heads)) * sizeof(float)), "out and lse");
    bench::fill_kernel<<<4096, 256>>>(numbers, q_count + 2 * kv_count, 1);
    AttentionInput in;
    in.q = QueryView::dense(numbers, DType::kBFloat16, 1, s.tokens, s.heads, s.dim);
    in.k = KvView::tokens_first(numbers + q_count, DType::kBFloat16, 1, s.tokens, s.kv_heads, s.dim);
    in.v = KvView::tokens_first(numbers + q_count + kv_count, DType::kBFloat16, 1, s.tokens, s.kv_heads, s.dim);
    in.order.branches = branches;
    AttentionOptions options;
    options.causal = true;
    {
      CudaPlan plan(0, in, options);
      check(cudaDeviceSynchronize(), "set up");
      const double ms =
          bench::median_ms(s.tokens > 20000 ? 5 : 15, [&](int) { plan.attention(out, out + q_count, nullptr); });
      check(cudaDeviceSynchronize(), "run");
      const double operations =
          2.0 * static_cast<double>(s.heads * s.dim) * static_cast<double>(s.tokens) * static_cast<double>(s.tokens);
      std::printf("%2lld/%lld x %-8lld %8lld %9.4f %9.1f %s\n", static_cast<long long>(s.heads),
                  static_cast<long long>(s.kv_heads), static_cast<long long>(s.dim), static_cast<long long>(s.tokens),
                  ms, operations / ms * 1e-9, plan.kernel().c_str());
    }
    check(cudaFree(numbers), "free");
    check(cudaFree(out), "free");
  }
  return 0;
}
