// SPDX-License-Identifier: Apache-2.0
// The linear maps of a decode step of Llama-3.1-8B and Llama-3.2-1B on the GPU, bfloat16 and int8, against a plain read
// of as many bytes in the same run: microseconds a layer, from a CUDA graph of layers with weights of their own.
#include <cuda_runtime.h>

#include <functional>

#include "gpu_bench.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/model/linear_kernels.h"
#include "treeattn/cuda.h"

namespace {

using namespace treeattn;
using bench::check, bench::median_ms;
using kernels::cuda::NextNorm, kernels::cuda::Queue, kernels::cuda::StreamedMap, kernels::cuda::StreamedRows;

struct Size {
  const char* name;
  std::int64_t hidden, kv, dim;
};
constexpr Size kSizes[] = {{"8B", 4096, 1024, 14336}, {"1B", 2048, 512, 8192}};
constexpr std::int64_t kMostRows = 16;
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
  const void* data = nullptr;
  const float* scales = nullptr;  // null: bfloat16
  std::int64_t rows = 0, cols = 0;

  Matrix(std::int64_t all_rows, std::int64_t all_cols, bool int8, unsigned seed) : rows(all_rows), cols(all_cols) {
    data = filled(rows * cols * (int8 ? 1 : 2), seed);
    if (int8) scales = static_cast<const float*>(filled(rows * cols / kernels::kWeightGroup * 4, seed));
  }
  StreamedMap map(float* y) const { return {data, y, rows, rows, scales}; }
  double bytes() const {
    return static_cast<double>(rows * cols) * (scales == nullptr ? 2.0 : 1.0 + 4.0 / kernels::kWeightGroup);
  }

 private:
  static void* filled(std::int64_t bytes, unsigned seed) {
    auto* memory = allocate<std::uint16_t>(bytes / 2, "weights");
    bench::fill_kernel<<<4096, 256>>>(memory, static_cast<std::size_t>(bytes / 2), seed);
    return memory;
  }
};

struct Layer {
  Layer(const Size& size, bool int8, unsigned seed)
      : q(size.hidden, size.hidden, int8, seed),
        k(size.kv, size.hidden, int8, seed + 1),
        v(size.kv, size.hidden, int8, seed + 2),
        o(size.hidden, size.hidden, int8, seed + 3),
        gate(size.dim, size.hidden, int8, seed + 4),
        up(size.dim, size.hidden, int8, seed + 5),
        down(size.hidden, size.dim, int8, seed + 6) {}
  Matrix q, k, v, o, gate, up, down;
};

// What the maps read and write beside the weights.
struct Rows {
  explicit Rows(const Size& size)
      : rounded(allocate<std::uint16_t>(kMostRows * size.hidden, "x")),
        activated(allocate<std::uint16_t>(kMostRows * size.dim, "activated")),
        q(allocate<float>(kMostRows * size.hidden, "q")),
        k(allocate<float>(kMostRows * size.kv, "k")),
        v(allocate<float>(kMostRows * size.kv, "v")),
        y(allocate<float>(kMostRows * size.hidden, "y")),
        norm(allocate<float>(size.hidden, "norm")),
        scaled(allocate<std::uint16_t>(kMostRows * size.hidden, "scaled")),
        squares(allocate<float>(kMostRows * size.hidden / kernels::cuda::kNormPart, "squares")) {}
  std::uint16_t *rounded, *activated;
  float *q, *k, *v, *y, *norm;
  std::uint16_t* scaled;
  float* squares;

  StreamedRows normalised() const { return {scaled, squares, y, 1e-5f}; }
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

// rate: GB/s of a plain read.
void measure(const Size& size, bool int8, double rate, const Queue& queue) {
  std::vector<Layer> layers;
  for (unsigned i = 0; i < kLayers; ++i) layers.emplace_back(size, int8, 8 * i);
  const Rows x(size);
  std::int64_t rows = 1;
  const auto qkv = [&](const Layer& w) {
    const StreamedMap maps[] = {w.q.map(x.q), w.k.map(x.k), w.v.map(x.v)};
    stream_linear(maps, size.hidden, x.normalised(), rows, queue);
  };
  const auto o = [&](const Layer& w) {
    stream_added(w.o.map(x.y), size.hidden, {x.rounded, nullptr, 0}, rows, x.next(), queue);
  };
  const auto gate_up = [&](const Layer& w) {
    stream_gated(w.gate.map(nullptr), w.up.map(nullptr), size.hidden, x.normalised(), rows, x.activated, queue);
  };
  const auto down = [&](const Layer& w) {
    stream_added(w.down.map(x.y), size.dim, {x.activated, nullptr, 0}, rows, x.next(), queue);
  };
  const auto all = [&](const Layer& w) {
    qkv(w);
    o(w);
    gate_up(w);
    down(w);
  };
  check(cudaDeviceSynchronize(), "set up");

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
      std::printf("%-5s %-8s %-5lld %-9s %9.1f %9.1f %6.1f%%\n", size.name, int8 ? "int8" : "bfloat16",
                  static_cast<long long>(count), part.name, limit, ours, 100 * limit / ours);
    }
  }
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
  queue.overlaps = kernels::cuda::code_is_for_hopper();
  queue.multiprocessors = gpu.multiprocessors;

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
  std::printf("%-5s %-8s %-5s %-9s %9s %9s %7s\n", "model", "weights", "rows", "maps", "limit us", "ours us", "ratio");
  for (const Size& size : kSizes) {
    for (const bool int8 : {false, true}) measure(size, int8, rate, queue);
  }
  check(cudaDeviceSynchronize(), "run");
  return 0;
}
