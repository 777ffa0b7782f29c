// SPDX-License-Identifier: Apache-2.0
// ModelOps on the CPU: checks, threads, and the kernels of one instruction set.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <vector>

#include <fmt/format.h>

#include "base/check.h"
#include "base/half.h"
#include "base/round_up.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/linear.h"
#include "kernels/model_ops.h"

namespace treeattn::kernels {
namespace {

constexpr std::int64_t kAlone = 1 << 14;  // elements; fewer are done before another thread has started

class CpuModelOps final : public ModelOps {
 public:
  CpuModelOps(const CpuTarget& target, ThreadPool& pool)
      : name_(fmt::format("cpu ({})", target.name)), kernels_(*target.model), pool_(pool), linear_(kernels_, pool) {}

  std::string_view name() const override { return name_; }

  void* allocate(std::size_t bytes) override;
  void release(void* memory) noexcept override;
  void to_host(void* to, const void* from, std::size_t bytes) override { copy(to, from, bytes); }
  void from_host(void* to, const void* from, std::size_t bytes) override { copy(to, from, bytes); }

  void embed(const WeightMatrix& table, std::span<const std::int32_t> tokens, float* x) override;
  void rms_norm(const float* x, const float* weight, float eps, std::int64_t rows, std::int64_t dim, float* y) override;
  void linear(const WeightMatrix& w, const float* x, std::int64_t rows, float* y, bool add) override {
    const Projection map{w, y};
    linear_.multiply({&map, 1}, x, rows, add);
  }
  void norm_linear(const float* x, const float* norm, float eps, std::int64_t rows, float* normed,
                   std::span<const Projection> projections) override {
    if (projections.empty()) return;
    rms_norm(x, norm, eps, rows, projections.front().w.cols, normed);
    linear_.multiply(projections, normed, rows, false);
  }
  void rope(float* x, std::int64_t rows, std::int64_t heads, std::int64_t dim, std::span<const std::int64_t> positions,
            std::span<const double> frequencies) override;
  void swiglu(const float* gate_up, std::int64_t rows, std::int64_t dim, float* y) override;

 private:
  static void copy(void* to, const void* from, std::size_t bytes) {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }

  // body(row), on all threads where there is enough to do.
  template <class Body>
  void for_each_row(std::int64_t rows, std::int64_t elements, const Body& body) {
    if (rows > 1 && rows * elements >= kAlone) {
      pool_.run(static_cast<std::size_t>(rows), [&](std::size_t row, int) { body(static_cast<std::int64_t>(row)); });
    } else {
      for (std::int64_t row = 0; row < rows; ++row) body(row);
    }
  }

  void fill_angles(std::span<const std::int64_t> positions, std::span<const double> frequencies);

