// SPDX-License-Identifier: Apache-2.0
// `bench attention` on one device: a shape becomes a line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "options.h"

namespace treeattn::tools {

struct AttentionLine {
  Shape shape;
  std::string isa;  // or the GPU's kernel
  double ms = 0;
  double gb_s = 0;
  double limit_gb_s = 0;
  double ratio = 0;  // of the limit that applies
  std::size_t peak_bytes = 0;
  std::size_t formula_bytes = 0;
  std::optional<double> gflops;
  double peak_gflops = 0;

  // Everything that follows from the shape, from the time of a call, and from the limits of the device.
  void fill_in(double seconds, double read_gb_s, double multiply_add_gflops);
};

// Few queries read K and V once and do little else: their limit is memory. More are limited by arithmetic.
bool is_prefill(const Shape& shape);

struct AttentionBenchOptions {
  int threads = 1;
  int repeat = 0;  // 0: as many as fit into a second or so
  std::uint64_t seed = 1;
  bool quick = false;
};

class AttentionBench {
 public:
  virtual ~AttentionBench() = default;
  // "cpu", or "cuda:0 NVIDIA H200".
  virtual std::string device() const = 0;
  // Bytes that a shape needs, and what is short where that is too much; empty where there is room.
  virtual std::string lack(const Shape& shape) const = 0;
  virtual AttentionLine measure(const Shape& shape) = 0;
};

std::unique_ptr<AttentionBench> cpu_attention_bench(const AttentionBenchOptions& options);
// Throws Unavailable.
std::unique_ptr<AttentionBench> gpu_attention_bench(const AttentionBenchOptions& options, int gpu);

}  // namespace treeattn::tools
