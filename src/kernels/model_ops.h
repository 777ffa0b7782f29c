// SPDX-License-Identifier: Apache-2.0
// What a Llama layer needs beside attention, once per backend. Activations are float32 and dense; pointers are memory
// of the backend. Every operation works row by row: the bits of a row of the result depend on that row of the input and
// the weights, never on how many rows come with it, on the number of threads or on the rank.
//
// What linear does to x before it meets the weights, by type of the weights (kernels/activations.h):
//   float32, float16  nothing: float32 multiply-adds
//   bfloat16          where the CPU has BF16 instructions each element is rounded to bfloat16, to nearest;
//                     elsewhere nothing. Products are added in float32
//   int8              each group of kWeightGroup elements is quantised to int8, to nearest, with the scale
//                     max|x| / 127; the products of a group are added exactly, in integers, the groups in float32.
//                     A NaN or infinity makes its group NaN
//
// On a GPU elements are rounded to bfloat16 for bfloat16 and int8 weights, and the other types are as on the CPU. There
// the bits of rows that meet bfloat16 weights depend on the pass as well: decode streams the weights past a few rows,
// prefill multiplies matrices, and the two add up in another order; so have those that meet int8 weights, of up to 2^28
// elements. And where weights are streamed a norm before the map divides by the size of the row after the map and not
// before it: the bits of norm_linear are not those of rms_norm and linear.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>

#include "treeattn/dtype.h"
#include "treeattn/thread_pool.h"

namespace treeattn::kernels {

// A weight matrix [rows, cols], row-major. float32, float16, bfloat16; or int8 with a float32 scale for every `group`
// columns of a row, scales [rows, cols / group].
struct WeightMatrix {
  const void* data = nullptr;
  DType dtype = DType::kBFloat16;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  const float* scales = nullptr;
  std::int64_t group = 0;
};

// Columns of int8 weights that share a scale.
inline constexpr std::int64_t kWeightGroup = 32;

// Rows of one pass are computed in one way, whatever comes with them: a token that was decoded has to be computed again
// as in decode.
enum class Pass : std::uint8_t { kDecode, kPrefill };

// What goes through the layers next. All in host memory.
struct PassRows {
  Pass pass = Pass::kDecode;
  std::span<const std::int32_t> tokens;
  std::span<const std::int64_t> positions;
  std::span<const double> frequencies;  // as rope wants them
};

// One of several linear maps of the same rows.
struct Projection {
  const WeightMatrix& w;
  float* y = nullptr;  // [rows, w.rows]
};

struct FeedForward {
  const float* norm = nullptr;
  float eps = 0;
  const WeightMatrix& gate;
  const WeightMatrix& up;
  const WeightMatrix& down;
  // Memory to work in, for the rows of the call.
  float* normed = nullptr;           // [rows, hidden]
  float* gate_up = nullptr;          // [rows, 2 * gate.rows]
  float* activated = nullptr;        // [rows, gate.rows]
  const float* next_norm = nullptr;  // as in add_linear; null: something else comes next
};

namespace cuda {
struct StepTarget;  // kernels/cuda/step_target.h
}

// One call at a time: it keeps memory of its own between calls.
class ModelOps {
 public:
  virtual ~ModelOps() = default;
  virtual std::string_view name() const = 0;  // "cpu (NEON_BF16)", "cuda:0"
  // Where its memory lies: the index of a GPU, or -1 for the host. And the cudaStream_t that its work is put on, in
  // order: only to_host and finish wait for it.
  virtual int gpu() const { return -1; }
  virtual void* stream() const { return nullptr; }

  virtual void* allocate(std::size_t bytes) = 0;  // throws std::bad_alloc or Unavailable, naming the bytes
  virtual void release(void* memory) noexcept = 0;
  virtual void to_host(void* to, const void* from, std::size_t bytes) = 0;
  virtual void from_host(void* to, const void* from, std::size_t bytes) = 0;

