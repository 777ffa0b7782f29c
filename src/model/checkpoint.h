// SPDX-License-Identifier: Apache-2.0
// The tensors of a model by name, wherever they come from: safetensors files, mapped and not read, or random numbers.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model/config.h"
#include "treeattn/dtype.h"

namespace treeattn::model {

// Memory of the checkpoint: valid as long as it lives. Little-endian, dense, row-major, aligned to its element size.
struct Tensor {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;  // float32, float16 or bfloat16
  std::vector<std::int64_t> shape;
};

class Checkpoint {
 public:
  virtual ~Checkpoint() = default;
  // Throws BadFile when there is no such tensor or its shape is another, naming the tensor, both shapes and the file.
  virtual Tensor tensor(const std::string& name, std::span<const std::int64_t> shape) const = 0;
  // Of every tensor that the files have; none where weights are not in files.
  virtual std::vector<std::string> names() const { return {}; }
  // Nobody reads this tensor any more, unless it is asked for again: its memory may go. Requires that it was asked for.
  virtual void release(const std::string& /*name*/) const {}
};

// model.safetensors, or the shards that model.safetensors.index.json lists, of a Hugging Face directory. All headers
// are checked here; the weights are mapped and read when used. Throws BadFile.
std::unique_ptr<Checkpoint> open_checkpoint(const std::filesystem::path& directory);

// bfloat16 weights of the right size for every tensor of the shape, the same for the same seed: for benchmarks.
// No two tensors share memory, so that reading the model reads all its bytes.
std::unique_ptr<Checkpoint> random_checkpoint(const LlamaConfig& config, std::uint64_t seed);

}  // namespace treeattn::model
