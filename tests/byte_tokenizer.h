// SPDX-License-Identifier: Apache-2.0
// A tokenizer whose tokens are the 256 bytes and the special ones of a Llama 3 chat.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "model/byte_alphabet.h"
#include "model/tokenizer.h"

namespace treeattn::testing_model {

inline constexpr std::int32_t kBeginOfText = 256, kStartHeader = 257, kEndHeader = 258, kEndOfTurn = 259;

// As tokenizer.json.
inline std::string byte_tokenizer_json() {
  nlohmann::json out;
  for (int byte = 0; byte < 256; ++byte) {
    out["model"]["vocab"][model::byte_character(static_cast<unsigned char>(byte))] = byte;
  }
  out["model"]["type"] = "BPE";
  out["model"]["merges"] = nlohmann::json::array();
  out["pre_tokenizer"] = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
  out["decoder"] = {{"type", "ByteLevel"}};
  int id = kBeginOfText;
  for (const char* token : {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}) {
    out["added_tokens"].push_back({{"id", id++}, {"content", token}, {"special", true}});
  }
  return out.dump();
}

inline model::Tokenizer byte_tokenizer() { return model::Tokenizer::parse(byte_tokenizer_json(), "bytes"); }

}  // namespace treeattn::testing_model
