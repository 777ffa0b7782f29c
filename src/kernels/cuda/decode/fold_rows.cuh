// SPDX-License-Identifier: Apache-2.0
// The rows of one warp while keys are folded into their states: logits become weights, m, l and o follow the maximum. A
// thread has the logits of rows lane / 4 (and that plus 8), and of o^T the columns of rows lane % 4 * 2 and one more.
#pragma once

#include "kernels/cuda/device_rows.cuh"
#include "kernels/cuda/piece_cursor.cuh"
#include "kernels/cuda/weights.cuh"
#include "merge/operator.h"

namespace treeattn::kernels::cuda {

// Products q . k of a piece become logits where there is a mask, a soft-cap or slopes. A thread has those of rows
// lane / 4 (and that plus 8), keys lane % 4 * 2 and one more of every 8.
template <int kHalves, int kEights>
__device__ inline void special_logits(const AttentionParams& p, const WorkItem& item, int lane, float (&s)[kEights][4],
                                      const Piece& piece, bool whole) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const int row = min(lane / 4 + half * 8, item.rows() - 1);
    const int query = query_of(item, row);
    int begin = piece.begin, end = piece.end;
    if (!whole) {
      const Range seen = visible(p, item.batch, query);
      begin = max(begin, static_cast<int>(seen.begin));
      end = min(end, static_cast<int>(seen.end));
    }
#pragma unroll
    for (int i = 0; i < 2 * kEights; ++i) {
      float& logit = s[i / 2][half * 2 + i % 2];
      const int token = piece.first + i / 2 * 8 + lane % 4 * 2 + i % 2;
      logit = p.softcap > 0 ? tanhf(logit * (p.scale / p.softcap)) * (p.softcap * merge::kLog2E)
                            : logit * (p.scale * merge::kLog2E);
      if (p.alibi_slopes != nullptr) {
        const std::int64_t distance = p.first_key + token - (p.first_query[item.batch] + query);
        logit = __fmaf_rn(p.alibi_slopes[head_of(p, item, row)] * merge::kLog2E, static_cast<float>(distance), logit);
      }
      if (token < begin || token >= end) logit = merge::kEmptyMax;
    }
  }
}

// Logits of one row of every thread become weights, times 2^shift; m and l move to the new maximum. Returns by what o
// has to be multiplied.
template <int kEights>
__device__ inline float weigh_row(float (&s)[kEights][4], int half, float shift, float& m, float& l) {
  float top = fmaxf(s[0][2 * half], s[0][2 * half + 1]);
#pragma unroll
  for (int t = 1; t < kEights; ++t) top = fmaxf(top, fmaxf(s[t][2 * half], s[t][2 * half + 1]));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  top = fmaxf(top, m);
  const float reference = top == merge::kEmptyMax ? 0.0f : top - shift;
  const float shrink = m == top || m == merge::kEmptyMax ? 1.0f : merge::state_weight(m, top);
  float sum = 0.0f;
#pragma unroll
  for (int t = 0; t < kEights; ++t) {
#pragma unroll
    for (int j = 2 * half; j < 2 * half + 2; ++j) {
      s[t][j] = exp2_fast(s[t][j] - reference);  // 0 for a hidden key
      sum += s[t][j];
    }
  }
  l = __fmaf_rn(l, shrink, sum);
  m = sum != sum ? sum : top;  // keys of which none is a number are not no keys
  return shrink;
}

// Rows of o^T lie in columns: multiplies each by the number that the threads of its logits have.
template <int kSteps>
__device__ inline void multiply_columns(float (&o)[kSteps][4], float of_row, int lane) {
  const float of_even = __shfl_sync(~0u, of_row, lane % 4 * 8);
  const float of_odd = __shfl_sync(~0u, of_row, lane % 4 * 8 + 4);
#pragma unroll
  for (int n = 0; n < kSteps; ++n) {
    o[n][0] *= of_even;
    o[n][1] *= of_odd;
    o[n][2] *= of_even;
    o[n][3] *= of_odd;
  }
}

// States of no keys.
template <int kHalves, int kSteps>
__device__ inline void clear_rows(float (&m)[kHalves], float (&l)[kHalves], float (&o)[kHalves][kSteps][4]) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    m[half] = merge::kEmptyMax;
    l[half] = 0.0f;
#pragma unroll
    for (int n = 0; n < kSteps; ++n) o[half][n][0] = o[half][n][1] = o[half][n][2] = o[half][n][3] = 0.0f;
  }
}

// Logits of a piece become weights, times 2^shift; m, l and o of the rows move to the new maximum.
template <int kHalves, int kEights, int kSteps>
__device__ inline void weigh_rows(float (&s)[kEights][4], float shift, float (&m)[kHalves], float (&l)[kHalves],
                                  float (&o)[kHalves][kSteps][4], int lane) {
  float shrink[kHalves];
  bool moved = false;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    shrink[half] = weigh_row(s, half, shift, m[half], l[half]);
    moved = moved || shrink[half] != 1.0f;
  }
  if (__any_sync(~0u, moved)) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) multiply_columns(o[half], shrink[half], lane);
  }
}

// Every thread has l of the keys of its row, not only of its own; l and o are taken out of units of 1 / unit.
template <int kHalves, int kSteps>
__device__ inline void settle_rows(float (&l)[kHalves], float (&o)[kHalves][kSteps][4], float unit) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    l[half] += __shfl_xor_sync(~0u, l[half], 1);
    l[half] += __shfl_xor_sync(~0u, l[half], 2);
    l[half] *= unit;
#pragma unroll
    for (int i = 0; i < 4 * kSteps; ++i) o[half][i / 4][i % 4] *= unit;
  }
}

}  // namespace treeattn::kernels::cuda
