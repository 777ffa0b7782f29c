// SPDX-License-Identifier: Apache-2.0
// For libFuzzer: -DTREEATTN_FUZZ=ON with clang, one program for each of the functions in the headers. The corpus is in
// corpus/; tests/model_files_fuzz_test.cc replays it.
#include "fuzz/model_files_fuzz.h"

#include "fuzz/other_bytes_fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  treeattn::fuzz::TREEATTN_FUZZ_FUNCTION({reinterpret_cast<const char*>(data), size});
  return 0;
}
