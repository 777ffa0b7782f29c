// SPDX-License-Identifier: Apache-2.0
// The tensors of a Llama model: Hugging Face's names and shapes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/config.h"

namespace treeattn::model {

struct NamedShape {
  std::string name;
  std::vector<std::int64_t> shape;  // a norm's weight has one dimension, a matrix [outputs, inputs]

  std::int64_t elements() const;
};

// In the order in which a forward pass needs them. lm_head.weight only when it is not the embedding.
std::vector<NamedShape> tensor_list(const LlamaConfig& config);

}  // namespace treeattn::model
