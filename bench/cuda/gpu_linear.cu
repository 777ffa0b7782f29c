// SPDX-License-Identifier: Apache-2.0
// The linear maps of a decode step of Llama-3.1-8B on the GPU, bfloat16, against a plain read of as many bytes in the
// same run: microseconds a layer, from a CUDA graph of layers with weights of their own.
#include <cuda_runtime.h>

#include <functional>

#include "gpu_bench.cuh"
#include "kernels/cuda/model/linear_kernels.h"
#include "treeattn/cuda.h"

namespace {

using namespace treeattn;
using bench::check, bench::median_ms;
using kernels::cuda::NextNorm, kernels::cuda::Queue, kernels::cuda::StreamedMap, kernels::cuda::StreamedRows;

constexpr std::int64_t kHidden = 4096, kKv = 1024, kDim = 14336, kMostRows = 16;
constexpr int kLayers = 8;

// GPU memory that lives as long as the program.
template <class T>
T* allocate(std::int64_t count, const char* what) {
  T* memory = nullptr;
  check(cudaMalloc(&memory, static_cast<std::size_t>(count) * sizeof(T)), what);
  check(cudaMemset(memory, 0, static_cast<std::size_t>(count) * sizeof(T)), what);
  return memory;
}

struct Matrix {
  const std::uint16_t* data = nullptr;
  std::int64_t rows = 0, cols = 0;

  Matrix(std::int64_t all_rows, std::int64_t all_cols, unsigned seed) : rows(all_rows), cols(all_cols) {
    auto* memory = allocate<std::uint16_t>(rows * cols, "weights");
    bench::fill_kernel<<<4096, 256>>>(memory, static_cast<std::size_t>(rows * cols), seed);
    data = memory;
  }
  double bytes() const { return 2.0 * static_cast<double>(rows * cols); }
};

struct Layer {
  explicit Layer(unsigned seed)
      : q(kHidden, kHidden, seed),
        k(kKv, kHidden, seed + 1),
        v(kKv, kHidden, seed + 2),
        o(kHidden, kHidden, seed + 3),
        gate(kDim, kHidden, seed + 4),
        up(kDim, kHidden, seed + 5),
        down(kHidden, kDim, seed + 6) {}
  Matrix q, k, v, o, gate, up, down;
};

// What the maps read and write beside the weights.
struct Rows {
  std::uint16_t* rounded = allocate<std::uint16_t>(kMostRows * kHidden, "x");
  std::uint16_t* activated = allocate<std::uint16_t>(kMostRows * kDim, "activated");
  float* q = allocate<float>(kMostRows * kHidden, "q");
  float* k = allocate<float>(kMostRows * kKv, "k");
  float* v = allocate<float>(kMostRows * kKv, "v");
  float* y = allocate<float>(kMostRows * kHidden, "y");
  float* norm = allocate<float>(kHidden, "norm");
  std::uint16_t* scaled = allocate<std::uint16_t>(kMostRows * kHidden, "scaled");
  float* squares = allocate<float>(kMostRows * kHidden / kernels::cuda::kNormPart, "squares");

  StreamedRows normalised() const { return {scaled, squares, 1e-5f}; }
  NextNorm next() const { return {norm, scaled, squares}; }
};

// Once, recorded and then repeated; milliseconds of the graph.
double graph_ms(const Queue& queue, const std::function<void()>& work) {
  cudaGraph_t recorded = nullptr;
  cudaGraphExec_t graph = nullptr;
  check(cudaStreamBeginCapture(queue.stream, cudaStreamCaptureModeThreadLocal), "recording");
  work();
  check(cudaStreamEndCapture(queue.stream, &recorded), "recording");
  check(cudaGraphInstantiate(&graph, recorded, 0), "recording");
  const double ms = median_ms(
      15, [&](int) { check(cudaGraphLaunch(graph, queue.stream), "graph"); }, queue.stream);
  check(cudaGraphExecDestroy(graph), "graph");
  check(cudaGraphDestroy(recorded), "graph");
  return ms;
}

}  // namespace

