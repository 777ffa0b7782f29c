// SPDX-License-Identifier: Apache-2.0
// Logits of a model in a directory, for a comparison from outside.
//
//   llama_logits MODEL TOKENS PROMPT RANKS KV_TYPE WEIGHTS OUT
//
// TOKENS: a file of whole numbers. The first PROMPT of them are prefilled, the others decoded one by one. OUT gets
// float32 [tokens - prompt + 1, vocab]: the logits after the prompt and after each token that follows.
#include <cstdlib>
#include <fstream>
#include <memory>
#include <span>
#include <vector>

#include "model/llama.h"
#include "peers/llama_case.h"

namespace {

using namespace treeattn;

void run(char** argv) {
  const testing_model::LlamaCase given(argv[1], argv[2], argv[3], argv[6]);
  const std::vector<std::int32_t>& tokens = given.tokens;
  const std::size_t prompt = given.prompt;
  LlamaOptions options;
  options.order.chunk_tokens = 64;
  options.kv_type = parse_dtype(argv[5]);
  options.chunks_per_piece = 1;

  const auto vocab = static_cast<std::size_t>(given.config.vocab);
  std::vector<float> all((tokens.size() - prompt + 1) * vocab);
  run_ranks(std::atoi(argv[4]), [&](std::shared_ptr<Communicator> world) {
    ThreadPool own_pool(1);
    const auto own_ops = kernels::cpu_model_ops(own_pool);
    model::Llama llama(given.weights, world, *own_ops, own_pool, options);
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
}

}  // namespace

int main(int argc, char** argv) {
  return treeattn::testing_model::exit_code(argc, argv, 8, "llama_logits MODEL TOKENS PROMPT RANKS KV_TYPE WEIGHTS OUT",
                                            run);
}
