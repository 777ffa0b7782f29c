// SPDX-License-Identifier: Apache-2.0
// The cases of `treeattn verify`, run and judged: rows of its table.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/case_list.h"
#include "treeattn/dtype.h"

namespace treeattn::tools {

// What computed, and a type of K.
struct VerifyRow {
  static constexpr std::size_t kNamedFailures = 5;  // more would bury the table

  std::size_t cases = 0;
  std::size_t failed = 0;
  double worst = 0;
  std::string worst_case;
  std::vector<std::string> failures;

  void add(const std::string& name, double error);
};

// An instruction set of the CPU, or a kernel of the GPU.
struct VerifyRows {
  std::string backend;  // "cpu", "cuda"
  std::string isa;
  std::array<VerifyRow, std::size(kAllDTypes)> by_type;

  VerifyRow& of(const kernels::Case& shape) { return by_type[static_cast<std::size_t>(shape.k_type)]; }
};

// Case i gets the numbers of seed + i.
// isa: only this one; empty: all that this processor can run.
std::vector<VerifyRows> verify_on_cpu(const std::vector<kernels::Case>& cases, std::uint64_t seed,
                                      const std::string& isa);
// A row for each kernel that served a case.
std::vector<VerifyRows> verify_on_gpu(const std::vector<kernels::Case>& cases, std::uint64_t seed, int gpu);

}  // namespace treeattn::tools