  std::string name_;
  const ModelKernels& kernels_;
  ThreadPool& pool_;
  LinearMap linear_;
  // Cosines and sines of the last call of rope: every layer asks for the same ones.
  std::vector<std::int64_t> positions_;
  std::vector<double> frequencies_;
  std::vector<float> angles_;  // [positions][2][frequencies]: cosines, then sines
};

void check_shape(const char* what, std::int64_t rows, std::int64_t dim) {
  base::require(rows >= 0 && dim >= 1, "{}: [{}, {}]; accepted: 0 or more rows of 1 or more", what, rows, dim);
}

void* CpuModelOps::allocate(std::size_t bytes) {
  // The line before it remembers the buffer, which knows how it has to be given back.
  constexpr std::size_t kFront = base::Buffer::kLine;
  try {
    auto* buffer = new base::Buffer(std::max<std::size_t>(bytes, 1) + kFront);
    std::byte* front = buffer->as<std::byte>();
    std::memcpy(front, &buffer, sizeof buffer);
    return front + kFront;
  } catch (const std::bad_alloc&) {
    throw Unavailable(fmt::format("{}: no memory for {} bytes", name_, bytes));
  }
}

void CpuModelOps::release(void* memory) noexcept {
  if (memory == nullptr) return;
  base::Buffer* buffer = nullptr;
  std::memcpy(&buffer, static_cast<std::byte*>(memory) - base::Buffer::kLine, sizeof buffer);
  delete buffer;
}

void CpuModelOps::embed(const WeightMatrix& table, std::span<const std::int32_t> tokens, float* x) {
  check_weights(table, "embed");
  for (const std::int32_t token : tokens) {
    base::require(token >= 0 && token < table.rows, "embed: token {}; accepted: 0 to {}", token, table.rows - 1);
  }
  const auto row_bytes = static_cast<std::int64_t>(dtype_size(table.dtype)) * table.cols;
  for_each_row(static_cast<std::int64_t>(tokens.size()), table.cols, [&](std::int64_t row) {
    const std::int64_t token = tokens[static_cast<std::size_t>(row)];
    float* out = x + row * table.cols;
    base::load_row_as_float(static_cast<const std::byte*>(table.data) + token * row_bytes, table.dtype, table.cols,
                            out);
    if (table.dtype != DType::kInt8) return;
    const float* scales = table.scales + token * (table.cols / table.group);
    for (std::int64_t i = 0; i < table.cols; ++i) out[i] *= scales[i / table.group];
  });
}

void CpuModelOps::rms_norm(const float* x, const float* weight, float eps, std::int64_t rows, std::int64_t dim,
                           float* y) {
  check_shape("rms_norm", rows, dim);
  for_each_row(rows, dim, [&](std::int64_t row) { kernels_.rms_norm(x + row * dim, weight, eps, dim, y + row * dim); });
}

// The angle in double precision: at position 2^20 a float32 angle would be wrong by a sixteenth of a radian.
void CpuModelOps::fill_angles(std::span<const std::int64_t> positions, std::span<const double> frequencies) {
  if (std::equal(positions.begin(), positions.end(), positions_.begin(), positions_.end()) &&
      std::equal(frequencies.begin(), frequencies.end(), frequencies_.begin(), frequencies_.end())) {
    return;
  }
  const std::size_t half = frequencies.size();
  positions_.clear();  // nothing is remembered until all of it is there
  frequencies_.assign(frequencies.begin(), frequencies.end());
  angles_.resize(positions.size() * 2 * half);
  for_each_row(static_cast<std::int64_t>(positions.size()), 32 * static_cast<std::int64_t>(half),
               [&](std::int64_t row) {
                 float* cosine = angles_.data() + static_cast<std::size_t>(row) * 2 * half;
                 const auto position = static_cast<double>(positions[static_cast<std::size_t>(row)]);
                 for (std::size_t i = 0; i < half; ++i) {
                   cosine[i] = static_cast<float>(std::cos(position * frequencies[i]));
                   cosine[half + i] = static_cast<float>(std::sin(position * frequencies[i]));
                 }
               });
  positions_.assign(positions.begin(), positions.end());
}

void CpuModelOps::rope(float* x, std::int64_t rows, std::int64_t heads, std::int64_t dim,
                       std::span<const std::int64_t> positions, std::span<const double> frequencies) {
  base::require(rows >= 0 && heads >= 1 && dim >= 2 && dim % 2 == 0,
                "rope: {} rows of {} heads of {}; accepted: 0 or more rows, 1 or more heads, an even head size", rows,
                heads, dim);
  const std::int64_t half = dim / 2;
  base::require(static_cast<std::int64_t>(positions.size()) == rows, "rope: {} positions for {} rows; accepted: {}",
                positions.size(), rows, rows);
  base::require(static_cast<std::int64_t>(frequencies.size()) == half,
                "rope: {} frequencies for heads of {}; accepted: {}", frequencies.size(), dim, half);
  if (rows == 0) return;
  fill_angles(positions, frequencies);
  for_each_row(rows, heads * dim, [&](std::int64_t row) {
    const float* cosine = angles_.data() + row * dim;
    for (std::int64_t head = 0; head < heads; ++head) {
      kernels_.rotate(x + (row * heads + head) * dim, cosine, cosine + half, half);
    }
  });
}

// In pieces of a row, as a single row is enough work for several threads. The pieces are whole vectors long.
void CpuModelOps::swiglu(const float* gate_up, std::int64_t rows, std::int64_t dim, float* y) {
  check_shape("swiglu", rows, dim);
  constexpr std::int64_t kPiece = 2048;
  const std::int64_t pieces = base::divide_up(dim, kPiece);
  for_each_row(rows * pieces, 4 * std::min(dim, kPiece), [&](std::int64_t piece) {
    const std::int64_t row = piece / pieces, first = piece % pieces * kPiece;
    const float* gate = gate_up + row * 2 * dim + first;
    kernels_.swiglu(gate, gate + dim, std::min(kPiece, dim - first), y + row * dim + first);
  });
}

}  // namespace

std::unique_ptr<ModelOps> cpu_model_ops_on(const CpuTarget& target, ThreadPool& pool) {
  return std::make_unique<CpuModelOps>(target, pool);
}

std::unique_ptr<ModelOps> cpu_model_ops(ThreadPool& pool) { return cpu_model_ops_on(active_target(), pool); }

}  // namespace treeattn::kernels
