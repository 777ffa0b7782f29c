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
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include "peers/llama_case.h"
#include "rounded_llama.h"

namespace {

using namespace treeattn;

testing_model::Arithmetic arithmetic_of(const std::string& who) {
  if (who == "float64") return testing_model::transformers_arithmetic(53);
  if (who == "float32") return testing_model::transformers_arithmetic(24);
  if (who == "bfloat16") return testing_model::transformers_arithmetic(8);
  if (who.starts_with("ours/")) return testing_model::our_arithmetic(parse_dtype(who.substr(5)));
  throw InvalidArgument("WHO = " + who + "; accepted: float64, float32, bfloat16, ours/KV_TYPE");
}

void run(char** argv) {
  const testing_model::LlamaCase given(argv[1], argv[2], argv[3], argv[4]);
  testing_model::RoundedLlama llama(*given.weights, given.tokens, given.prompt - 1, arithmetic_of(argv[5]));

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
}

}  // namespace

int main(int argc, char** argv) {
  return treeattn::testing_model::exit_code(argc, argv, 7, "llama_deviations MODEL TOKENS PROMPT WEIGHTS WHO LOGITS",
                                            run);
}
