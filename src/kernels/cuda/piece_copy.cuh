// SPDX-License-Identifier: Apache-2.0
// The rows of a piece on their way from memory to the shared memory of one warp. On Hopper and later one lane asks for
// all of them with a tensor copy; elsewhere, and where the rows do not suit it, the warp copies 16 bytes a lane. Either
// way a barrier in shared memory says when they are there.
//
// Layout: rows are cut into parts of 128 bytes, [parts, kTile, 128], and the 16-byte units of row r are exchanged:
// unit u lies at u ^ (r % 8), so that the same column of eight rows lies in different banks. Rows of 64 bytes are two
// to a line of 128: unit u lies at u ^ (r / 2 % 4).
#pragma once

#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/piece_cursor.cuh"

namespace treeattn::kernels::cuda {

// A barrier for every stage of a warp.
struct StageBarriers {
  std::uint32_t address;

  // By one lane; the others look at them after the next __syncwarp. arrivals: how many make a fill.
  __device__ void init(int stages, int arrivals) const {
    for (int i = 0; i < stages; ++i) {
      asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(address + 8 * i), "r"(arrivals));
    }
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
#endif
  }
  // Where arrivals of threads and not copies make a fill: what this thread wrote before is there.
  __device__ void arrive(int stage) const {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}\n" ::"r"(address + 8 * stage)
                 : "memory");
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

// Where a tensor map has a token.
struct MapPlace {
  int row, outer;

  __device__ MapPlace(int token, int batch) : row(token), outer(batch) {}
  __device__ MapPlace(const RowSource& source, int token) : row(token), outer(source.batch) {
    if (source.table == nullptr) return;
    const unsigned page = source.page_of(token);
    row = token - static_cast<int>(page * source.page_tokens);
    outer = source.table[page];
  }
};

__device__ inline void prefetch_map(const TensorMap& map) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(&map) : "memory");
#endif
}

// A box of a tensor map, by one thread: 128 bytes, from `element` on, of each row of a head. read_once: the L2 cache
// may give its place to anything else.
__device__ inline void start_box(std::uint32_t to, std::uint32_t barrier, const TensorMap& map, const MapPlace& place,
                                 int head, int element, bool read_once = false) {
#if __CUDA_ARCH__ >= 900
  if (read_once) {
    asm volatile(
        "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%2, %3, %4, %5}], [%6], policy;\n}\n" ::"r"(to),
        "l"(&map), "r"(element), "r"(head), "r"(place.row), "r"(place.outer), "r"(barrier)
        : "memory");
    return;
  }
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];\n" ::"r"(to),
      "l"(&map), "r"(element), "r"(head), "r"(place.row), "r"(place.outer), "r"(barrier)
      : "memory");
#endif
}

// kTile rows of kRowBytes.
template <int kRowBytes, int kTile>
struct PieceCopy {
  static constexpr int kPitch = kRowBytes > 64 ? 128 : 64;  // make_tensor_map has the same
  static constexpr int kParts = (kRowBytes + kPitch - 1) / kPitch;
  static constexpr int kBytes = kParts * kTile * kPitch;

  // Address of 16-byte unit `unit` of a row, from the beginning of the piece.
  __device__ static std::uint32_t offset(int row, int unit) {
    const int exchange = kPitch == 128 ? row % 8 : row / 2 % 4;
    return unit / kUnits * (kTile * kPitch) + row * kPitch + ((unit % kUnits) ^ exchange) * 16;
  }

  // By one lane, for K and V each; keys around the piece may come with it.
  template <int kElementBytes>
  __device__ static void start_tensor(std::uint32_t to, std::uint32_t barrier, const TensorMap& map,
                                      const MapPlace& place, int head, bool read_once) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      start_box(to + part * kTile * kPitch, barrier, map, place, head, part * (kPitch / kElementBytes),
                read_once && kPitch == 128);  // of a shorter row, others want the rest of the line
    }
  }
  __device__ static void expect(std::uint32_t barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
#endif
  }

  // By the whole warp. Rows that are not keys of the piece become zeros, and so does what is behind the units of a row.
  __device__ static void start_rows(std::uint32_t to, const RowSource& source, int units, const Piece& piece) {
    constexpr int kUsed = kRowBytes / 16;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < kTile * kUsed; i += 32) {
      const int row = i / kUsed, unit = i % kUsed;
      const int token = piece.first + row;
      const bool valid = token >= piece.begin && token < piece.end && unit < units;
      copy_async_16(to + offset(row, unit), valid ? source.row(token) + unit * 16 : source.row(piece.begin), valid);
    }
  }
  // The copies of this lane so far count as arrived when they are done.
  __device__ static void arrive_after_rows(std::uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(barrier) : "memory");
  }

  // Rows that a tensor copy brought along and that are not keys of the piece become zeros: a weight of zero times
  // garbage may not be zero.
  __device__ static void clear_others(std::uint32_t piece_address, const Piece& piece) {
    for (int i = threadIdx.x % 32; i < kParts * kTile * kUnits; i += 32) {
      const int token = piece.first + i / kUnits % kTile;
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

 private:
  static constexpr int kUnits = kPitch / 16;  // of a row of a part
};

}  // namespace treeattn::kernels::cuda
