// SPDX-License-Identifier: Apache-2.0
// Decode on the GPU against a plain read of as many bytes, in the same run: medians over rotating buffers, so that no
// call finds its keys in a cache.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <utility>
#include <vector>

#include "gpu_bench.cuh"
#include "treeattn/cuda.h"

namespace {

using namespace treeattn;
using bench::check, bench::fill_kernel, bench::median_ms, bench::read_kernel;

// Any int8; as fp8, numbers below 2.
__global__ void fill_bytes_kernel(unsigned char* data, std::size_t count, unsigned seed) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x) {
    unsigned x = static_cast<unsigned>(i) * 2654435761u + seed;
    x ^= x >> 15;
    x *= 2246822519u;
    data[i] = static_cast<unsigned char>(x >> 13 & 0xbf);
  }
}

__global__ void fill_scales_kernel(float* data, std::size_t count) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x) {
    data[i] = 0.01f + 0.001f * static_cast<float>(i % 7);
  }
}

struct Shape {
  std::int64_t heads, kv_heads, dim, batch, tokens;
  DType type = DType::kBFloat16;
  bool scales = false;
  DType q_type = DType::kBFloat16;

  std::size_t rows() const { return static_cast<std::size_t>(batch * tokens * kv_heads); }
  // Bytes of K, or of V, and of their scales.
  std::size_t elements() const { return rows() * static_cast<std::size_t>(dim) * dtype_size(type); }
  std::size_t with_scales() const { return elements() + (scales ? rows() * sizeof(float) : 0); }
  const char* type_name() const {
    return scales ? type == DType::kInt8 ? "int8" : "fp8+scale" : dtype_name(type).data();
  }
};

// K or V at `data`, elements first.
KvView view_of(const Shape& s, const std::byte* data) {
  const KvView view = KvView::tokens_first(data, s.type, s.batch, s.tokens, s.kv_heads, s.dim);
  return s.scales ? view.with_scales(reinterpret_cast<const float*>(data + s.elements())) : view;
}

void fill(const Shape& s, std::byte* data, unsigned seed) {
  if (dtype_size(s.type) > 1) {  // two of bfloat16 side by side are a float32 like the second
    fill_kernel<<<4096, 256>>>(reinterpret_cast<unsigned short*>(data), s.elements() / 2, seed);
  } else {
    fill_bytes_kernel<<<4096, 256>>>(reinterpret_cast<unsigned char*>(data), s.elements(), seed);
  }
  if (s.scales) fill_scales_kernel<<<1024, 256>>>(reinterpret_cast<float*>(data + s.elements()), s.rows());
}

}  // namespace

