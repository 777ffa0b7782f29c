// SPDX-License-Identifier: Apache-2.0
// Logits of a model in a directory, for a comparison from outside.
//
//   llama_logits MODEL TOKENS PROMPT RANKS KV_TYPE WEIGHTS OUT
//
// TOKENS: a file of whole numbers. The first PROMPT of them are prefilled, the others decoded one by one. OUT gets
// float32 [tokens - prompt + 1, vocab]: the logits after the prompt and after each token that follows.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iterator>
#include <memory>
#include <span>
#include <vector>

#include "kernels/model_ops.h"
#include "model/checkpoint.h"
#include "model/config.h"
#include "model/llama.h"
#include "model/weights.h"
#include "treeattn/error.h"

namespace {

using namespace treeattn;

int run(char** argv) {
  const model::LlamaConfig config = model::read_config(std::filesystem::path(argv[1]) / "config.json");
  std::ifstream file(argv[2]);
  const std::vector<std::int32_t> tokens((std::istream_iterator<std::int32_t>(file)), {});
  const auto prompt = static_cast<std::size_t>(std::atoi(argv[3]));
  if (prompt < 1 || prompt > tokens.size()) throw InvalidArgument("PROMPT must be 1 to the number of tokens");
  LlamaOptions options;
  options.order.chunk_tokens = 64;
  options.kv_type = parse_dtype(argv[5]);
  options.chunks_per_piece = 1;

  ThreadPool pool(1);
  const auto ops = kernels::cpu_model_ops(pool);
  model::WeightOptions loading;
  loading.format = model::parse_weight_format(argv[6]);
  const auto weights = std::make_shared<model::Weights>(config, model::open_checkpoint(argv[1]), *ops, pool, loading);
  const auto vocab = static_cast<std::size_t>(config.vocab);
  std::vector<float> all((tokens.size() - prompt + 1) * vocab);
  run_ranks(std::atoi(argv[4]), [&](std::shared_ptr<Communicator> world) {
    ThreadPool own_pool(1);
    const auto own_ops = kernels::cpu_model_ops(own_pool);
    model::Llama llama(weights, world, *own_ops, own_pool, options);
    const SequenceId id = llama.add_sequence();
    std::vector<float> unused(all.size());
    const std::span<float> out = world->rank() == 0 ? std::span(all) : std::span(unused);
    llama.prefill(id, std::span(tokens).first(prompt), out.first(vocab));
    for (std::size_t i = prompt; i < tokens.size(); ++i) {
      llama.decode({&id, 1}, {&tokens[i], 1}, out.subspan((i - prompt + 1) * vocab, vocab));
    }
  });
  std::ofstream(argv[7], std::ios::binary)
      .write(reinterpret_cast<const char*>(all.data()), static_cast<std::streamsize>(all.size() * sizeof(float)));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 8) {
    std::fputs("llama_logits MODEL TOKENS PROMPT RANKS KV_TYPE WEIGHTS OUT\n", stderr);
    return 2;
  }
  try {
    return run(argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "llama_logits: %s\n", error.what());
    return 1;
  }
}
