// SPDX-License-Identifier: Apache-2.0
// The rows of a piece on their way from memory to the shared memory of one warp. On Hopper and later one lane asks for
// all of them with a tensor copy; elsewhere, and where the rows do not suit it, the warp copies 16 bytes a lane. Either
// way a barrier in shared memory says when they are there.
//
// Layout: rows are cut into parts of 128 bytes, [parts, kTile, 128], and the 16-byte units of row r are exchanged:
// unit u lies at u ^ (r % 8), so that the same column of eight rows lies in different banks.
#pragma once

#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/piece_cursor.cuh"

namespace treeattn::kernels::cuda {

// A barrier for every stage of a warp.
struct StageBarriers {
  std::uint32_t address;

  __device__ void init(int stages, bool tensor_copies) const {
    if (threadIdx.x % 32 == 0) {
      for (int i = 0; i < stages; ++i) {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(address + 8 * i), "r"(tensor_copies ? 1 : 32));
      }
#if __CUDA_ARCH__ >= 900
      asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
#endif
    }
    __syncwarp();
  }
  // Waits for a fill of a stage; `phase` is its number modulo 2.
  __device__ void wait(int stage, unsigned phase) const {
    unsigned done = 0;
    while (done == 0) {
#if __CUDA_ARCH__ >= 900
      asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}\n"
                   : "=r"(done)
                   : "r"(address + 8 * stage), "r"(phase)
                   : "memory");
#else
      asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}\n"
                   : "=r"(done)
                   : "r"(address + 8 * stage), "r"(phase)
                   : "memory");
#endif
    }
  }
};

// kTile rows of kRowBytes.
template <int kRowBytes, int kTile>
struct PieceCopy {
  static constexpr int kParts = (kRowBytes + 127) / 128;
  static constexpr int kBytes = kParts * kTile * 128;

  // Address of 16-byte unit `unit` of a row, from the beginning of the piece.
  __device__ static std::uint32_t offset(int row, int unit) {
    return unit / 8 * (kTile * 128) + row * 128 + ((unit % 8) ^ (row % 8)) * 16;
  }

  // By one lane, for K and V each; keys around the piece may come with it.
  __device__ static void start_tensor(std::uint32_t to, std::uint32_t barrier, const TensorMap& map,
                                      const RowSource& source, int head, int first) {
#if __CUDA_ARCH__ >= 900
    int outer = source.batch, row = first;
    if (source.table != nullptr) {
      const unsigned page = source.page_of(first);
      row = first - static_cast<int>(page * source.page_tokens);
      outer = source.table[page];
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      asm volatile(
          "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, "
          "%5}], [%6];\n" ::"r"(to + part * kTile * 128),
          "l"(&map), "r"(part * (128 / static_cast<int>(source.element_bytes))), "r"(head), "r"(row), "r"(outer),
          "r"(barrier)
          : "memory");
    }
#endif
  }
  __device__ static void expect(std::uint32_t barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
#endif
  }

  // By the whole warp. Rows that are not keys of the piece become zeros.
  __device__ static void start_rows(std::uint32_t to, const RowSource& source, const Piece& piece) {
    constexpr int kUnits = kRowBytes / 16;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < kTile * kUnits; i += 32) {
      const int row = i / kUnits, unit = i % kUnits;
      const int token = piece.first + row;
      const bool valid = token >= piece.begin && token < piece.end;
      copy_async_16(to + offset(row, unit), source.row(valid ? token : piece.begin) + unit * 16, valid);
    }
  }
  // The copies of this lane so far count as arrived when they are done.
  __device__ static void arrive_after_rows(std::uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(barrier) : "memory");
  }

  // Rows that a tensor copy brought along and that are not keys of the piece become zeros: a weight of zero times
  // garbage may not be zero.
  __device__ static void clear_others(std::uint32_t piece_address, const Piece& piece) {
    for (int i = threadIdx.x % 32; i < kParts * kTile * 8; i += 32) {
      const int token = piece.first + i / 8 % kTile;
      if (token < piece.begin || token >= piece.end) {
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};\n" ::"r"(piece_address + i * 16), "r"(0) : "memory");
      }
    }
    __syncwarp();
  }
  // Between such writes and the next tensor copy to the same place.
  __device__ static void order_writes() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
#endif
  }
};

}  // namespace treeattn::kernels::cuda
