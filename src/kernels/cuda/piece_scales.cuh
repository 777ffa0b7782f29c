// SPDX-License-Identifier: Apache-2.0
// The row scales of a piece on their way to shared memory, with the barrier of its rows: [K or V, kTile / 8, kHeads, 8]
// floats a stage. Scales of the same eight keys lie in different banks.
#pragma once

#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/piece_cursor.cuh"

namespace treeattn::kernels::cuda {

// Of types that have none.
struct NoScales {
  static constexpr int kBytes = 0;  // of a stage
  __device__ NoScales(const AttentionParams&, const WorkItem&, std::uint32_t, int) {}
  __device__ static bool any(const AttentionParams&) { return false; }
  __device__ void start(int, const Piece&, int) const {}
  __device__ std::uint32_t address(int) const { return 0; }
};

// kHeads: neighbouring KV heads that a piece has rows of.
template <int kTile, int kHeads>
class PieceScales {
 public:
  static constexpr int kCount = kTile * kHeads;  // of K, and of V
  static constexpr int kBytes = 2 * kCount * static_cast<int>(sizeof(float));

  // Called by the whole warp; `address` is its own. Rows without a scale have 1, which is written once.
  __device__ PieceScales(const AttentionParams& p, const WorkItem& item, std::uint32_t address, int stages)
      : k_(as_rows(p.k), item, sizeof(float)),
        v_(as_rows(p.v), item, sizeof(float)),
        has_k_(p.k.scales != nullptr),
        has_v_(p.v.scales != nullptr),
        k_head_bytes_(p.k.scale_head_stride * static_cast<int>(sizeof(float))),
        v_head_bytes_(p.v.scale_head_stride * static_cast<int>(sizeof(float))),
        address_(address) {
    for (int i = threadIdx.x % 32; i < stages * 2 * kCount; i += 32) {
      if (i / kCount % 2 == 0 ? has_k_ : has_v_) continue;
      asm volatile("st.shared.f32 [%0], %1;\n" ::"r"(address_ + i * 4), "f"(1.0f) : "memory");
    }
    __syncwarp();
  }
  __device__ static bool any(const AttentionParams& p) { return p.k.scales != nullptr || p.v.scales != nullptr; }
  // Starts the copies for a piece. What is no key of it gets scale 0.
  __device__ void start(int stage, const Piece& piece, int lane) const {
#pragma unroll
    for (int key = lane; key < kTile; key += 32) {
      const int token = piece.first + key;
      const bool valid = token >= piece.begin && token < piece.end;
      const std::uint32_t to = address(stage) + offset(key / 8, 0) + key % 8 * 4;
      if (has_k_) start_heads(to, k_.row(valid ? token : piece.begin), k_head_bytes_, valid);
      if (has_v_) start_heads(to + kCount * 4, v_.row(valid ? token : piece.begin), v_head_bytes_, valid);
    }
  }
  __device__ std::uint32_t address(int stage) const { return address_ + stage * kBytes; }
  // Where in a stage the scales of eight keys of a head lie, those of K; kCount floats further those of V.
  __device__ static std::uint32_t offset(int eight, int head) { return (eight * kHeads + head) * 32; }

 private:
  __device__ static void start_heads(std::uint32_t to, const std::byte* from, std::int64_t head_bytes, bool valid) {
#pragma unroll
    for (int head = 0; head < kHeads; ++head) copy_async_4(to + head * 32, from + head * head_bytes, valid);
  }
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
  const std::int64_t k_head_bytes_, v_head_bytes_;
  const std::uint32_t address_;
};

}  // namespace treeattn::kernels::cuda
