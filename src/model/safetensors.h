// SPDX-License-Identifier: Apache-2.0
// One file of tensors in the safetensors format: eight bytes with the length of a JSON header, the header, the data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/mapped_file.h"
#include "model/checkpoint.h"

namespace treeattn::model {

// What the header says of one tensor. The bytes are counted from the start of the file.
struct SafetensorsEntry {
  std::string dtype;  // as written: "BF16"
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

using SafetensorsHeader = std::map<std::string, SafetensorsEntry>;

// Checks all that the header of a whole file promises: sizes fit shapes and types, and the tensors lie in the data one
// after the other, without gap or overlap, up to the end of the file, each aligned to its element. A type that is not
// known is no error: its size is not checked. Throws BadFile; `name` stands for the file.
SafetensorsHeader parse_safetensors(std::span<const std::byte> file, const std::string& name);

// A mapped file. Movable.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);

  bool contains(const std::string& tensor) const { return header_.contains(tensor); }
  std::vector<std::string> names() const;
  // As Checkpoint::tensor; also throws BadFile for a type that is not float32, float16 or bfloat16.
  Tensor tensor(const std::string& tensor, std::span<const std::int64_t> shape) const;

 private:
  std::string name_;
  base::MappedFile file_;
  SafetensorsHeader header_;
};

}  // namespace treeattn::model
