// SPDX-License-Identifier: Apache-2.0
// Runs one attention() call whose description and tensors are in files, for tests that compare with other programs.
//
// Usage: attention_file CALL.json. Shapes are those of treeattn/attention.h, tensors are raw and dense:
//   dtype            "float32", "float16" or "bfloat16"
//   batch, queries, heads, kv_heads, tokens, head_dim, v_dim
//   heads_first      K and V are [batch, kv_heads, tokens, dim] instead of [batch, tokens, kv_heads, dim]
//   causal, window, scale
//   lengths, first_query    [batch], or [] for the default
//   threads
//   q, k, v          files to read;   out, lse: files to write, float32
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "treeattn/attention.h"
#include "treeattn/dtype.h"

namespace {

using Bytes = std::vector<char>;

Bytes read_file(const std::string& path, std::size_t size) {
  std::ifstream file(path, std::ios::binary);
  Bytes bytes(size);
  file.read(bytes.data(), static_cast<std::streamsize>(size));
  if (!file || file.peek() != std::ifstream::traits_type::eof()) {
    throw std::runtime_error(path + ": cannot be read, or does not hold exactly " + std::to_string(size) + " bytes");
  }
  return bytes;
}

void write_file(const std::string& path, const std::vector<float>& numbers) {
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(numbers.data()),
             static_cast<std::streamsize>(numbers.size() * sizeof(float)));
  file.close();
  if (!file) throw std::runtime_error(path + ": cannot be written");
}

void run(const nlohmann::json& call) {
  const auto number = [&](const char* name) { return call.at(name).get<std::int64_t>(); };
  const auto path = [&](const char* name) { return call.at(name).get<std::string>(); };
  const treeattn::DType dtype = treeattn::parse_dtype(call.at("dtype").get<std::string>());
  const std::int64_t batch = number("batch"), queries = number("queries"), heads = number("heads");
  const std::int64_t kv_heads = number("kv_heads"), tokens = number("tokens");
  const std::int64_t head_dim = number("head_dim"), v_dim = number("v_dim");
  const auto tensor = [&](const char* name, std::int64_t elements) {
    return read_file(path(name), static_cast<std::size_t>(elements) * treeattn::dtype_size(dtype));
  };
  const Bytes q = tensor("q", batch * queries * heads * head_dim);
  const Bytes k = tensor("k", batch * tokens * kv_heads * head_dim);
  const Bytes v = tensor("v", batch * tokens * kv_heads * v_dim);
  const auto lengths = call.at("lengths").get<std::vector<std::int64_t>>();
  const auto first_query = call.at("first_query").get<std::vector<std::int64_t>>();

  const auto view = call.at("heads_first").get<bool>() ? treeattn::KvView::heads_first : treeattn::KvView::tokens_first;
  treeattn::AttentionInput in;
  in.q = treeattn::QueryView::dense(q.data(), dtype, batch, queries, heads, head_dim);
  in.k = view(k.data(), dtype, batch, tokens, kv_heads, head_dim);
  in.v = view(v.data(), dtype, batch, tokens, kv_heads, v_dim);
  in.lengths = lengths;
  in.first_query = first_query;
  treeattn::AttentionOptions options;
  options.causal = call.at("causal").get<bool>();
  options.window = number("window");
  options.scale = call.at("scale").get<float>();

  const auto rows = static_cast<std::size_t>(batch * queries * heads);
  std::vector<float> out(rows * static_cast<std::size_t>(v_dim)), lse(rows);
  treeattn::ThreadPool pool(call.at("threads").get<int>());
  treeattn::attention(in, options, out, lse, pool);
  write_file(path("out"), out);
  write_file(path("lse"), lse);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: attention_file CALL.json\n");
    return 2;
  }
  try {
    std::ifstream file(argv[1]);
    run(nlohmann::json::parse(file));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "attention_file: %s\n", error.what());
    return 1;
  }
  return 0;
}
