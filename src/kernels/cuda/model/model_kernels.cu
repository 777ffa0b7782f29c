// SPDX-License-Identifier: Apache-2.0
#include "base/half.h"
#include "kernels/cuda/dependent_launch.cuh"
#include "kernels/cuda/device_rows.cuh"
#include "kernels/cuda/model/model_kernels.h"
#include "kernels/cuda/model/norm.cuh"
#include "kernels/cuda/model/rope.cuh"
#include "kernels/cuda/model/swiglu.cuh"
#include "kernels/cuda/ranks/warp_rows.cuh"

namespace treeattn::kernels::cuda {
namespace {

constexpr unsigned kThreads = 256;

unsigned blocks_for(std::int64_t count) {
  return static_cast<unsigned>((count + std::int64_t{kThreads} - 1) / std::int64_t{kThreads});
}

__device__ std::int64_t thread_number() { return blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; }

__global__ void embed_kernel(WeightMatrix table, const std::int32_t* tokens, float* x) {
  let_next_start();
  wait_for_earlier();
  const std::int64_t token = tokens[blockIdx.x];
  const std::byte* row = static_cast<const std::byte*>(table.data) + token * table.cols * element_size(table.dtype);
  const int i = static_cast<int>(blockIdx.y * kThreads + threadIdx.x);
  if (i >= table.cols) return;
  float value = load_element(row, i, table.dtype);
  if (table.dtype == DType::kInt8) value *= table.scales[(token * table.cols + i) / table.group];
  x[blockIdx.x * table.cols + i] = value;
}

__global__ void __launch_bounds__(kNormThreads)
    norm_kernel(const float* x, const float* weight, float eps, std::int64_t dim, float* y, std::uint16_t* y_bf16) {
  __shared__ float shared[kNormThreads / kLanes];
  let_next_start();
  wait_for_earlier();
  x += blockIdx.x * dim;
  const float mean = mean_square(squares_of_thread(x, dim), dim, eps, shared);
  const auto store_times = [&](auto by) {
    for (std::int64_t i = threadIdx.x; i < dim; i += blockDim.x) {
      const auto value = static_cast<float>(x[i] * by * weight[i]);
      if (y != nullptr) y[blockIdx.x * dim + i] = value;
      if (y_bf16 != nullptr) y_bf16[blockIdx.x * dim + i] = base::float_to_bfloat16(value);
    }
  };
  if (is_sound(mean)) return store_times(1.0f / sqrtf(mean));
  const double by = inverse_in_double(x, dim, eps);
  __syncthreads();  // y may be x, and all threads have read all of it
  store_times(by);
}

// As TileSums::store_for_norm does it.
__global__ void scale_kernel(const float* x, const float* weight, std::int64_t count, std::int64_t dim,
                             std::uint16_t* scaled, float* squares) {
  let_next_start();
  wait_for_earlier();
  const std::int64_t i = thread_number();
  const bool there = i < count;
  const float value = there ? x[i] : 0.0f;
  if (there) scaled[i] = base::float_to_bfloat16(value * weight[i % dim]);
  float sum = value * value;
  for (int distance = 1; distance < kNormPart; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
  if (there && i % kNormPart == 0) squares[i / kNormPart] = sum;
}

__global__ void round_kernel(const float* x, std::int64_t count, std::uint16_t* y) {
  let_next_start();
  wait_for_earlier();
  const std::int64_t i = thread_number();
  if (i < count) y[i] = base::float_to_bfloat16(x[i]);
}

// 16 weights a thread; a group has more.
__global__ void unpack_kernel(const uint4* weights, const float* scales, int group, std::int64_t count, uint4* to) {
  const std::int64_t i = thread_number();
  if (i >= count) return;
  const uint4 packed = weights[i];
  const float scale = scales[i * 16 / group];
  std::uint32_t pairs[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const std::uint32_t word = k < 2 ? packed.x : k < 4 ? packed.y : k < 6 ? packed.z : packed.w;
    const auto rounded = [&](int byte) {
      return std::uint32_t{
          base::float_to_bfloat16(static_cast<float>(static_cast<signed char>(word >> 8 * byte)) * scale)};
    };
    pairs[k] = rounded(k % 2 * 2) | rounded(k % 2 * 2 + 1) << 16;
  }
  to[2 * i] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  to[2 * i + 1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
}

__global__ void angles_kernel(const std::int64_t* positions, const double* frequencies, std::int64_t rows,
                              std::int64_t half, float* angles) {
  const std::int64_t i = thread_number();
  if (i >= rows * half) return;
  const std::int64_t row = i / half, column = i % half;
  double sine, cosine;
  sincos(static_cast<double>(positions[row]) * frequencies[column], &sine, &cosine);
  angles[row * 2 * half + column] = static_cast<float>(cosine);
  angles[row * 2 * half + half + column] = static_cast<float>(sine);
}

__global__ void rope_kernel(float* x, std::int64_t heads, std::int64_t half, std::int64_t count, const float* angles) {
  let_next_start();
  wait_for_earlier();
  const std::int64_t i = thread_number();
  if (i >= count) return;
  const std::int64_t head = i / half, column = i % half;
  const float* cosine = angles + head / heads * 2 * half + column;
  float* at = x + head * 2 * half + column;
  const TurnedPair pair = turned(at[0], at[half], cosine[0], cosine[half]);
  at[0] = pair.first;
  at[half] = pair.second;
}

// Gates and ups `apart` floats from each other, in rows of `dim`.
__global__ void swiglu_kernel(const float* gate_up, std::int64_t count, std::int64_t dim, float* y) {
  let_next_start();
  wait_for_earlier();
  const std::int64_t i = thread_number();
  if (i >= count) return;
  const float* gate = gate_up + i / dim * 2 * dim + i % dim;
  y[i] = swiglu(gate[0], gate[dim]);
}

__global__ void swiglu_round_kernel(const float* gates, const float* ups, std::int64_t count, std::uint16_t* y) {
  let_next_start();
  wait_for_earlier();
  const std::int64_t i = thread_number();
  if (i < count) y[i] = base::float_to_bfloat16(swiglu(gates[i], ups[i]));
}

}  // namespace

void embed_rows(const WeightMatrix& table, const std::int32_t* tokens, std::int64_t rows, float* x,
                const Queue& queue) {
  if (rows == 0) return;
  start_dependent(embed_kernel, dim3(static_cast<unsigned>(rows), blocks_for(table.cols)), kThreads, false,
                  queue.stream, "embedding", table, tokens, x);
}

void rms_norm_rows(const float* x, const float* weight, float eps, std::int64_t rows, std::int64_t dim, float* y,
                   std::uint16_t* y_bf16, const Queue& queue) {
  if (rows == 0) return;
  start_dependent(norm_kernel, static_cast<unsigned>(rows), kNormThreads, queue.overlaps, queue.stream, "norm", x,
                  weight, eps, dim, y, y_bf16);
}

void scale_rows(const float* x, const float* weight, std::int64_t rows, std::int64_t dim, std::uint16_t* scaled,
                float* squares, const Queue& queue) {
  if (rows * dim == 0) return;
  start_dependent(scale_kernel, blocks_for(rows * dim), kThreads, queue.overlaps, queue.stream, "norm", x, weight,
                  rows * dim, dim, scaled, squares);
}

void to_bfloat16(const float* x, std::int64_t count, std::uint16_t* y, const Queue& queue) {
  if (count == 0) return;
  start_dependent(round_kernel, blocks_for(count), kThreads, queue.overlaps, queue.stream, "rounding", x, count, y);
}

void unpack_weights(const WeightMatrix& w, std::uint16_t* to, const Queue& queue) {
  static_assert(kWeightGroup % 16 == 0);
  const std::int64_t count = w.rows * w.cols / 16;
  start_dependent(unpack_kernel, blocks_for(count), kThreads, false, queue.stream, "weights",
                  static_cast<const uint4*>(w.data), w.scales, static_cast<int>(w.group), count,
                  reinterpret_cast<uint4*>(to));
}

void fill_angles(const std::int64_t* positions, const double* frequencies, std::int64_t rows, std::int64_t half,
                 float* angles, const Queue& queue) {
  if (rows == 0) return;
  start_dependent(angles_kernel, blocks_for(rows * half), kThreads, false, queue.stream, "angles", positions,
                  frequencies, rows, half, angles);
}

void rope_rows(float* x, std::int64_t rows, std::int64_t heads, std::int64_t half, const float* angles,
               const Queue& queue) {
  const std::int64_t count = rows * heads * half;
  if (count == 0) return;
  start_dependent(rope_kernel, blocks_for(count), kThreads, queue.overlaps, queue.stream, "rope", x, heads, half, count,
                  angles);
}

void swiglu_rows(const float* gate_up, std::int64_t rows, std::int64_t dim, float* y, const Queue& queue) {
  if (rows * dim == 0) return;
  start_dependent(swiglu_kernel, blocks_for(rows * dim), kThreads, queue.overlaps, queue.stream, "swiglu", gate_up,
                  rows * dim, dim, y);
}

void swiglu_to_bfloat16(const float* gates, const float* ups, std::int64_t count, std::uint16_t* y,
                        const Queue& queue) {
  if (count == 0) return;
  start_dependent(swiglu_round_kernel, blocks_for(count), kThreads, queue.overlaps, queue.stream, "swiglu", gates, ups,
                  count, y);
}

}  // namespace treeattn::kernels::cuda