int main() {
  if (!cuda_problem().empty()) {
    std::printf("SKIPPED: %s\n", cuda_problem().c_str());
    return 77;
  }
  Queue queue;
  check(cudaStreamCreateWithFlags(&queue.stream, cudaStreamNonBlocking), "stream");
  const CudaDevice gpu = cuda_devices()[0];
  queue.overlaps = gpu.compute_major >= 9;
  queue.multiprocessors = gpu.multiprocessors;

  std::vector<Layer> layers;
  for (unsigned i = 0; i < kLayers; ++i) layers.emplace_back(8 * i);
  const Rows x;
  std::int64_t rows = 1;
  const auto qkv = [&](const Layer& w) {
    const StreamedMap maps[] = {{w.q.data, x.q, kHidden}, {w.k.data, x.k, kKv}, {w.v.data, x.v, kKv}};
    stream_linear(maps, kHidden, x.normalised(), rows, queue);
  };
  const auto o = [&](const Layer& w) {
    const StreamedMap map{w.o.data, x.y, kHidden};
    stream_added(map, kHidden, {x.rounded, nullptr, 0}, rows, x.next(), queue);
  };
  const auto gate_up = [&](const Layer& w) {
    stream_gated(w.gate.data, w.up.data, kDim, kHidden, x.normalised(), rows, x.activated, queue);
  };
  const auto down = [&](const Layer& w) {
    const StreamedMap map{w.down.data, x.y, kHidden};
    stream_added(map, kDim, {x.activated, nullptr, 0}, rows, x.next(), queue);
  };
  const auto all = [&](const Layer& w) {
    qkv(w);
    o(w);
    gate_up(w);
    down(w);
  };

  constexpr std::int64_t kReadBytes = std::int64_t{2} << 30;  // which no cache holds
  auto* const read_from = allocate<std::uint16_t>(kReadBytes / 2, "what is read");
  auto* const sink = allocate<unsigned>(1, "sink");
  bench::fill_kernel<<<4096, 256>>>(read_from, kReadBytes / 2, 1);
  check(cudaDeviceSynchronize(), "set up");
  const double read_ms = graph_ms(queue, [&] {
    bench::read_kernel<<<static_cast<unsigned>(16 * gpu.multiprocessors), 256, 0, queue.stream>>>(
        reinterpret_cast<const uint4*>(read_from), kReadBytes / 16, sink);
  });
  const double rate = static_cast<double>(kReadBytes) / read_ms * 1e-6;  // GB/s
  std::printf("a plain read: %.0f GB/s\n", rate);
  std::printf("%-5s %-9s %9s %9s %7s\n", "rows", "maps", "limit us", "ours us", "ratio");

  const Layer& first = layers.front();
  const double qkv_bytes = first.q.bytes() + first.k.bytes() + first.v.bytes();
  const double gate_up_bytes = first.gate.bytes() + first.up.bytes();
  const struct {
    const char* name;
    double bytes;
    std::function<void(const Layer&)> work;
  } parts[] = {{"q, k, v", qkv_bytes, qkv},
               {"o", first.o.bytes(), o},
               {"gate, up", gate_up_bytes, gate_up},
               {"down", first.down.bytes(), down},
               {"a layer", qkv_bytes + first.o.bytes() + gate_up_bytes + first.down.bytes(), all}};
  for (const std::int64_t count : {1, 8, 16}) {
    rows = count;
    for (const auto& part : parts) {
      const double ms = graph_ms(queue, [&] {
        for (const Layer& w : layers) part.work(w);
      });
      const double limit = part.bytes / rate * 1e-3, ours = ms * 1e3 / kLayers;
      std::printf("%-5lld %-9s %9.1f %9.1f %6.1f%%\n", static_cast<long long>(count), part.name, limit, ours,
                  100 * limit / ours);
    }
  }
  check(cudaDeviceSynchronize(), "run");
  return 0;
}
