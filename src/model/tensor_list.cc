// SPDX-License-Identifier: Apache-2.0
#include "model/tensor_list.h"

namespace treeattn::model {

std::int64_t NamedShape::elements() const {
  std::int64_t product = 1;
  for (const std::int64_t size : shape) product *= size;
  return product;
}

std::vector<NamedShape> tensor_list(const LlamaConfig& c) {
  const std::int64_t q = c.heads * c.head_dim, kv = c.kv_heads * c.head_dim;
  std::vector<NamedShape> list;
  list.push_back({"model.embed_tokens.weight", {c.vocab, c.hidden}});
  for (std::int64_t layer = 0; layer < c.layers; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    list.push_back({prefix + "input_layernorm.weight", {c.hidden}});
    list.push_back({prefix + "self_attn.q_proj.weight", {q, c.hidden}});
    list.push_back({prefix + "self_attn.k_proj.weight", {kv, c.hidden}});
    list.push_back({prefix + "self_attn.v_proj.weight", {kv, c.hidden}});
    list.push_back({prefix + "self_attn.o_proj.weight", {c.hidden, q}});
    list.push_back({prefix + "post_attention_layernorm.weight", {c.hidden}});
    list.push_back({prefix + "mlp.gate_proj.weight", {c.feed_forward, c.hidden}});
    list.push_back({prefix + "mlp.up_proj.weight", {c.feed_forward, c.hidden}});
    list.push_back({prefix + "mlp.down_proj.weight", {c.hidden, c.feed_forward}});
  }
  list.push_back({"model.norm.weight", {c.hidden}});
  if (!c.tied_embeddings) list.push_back({"lm_head.weight", {c.vocab, c.hidden}});
  return list;
}

}  // namespace treeattn::model
