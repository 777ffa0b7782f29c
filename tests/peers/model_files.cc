// SPDX-License-Identifier: Apache-2.0
// Reads model files and says in JSON what it read, for tests that compare with other programs.
//
// Usage: model_files tokenizer TOKENIZER.json ASK.json     ASK: {"texts": [...], "tokens": [[...]], "chats": [...],
//                                                                "date": "..."}, the date for chats that have one
//        model_files config CONFIG.json
//        model_files shapes                                those that are known by name
//        model_files checkpoint DIRECTORY ASK.json         ASK: [[name, shape], ...]
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "model/checkpoint.h"
#include "model/config.h"
#include "model/tokenizer.h"

namespace {

using nlohmann::json;
using namespace treeattn::model;

json read_json(const char* path) {
  std::ifstream file(path);
  return json::parse(file);
}

std::string stream_text(const Tokenizer& tokenizer, const std::vector<std::int32_t>& tokens) {
  TextStream stream(tokenizer);
  std::string text;
  for (const std::int32_t token : tokens) text += stream.next(token);
  return text + stream.finish();
}

json tokenizer_answers(const char* file, const json& ask) {
  const Tokenizer tokenizer = Tokenizer::read(file);
  json out = {
      {"texts", json::array()}, {"tokens", json::array()}, {"chats", json::array()}, {"dated_chats", json::array()}};
  const std::string date = ask.value("date", "");
  for (const json& text : ask.at("texts")) {
    const auto& string = text.get_ref<const std::string&>();
    out["texts"].push_back({{"special", tokenizer.encode(string, true)}, {"plain", tokenizer.encode(string, false)}});
  }
  for (const json& tokens : ask.at("tokens")) out["tokens"].push_back(stream_text(tokenizer, tokens));
  for (const json& chat : ask.at("chats")) {
    std::vector<ChatMessage> messages;
    for (const json& message : chat) messages.push_back({message.at("role"), message.at("content")});
    out["chats"].push_back(chat_tokens(tokenizer, messages, true));
    out["dated_chats"].push_back(chat_tokens(tokenizer, messages, true, date));
  }
  out["vocab"] = tokenizer.vocab();
  out["bos"] = tokenizer.bos() ? json(*tokenizer.bos()) : json();
  return out;
}

json config_answer(const LlamaConfig& c) {
  json out = {{"vocab_size", c.vocab},
              {"hidden_size", c.hidden},
              {"num_hidden_layers", c.layers},
              {"num_attention_heads", c.heads},
              {"num_key_value_heads", c.kv_heads},
              {"head_dim", c.head_dim},
              {"intermediate_size", c.feed_forward},
              {"max_position_embeddings", c.context},
              {"rms_norm_eps", c.rms_eps},
              {"rope_theta", c.rope_theta},
              {"tie_word_embeddings", c.tied_embeddings},
              {"eos_token_id", c.eos},
              {"rope_scaling", nullptr}};
  if (c.rope_scaling) {
    out["rope_scaling"] = {{"rope_type", "llama3"},
                           {"factor", c.rope_scaling->factor},
                           {"low_freq_factor", c.rope_scaling->low_freq_factor},
                           {"high_freq_factor", c.rope_scaling->high_freq_factor},
                           {"original_max_position_embeddings", c.rope_scaling->original_context}};
  }
  return out;
}

json shape_answers() {
  json out = json::object();
  for (const std::string_view name : known_shapes()) out[std::string(name)] = config_answer(known_shape(name));
  return out;
}

// The bytes of every tensor, in hexadecimal.
json checkpoint_answers(const char* directory, const json& ask) {
  const auto checkpoint = open_checkpoint(directory);
  json out = json::object();
  for (const json& one : ask) {
    const auto shape = one.at(1).get<std::vector<std::int64_t>>();
    const Tensor tensor = checkpoint->tensor(one.at(0), shape);
    std::size_t bytes = treeattn::dtype_size(tensor.dtype);
    for (const std::int64_t size : shape) bytes *= static_cast<std::size_t>(size);
    std::string hex;
    for (std::size_t i = 0; i < bytes; ++i) {
      char two[3];
      std::snprintf(two, sizeof two, "%02x", static_cast<const unsigned char*>(tensor.data)[i]);
      hex += two;
    }
    out[one.at(0).get<std::string>()] = {{"dtype", treeattn::dtype_name(tensor.dtype)}, {"hex", hex}};
  }
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::string what = argc > 1 ? argv[1] : "";
    if (what == "tokenizer" && argc == 4) {
      std::cout << tokenizer_answers(argv[2], read_json(argv[3])) << "\n";
    } else if (what == "config" && argc == 3) {
      std::cout << config_answer(read_config(argv[2])) << "\n";
    } else if (what == "shapes" && argc == 2) {
      std::cout << shape_answers() << "\n";
    } else if (what == "checkpoint" && argc == 4) {
      std::cout << checkpoint_answers(argv[2], read_json(argv[3])) << "\n";
    } else {
      std::fprintf(stderr, "usage: model_files shapes, or tokenizer|config|checkpoint FILE [ASK.json]\n");
      return 2;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "model_files: %s\n", error.what());
    return 1;
  }
  return 0;
}
