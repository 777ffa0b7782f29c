// SPDX-License-Identifier: Apache-2.0
// The merge operator gives the same bits in a CUDA thread as on the host, and the quotients at the end of a call are
// those of `/`. Needs nothing but the CUDA toolkit.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/cuda/merge_tail.cuh"
#include "merge/operator.h"

namespace {

constexpr int kSkipped = 77;  // what ctest is told to read as "skipped"

__global__ void merge_kernel(float* lower, const float* higher, std::size_t rows, std::size_t row_floats) {
  const std::size_t row = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x;
  if (row < rows) treeattn::merge::merge_row(lower + row * row_floats, higher + row * row_floats, row_floats);
}

// Moderate numbers of every exponent, from a counter.
__device__ float moderate(std::uint64_t number) {
  number = (number ^ number >> 31) * 0x7fb5d329728ea185ull;
  number = (number ^ number >> 27) * 0x81dadef4bc2dd44dull;
  const auto bits = static_cast<std::uint32_t>(number >> 32);
  return __uint_as_float((bits & 0x807fffffu) | (127 - 60 + (bits >> 23 & 127) % 120) << 23);
}

__global__ void divide_kernel(std::uint64_t seed, int rounds, unsigned long long* differ) {
  using treeattn::kernels::cuda::is_moderate, treeattn::kernels::cuda::moderate_quotients;
  std::uint64_t at = seed + (blockIdx.x * std::uint64_t{blockDim.x} + threadIdx.x) * static_cast<unsigned>(rounds) * 5;
  for (int i = 0; i < rounds; ++i, at += 5) {
    const float l = moderate(at), o[4] = {moderate(at + 1), moderate(at + 2), moderate(at + 3), moderate(at + 4)};
    const float4 all = moderate_quotients(make_float4(o[0], o[1], o[2], o[3]), l);
    const float got[4] = {all.x, all.y, all.z, all.w};
    for (int k = 0; k < 4; ++k) {
      const bool good = is_moderate(l) && is_moderate(o[k]) && __float_as_uint(got[k]) == __float_as_uint(o[k] / l);
      if (!good) atomicAdd(differ, 1ull);
    }
  }
}

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

// Rows of every kind: ordinary, empty with garbage behind the mark, far apart maxima, negative zeros, NaN.
std::vector<float> make_rows(std::size_t rows, std::size_t row_floats, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> out(rows * row_floats);
  for (std::size_t r = 0; r < rows; ++r) {
    float* row = out.data() + r * row_floats;
    for (std::size_t i = 0; i < row_floats; ++i) row[i] = normal(random);
    row[0] *= random() % 4 == 0 ? 1e5f : 10.0f;
    row[1] = row[1] < 0 ? -row[1] : row[1];
    if (random() % 7 == 0) row[0] = treeattn::merge::kEmptyMax;
    if (random() % 11 == 0) row[2] = std::numeric_limits<float>::quiet_NaN();
    if (random() % 13 == 0) row[3] = -0.0f;
  }
  return out;
}

bool same(float a, float b) { return (a != a && b != b) || std::memcmp(&a, &b, sizeof a) == 0; }

}  // namespace

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("SKIPPED: no CUDA device here; the merge operator was compiled for one but not run\n");
    return kSkipped;
  }
  const char* given = std::getenv("TREEATTN_SEED");
  const std::uint32_t seed =
      given ? static_cast<std::uint32_t>(std::strtoul(given, nullptr, 10)) : std::random_device{}();
  std::printf("TREEATTN_SEED=%u\n", seed);
  constexpr std::size_t kRows = 10007, kRowFloats = 130;
  std::vector<float> lower = make_rows(kRows, kRowFloats, seed), higher = make_rows(kRows, kRowFloats, seed + 1);

  const std::size_t bytes = lower.size() * sizeof(float);
  float *device_lower = nullptr, *device_higher = nullptr;
  check(cudaMalloc(&device_lower, bytes), "cudaMalloc");
  check(cudaMalloc(&device_higher, bytes), "cudaMalloc");
  check(cudaMemcpy(device_lower, lower.data(), bytes, cudaMemcpyHostToDevice), "copy in");
  check(cudaMemcpy(device_higher, higher.data(), bytes, cudaMemcpyHostToDevice), "copy in");
  merge_kernel<<<(kRows + 127) / 128, 128>>>(device_lower, device_higher, kRows, kRowFloats);
  check(cudaGetLastError(), "launch");
  std::vector<float> from_device(lower.size());
  check(cudaMemcpy(from_device.data(), device_lower, bytes, cudaMemcpyDeviceToHost), "copy out");

  std::size_t differ = 0;
  for (std::size_t r = 0; r < kRows; ++r) {
    treeattn::merge::merge_row(lower.data() + r * kRowFloats, higher.data() + r * kRowFloats, kRowFloats);
  }
  for (std::size_t i = 0; i < lower.size(); ++i) differ += !same(lower[i], from_device[i]);
  std::printf("%zu rows merged on the device, %zu of %zu floats differ in bits from the host\n", kRows, differ,
              lower.size());

  constexpr int kBlocks = 1024, kThreads = 256, kRounds = 256;
  unsigned long long *device_count = nullptr, quotients = 0;
  check(cudaMalloc(&device_count, sizeof quotients), "cudaMalloc");
  check(cudaMemset(device_count, 0, sizeof quotients), "cudaMemset");
  divide_kernel<<<kBlocks, kThreads>>>(std::uint64_t{seed} << 32, kRounds, device_count);
  check(cudaGetLastError(), "launch");
  check(cudaMemcpy(&quotients, device_count, sizeof quotients, cudaMemcpyDeviceToHost), "copy out");
  std::printf("%d quotients, %llu of them not those of `/`\n", kBlocks * kThreads * kRounds * 4, quotients);
  return differ == 0 && quotients == 0 ? 0 : 1;
}
