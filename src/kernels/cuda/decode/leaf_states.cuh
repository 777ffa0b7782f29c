// SPDX-License-Identifier: Apache-2.0
// States of a leaf's rows in shared memory, [rows, kPitch], and how a warp of a decode kernel puts its own there.
#pragma once

#include "kernels/cuda/merge_tail.cuh"

namespace treeattn::kernels::cuda {

// A Warp has m and l of rows lane / 4 (and that plus 8) and, of rows lane % 4 * 2 and one more, columns of o:
// o[half][n] has column(n) of both, then the column kPairStep behind it, if it owns them. Once its keys are folded in
// it is settled: l is that of the row's four lanes together, and nothing is in units of its own.
template <class Warp>
class LeafStates {
 public:
  static constexpr int kDim = Warp::kDim, kHalves = Warp::kRows / 8;
  static constexpr int kPitch = row_state_floats(kDim);  // columns of different rows lie in different banks
  static constexpr int kMostLevels = 8;                  // whose states wait

  __device__ LeafStates(int rows, int lane) : rows_(rows), lane_(lane) {}

  __device__ int floats() const { return rows_ * kPitch; }

  __device__ void store(const Warp& own, float* state) const {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int row = lane_ / 4 + 8 * half;
      if (lane_ % 4 == 0 && row < rows_) {
        *reinterpret_cast<float2*>(state + row * kPitch + kDim) = make_float2(own.m[half], own.l[half]);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        for_columns(own, state, half, j, [&](int n, float* to) {
          const float first = own.o[half][n][j], second = own.o[half][n][j + 2];
          if constexpr (Warp::kPairStep == 1) {
            *reinterpret_cast<float2*>(to) = make_float2(first, second);
          } else {
            to[0] = first;
            to[Warp::kPairStep] = second;
          }
        });
      }
    }
  }

  // own becomes the merge of itself and `state`. Rows that the item does not have repeat its last.
  template <bool kOwnIsLower>
  __device__ void merge(Warp& own, float* state) const {
    const auto merge_into = [](float& mine, float other, const MergeWeights& w) {
      mine = kOwnIsLower ? w.merged(mine, other) : w.merged(other, mine);
    };
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int row = min(lane_ / 4 + 8 * half, rows_ - 1);
      const float2 sums = *reinterpret_cast<const float2*>(state + row * kPitch + kDim);
      float& m = own.m[half];
      const MergeWeights w = kOwnIsLower ? MergeWeights::of(m, sums.x, m) : MergeWeights::of(sums.x, m, m);
      merge_into(own.l[half], sums.y, w);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int lane_of_row = lane_ % 4 * 8 + 4 * j;
        const MergeWeights of_row{__shfl_sync(~0u, w.lower, lane_of_row), __shfl_sync(~0u, w.higher, lane_of_row)};
        for_columns(own, state, half, j, [&](int n, float* from) {
          float2 other;
          if constexpr (Warp::kPairStep == 1) {
            other = *reinterpret_cast<const float2*>(from);
          } else {
            other = make_float2(from[0], from[Warp::kPairStep]);
          }
          merge_into(own.o[half][n][j], other.x, of_row);
          merge_into(own.o[half][n][j + 2], other.y, of_row);
        });
      }
    }
  }

 private:
  // body(n, address) for the columns that this thread has of one of its rows.
  template <class Body>
  __device__ void for_columns(const Warp& own, float* state, int half, int j, const Body& body) const {
    const int row = lane_ % 4 * 2 + j + 8 * half;
    if (row >= rows_) return;
#pragma unroll
    for (int n = 0; n < Warp::kSteps; ++n) {
      const int column = own.column(n);
      if (own.owns(row, column)) body(n, state + row * kPitch + column % kDim);
    }
  }

  const int rows_, lane_;
};

// Four columns of a row's state.
struct StatePart {
  float m, l;
  float4 o;

  __device__ static StatePart load(const float* row, int dim, int column) {
    return {row[dim], row[dim + 1], *reinterpret_cast<const float4*>(row + column)};
  }
  __device__ bool store(float* row, int dim, int column) const {
    *reinterpret_cast<float4*>(row + column) = o;
    if (column == 0) *reinterpret_cast<float2*>(row + dim) = make_float2(m, l);
    return isfinite(l) && isfinite(o.x) && isfinite(o.y) && isfinite(o.z) && isfinite(o.w);
  }
};

// The rows of an item, four of their `dim` columns at a time, over the threads of a block.
template <class Warp>
struct StateUnits {
  static constexpr int kOfRow = Warp::kDim / 4;
  static constexpr int kMost = (Warp::kRows * kOfRow + 127) / 128;  // of a thread

  // body(number of this thread's, row, column)
  template <class Body>
  __device__ static void for_each(int rows, int dim, const Body& body) {
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int unit = i * 128 + static_cast<int>(threadIdx.x), column = unit % kOfRow * 4;
      if (unit < rows * kOfRow && column < dim) body(i, unit / kOfRow, column);
    }
  }
};

}  // namespace treeattn::kernels::cuda
