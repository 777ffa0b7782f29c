// SPDX-License-Identifier: Apache-2.0
// Device memory of the tests, and the one list of cases on a GPU.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <string>

#include "kernels/cuda/device_case.h"
#include "kernels/cuda/error_model.h"
#include "kernels/problem.h"

namespace treeattn::kernels {

using cuda::DeviceCase;

inline void cuda_check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// compute-sanitizer makes everything a hundred times slower: TREEATTN_TEST_THINNING=8 takes every eighth case.
inline std::size_t thinning() {
  const char* given = std::getenv("TREEATTN_TEST_THINNING");
  const std::size_t step = given ? std::max(1ull, std::strtoull(given, nullptr, 10)) : 1;
  if (step > 1) std::printf("TREEATTN_TEST_THINNING=%zu: not the whole list\n", step);
  return step;
}

// Device memory of a test.
class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t bytes) {
    cuda_check(cudaMalloc(&data_, std::max<std::size_t>(bytes, 1)), "malloc");
  }
  DeviceMemory(const void* from, std::size_t bytes) : DeviceMemory(bytes) {
    cuda_check(cudaMemcpy(data_, from, bytes, cudaMemcpyHostToDevice), "copy");
  }
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

// The largest error in units of its bound. kernel, if not null, becomes the one that served the call.
inline double check_case(const CaseData& data, std::string* kernel = nullptr) {
  const cuda::DeviceOutput got = DeviceCase(data).run();
  if (kernel != nullptr) *kernel = got.kernel;
  const Problem problem = make_problem(data.input(), data.options());
  return worst_in_bounds(got.out, got.lse, reference_attention(problem, cuda::error_model(got.kernel, problem)));
}

// Gives row scales and queries of one sequence very different sizes: exponents up to `spread` either way, around
// `shift`. third, others: scales of every third key, and of the rest, before that.
inline void spread_sizes(CaseData& data, int spread, int shift, float third, float others) {
  const Case& shape = data.shape();
  std::mt19937_64 engine(static_cast<std::uint64_t>(spread));
  for (std::int64_t t = 0; t < shape.tokens; ++t) {
    for (std::int64_t h = 0; h < shape.kv_heads; ++h) {
      const int exponent = spread == 0 ? 0 : static_cast<int>(engine() % (2 * static_cast<unsigned>(spread))) - spread;
      data.set_v_scale(0, t, h, std::ldexp(t % 2 == 0 ? 0.7f : -1.3f, exponent / (shift == 0 ? 1 : 3) + shift));
      data.set_k_scale(0, t, h, std::ldexp(t % 3 == 0 ? third : others, -shift + exponent % 3));
    }
  }
  for (std::int64_t q = 0; q < shape.queries; ++q) {
    for (std::int64_t h = 0; h < shape.heads; ++h) {
      for (std::int64_t d = 0; d < shape.head_dim; ++d) {
        data.set_q(0, q, h, d, std::ldexp(static_cast<float>(engine() % 1000) * 1e-3f - 0.5f, shift));
      }
    }
  }
}

}  // namespace treeattn::kernels
