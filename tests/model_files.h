// SPDX-License-Identifier: Apache-2.0
// Small model files, made by the tests.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "model/byte_alphabet.h"
#include "treeattn/error.h"

namespace treeattn::testing_model {

using Json = nlohmann::json;

inline void write_file(const std::filesystem::path& path, const std::string& content) {
  std::ofstream(path, std::ios::binary) << content;
}

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Expects BadFile (or another error) whose message holds every one of `parts`.
template <class Error = BadFile, class Body>
void expect_refused(const Body& body, const std::vector<std::string>& parts) {
  try {
    body();
    ADD_FAILURE() << "was accepted; its refusal should say: " << (parts.empty() ? "" : parts[0]);
  } catch (const Error& error) {
    for (const std::string& part : parts)
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

// config.json of Llama 3.2 1B Instruct.
inline Json llama_config() {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"attention_bias", false},
          {"attention_dropout", 0.0},
          {"bos_token_id", 128000},
          {"eos_token_id", {128001, 128008, 128009}},
          {"head_dim", 64},
          {"hidden_act", "silu"},
          {"hidden_size", 2048},
          {"initializer_range", 0.02},
          {"intermediate_size", 8192},
          {"max_position_embeddings", 131072},
          {"mlp_bias", false},
          {"model_type", "llama"},
          {"num_attention_heads", 32},
          {"num_hidden_layers", 16},
          {"num_key_value_heads", 8},
          {"pretraining_tp", 1},
          {"rms_norm_eps", 1e-05},
          {"rope_scaling",
           {{"factor", 32.0},
            {"high_freq_factor", 4.0},
            {"low_freq_factor", 1.0},
            {"original_max_position_embeddings", 8192},
            {"rope_type", "llama3"}}},
          {"rope_theta", 500000.0},
          {"tie_word_embeddings", true},
          {"torch_dtype", "bfloat16"},
          {"transformers_version", "4.45.0.dev0"},
          {"use_cache", true},
          {"vocab_size", 128256}};
}

inline constexpr const char* kLlama3Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

inline Json added_token(std::int32_t id, const std::string& text, bool special = true) {
  return {{"id", id},        {"content", text},     {"single_word", false}, {"lstrip", false},
          {"rstrip", false}, {"normalized", false}, {"special", special}};
}

// 256 bytes (token = byte), then the merged tokens in order, then the special ones of Llama 3.
inline Json small_tokenizer(const std::vector<std::pair<std::string, std::string>>& merges = {
                                {"h", "e"}, {"l", "l"}, {"he", "ll"}, {"hell", "o"}}) {
  Json vocab = Json::object(), list = Json::array(), added = Json::array();
  std::int32_t next = 0;
  for (int byte = 0; byte < 256; ++byte) vocab[model::byte_character(static_cast<unsigned char>(byte))] = next++;
  for (const auto& [left, right] : merges) {
    if (!vocab.contains(left + right)) vocab[left + right] = next++;
    list.push_back({left, right});
  }
  for (const char* text :
       {"<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}) {
    added.push_back(added_token(next++, text));
  }
  const Json split = {
      {"type", "Split"}, {"pattern", {{"Regex", kLlama3Pattern}}}, {"behavior", "Isolated"}, {"invert", false}};
  const Json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}};
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", added},
          {"normalizer", nullptr},
          {"pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", Json::array({split, byte_level})}}},
          {"post_processor",
           {{"type", "TemplateProcessing"},
            {"single", Json::array({{{"SpecialToken", {{"id", "<|begin_of_text|>"}, {"type_id", 0}}}},
                                    {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}})}}},
          {"decoder", {{"type", "ByteLevel"}}},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", nullptr},
            {"byte_fallback", false},
            {"ignore_merges", true},
            {"vocab", vocab},
            {"merges", list}}}};
}

// The same with added tokens of every sort, and more merges.
inline Json fuzz_tokenizer() {
  Json json = small_tokenizer({{"h", "e"},
                               {"l", "l"},
                               {"he", "ll"},
                               {"hell", "o"},
                               {"a", "a"},
                               {"aa", "a"},
                               {"a", "aa"},
                               {"Ġ", "Ġ"},
                               {"Ġ", "t"},
                               {"Ċ", "Ċ"},
                               {"Ã", "©"},
                               {"1", "2"}});
  std::int32_t next = 300;
  for (const char* text : {"<plain>", "<late>", "<wide>", "<|eot", "<left>"}) {
    json["added_tokens"].push_back(added_token(next++, text, false));
  }
  const std::size_t first = json["added_tokens"].size() - 5;
  json["added_tokens"][first + 1]["normalized"] = true;
  json["added_tokens"][first + 2]["lstrip"] = true;
  json["added_tokens"][first + 2]["rstrip"] = true;
  json["added_tokens"][first + 4]["lstrip"] = true;
  return json;
}

// A safetensors file with this header, padded with spaces to a multiple of eight bytes, and this data.
inline std::string safetensors_file(std::string header, const std::string& data) {
  while (header.size() % 8 != 0) header += ' ';
  const std::uint64_t length = header.size();
  std::string file(sizeof length, '\0');
  std::memcpy(file.data(), &length, sizeof length);
  return file + header + data;
}

inline Json tensor_entry(const std::string& dtype, const Json& shape, std::uint64_t begin, std::uint64_t end) {
  return {{"dtype", dtype}, {"shape", shape}, {"data_offsets", {begin, end}}};
}

}  // namespace treeattn::testing_model
