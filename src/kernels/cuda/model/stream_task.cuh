// SPDX-License-Identifier: Apache-2.0
// What a kernel of streamed linear maps is told, which rows of weights make up a tile, and where its sums go.
#pragma once

#include "base/half.h"
#include "kernels/cuda/model/linear_kernels.h"
#include "kernels/cuda/model/norm.cuh"
#include "kernels/cuda/model/step_rows.cuh"
#include "kernels/cuda/model/swiglu.cuh"

namespace treeattn::kernels::cuda {

// A matrix of weights, and its scales where it has any.
struct WeightRows {
  const std::byte* matrix = nullptr;
  const float* scales = nullptr;
  int rows = 0;
};

struct StreamTask {
  WeightRows weights[kStreamedMaps];  // of each map; where it is gated, of gates and ups
  StreamedMap maps[kStreamedMaps];
  int first_tile[kStreamedMaps + 1] = {};  // of each map, then of none
  std::uint16_t* activated = nullptr;      // not null: gated, map 0 is the gates, and this is where the result goes
  StepTarget step;                         // where q, k and v go, the three maps
  int half = 0;                            // of their heads; 0: there is no such place
  int first_row = 0;                       // of the step, that x begins with
  StreamedRows x;
  NextNorm next;  // that map 0 goes through, which is added
  int tiles = 0;
  int cols = 0;
  int rows = 0;  // of x
  bool add = false;

  // Rows of weights come in pairs: gates and ups, or the two halves of a head.
  __host__ __device__ bool paired() const { return activated != nullptr || half > 0; }
};

// A tile of weights: kRows rows of one map, and kRows that go with them. These are the next ones, or the other ones of
// their pairs.
template <int kRows>
struct TileRows {
  int map = 0;
  int first;                   // row, or pair, of the map
  int low, high, high_source;  // rows of the first and second half; and of which matrix the second is

  __device__ TileRows(const StreamTask& t, int tile) {
    while (map + 1 < kStreamedMaps && tile >= t.first_tile[map + 1]) ++map;
    first = (tile - t.first_tile[map]) * (t.paired() ? kRows : 2 * kRows);
    low = t.half > 0 ? first + first / t.half * t.half : first;
    high = t.half > 0 ? low + t.half : t.activated != nullptr ? low : low + kRows;
    high_source = t.activated != nullptr ? 1 : map;
  }
};

// The sums of one thread of a tensor-core tile: rows g of both halves from 8m on, rows 2t and 2t + 1 of x from 8n on.
template <int kRows>
class TileSums {
 public:
  __device__ TileSums(const StreamTask& task, int tile, int m, int n, int lane)
      : t(task), rows(task, tile), row(rows.first + m * 8 + lane / 4), x_row(n * 8 + lane % 4 * 2) {}

  // What the end of the tile will need; asked for early, so that nobody waits for it.
  __device__ void load() {
    if (t.half > 0) {
      each_pair([&](int j, int head, int i) {
        const int of = t.first_row + x_row + j;
        to[j] = step_row(t.step, rows.map, of, head);
        const TurnedPair angle = step_angle(t.step, rows.map, of, i);
        before[j] = angle.first;
        before[2 + j] = angle.second;
      });
    } else if (t.add) {
      each([&](int i, const float* y) { before[i] = *y; });
      if (t.next.weight == nullptr) return;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = row + i * kRows;
        weight[i] = at < t.maps[0].rows ? t.next.weight[at] : 0.0f;
      }
    }
  }

  __device__ void store(const float (&sum)[4]) const {
    if (t.half > 0) {
      each_pair([&](int j, int, int i) {
        store_pair(t.step, rows.map, to[j], i, {sum[j], sum[2 + j]}, {before[j], before[2 + j]});
      });
    } else if (t.activated != nullptr) {
      each_pair([&](int j, int, int i) {
        t.activated[(x_row + j) * t.maps[0].rows + i] = base::float_to_bfloat16(swiglu(sum[j], sum[2 + j]));
      });
    } else if (t.next.weight != nullptr) {
      store_for_norm(sum);
    } else {
      each([&](int i, float* y) { *y = t.add ? before[i] + sum[i] : sum[i]; });
    }
  }

 private:
  // The eight threads of a column have kNormPart neighbours.
  __device__ void store_for_norm(const float (&sum)[4]) const {
    static_assert(kNormPart == 8);
    const std::int64_t dim = t.maps[0].rows;
    float squares[4] = {};
    each([&](int i, float* y) {
      const float value = before[i] + sum[i];
      *y = value;
      squares[i] = value * value;
      t.next.scaled[(x_row + i % 2) * dim + row + i / 2 * kRows] = base::float_to_bfloat16(value * weight[i / 2]);
    });
#pragma unroll
    for (float& square : squares) square = sum_of_lanes(square, 4);
    each([&](int i, const float*) {
      const int at = row + i / 2 * kRows;
      if (at % kNormPart == 0) t.next.squares[(x_row + i % 2) * (dim / kNormPart) + at / kNormPart] = squares[i];
    });
  }

  template <class Work>
  __device__ void each(const Work& work) const {
    const StreamedMap& map = t.maps[rows.map];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = row + i / 2 * kRows, of = x_row + i % 2;
      if (at < map.rows && of < t.rows) work(i, map.y + of * map.pitch + at);
    }
  }
  // Of a pair: its head, and where in the first half of it; or where among the gates.
  template <class Work>
  __device__ void each_pair(const Work& work) const {
    const int all = static_cast<int>(t.maps[rows.map].rows) / (t.half > 0 ? 2 : 1);
    const int head = t.half > 0 ? row / t.half : 0;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (row < all && x_row + j < t.rows) work(j, head, row - head * t.half);
    }
  }

  const StreamTask& t;
  const TileRows<kRows> rows;
  const int row, x_row;
  float before[4] = {};
  float weight[2] = {};  // of the next norm
  std::byte* to[2] = {};
};

}  // namespace treeattn::kernels::cuda
