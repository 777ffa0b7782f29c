// SPDX-License-Identifier: Apache-2.0
// What both fuzzers of model files call: libFuzzer's (model_files_fuzz.cc) and the test that replays the corpus.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/config.h"
#include "model/generation_config.h"
#include "model/safetensors.h"
#include "model/safetensors_index.h"
#include "model/sampler.h"
#include "model/tensor_list.h"
#include "model/tokenizer.h"
#include "model/tokenizer_config.h"
#include "model/utf8.h"
#include "treeattn/error.h"

namespace treeattn::fuzz {

// What does not hold ends the program, so that libFuzzer keeps the input. Anything thrown but an Error gets out.
inline void must(bool holds) {
  if (!holds) std::abort();
}

// Each returns whether the bytes were taken.

inline bool try_config(std::string_view bytes) {
  try {
    const model::LlamaConfig config = model::parse_config(bytes, "fuzz");
    must(config.parameters() > 0 && config.heads % config.kv_heads == 0 && config.head_dim % 8 == 0);
    for (const model::NamedShape& tensor : model::tensor_list(config)) must(tensor.elements() > 0);
    return true;
  } catch (const BadFile&) {
    return false;
  }
}

inline bool try_generation_config(std::string_view bytes) {
  try {
    model::check_sampler(model::parse_generation_config(bytes, "fuzz").sampler);
    return true;
  } catch (const BadFile&) {
    return false;
  }
}

inline bool try_safetensors(std::string_view bytes) {
  try {
    const auto file = std::as_bytes(std::span(bytes));
    std::uint64_t total = 0;
    for (const auto& [name, entry] : model::parse_safetensors(file, "fuzz")) {
      must(entry.begin <= entry.end && entry.end <= file.size());
      total += entry.end - entry.begin;
    }
    must(total < file.size());  // each byte of the data is one tensor's
    return true;
  } catch (const BadFile&) {
    return false;
  }
}

inline bool try_index(std::string_view bytes) {
  try {
    for (const auto& [tensor, file] : model::parse_safetensors_index(bytes, "fuzz")) {
      must(!file.empty() && file.find('/') == std::string::npos && file != "." && file != "..");
    }
    return true;
  } catch (const BadFile&) {
    return false;
  }
}

inline bool try_tokenizer_config(std::string_view bytes) {
  try {
    const model::TokenizerConfig config = model::parse_tokenizer_config(bytes, "fuzz");
    model::llama3_chat_form(config, "fuzz");
    return true;
  } catch (const BadFile&) {
    return false;
  } catch (const Unavailable&) {
    return true;
  }
}

// Any text and what it becomes.
inline void check_text(const model::Tokenizer& tokenizer, std::string_view text) {
  for (const bool special : {false, true}) {
    std::vector<std::int32_t> tokens;
    try {
      tokens = tokenizer.encode(text, special);
    } catch (const InvalidArgument&) {
      must(model::valid_utf8(text) < text.size());
      return;
    }
    const std::string back = tokenizer.decode(tokens, true);
    // Added tokens may take white space with them, and that alone.
    must(back.size() <= text.size());
    std::size_t at = 0;
    for (const char byte : text) at += at < back.size() && back[at] == byte ? 1 : 0;
    must(at == back.size());
    model::TextStream stream(tokenizer);
    std::string streamed;
    for (const std::int32_t token : tokens) streamed += stream.next(token);
    streamed += stream.finish();
    must(model::valid_utf8(streamed) == streamed.size());
  }
}

// tokenizer.json, a zero byte, and a text.
inline bool try_tokenizer(std::string_view bytes) {
  const std::size_t end = bytes.find('\0');
  try {
    const model::Tokenizer tokenizer = model::Tokenizer::parse(bytes.substr(0, end), "fuzz");
    check_text(tokenizer, "It's 12345 o'clock,\r\n  isn't it?");
    if (end != std::string_view::npos) check_text(tokenizer, bytes.substr(end + 1));
    return true;
  } catch (const BadFile&) {
    return false;
  }
}

}  // namespace treeattn::fuzz