  // x [tokens.size(), table.cols] = rows of the table. tokens: host memory.
  virtual void embed(const WeightMatrix& table, std::span<const std::int32_t> tokens, float* x) = 0;
  // y = x / sqrt(mean(x^2) + eps) * weight; x and y [rows, dim], y may be x. x may be of any size. (Where a GPU streams
  // the weights of norm_linear it divides after the map: there x times the norm's weights, and the map of that, have to
  // be numbers of float32.)
  virtual void rms_norm(const float* x, const float* weight, float eps, std::int64_t rows, std::int64_t dim,
                        float* y) = 0;
  // y [rows, w.rows] = x [rows, w.cols] w^T; add: y += that. x and y do not overlap.
  virtual void linear(const WeightMatrix& w, const float* x, std::int64_t rows, float* y, bool add) = 0;
  // y += x w^T. next_norm: the norm that y goes through if the next call is one of those below that begin with one; or
  // null.
  virtual void add_linear(const WeightMatrix& w, const float* x, std::int64_t rows, float* y,
                          const float* /*next_norm*/) {
    linear(w, x, rows, y, true);
  }
  // Rotates pairs (i, i + dim / 2) of every head of x [rows, heads, dim] by positions[row] * frequencies[i]. positions
  // and frequencies [dim / 2]: host memory.
  virtual void rope(float* x, std::int64_t rows, std::int64_t heads, std::int64_t dim,
                    std::span<const std::int64_t> positions, std::span<const double> frequencies) = 0;
  // y [rows, dim] = gate / (1 + exp(-gate)) * up, gate_up [rows, 2 * dim]: the gates of a row, then its ups.
  virtual void swiglu(const float* gate_up, std::int64_t rows, std::int64_t dim, float* y) = 0;

  // Several of the above in one call, for backends that have less to do then. Here they are what they are made of.

  // A pass begins: embed and rope are then called with these rows. Without it, kDecode.
  virtual void begin(const PassRows& /*rows*/) {}
  // On a GPU the cosines and sines of the pass that was begun, [rows, 2, frequencies], in its memory.
  virtual const float* angles() const { return nullptr; }
  // y = rms_norm(x) w^T for each of them. normed [rows, dim]: memory to work in.
  virtual void norm_linear(const float* x, const float* norm, float eps, std::int64_t rows, float* normed,
                           std::span<const Projection> projections);
  // The same of q, k and v, which are turned by the angles of the pass and go where attention finds them, and not to y.
  // False where that is not done, and nothing is.
  virtual bool norm_linear_step(const float* /*x*/, const float* /*norm*/, float /*eps*/, std::int64_t /*rows*/,
                                std::span<const Projection> /*qkv*/, const cuda::StepTarget& /*target*/) {
    return false;
  }
  // The same of one map, for the host to read: [rows, w.rows] in its memory, valid until the next such call, and there
  // once finish() has returned. one.y: memory to work in.
  virtual const float* norm_linear_to_host(const float* x, const float* norm, float eps, std::int64_t rows,
                                           float* normed, const Projection& one);
  // Where whoever computes x [rows, cols] for the next call, linear or add_linear of x, may put it in bfloat16 as well;
  // then it must. Null: nowhere.
  virtual std::uint16_t* rounded_copy(const float* /*x*/, std::int64_t /*rows*/, std::int64_t /*cols*/) {
    return nullptr;
  }
  // Waits until all work is done.
  virtual void finish() {}
  // x += swiglu(n gate^T, n up^T) down^T, where n = rms_norm(x).
  virtual void feed_forward(const FeedForward& f, std::int64_t rows, float* x);
  // Calls work, which makes calls of this object alone and begins with begin(rows); or repeats what it did when it was
  // last called with this key. The key stands for everything but the rows' tokens and positions and what memory holds.
  // all_ready: called once, when nothing is left to be done but either of the two, with whether it can be repeated;
  // returns whether it is to be.
  virtual void recorded(std::span<const std::int64_t> /*key*/, const PassRows& /*rows*/,
                        const std::function<bool(bool)>& all_ready, const std::function<void()>& work) {
    all_ready(false);
    work();
  }
};

// Throws InvalidArgument unless it is a matrix to work on: a known type, scales and whole groups with int8.
void check_weights(const WeightMatrix& w, const char* what);

// The pool must outlive it.
std::unique_ptr<ModelOps> cpu_model_ops(ThreadPool& pool);
// Throws Unavailable where there is no such GPU.
std::unique_ptr<ModelOps> cuda_model_ops(int gpu);
// gpu: its index, or -1 for the CPU.
std::unique_ptr<ModelOps> make_model_ops(int gpu, ThreadPool& pool);

// int8 weights with scale max|w| / 127 for each group; values [rows * cols], scales [rows, cols / kWeightGroup]. w in
// float32, float16 or bfloat16, cols a multiple of kWeightGroup.
void quantize_weights(const WeightMatrix& w, std::int8_t* values, float* scales, ThreadPool& pool);

}  // namespace treeattn::kernels
