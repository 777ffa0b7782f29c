// SPDX-License-Identifier: Apache-2.0
// How far somebody's logits are off from double precision, for a comparison from outside.
//
//   llama_deviations MODEL TOKENS PROMPT WEIGHTS WHO LOGITS
//
// TOKENS and PROMPT: as llama_logits has them. WHO made LOGITS, a file of float64 [tokens - prompt + 1, vocab]:
// float64, float32 or bfloat16 are transformers, ours/KV_TYPE is this library. Prints how many deviations the logits
// are off (rounded_llama.h), how many they may be, and, in units of the largest logit, how much they are off and what a
// deviation is.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iterator>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/model_ops.h"
#include "model/checkpoint.h"
#include "model/config.h"
#include "model/weights.h"
#include "rounded_llama.h"
#include "treeattn/error.h"

namespace {

using namespace treeattn;

testing_model::Arithmetic arithmetic_of(const std::string& who) {
  if (who == "float64") return testing_model::transformers_arithmetic(53);
  if (who == "float32") return testing_model::transformers_arithmetic(24);
  if (who == "bfloat16") return testing_model::transformers_arithmetic(8);
  if (who.starts_with("ours/")) return testing_model::our_arithmetic(parse_dtype(who.substr(5)));
  throw InvalidArgument("WHO = " + who + "; accepted: float64, float32, bfloat16, ours/KV_TYPE");
}

int run(char** argv) {
  const model::LlamaConfig config = model::read_config(std::filesystem::path(argv[1]) / "config.json");
  std::ifstream file(argv[2]);
  const std::vector<std::int32_t> tokens((std::istream_iterator<std::int32_t>(file)), {});
  const auto prompt = static_cast<std::size_t>(std::atoi(argv[3]));
  if (prompt < 1 || prompt > tokens.size()) throw InvalidArgument("PROMPT must be 1 to the number of tokens");
  ThreadPool pool(1);
  const auto ops = kernels::cpu_model_ops(pool);
  model::WeightOptions loading;
  loading.format = model::parse_weight_format(argv[4]);
  const model::Weights weights(config, model::open_checkpoint(argv[1]), *ops, pool, loading);
  testing_model::RoundedLlama llama(weights, tokens, prompt - 1, arithmetic_of(argv[5]));

  std::vector<double> logits(llama.logits().size());
  std::ifstream(argv[6], std::ios::binary)
      .read(reinterpret_cast<char*>(logits.data()), static_cast<std::streamsize>(logits.size() * sizeof(double)));
  double off = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) off = std::fmax(off, std::fabs(logits[i] - llama.logits()[i]));
  const double deviations = llama.deviations_off(std::span<const double>(logits));
  std::vector<double> last(logits.size());
  last.back() = 1;
  std::printf("%.17g %.17g %.17g %.17g\n", deviations, testing_model::kMostDeviations, off / llama.largest_logit(),
              llama.spread(last).deviation / llama.largest_logit());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7) {
    std::fputs("llama_deviations MODEL TOKENS PROMPT WEIGHTS WHO LOGITS\n", stderr);
    return 2;
  }
  try {
    return run(argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "llama_deviations: %s\n", error.what());
    return 1;
  }
}
