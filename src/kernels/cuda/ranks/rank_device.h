// SPDX-License-Identifier: Apache-2.0
// One rank's GPU: a stream, memory that grows without moving, rows of K and V converted where they lie, and attention
// to them. Several ranks may have the same GPU. This header needs no CUDA; without it the constructor throws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/cuda/step_target.h"
#include "kernels/problem.h"
#include "treeattn/views.h"

namespace treeattn::kernels::cuda {

// GPU memory at addresses that are reserved first: the counterpart of base::VirtualMemory. Movable.
class DeviceArray {
 public:
  DeviceArray() = default;
  // Reserves addresses, no memory. Throws std::bad_alloc when there are not so many left.
  DeviceArray(int gpu, std::size_t bytes);
  ~DeviceArray();
  DeviceArray(DeviceArray&& other) noexcept { swap(other); }
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    swap(other);
    return *this;
  }

  std::byte* data() const { return data_; }
  // Makes at least the first `bytes` usable, content undefined. Never moves, never shrinks. Requires no more than were
  // reserved. Throws std::bad_alloc.
  void grow(std::size_t bytes);

 private:
  struct Piece {
    unsigned long long handle = 0;
    std::size_t first = 0;
    std::size_t bytes = 0;
  };
  void swap(DeviceArray& other) noexcept;

  int gpu_ = 0;
  std::byte* data_ = nullptr;
  std::size_t reserved_ = 0;
  std::size_t usable_ = 0;
  std::size_t step_ = 0;  // what memory is handed out in
  std::vector<Piece> pieces_;
};

// to[0, bytes) = from[0, bytes), either in the host's memory or in that of any GPU. What is under way on streams is not
// waited for. Done when finish_copies() of the same thread has returned.
void start_copy(void* to, const void* from, std::size_t bytes);
// The same by one GPU, which reaches both.
void start_copy_on(int gpu, void* to, const void* from, std::size_t bytes);
void finish_copies();

// Makes a GPU the calling thread's own; nothing for a number below 0. Everything here leaves a thread on the GPU it was
// on; one that was on none is on GPU 0 by the driver's rule, and to go back there takes some of that GPU's memory.
// Throws Unavailable where the GPU cannot be used.
void stay_on_gpu(int gpu);

// Not thread-safe: one thread of a rank at a time. Everything below is put on the rank's stream, in order, and may be
// under way when the call returns unless it says otherwise. Throws Unavailable naming what failed.
class RankDevice {
 public:
  // Throws Unavailable where there is no such GPU.
  explicit RankDevice(int gpu);
  ~RankDevice();
  RankDevice(const RankDevice&) = delete;
  RankDevice& operator=(const RankDevice&) = delete;

  int gpu() const;
  // Which GPU of the machine it is, whatever its number in this process.
  std::int64_t slot() const;
  // "CUDA 9.0": its kernels make the same bits on every GPU of that compute capability.
  std::string kernels() const;
  void* stream() const;  // a cudaStream_t
  std::size_t memory_bytes() const;

  // The host's memory must stay as it is until finish().
  void copy_in(void* to, const void* host, std::size_t bytes);
  void copy_out(void* host, const void* from, std::size_t bytes);
  // The same, and waits until it is there. Results go by way of pinned memory: a copy into other memory holds up the
  // ranks that share the GPU.
  void fetch(void* host, const void* from, std::size_t bytes);
  void copy(void* to, const void* from, std::size_t bytes);
  void fill_zero(void* to, std::size_t bytes);
  // Waits until all of it is done.
  void finish();

  // What is put on `stream` (a cudaStream_t of this GPU) up to now comes before what is put on the rank's stream later.
  void wait_for(void* stream);
  // The other way round.
  void hold_up(void* stream);

  // parallel::store_rows (parallel/kv_rows.h), bit for bit, with the rows and scales of the source in memory of this
  // GPU and its page table in the host's.
  void store_rows(const KvView& source, std::int64_t first, std::int64_t count, DType type, std::byte* rows,
                  float* scales);

  // States [problem.nodes, batch, queries, heads, v_dim + 2] of K and V on this GPU, q being in the host's memory.
  // Tables and buffers are kept from call to call, so that a step of decoding allocates nothing on the GPU, and a call
  // that is split like the last one sends only what has changed: q, lengths and page tables. Returns memory of this
  // object that is valid until the next call.
  float* attend(const Problem& problem);
  // The same into other memory of this GPU. q_on_gpu: with q there as well.
  void attend_into(const Problem& problem, float* states_on_gpu, bool q_on_gpu);
  // out [rows, v_dim] of states [rows, v_dim + 2], both on this GPU.
  void finalize(const float* states, std::size_t rows, std::int64_t v_dim, float* out);
  // The same into the host's memory; done when it returns.
  void attend(const Problem& problem, float* states);

  // The finished result of the whole tree, with q in this GPU's memory too; out [batch, queries, heads, v_dim] there.
  void attend_on_device(const Problem& problem, float* out);

  // A decode step, layer by layer, on a stream of the caller's, with q, k, v and what comes out in this GPU's memory.
  // First prepare_step, with the problem of any layer, whose q is step_queries(); what it returns is all that the rest
  // depends on beside the content of memory: so the rest may be recorded and repeated. The caller's stream must be done
  // with the last step when the next is prepared.
  struct StepRows {
    const float* q = nullptr;  // [rows, heads, dim], not yet turned
    const float* k = nullptr;  // [rows, kv_heads, dim], the same
    const float* v = nullptr;  // the same shape
  };
  void* step_queries(std::size_t bytes);
  std::vector<std::int64_t> prepare_step(const Problem& problem, void* stream);
  void send_step(void* stream);
  // Where q, k and v of a layer go, but for the angles. K and V of float32, float16 or bfloat16, with one head dim.
  StepTarget step_target(const KvView& k, const KvView& v) const;
  // Turns q and k, stores them, and v, there; k and v of sequences whose new token this rank carries.
  void store_step(const StepTarget& target, const StepRows& rows, void* stream);
  // Attends to what is there, on a rank that carries everything. rounded_out: where the result goes in bfloat16 as
  // well, or null.
  void attend_step(const KvView& k, const KvView& v, float* out, std::uint16_t* rounded_out, void* stream);
  // The same where others carry some of it: states, as attend() has them.
  void attend_step_into(const KvView& k, const KvView& v, float* states, void* stream);

  // The kernel that the last of these calls used, as CudaPlan::kernel() names it; empty before.
  std::string_view kernel() const;

  // GB/s (1e9 bytes) of a plain read of so many bytes, the best of three.
  double read_bandwidth(std::size_t bytes);
  // TFLOP/s of a product of two bfloat16 matrices of this size, by cuBLASLt, the best of three.
  double product_rate(std::int64_t size);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace treeattn::kernels::cuda
