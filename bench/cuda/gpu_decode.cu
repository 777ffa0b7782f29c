// SPDX-License-Identifier: Apache-2.0
// Decode on the GPU against a plain read of as many bytes, in the same run: medians over rotating buffers, so that no
// call finds its keys in a cache.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "treeattn/cuda.h"

namespace {

using namespace treeattn;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

__global__ void read_kernel(const uint4* data, std::size_t count, unsigned* out) {
  unsigned sum = 0;
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x;
  for (; i + 3 * stride < count; i += 4 * stride) {
    const uint4 a = data[i], b = data[i + stride], c = data[i + 2 * stride], d = data[i + 3 * stride];
    sum += a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
  }
  for (; i < count; i += stride) sum += data[i].x ^ data[i].y ^ data[i].z ^ data[i].w;
  if (sum == 0x12345678u) *out = sum;
}

// Small bfloat16 numbers.
__global__ void fill_kernel(unsigned short* data, std::size_t count, unsigned seed) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x) {
    unsigned x = static_cast<unsigned>(i) * 2654435761u + seed;
    x ^= x >> 15;
    x *= 2246822519u;
    x ^= x >> 13;
    data[i] = static_cast<unsigned short>(((x & 1) << 15) | ((120 + (x >> 1) % 8) << 7) | ((x >> 8) & 127));
  }
}

struct Shape {
  std::int64_t heads, kv_heads, dim, batch, tokens;
};

template <class Call>
double median_ms(int repeats, const Call& call) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  std::vector<float> times;
  for (int i = 0; i < repeats + 3; ++i) {
    check(cudaEventRecord(begin), "record");
    call(i);
    check(cudaEventRecord(end), "record");
    check(cudaEventSynchronize(end), "synchronize");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "time");
    if (i >= 3) times.push_back(ms);
  }
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  return times[times.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  const int only = argc > 1 ? std::atoi(argv[1]) : -1;  // one line of the table
  if (!cuda_problem().empty()) {
    std::printf("SKIPPED: %s\n", cuda_problem().c_str());
    return 77;
  }
  const int blocks = 8 * cuda_devices()[0].multiprocessors;
  const Shape shapes[] = {{16, 16, 128, 1, 2048},   {16, 16, 128, 1, 16384},  {16, 16, 128, 1, 65536},
                          {16, 16, 128, 1, 131072}, {16, 16, 128, 1, 655360}, {32, 8, 128, 1, 4096},
                          {32, 8, 128, 1, 16384},   {32, 8, 128, 1, 32768},   {32, 8, 128, 1, 65536},
                          {32, 8, 128, 1, 131072},  {32, 8, 128, 1, 655360},  {64, 8, 128, 1, 131072},
                          {32, 8, 64, 1, 131072},   {32, 8, 128, 32, 8192},   {32, 8, 128, 16, 32768}};
  std::printf("%-14s %5s %8s %9s %9s %9s %7s %s\n", "heads x dim", "batch", "tokens", "MiB", "read ms", "ours ms",
              "ratio", "kernel");
  for (const Shape& s : shapes) {
    if (only >= 0 && &s != shapes + only) continue;
    const std::size_t elements = static_cast<std::size_t>(s.batch * s.tokens * s.kv_heads * s.dim);
    const std::size_t bytes = 4 * elements;  // K and V
    const int sets = static_cast<int>(std::max<std::size_t>(1, (std::size_t{1} << 30) / bytes + 1));
    unsigned short* kv = nullptr;
    unsigned short* q = nullptr;
    float* out = nullptr;
    unsigned* sink = nullptr;
    check(cudaMalloc(&kv, sets * bytes), "K and V");
    check(cudaMalloc(&q, static_cast<std::size_t>(s.batch * s.heads * s.dim) * 2), "q");
    check(cudaMalloc(&out, static_cast<std::size_t>(s.batch * s.heads * (s.dim + 1)) * 4), "out");
    check(cudaMalloc(&sink, 4), "sink");
    fill_kernel<<<4096, 256>>>(kv, static_cast<std::size_t>(sets) * 2 * elements, 1);
    fill_kernel<<<64, 256>>>(q, static_cast<std::size_t>(s.batch * s.heads * s.dim), 2);
    std::vector<CudaPlan> plans;
    for (int set = 0; set < sets; ++set) {
      AttentionInput in;
      const unsigned short* k = kv + static_cast<std::size_t>(set) * 2 * elements;
      in.q = QueryView::dense(q, DType::kBFloat16, s.batch, 1, s.heads, s.dim);
      in.k = KvView::tokens_first(k, DType::kBFloat16, s.batch, s.tokens, s.kv_heads, s.dim);
      in.v = KvView::tokens_first(k + elements, DType::kBFloat16, s.batch, s.tokens, s.kv_heads, s.dim);
      plans.emplace_back(0, in, AttentionOptions{});
    }
    check(cudaDeviceSynchronize(), "set up");
    const double read = median_ms(31, [&](int i) {
      const auto* from = reinterpret_cast<const uint4*>(kv + static_cast<std::size_t>(i % sets) * 2 * elements);
      read_kernel<<<blocks, 256>>>(from, bytes / 16, sink);
    });
    float* lse = out + s.batch * s.heads * s.dim;
    const double ours =
        median_ms(31, [&](int i) { plans[static_cast<std::size_t>(i % sets)].attention(out, lse, nullptr); });
    check(cudaDeviceSynchronize(), "run");
    std::printf("%2lld/%lld x %-8lld %5lld %8lld %9.0f %9.4f %9.4f %6.1f%% %s\n", static_cast<long long>(s.heads),
                static_cast<long long>(s.kv_heads), static_cast<long long>(s.dim), static_cast<long long>(s.batch),
                static_cast<long long>(s.tokens), static_cast<double>(bytes) / (1 << 20), read, ours, 100 * read / ours,
                plans[0].kernel().c_str());
    plans.clear();
    cudaFree(kv);
    cudaFree(q);
    cudaFree(out);
    cudaFree(sink);
  }
  return 0;
}
