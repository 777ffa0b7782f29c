// SPDX-License-Identifier: Apache-2.0
// How long attention takes on a device of a cluster that is only described.
#pragma once

#include <cstdint>

#include "options.h"
#include "plan/cluster.h"

namespace treeattn::tools {

// How long attention to K and V takes, as bytes read by the device: what it waits for, memory or products.
class AttentionModel {
 public:
  AttentionModel(const plan::Cluster& cluster, const Shape& shape);

  // One call that attends to so many bytes of K and V, the launch included.
  double call_bytes(std::uint64_t kv_bytes) const;
  double call_seconds(std::uint64_t kv_bytes) const { return call_bytes(kv_bytes) / bytes_per_s_; }
  // K and V per second, launch apart: for the closed form.
  double kv_bytes_per_s() const { return bytes_per_s_ / bytes_read_per_kv_byte_; }

 private:
  double bytes_per_s_;
  double launch_s_;
  double bytes_read_per_kv_byte_;  // 1, or more where the products take longer than the reading
};

}  // namespace treeattn::tools
