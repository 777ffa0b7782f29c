// SPDX-License-Identifier: Apache-2.0
// The row scales of a piece on their way to shared memory, with the barrier of its rows: [K or V, kTile] floats a
// stage.
#pragma once

#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/piece_cursor.cuh"

namespace treeattn::kernels::cuda {

// Of types that have none.
struct NoScales {
  static constexpr int kBytes = 0;  // of a stage
  __device__ NoScales(const AttentionParams&, const WorkItem&, std::uint32_t, int) {}
  __device__ bool any() const { return false; }
  __device__ void start(int, const Piece&, int) const {}
  __device__ std::uint32_t address(int) const { return 0; }
};

template <int kTile>
class PieceScales {
 public:
  static constexpr int kBytes = 2 * kTile * static_cast<int>(sizeof(float));

  // Called by the whole warp; `address` is its own. Rows without a scale have 1, which is written once.
  __device__ PieceScales(const AttentionParams& p, const WorkItem& item, std::uint32_t address, int stages)
      : k_(as_rows(p.k), item, sizeof(float)),
        v_(as_rows(p.v), item, sizeof(float)),
        has_k_(p.k.scales != nullptr),
        has_v_(p.v.scales != nullptr),
        address_(address) {
    for (int i = threadIdx.x % 32; i < stages * 2 * kTile; i += 32) {
      if (i / kTile % 2 == 0 ? has_k_ : has_v_) continue;
      asm volatile("st.shared.f32 [%0], %1;\n" ::"r"(address_ + i * 4), "f"(1.0f) : "memory");
    }
    __syncwarp();
  }
  __device__ bool any() const { return has_k_ || has_v_; }
  // Starts the copies for a piece. What is no key of it gets scale 0.
  __device__ void start(int stage, const Piece& piece, int lane) const {
#pragma unroll
    for (int key = lane; key < kTile; key += 32) {
      const int token = piece.first + key;
      const bool valid = token >= piece.begin && token < piece.end;
      const std::uint32_t to = address(stage) + key * 4;
      if (has_k_) copy_async_4(to, k_.row(valid ? token : piece.begin), valid);
      if (has_v_) copy_async_4(to + kTile * 4, v_.row(valid ? token : piece.begin), valid);
    }
  }
  __device__ std::uint32_t address(int stage) const { return address_ + stage * kBytes; }

 private:
  // Scales are rows of one float.
  __device__ static DeviceKv as_rows(const DeviceKv& kv) {
    DeviceKv rows = kv;
    rows.data = reinterpret_cast<const std::byte*>(kv.scales);
    rows.batch_stride = kv.scale_batch_stride;
    rows.token_stride = kv.scale_token_stride;
    rows.head_stride = kv.scale_head_stride;
    rows.page_stride = kv.scale_page_stride;
    return rows;
  }
  const RowSource k_, v_;
  const bool has_k_, has_v_;
  const std::uint32_t address_;
};

}  // namespace treeattn::kernels::cuda
