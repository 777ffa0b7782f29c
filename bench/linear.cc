// SPDX-License-Identifier: Apache-2.0
// Linear maps of a Llama-3.2-1B: one row of x against the read bandwidth, 512 rows in GFLOP/s.
// usage: linear [threads]
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <vector>

#include "base/buffer.h"
#include "base/half.h"
#include "base/read_bandwidth.h"
#include "base/timing.h"
#include "kernels/model_ops.h"

namespace {

using treeattn::DType;
using treeattn::ThreadPool;
using treeattn::kernels::ModelOps;
using treeattn::kernels::WeightMatrix;

constexpr std::int64_t kGroup = treeattn::kernels::kWeightGroup;
constexpr std::size_t kTotalBytes = std::size_t{768} << 20;  // of copies of a matrix: far beyond the last cache
constexpr int kRepeats = 7;

struct Shape {
  std::int64_t rows, cols;
};
constexpr Shape kShapes[] = {{2048, 2048}, {2 * 8192, 2048}, {2048, 8192}, {128256, 2048}};

double seconds_of(const auto& body) {
  const auto start = treeattn::base::Clock::now();
  body();
  return treeattn::base::seconds_since(start);
}

// As many copies of one matrix as make kTotalBytes, so that none is found in a cache.
class Weights {
 public:
  Weights(Shape shape, DType dtype, ThreadPool& pool) : shape_(shape), dtype_(dtype) {
    const std::size_t elements = static_cast<std::size_t>(shape.rows * shape.cols);
    value_bytes_ = elements * treeattn::dtype_size(dtype);
    scale_bytes_ = dtype == DType::kInt8 ? elements / kGroup * sizeof(float) : 0;
    copies_ = std::max<std::size_t>(1, kTotalBytes / bytes());
    memory_ = treeattn::base::Buffer(copies_ * bytes());
    pool.run(copies_ * kPieces, [&](std::size_t piece, int) { fill(piece / kPieces, piece % kPieces); });
  }

  std::size_t bytes() const { return value_bytes_ + scale_bytes_; }
  std::size_t copies() const { return copies_; }
  WeightMatrix operator[](std::size_t copy) const {
    const std::byte* data = memory_.as<std::byte>() + copy * bytes();
    WeightMatrix w{data, dtype_, shape_.rows, shape_.cols};
    if (dtype_ == DType::kInt8) w.scales = reinterpret_cast<const float*>(data + value_bytes_), w.group = kGroup;
    return w;
  }

 private:
  static constexpr std::size_t kPieces = 16;

  void fill(std::size_t copy, std::size_t piece) {
    std::byte* data = memory_.as<std::byte>() + copy * bytes();
    const std::size_t size = value_bytes_ / kPieces;
    std::uint64_t state = (copy * kPieces + piece + 1) * 0x9e3779b97f4a7c15ull;
    for (std::size_t i = piece * size; i < (piece + 1) * size; i += treeattn::dtype_size(dtype_)) {
      state = state * 6364136223846793005ull + 1442695040888963407ull;
      const float value = static_cast<float>(static_cast<std::int32_t>(state >> 32)) * 0x1p-31f;
      treeattn::base::store_from_float(data + i, dtype_ == DType::kInt8 ? value * 127 : value, dtype_);
    }
    float* scales = reinterpret_cast<float*>(data + value_bytes_);
    const std::size_t count = scale_bytes_ / sizeof(float) / kPieces;
    std::fill(scales + piece * count, scales + (piece + 1) * count, 1.0f / 127);
  }

  Shape shape_;
  DType dtype_;
  std::size_t value_bytes_ = 0, scale_bytes_ = 0, copies_ = 0;
  treeattn::base::Buffer memory_;
};

// One pass over all copies, one after the other, as decode goes through the layers.
double pass_seconds(ModelOps& ops, const Weights& weights, const float* x, std::int64_t rows, float* y) {
  return seconds_of([&] {
    for (std::size_t copy = 0; copy < weights.copies(); ++copy) ops.linear(weights[copy], x, rows, y, false);
  });
}

void bench(DType dtype, ModelOps& ops, ThreadPool& pool, treeattn::base::ReadBandwidthProbe& probe) {
  for (const Shape shape : kShapes) {
    const Weights weights(shape, dtype, pool);
    const auto gigabytes = static_cast<double>(weights.bytes() * weights.copies()) * 1e-9;
    const bool output = shape.rows > 100000;  // the output map: only ever for one row
    const std::int64_t many = output ? 1 : 512;
    std::vector<float> x(static_cast<std::size_t>(many * shape.cols)), y(static_cast<std::size_t>(many * shape.rows));
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>((i * 7919) % 1999) * 1e-3f - 1.0f;

    // In turns, so that both see the same neighbours.
    std::vector<double> rates, limits, ratios;
    pass_seconds(ops, weights, x.data(), 1, y.data());
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      rates.push_back(gigabytes / pass_seconds(ops, weights, x.data(), 1, y.data()));
      limits.push_back(probe.measure(pool, 1));
      ratios.push_back(rates.back() / limits.back());
    }
    const auto best = [](const std::vector<double>& v) { return *std::max_element(v.begin(), v.end()); };
    fmt::print("{:9} [{:6}, {:4}] {:8.1f} {:8.1f} {:7.0f} % {:7.0f} %", treeattn::dtype_name(dtype), shape.rows,
               shape.cols, best(rates), best(limits), 100 * best(rates) / best(limits),
               100 * treeattn::base::median(ratios));
    if (!output) {
      double least = 1e30;
      for (int repeat = 0; repeat < kRepeats; ++repeat) {
        least = std::min(least, seconds_of([&] { ops.linear(weights[0], x.data(), many, y.data(), false); }));
      }
      fmt::print(" {:10.0f}", 2e-9 * static_cast<double>(many * shape.rows * shape.cols) / least);
    }
    fmt::print("\n");
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    ThreadPool pool(argc > 1 ? std::atoi(argv[1]) : ThreadPool::available_cores());
    const auto ops = treeattn::kernels::cpu_model_ops(pool);
    treeattn::base::ReadBandwidthProbe probe(pool);
    fmt::print("{}, {} threads; best and median of {}\n", ops->name(), pool.size(), kRepeats);
    fmt::print("weights   [  rows, cols]     GB/s  reading    best   median  GFLOP/s with 512 rows\n");
    for (const DType dtype : {DType::kBFloat16, DType::kInt8}) bench(dtype, *ops, pool, probe);
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
