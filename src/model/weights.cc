// SPDX-License-Identifier: Apache-2.0
#include "model/weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <set>
#include <string>
#include <utility>

#include "base/buffer.h"
#include "base/check.h"
#include "base/half.h"
#include "base/round_up.h"

namespace treeattn::model {

using kernels::WeightMatrix;

namespace {

constexpr char kAcceptedFormats[] = "stored, bf16, int8";

}  // namespace

std::size_t matrix_bytes(const WeightMatrix& m) {
  const auto elements = static_cast<std::size_t>(m.rows * m.cols);
  const std::size_t scales = m.scales ? elements / static_cast<std::size_t>(m.group) * sizeof(float) : 0;
  return elements * dtype_size(m.dtype) + scales;
}

std::size_t weight_bytes(std::size_t elements, WeightFormat format, DType stored) {
  constexpr std::size_t kGroup = kernels::kWeightGroup;
  switch (format) {
    case WeightFormat::kAsStored:
      return elements * dtype_size(stored);
    case WeightFormat::kBFloat16:
      return elements * dtype_size(DType::kBFloat16);
    case WeightFormat::kInt8:
      return elements / kGroup * (kGroup + sizeof(float));
  }
  return 0;  // not reached
}

std::size_t all_weight_bytes(const LlamaConfig& c, WeightFormat format) {
  const auto parameters = static_cast<std::size_t>(c.parameters());
  const auto table = static_cast<std::size_t>(c.vocab * c.hidden);
  if (format != WeightFormat::kInt8) return weight_bytes(parameters, format, c.stored);
  // The embedding is not quantised; a head that is tied to it is a copy then.
  return weight_bytes(c.tied_embeddings ? parameters : parameters - table, format, c.stored) +
         weight_bytes(table, WeightFormat::kAsStored, c.stored);
}

std::size_t weight_bytes_per_token(const LlamaConfig& c, WeightFormat format) {
  const std::int64_t attention = c.hidden * c.head_dim * (2 * c.heads + 2 * c.kv_heads);
  const std::int64_t layer = attention + 3 * c.hidden * c.feed_forward;
  const auto elements = static_cast<std::size_t>(c.layers * layer + c.vocab * c.hidden);
  return weight_bytes(elements, format, c.stored);
}

WeightFormat parse_weight_format(std::string_view name) {
  if (name == "stored") return WeightFormat::kAsStored;
  if (name == "bf16") return WeightFormat::kBFloat16;
  if (name == "int8") return WeightFormat::kInt8;
  base::throw_invalid("weights are \"{}\"; accepted: {}", name, kAcceptedFormats);
}

void check_weight_format(WeightFormat format) {
  base::require(format <= WeightFormat::kInt8, "weights = {}; accepted: {}", static_cast<int>(format),
                kAcceptedFormats);
}

bool stays_as_stored(WeightFormat format, DType stored) {
  return format == WeightFormat::kAsStored || (format == WeightFormat::kBFloat16 && stored == DType::kBFloat16);
}

// Takes tensors one by one and leaves them where the backend can read them.
class Weights::Loader {
 public:
  Loader(Weights& weights, ThreadPool& pool, const WeightOptions& options)
      : weights_(weights), pool_(pool), options_(options) {
    const LlamaConfig& c = weights.config_;
    total_ = static_cast<std::size_t>(c.parameters());
  }

  const float* norm(const std::string& name) {
    const std::int64_t dim = weights_.config_.hidden;
    const Tensor tensor = weights_.checkpoint_->tensor(name, std::span(&dim, 1));
    std::vector<float> values(static_cast<std::size_t>(dim));
    base::load_row_as_float(tensor.data, tensor.dtype, dim, values.data());
    count(values.size());
    return static_cast<const float*>(keep(values.data(), values.size() * sizeof(float)));
  }

