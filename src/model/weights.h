// SPDX-License-Identifier: Apache-2.0
// The matrices of a Llama, where the backend can read them. Ranks that are threads share one copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "kernels/model_ops.h"
#include "model/checkpoint.h"
#include "model/config.h"
#include "treeattn/llama.h"
#include "treeattn/thread_pool.h"

namespace treeattn::model {

struct LayerWeights {
  const float* attention_norm = nullptr;  // [hidden]
  kernels::WeightMatrix q, k, v, o;
  const float* feed_forward_norm = nullptr;  // [hidden]
  kernels::WeightMatrix gate, up, down;
};

// "stored", "bf16" and "int8". Throws InvalidArgument.
WeightFormat parse_weight_format(std::string_view name);
// Throws InvalidArgument for a value that is none of them.
void check_weight_format(WeightFormat format);
// Whether a matrix of the type `stored` stays as the checkpoint has it, and where.
bool stays_as_stored(WeightFormat format, DType stored);

struct WeightOptions {
  WeightFormat format = WeightFormat::kAsStored;
  // Whether the backend reads the memory of the checkpoint itself; false: everything is copied by from_host.
  bool host_memory = true;
  // Called now and then with the parameters done and those in all.
  std::function<void(std::size_t done, std::size_t total)> progress;
};

class Weights {
 public:
  // Reads every weight once, so that the first token does not wait for the disk. `ops` gives the memory and must
  // outlive this. Throws BadFile; InvalidArgument for a shape that the format cannot have.
  Weights(const LlamaConfig& config, std::shared_ptr<const Checkpoint> checkpoint, kernels::ModelOps& ops,
          ThreadPool& pool, const WeightOptions& options = {});
  ~Weights();
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;

  const LlamaConfig& config() const { return config_; }
  const kernels::WeightMatrix& embedding() const { return embedding_; }
  const std::vector<LayerWeights>& layers() const { return layers_; }
  const float* final_norm() const { return final_norm_; }
  const kernels::WeightMatrix& head() const { return head_; }
  // Of all matrices that one token reads: all but the embedding, of which it reads one row.
  std::size_t bytes_per_token() const { return bytes_per_token_; }

 private:
  class Loader;

  LlamaConfig config_;
  std::shared_ptr<const Checkpoint> checkpoint_;
  kernels::ModelOps& ops_;
  std::vector<void*> owned_;  // of ops_
  kernels::WeightMatrix embedding_;
  std::vector<LayerWeights> layers_;
  const float* final_norm_ = nullptr;
  kernels::WeightMatrix head_;
  std::size_t bytes_per_token_ = 0;
};

// Bytes of a matrix, scales included.
std::size_t matrix_bytes(const kernels::WeightMatrix& matrix);
// Of so many weights, stored in `stored`, as they are kept.
std::size_t weight_bytes(std::size_t elements, WeightFormat format, DType stored);
// Of all weights as they are kept, one copy.
std::size_t all_weight_bytes(const LlamaConfig& config, WeightFormat format);
// What Weights::bytes_per_token will say, before the model is loaded.
std::size_t weight_bytes_per_token(const LlamaConfig& config, WeightFormat format);

}  // namespace treeattn::model
