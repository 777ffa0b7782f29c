// SPDX-License-Identifier: Apache-2.0
#include "base/half.h"
#include "kernels/cuda/dependent_launch.cuh"
#include "kernels/cuda/device_rows.cuh"
#include "kernels/cuda/ranks/row_kernels.h"
#include "kernels/cuda/ranks/warp_rows.cuh"

namespace treeattn::kernels::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kMostElements = 256 / kLanes;  // of a row, in one lane

__device__ float load(const std::byte* row, int i, DType type) {
  switch (type) {
    case DType::kFloat32:
      return reinterpret_cast<const float*>(row)[i];
    case DType::kFloat16:
      return base::float16_to_float(reinterpret_cast<const std::uint16_t*>(row)[i]);
    default:
      return base::bfloat16_to_float(reinterpret_cast<const std::uint16_t*>(row)[i]);
  }
}

__device__ float largest_of_warp(float value) {
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(~0u, value, distance));
  }
  return value;
}

__device__ std::int8_t to_int8(float value) {
  const float clamped = value > 127.0f ? 127.0f : value < -127.0f ? -127.0f : value;
  return static_cast<std::int8_t>(rintf(clamped));
}

// quantize_row_int8 and quantize_row_fp8 of base/half.h, a warp to a row.
__device__ void quantize(const float* mine, int count, int lane, DType type, std::byte* row, float* scale) {
  constexpr float kFinite = 0x1.fffffep+127f;
  const float nan = __uint_as_float(0x7fc00000u);
  float largest = 0.0f;
  bool finite = true;
  for (int j = 0; j < count; ++j) {
    const float magnitude = fabsf(mine[j]);
    const bool ok = magnitude <= kFinite;
    finite = finite && ok;
    if (ok && magnitude > largest) largest = magnitude;
  }
  largest = largest_of_warp(largest);
  finite = __all_sync(~0u, finite);
  const bool int8 = type == DType::kInt8;
  float by = base::scale_to_fit(largest, int8 ? 127.0f : base::kMaxFp8, base::kScaleOfZeroRow);
  if (int8 && !finite) by = nan;
  if (lane == 0) *scale = by;
  for (int j = 0, i = lane; j < count; ++j, i += kLanes) {
    if (int8) {
      reinterpret_cast<std::int8_t*>(row)[i] = finite ? to_int8(mine[j] / by) : std::int8_t{0};
    } else {
      const float value = fabsf(mine[j]) <= kFinite ? mine[j] / by : nan;
      reinterpret_cast<std::uint8_t*>(row)[i] = base::float_to_fp8(value);
    }
  }
}

__global__ void convert_kernel(const __grid_constant__ RowConversion c) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const std::int64_t row = blockIdx.x * std::int64_t{kWarps} + threadIdx.x / kLanes;
  if (row >= c.tokens * c.heads) return;
  const std::int64_t token = row / c.heads;
  const int head = static_cast<int>(row % c.heads);
  const auto size = static_cast<std::int64_t>(element_size(c.from_type));
  const std::byte* from = c.from + (token * c.token_stride + head * c.head_stride) * size;
  std::byte* to = c.to + row * c.dim * static_cast<std::int64_t>(element_size(c.to_type));
  if (c.from_type == c.to_type) {
    for (int i = lane; i < c.dim * static_cast<int>(size); i += kLanes) to[i] = from[i];
    if (c.to_scales == nullptr || lane != 0) return;
    const std::int64_t at = token * c.scale_token_stride + head * c.scale_head_stride;
    c.to_scales[row] = c.from_scales == nullptr ? 1.0f : c.from_scales[at];
    return;
  }
  float mine[kMostElements];
  int count = 0;
#pragma unroll
  for (int j = 0; j < kMostElements; ++j) {
    const int i = lane + j * kLanes;
    if (i >= c.dim) continue;
    mine[j] = load(from, i, c.from_type);
    count = j + 1;
  }
  if (c.to_scales != nullptr) return quantize(mine, count, lane, c.to_type, to, c.to_scales + row);
  for (int j = 0, i = lane; j < count; ++j, i += kLanes) {
    if (c.to_type == DType::kFloat32) {
      reinterpret_cast<float*>(to)[i] = mine[j];
    } else if (c.to_type == DType::kFloat16) {
      reinterpret_cast<std::uint16_t*>(to)[i] = base::float_to_float16(mine[j]);
    } else {
      reinterpret_cast<std::uint16_t*>(to)[i] = base::float_to_bfloat16(mine[j]);
    }
  }
}

__global__ void noise_kernel(std::uint16_t* to, std::size_t count, std::uint32_t seed) {
  const std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x;
  if (i >= count) return;
  std::uint32_t bits = (static_cast<std::uint32_t>(i) + seed) * 0x9e3779b9u;
  bits = (bits ^ (bits >> 15)) * 0x85ebca6bu;
  bits ^= bits >> 13;
  to[i] = static_cast<std::uint16_t>(0x3f00u + (bits & 0x80ffu));
}

__global__ void read_kernel(const uint4* data, std::size_t count, unsigned* sink) {
  unsigned sum = 0;
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  const auto add = [&](uint4 value) { sum += value.x ^ value.y ^ value.z ^ value.w; };
  std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x;
  for (; i + 3 * step < count; i += 4 * step) {  // four loads on their way
    const uint4 a = __ldcs(data + i), b = __ldcs(data + i + step);
    const uint4 c = __ldcs(data + i + 2 * step), d = __ldcs(data + i + 3 * step);
    add(a);
    add(b);
    add(c);
    add(d);
  }
  for (; i < count; i += step) add(__ldcs(data + i));
  if (sum == 0x9e3779b9u) *sink = sum;  // hardly ever, but the compiler cannot know
}

}  // namespace

void convert_rows(const RowConversion& conversion, cudaStream_t stream) {
  const std::int64_t rows = conversion.tokens * conversion.heads;
  if (rows == 0) return;
  const auto blocks = static_cast<unsigned>((rows + kWarps - 1) / kWarps);
  start_dependent(convert_kernel, blocks, kWarps * kLanes, false, stream, "conversion of rows", conversion);
}

void fill_noise(std::uint16_t* to, std::size_t count, std::uint32_t seed, cudaStream_t stream) {
  if (count == 0) return;
  start_dependent(noise_kernel, static_cast<unsigned>((count + 255) / 256), 256, false, stream, "random numbers", to,
                  count, seed);
}

void read_all(const void* data, std::size_t bytes, unsigned* sink, cudaStream_t stream) {
  start_dependent(read_kernel, 1056, 512, false, stream, "read of memory", static_cast<const uint4*>(data),
                  bytes / sizeof(uint4), sink);
}

}  // namespace treeattn::kernels::cuda
