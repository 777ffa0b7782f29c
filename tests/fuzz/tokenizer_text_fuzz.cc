// SPDX-License-Identifier: Apache-2.0
// For libFuzzer: any text through a sound tokenizer. The bytes of a damaged tokenizer.json seldom get that far.
#include <string>

#include "fuzz/model_files_fuzz.h"
#include "model_files.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const treeattn::model::Tokenizer tokenizer =
      treeattn::model::Tokenizer::parse(treeattn::testing_model::fuzz_tokenizer().dump(), "fuzz");
  treeattn::fuzz::check_text(tokenizer, {reinterpret_cast<const char*>(data), size});
  return 0;
}
