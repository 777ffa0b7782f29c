// SPDX-License-Identifier: Apache-2.0
// JSON that strangers wrote: parsed within limits, then asked for values by key. Every refusal is a BadFile that names
// the file, the key, the value and what is accepted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace treeattn::model {

using Json = nlohmann::json;

// Throws BadFile for what a clone without Git LFS has in the place of a large file.
void refuse_lfs_pointer(std::string_view text, const std::string& name);

// One JSON value, UTF-8, with no key twice in an object and nothing nested deeper than `depth`.
Json parse_json(std::string_view text, const std::string& name, int depth = 32);

// A value and where it stands. Does not own the value.
class JsonNode {
 public:
  JsonNode(const Json& value, std::string file) : value_(&value), file_(std::move(file)) {}

  const Json& value() const { return *value_; }
  const std::string& file() const { return file_; }

  // Members of an object; throws when this is none. null counts as absent.
  std::optional<JsonNode> find(const std::string& key) const;
  JsonNode at(const std::string& key) const;
  // What an iteration over the members has found, by its key.
  JsonNode member(const std::string& key, const Json& value) const { return {value, file_, path_of(key)}; }
  // Elements of an array of at most `limit`.
  std::vector<JsonNode> elements(std::size_t limit) const;

  std::int64_t integer(std::int64_t low, std::int64_t high) const;
  double number(double low, double high) const;
  bool boolean() const;
  const std::string& text() const;
  std::int64_t integer(const std::string& key, std::int64_t low, std::int64_t high) const;
  // The members that may be absent.
  std::int64_t integer_or(const std::string& key, std::int64_t otherwise, std::int64_t low, std::int64_t high) const;
  double number_or(const std::string& key, double otherwise, double low, double high) const;
  bool boolean_or(const std::string& key, bool otherwise) const;

  // Throws unless the value is an object.
  const JsonNode& object() const;
  [[noreturn]] void refuse(std::string_view accepted) const;

 private:
  JsonNode(const Json& value, std::string file, std::string path)
      : value_(&value), file_(std::move(file)), path_(std::move(path)) {}
  std::string path_of(const std::string& key) const { return path_.empty() ? key : path_ + "." + key; }

  const Json* value_;
  std::string file_;
  std::string path_;  // "rope_scaling.factor"; empty at the top
};

// Text for a message: what is not printable ASCII is escaped, what is long is cut.
std::string shown(std::string_view text);

}  // namespace treeattn::model
