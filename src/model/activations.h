// SPDX-License-Identifier: Apache-2.0
// Memory of a backend, and the activations of some rows in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/model_ops.h"
#include "model/config.h"

namespace treeattn::model {

// Floats in the backend's memory. The backend must outlive it.
class OpsArray {
 public:
  OpsArray() = default;
  OpsArray(kernels::ModelOps& ops, std::int64_t floats)
      : ops_(&ops), data_(static_cast<float*>(ops.allocate(static_cast<std::size_t>(floats) * sizeof(float)))) {}
  ~OpsArray() {
    if (data_) ops_->release(data_);
  }
  OpsArray(OpsArray&& other) noexcept : ops_(other.ops_), data_(std::exchange(other.data_, nullptr)) {}
  OpsArray& operator=(OpsArray&& other) noexcept {
    std::swap(ops_, other.ops_);
    std::swap(data_, other.data_);
    return *this;
  }
  float* get() const { return data_; }

 private:
  kernels::ModelOps* ops_ = nullptr;
  float* data_ = nullptr;
};

// What a layer holds for `rows` tokens.
struct Activations {
  Activations() = default;
  Activations(kernels::ModelOps& ops, const LlamaConfig& c, std::int64_t row_count)
      : rows(row_count),
        x(ops, rows * c.hidden),
        normed(ops, rows * c.hidden),
        q(ops, rows * c.heads * c.head_dim),
        k(ops, rows * c.kv_heads * c.head_dim),
        v(ops, rows * c.kv_heads * c.head_dim),
        attended(ops, rows * c.heads * c.head_dim),
        gate_up(ops, rows * 2 * c.feed_forward),
        activated(ops, rows * c.feed_forward) {}

  // The same sum as above.
  static std::size_t bytes(const LlamaConfig& c, std::int64_t rows) {
    const std::int64_t row = 2 * c.hidden + 2 * (c.heads + c.kv_heads) * c.head_dim + 3 * c.feed_forward;
    return static_cast<std::size_t>(rows * row) * sizeof(float);
  }

  std::int64_t rows = 0;  // room for so many
  OpsArray x, normed, q, k, v, attended, gate_up, activated;
};

}  // namespace treeattn::model
