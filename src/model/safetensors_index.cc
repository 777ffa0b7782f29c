// SPDX-License-Identifier: Apache-2.0
#include "model/safetensors_index.h"

#include <algorithm>
#include <set>

#include "base/file.h"
#include "model/json.h"

namespace treeattn::model {
namespace {

constexpr std::size_t kMostFiles = 4096;

// It will be said when it is missing: nothing in it may move the cursor of a terminal.
bool is_plain_name(std::string_view file) {
  const auto is_control = [](char c) { return static_cast<unsigned char>(c) < ' ' || c == '\x7f'; };
  return !file.empty() && file.size() < 256 && !file.starts_with('.') && std::ranges::none_of(file, is_control) &&
         file.find_first_of("/\\") == std::string_view::npos;
}

}  // namespace

std::map<std::string, std::string> parse_safetensors_index(std::string_view text, const std::string& name) {
  const Json value = parse_json(text, name, 8);
  const JsonNode map = JsonNode(value, name).at("weight_map").object();
  std::map<std::string, std::string> files;
  std::set<std::string> different;
  for (const auto& [tensor, ignored] : map.value().items()) {
    const JsonNode file = map.at(tensor);
    if (!is_plain_name(file.text())) file.refuse("the name of a file in the directory of the index");
    if (different.insert(file.text()).second && different.size() > kMostFiles) {
      base::throw_bad_file(name, "names too many files; accepted: " + std::to_string(kMostFiles));
    }
    files.emplace(tensor, file.text());
  }
  if (files.empty()) map.refuse("at least one tensor");
  return files;
}

}  // namespace treeattn::model
