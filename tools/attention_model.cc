// SPDX-License-Identifier: Apache-2.0
#include "attention_model.h"

#include <algorithm>

namespace treeattn::tools {

AttentionModel::AttentionModel(const plan::Cluster& cluster, const Shape& shape)
    : bytes_per_s_(cluster.device_bytes_per_s), launch_s_(cluster.launch_s), bytes_read_per_kv_byte_(1) {
  if (cluster.device_flops_per_s <= 0) return;
  // Per token of K and V: two products of a multiply and an add per element of every query head.
  const double flops = 4.0 * static_cast<double>(shape.queries * shape.heads * shape.head_dim);
  Shape token = shape;
  token.batch = token.tokens = 1;
  const double read_s = static_cast<double>(token.cache_bytes()) / cluster.device_bytes_per_s;
  bytes_read_per_kv_byte_ = std::max(1.0, flops / cluster.device_flops_per_s / read_s);
}

double AttentionModel::call_bytes(std::uint64_t kv_bytes) const {
  return launch_s_ * bytes_per_s_ + static_cast<double>(kv_bytes) * bytes_read_per_kv_byte_;
}

}  // namespace treeattn::tools
