// SPDX-License-Identifier: Apache-2.0
// How a block ends: it stores the state of its node, and the last block of a group merges them all. No second launch,
// no host in between.
#pragma once

#include "kernels/cuda/device_rows.cuh"
#include "merge/operator.h"

namespace treeattn::kernels::cuda {

// The component of merge(lower, higher) at place i of two packed rows; what merge::merge_row does, one float at a time.
__device__ inline float merged_component(const float* lower, const float* higher, int i) {
  if (higher[0] == merge::kEmptyMax) return lower[i];
  if (lower[0] == merge::kEmptyMax) return higher[i];
  const float m = merge::ScalarOps::max(lower[0], higher[0]);
  if (i == 0) return m;
  return merge::merge_component<merge::ScalarOps>(lower[i], merge::state_weight(lower[0], m), higher[i],
                                                  merge::state_weight(higher[0], m));
}

// lower(i) = merge(lower(i), higher(i)) for `blocks` blocks of `rows` packed rows each, `lower` and `higher` giving
// their addresses. Called by all threads of the block. The maxima come last: the other components need the old ones.
template <class Lower, class Higher>
__device__ void merge_blocks(int blocks, int rows, int row_floats, const Lower& lower, const Higher& higher) {
  const int parts = row_floats - 1;
  for (int i = threadIdx.x; i < blocks * rows * parts; i += blockDim.x) {
    const int block = i / (rows * parts), row = i / parts % rows * row_floats, c = i % parts + 1;
    float* low = lower(block) + row;
    low[c] = merged_component(low, higher(block) + row, c);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < blocks * rows; i += blockDim.x) {
    float* low = lower(i / rows) + i % rows * row_floats;
    low[0] = merged_component(low, higher(i / rows) + i % rows * row_floats, 0);
  }
  __syncthreads();
}

// The result of a group, from its root's rows: as states, or finished.
__device__ inline void store_result(const AttentionParams& p, const WorkItem& item, int node, const float* root) {
  const int row_floats = p.v.dim + 2;
  for (int i = threadIdx.x; i < item.rows() * row_floats; i += blockDim.x) {
    const int r = i / row_floats, c = i % row_floats;
    const std::int64_t row = global_row(p, item, r);
    const float* state = root + r * row_floats;
    if (p.states != nullptr) {
      p.states[(node * p.rows + row) * row_floats + c] = state[c];
      continue;
    }
    // A sink is the state of one key whose value is zero.
    float sink[2] = {merge::kEmptyMax, 1.0f};
    if (p.sinks != nullptr) sink[0] = p.sinks[row % p.heads] * 0x1.715476p+0f;
    const float m = merged_component(state, sink, 0);
    const float l = merged_component(state, sink, 1);
    float o = 0.0f;
    if (c >= 2) {
      const float lower[2] = {state[0], state[c]}, zero[2] = {sink[0], 0.0f};
      o = merged_component(lower, zero, 1);
    }
    const bool empty = m == merge::kEmptyMax;
    if (c >= 2) p.out[row * p.v.dim + c - 2] = empty ? 0.0f : o / l;
    if (c == 0 && p.lse != nullptr) {
      constexpr double kLn2 = 0x1.62e42fefa39efp-1;
      p.lse[row] = empty ? merge::kEmptyMax : static_cast<float>(m * kLn2 + log(static_cast<double>(l)));
    }
  }
}

// What the two sides of a merge weigh; an empty side is selected away.
struct MergeWeights {
  float lower, higher;
  __device__ static MergeWeights of(float m_lower, float m_higher, float& m) {
    m = m_lower;
    if (m_higher == merge::kEmptyMax) return {1.0f, kSkip};
    m = m_higher;
    if (m_lower == merge::kEmptyMax) return {kSkip, 1.0f};
    m = merge::ScalarOps::max(m_lower, m_higher);
    return {merge::state_weight(m_lower, m), merge::state_weight(m_higher, m)};
  }
  __device__ float merged(float low, float high) const {
    if (higher == kSkip) return low;
    if (lower == kSkip) return high;
    return merge::merge_component<merge::ScalarOps>(low, lower, high, higher);
  }
  static constexpr float kSkip = -1.0f;
};

// Most states merged at once; more are first merged pair by pair where they lie.
inline constexpr int kMergeAtOnce = 64;

// Shared memory for that.
__host__ __device__ inline std::size_t merge_floats(int rows, int row_floats) {
  return static_cast<std::size_t>(rows) * (row_floats + 3 * kMergeAtOnce);
}

// Merges kCount states [rows, row_floats], `stride` floats apart, along the tree: first the maxima, which give every
// merge its weights, then all components, each by one thread with all its loads under way at once.
template <int kCount>
__device__ void merge_tree(const float* states, std::int64_t stride, int rows, int row_floats, float* scratch) {
  float* const root = scratch;                                                       // [rows, row_floats]
  float* const top = root + rows * row_floats;                                       // [kCount, rows]
  auto* const weights = reinterpret_cast<MergeWeights*>(top + kMergeAtOnce * rows);  // [kCount - 1, rows]
  for (int i = threadIdx.x; i < kCount * rows; i += blockDim.x) {
    top[i] = states[i / rows * stride + i % rows * row_floats];
  }
  __syncthreads();
  int done = 0;
  for (int width = 1; width < kCount; width *= 2) {
    const int pairs = kCount / (2 * width);
    for (int i = threadIdx.x; i < pairs * rows; i += blockDim.x) {
      float* lower = top + i / rows * 2 * width * rows + i % rows;
      float m;
      weights[(done + i / rows) * rows + i % rows] = MergeWeights::of(lower[0], lower[width * rows], m);
      lower[0] = m;
    }
    done += pairs;
    __syncthreads();
  }
  const int parts = row_floats - 1;
  for (int i = threadIdx.x; i < rows * parts; i += blockDim.x) {
    const int r = i / parts, c = i % parts + 1;
    float value[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k) value[k] = states[k * stride + r * row_floats + c];
    const MergeWeights* weight = weights + r;
#pragma unroll
    for (int width = 1; width < kCount; width *= 2) {
#pragma unroll
      for (int k = 0; k < kCount; k += 2 * width) {
        value[k] = weight->merged(value[k], value[k + width]);
        weight += rows;
      }
    }
    root[r * row_floats + c] = value[0];
  }
  for (int r = threadIdx.x; r < rows; r += blockDim.x) root[r * row_floats] = top[r];
  __syncthreads();
}

// Called by all threads of the block once item_states of this block's item is written. scratch: merge_floats of shared
// memory.
__device__ inline void finish_item(const AttentionParams& p, const WorkItem& item, float* scratch) {
  const MergeGroup group = p.groups[item.group];
  const int rows = item.rows(), row_floats = p.v.dim + 2;
  const std::int64_t stride = static_cast<std::int64_t>(p.rows_per_item) * row_floats;
  float* states = p.item_states + group.first_item * stride;
  if (group.items > 1) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(p.arrived + item.group, 1u) + 1 == static_cast<unsigned>(group.items);
    __syncthreads();
    if (!last) return;
    __threadfence();
    if (threadIdx.x == 0) p.arrived[item.group] = 0;  // for the next call
  }
  __syncthreads();
  int width = 1;
  for (; group.items / width > kMergeAtOnce; width *= 2) {
    const auto lower = [&](int pair) { return states + pair * 2 * width * stride; };
    merge_blocks(group.items / (2 * width), rows, row_floats, lower,
                 [&](int pair) { return lower(pair) + width * stride; });
  }
  switch (group.items / width) {
    case 1:
      merge_tree<1>(states, width * stride, rows, row_floats, scratch);
      break;
    case 2:
      merge_tree<2>(states, width * stride, rows, row_floats, scratch);
      break;
    case 4:
      merge_tree<4>(states, width * stride, rows, row_floats, scratch);
      break;
    case 8:
      merge_tree<8>(states, width * stride, rows, row_floats, scratch);
      break;
    case 16:
      merge_tree<16>(states, width * stride, rows, row_floats, scratch);
      break;
    case 32:
      merge_tree<32>(states, width * stride, rows, row_floats, scratch);
      break;
    default:
      merge_tree<64>(states, width * stride, rows, row_floats, scratch);
      break;
  }
  store_result(p, item, group.node, scratch);
}

}  // namespace treeattn::kernels::cuda