int main(int argc, char** argv) {
  // Lines of the table: all, or from one to another.
  const int from = argc > 1 ? std::atoi(argv[1]) : 0;
  const int to = argc > 2 ? std::atoi(argv[2]) : argc > 1 ? from : std::numeric_limits<int>::max();
  if (!cuda_problem().empty()) {
    std::printf("SKIPPED: %s\n", cuda_problem().c_str());
    return 77;
  }
  const int blocks = 8 * cuda_devices()[0].multiprocessors;
  std::vector<Shape> shapes = {{16, 16, 128, 1, 2048},   {16, 16, 128, 1, 16384},  {16, 16, 128, 1, 65536},
                               {16, 16, 128, 1, 131072}, {16, 16, 128, 1, 655360}, {32, 8, 128, 1, 4096},
                               {32, 8, 128, 1, 16384},   {32, 8, 128, 1, 32768},   {32, 8, 128, 1, 65536},
                               {32, 8, 128, 1, 131072},  {32, 8, 128, 1, 655360},  {64, 8, 128, 1, 131072},
                               {32, 8, 64, 1, 131072},   {32, 8, 128, 32, 8192},   {32, 8, 128, 16, 32768}};
  for (const auto& [type, scales] :
       {std::pair{DType::kInt8, true}, std::pair{DType::kFp8E4M3, false}, std::pair{DType::kFp8E4M3, true}}) {
    for (const Shape& s : {Shape{16, 16, 128, 1, 131072}, Shape{16, 16, 128, 1, 262144}, Shape{32, 8, 128, 1, 262144},
                           Shape{32, 8, 128, 1, 1048576}, Shape{64, 8, 128, 1, 262144}, Shape{64, 8, 128, 1, 1048576},
                           Shape{32, 8, 64, 1, 524288}, Shape{32, 8, 64, 1, 1048576}}) {
      shapes.push_back(s);
      shapes.back().type = type;
      shapes.back().scales = scales;
    }
  }
  for (const std::int64_t tokens : {65536, 131072}) shapes.push_back({128, 8, 128, 1, tokens});
  for (const Shape& s : {Shape{28, 4, 128, 1, 262144}, Shape{8, 2, 128, 1, 524288}, Shape{16, 1, 128, 1, 1048576}}) {
    shapes.push_back(s);
  }
  for (const Shape& s : {Shape{16, 16, 128, 1, 32768}, Shape{32, 8, 128, 1, 65536}, Shape{64, 8, 128, 1, 65536},
                         Shape{128, 8, 128, 1, 65536}, Shape{32, 8, 64, 1, 131072}, Shape{16, 8, 256, 1, 65536}}) {
    shapes.push_back(s);
    shapes.back().type = DType::kFloat32;
  }
  for (const DType type : {DType::kInt8, DType::kFp8E4M3}) {
    shapes.push_back({128, 8, 128, 1, 262144});
    shapes.back().type = type;
    shapes.back().scales = true;
  }
  for (const Shape& s : {Shape{128, 8, 64, 1, 262144}, Shape{16, 8, 256, 1, 65536}, Shape{64, 8, 256, 1, 65536},
                         Shape{32, 8, 72, 1, 131072}, Shape{32, 8, 112, 1, 131072}, Shape{32, 8, 192, 1, 65536}}) {
    shapes.push_back(s);
  }
  for (const Shape& s : {Shape{16, 16, 128, 1, 65536}, Shape{32, 8, 128, 1, 131072}, Shape{64, 8, 128, 1, 131072}}) {
    shapes.push_back(s);
    shapes.back().q_type = DType::kFloat32;
  }
  std::printf("%-9s %-14s %5s %8s %9s %9s %9s %7s %s\n", "K and V", "heads x dim", "batch", "tokens", "MiB", "read ms",
              "ours ms", "ratio", "kernel");
  for (const Shape& s : shapes) {
    if (&s - shapes.data() < from || &s - shapes.data() > to) continue;
    const std::size_t bytes = 2 * s.with_scales();
    const int sets = static_cast<int>(std::max<std::size_t>(1, (std::size_t{1} << 30) / bytes + 1));
    std::byte* kv = nullptr;
    unsigned short* q = nullptr;
    float* out = nullptr;
    unsigned* sink = nullptr;
    check(cudaMalloc(&kv, static_cast<std::size_t>(sets) * bytes), "K and V");
    const auto q_units = static_cast<std::size_t>(s.batch * s.heads * s.dim) * dtype_size(s.q_type) / 2;
    check(cudaMalloc(&q, q_units * 2), "q");
    check(cudaMalloc(&out, static_cast<std::size_t>(s.batch * s.heads * (s.dim + 1)) * 4), "out");
    check(cudaMalloc(&sink, 4), "sink");
    fill_kernel<<<64, 256>>>(q, q_units, 2);
    std::vector<CudaPlan> plans;
    for (int set = 0; set < sets; ++set) {
      std::byte* k = kv + static_cast<std::size_t>(set) * bytes;
      std::byte* v = k + s.with_scales();
      fill(s, k, 1);
      fill(s, v, 3);
      AttentionInput in;
      in.q = QueryView::dense(q, s.q_type, s.batch, 1, s.heads, s.dim);
      in.k = view_of(s, k);
      in.v = view_of(s, v);
      plans.emplace_back(0, in, AttentionOptions{});
    }
    check(cudaDeviceSynchronize(), "set up");
    const double read = median_ms(31, [&](int i) {
      const auto* first = reinterpret_cast<const uint4*>(kv + static_cast<std::size_t>(i % sets) * bytes);
      read_kernel<<<blocks, 256>>>(first, bytes / 16, sink);
    });
    float* lse = out + s.batch * s.heads * s.dim;
    const double ours =
        median_ms(31, [&](int i) { plans[static_cast<std::size_t>(i % sets)].attention(out, lse, nullptr); });
    check(cudaDeviceSynchronize(), "run");
    std::printf("%-9s %3lld/%lld x %-7lld %5lld %8lld %9.0f %9.4f %9.4f %6.1f%% %s\n", s.type_name(),
                static_cast<long long>(s.heads), static_cast<long long>(s.kv_heads), static_cast<long long>(s.dim),
                static_cast<long long>(s.batch), static_cast<long long>(s.tokens),
                static_cast<double>(bytes) / (1 << 20), read, ours, 100 * read / ours, plans[0].kernel().c_str());
    plans.clear();
    cudaFree(kv);
    cudaFree(q);
    cudaFree(out);
    cudaFree(sink);
  }
  return 0;
}