  WeightMatrix matrix(const std::string& name, std::int64_t rows, std::int64_t cols, WeightFormat format) {
    const std::int64_t shape[] = {rows, cols};
    const Tensor tensor = weights_.checkpoint_->tensor(name, shape);
    WeightMatrix out{tensor.data, tensor.dtype, rows, cols, nullptr, 0};
    if (!stays_as_stored(format, out.dtype)) {
      out = format == WeightFormat::kInt8 ? quantized(name, out) : rounded(out);
    } else if (options_.host_memory) {
      touch(out);
    } else {
      out.data = keep(out.data, matrix_bytes(out));
    }
    if (out.data == tensor.data) {
      in_place_.insert(name);
    } else if (!in_place_.contains(name)) {
      weights_.checkpoint_->release(name);
    }
    count(static_cast<std::size_t>(rows * cols));
    return out;
  }

 private:
  static constexpr std::size_t kPiece = 256;  // alignment of matrices in one allocation, as GPUs like it

  // What the host makes for the backend: in place where that is the host's memory, else first beside it.
  class Made {
   public:
    Made(Loader& loader, std::size_t bytes, void* there)
        : loader_(loader), bytes_(bytes), there_(there), copy_(loader.options_.host_memory ? 0 : bytes) {}
    template <class T>
    T* as() {
      return loader_.options_.host_memory ? static_cast<T*>(there_) : copy_.as<T>();
    }
    // Where it is for the backend.
    const void* finish() {
      if (!loader_.options_.host_memory) loader_.weights_.ops_.from_host(there_, as<std::byte>(), bytes_);
      return there_;
    }

   private:
    Loader& loader_;
    std::size_t bytes_;
    void* there_;
    base::Buffer copy_;
  };

  WeightMatrix rounded(const WeightMatrix& from) {
    WeightMatrix out{nullptr, DType::kBFloat16, from.rows, from.cols, nullptr, 0};
    const auto cols = static_cast<std::size_t>(from.cols);
    Made made(*this, matrix_bytes(out), allocate(matrix_bytes(out)));
    auto* here = made.as<std::byte>();
    const auto* stored = static_cast<const std::byte*>(from.data);
    pool_.run(static_cast<std::size_t>(from.rows), [&](std::size_t row, int) {
      std::vector<float> values(cols);
      base::load_row_as_float(stored + row * cols * dtype_size(from.dtype), from.dtype, from.cols, values.data());
      base::store_row_from_float(values.data(), cols, out.dtype, here + row * cols * dtype_size(out.dtype));
    });
    out.data = made.finish();
    return out;
  }

  WeightMatrix quantized(const std::string& name, const WeightMatrix& from) {
    base::require(from.cols % kernels::kWeightGroup == 0, "int8 weights: {} has rows of {}; accepted: a multiple of {}",
                  name, from.cols, kernels::kWeightGroup);
    const auto elements = static_cast<std::size_t>(from.rows * from.cols);
    const std::size_t scale_bytes = elements / static_cast<std::size_t>(kernels::kWeightGroup) * sizeof(float);
    WeightMatrix out{nullptr, DType::kInt8, from.rows, from.cols, nullptr, kernels::kWeightGroup};
    Made values(*this, elements, carve(elements)), scales(*this, scale_bytes, carve(scale_bytes));
    kernels::quantize_weights(from, values.as<std::int8_t>(), scales.as<float>(), pool_);
    out.data = values.finish();
    out.scales = static_cast<const float*>(scales.finish());
    return out;
  }

  // All int8 matrices lie in one allocation: many a matrix, and the scales of most, are too small for huge pages by
  // themselves, and decode reads each of them in streams.
  void* carve(std::size_t bytes) {
    const LlamaConfig& c = weights_.config_;
    if (carved_ == nullptr) {
      const auto pieces = 2 * static_cast<std::size_t>(7 * c.layers + 1);
      carved_ = static_cast<std::byte*>(allocate(weight_bytes_per_token(c, WeightFormat::kInt8) + pieces * kPiece));
    }
    std::byte* piece = carved_;
    carved_ += base::round_up(bytes, kPiece);
    return piece;
  }

  void* allocate(std::size_t bytes) {
    weights_.owned_.push_back(nullptr);
    return weights_.owned_.back() = weights_.ops_.allocate(bytes);
  }
  const void* keep(const void* from, std::size_t bytes) {
    void* to = allocate(bytes);
    weights_.ops_.from_host(to, from, bytes);
    return to;
  }

  // A mapped file is read when it is touched.
  void touch(const WeightMatrix& matrix) {
    constexpr std::size_t kPage = 4096, kPart = std::size_t{16} << 20;
    const auto* bytes = static_cast<const unsigned char*>(matrix.data);
    const std::size_t size = matrix_bytes(matrix);
    std::atomic<unsigned> sum = 0;  // so that the reading cannot be optimised away
    pool_.run(base::divide_up(size, kPart), [&](std::size_t part, int) {
      unsigned mine = 0;
      for (std::size_t i = part * kPart; i < std::min(size, (part + 1) * kPart); i += kPage) mine += bytes[i];
      sum += mine;
    });
  }

  void count(std::size_t elements) {
    done_ += elements;
    if (options_.progress) options_.progress(std::min(done_, total_), total_);
  }

  Weights& weights_;
  ThreadPool& pool_;
  const WeightOptions& options_;
  std::size_t done_ = 0, total_ = 0;
  std::byte* carved_ = nullptr;     // where the next int8 matrix goes
  std::set<std::string> in_place_;  // tensors that are read where the checkpoint has them
};

Weights::Weights(const LlamaConfig& config, std::shared_ptr<const Checkpoint> checkpoint, kernels::ModelOps& ops,
                 ThreadPool& pool, const WeightOptions& options)
    : config_(config), checkpoint_(std::move(checkpoint)), ops_(ops) {
  const std::int64_t hidden = config.hidden, feed_forward = config.feed_forward;
  const std::int64_t q_dim = config.heads * config.head_dim, kv_dim = config.kv_heads * config.head_dim;
  Loader loader(*this, pool, options);
  try {
    const std::string table = "model.embed_tokens.weight";
    const bool quantizes = options.format == WeightFormat::kInt8;
    embedding_ = loader.matrix(table, config.vocab, hidden, quantizes ? WeightFormat::kAsStored : options.format);
    for (std::int64_t i = 0; i < config.layers; ++i) {
      const std::string layer = fmt::format("model.layers.{}.", i);
      const auto matrix = [&](const char* name, std::int64_t rows, std::int64_t cols) {
        WeightMatrix out = loader.matrix(layer + name + ".weight", rows, cols, options.format);
        bytes_per_token_ += matrix_bytes(out);
        return out;
      };
      LayerWeights& w = layers_.emplace_back();
      w.attention_norm = loader.norm(layer + "input_layernorm.weight");
      w.q = matrix("self_attn.q_proj", q_dim, hidden);
      w.k = matrix("self_attn.k_proj", kv_dim, hidden);
      w.v = matrix("self_attn.v_proj", kv_dim, hidden);
      w.o = matrix("self_attn.o_proj", hidden, q_dim);
      w.feed_forward_norm = loader.norm(layer + "post_attention_layernorm.weight");
      w.gate = matrix("mlp.gate_proj", feed_forward, hidden);
      w.up = matrix("mlp.up_proj", feed_forward, hidden);
      w.down = matrix("mlp.down_proj", hidden, feed_forward);
    }
    final_norm_ = loader.norm("model.norm.weight");
    const bool shared = config.tied_embeddings && !quantizes;
    const std::string& head = config.tied_embeddings ? table : "lm_head.weight";
    head_ = shared ? embedding_ : loader.matrix(head, config.vocab, hidden, options.format);
    bytes_per_token_ += matrix_bytes(head_);
    if (!options.host_memory) checkpoint_.reset();  // everything has been copied
  } catch (...) {
    for (void* memory : owned_) ops_.release(memory);
    throw;
  }
}

Weights::~Weights() {
  for (void* memory : owned_) ops_.release(memory);
}

}  // namespace treeattn::model
