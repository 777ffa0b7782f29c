// SPDX-License-Identifier: Apache-2.0
#include "model/json.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <unordered_set>

#include "base/file.h"
#include "treeattn/error.h"

namespace treeattn::model {

std::string shown(std::string_view text) {
  constexpr std::size_t kLongest = 120;
  std::string out;
  for (const char c : text.substr(0, kLongest)) {
    if (c >= ' ' && c <= '~') {
      out += c;
    } else {
      out += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    }
  }
  if (text.size() > kLongest) out += "...";
  return out;
}

void refuse_lfs_pointer(std::string_view text, const std::string& name) {
  if (!text.starts_with("version https://git-lfs")) return;
  base::throw_bad_file(name, "is a pointer of Git LFS, not the file it stands for; `git lfs pull` fetches that");
}

Json parse_json(std::string_view text, const std::string& name, int depth_limit) {
  refuse_lfs_pointer(text, name);
  std::vector<std::unordered_set<std::string>> keys;  // of the objects that are open
  const auto watch = [&](int depth, Json::parse_event_t event, Json& parsed) {
    switch (event) {
      case Json::parse_event_t::object_start:
        keys.emplace_back();
        [[fallthrough]];
      case Json::parse_event_t::array_start:
        if (depth >= depth_limit) {
          base::throw_bad_file(name, fmt::format("nested too deep; accepted: {} levels", depth_limit));
        }
        break;
      case Json::parse_event_t::key:
        if (!keys.back().insert(parsed.get_ref<const std::string&>()).second) {
          base::throw_bad_file(name, fmt::format("the key \"{}\" stands twice in one object; accepted: once",
                                                 shown(parsed.get_ref<const std::string&>())));
        }
        break;
      case Json::parse_event_t::object_end:
        keys.pop_back();
        break;
      default:
        break;
    }
    return true;
  };
  try {
    return Json::parse(text.begin(), text.end(), watch);
  } catch (const Json::exception& error) {
    std::string_view why = error.what();  // after its own name in brackets
    why.remove_prefix(why.find("] ") == why.npos ? 0 : why.find("] ") + 2);
    base::throw_bad_file(name, fmt::format("not JSON: {}", shown(why)));
  }
}

std::optional<JsonNode> JsonNode::find(const std::string& key) const {
  object();
  const auto found = value_->find(key);
  if (found == value_->end() || found->is_null()) return std::nullopt;
  return JsonNode(*found, file_, path_of(key));
}

JsonNode JsonNode::at(const std::string& key) const {
  auto found = find(key);
  if (!found) base::throw_bad_file(file_, fmt::format("has no {}; it is required", shown(path_of(key))));
  return *found;
}

std::vector<JsonNode> JsonNode::elements(std::size_t limit) const {
  if (!value_->is_array()) refuse("an array");
  if (value_->size() > limit) refuse(fmt::format("at most {} elements", limit));
  std::vector<JsonNode> nodes;
  nodes.reserve(value_->size());
  for (std::size_t i = 0; i < value_->size(); ++i) {
    nodes.push_back(JsonNode((*value_)[i], file_, fmt::format("{}[{}]", path_, i)));
  }
  return nodes;
}

std::int64_t JsonNode::integer(std::int64_t low, std::int64_t high) const {
  const bool fits = value_->is_number_integer() &&
                    (!value_->is_number_unsigned() ||
                     value_->get<std::uint64_t>() <= std::uint64_t{std::numeric_limits<std::int64_t>::max()});
  if (!fits || value_->get<std::int64_t>() < low || value_->get<std::int64_t>() > high) {
    refuse(fmt::format("an integer from {} to {}", low, high));
  }
  return value_->get<std::int64_t>();
}

double JsonNode::number(double low, double high) const {
  // The comparison is written so that a NaN fails.
  if (!value_->is_number() || !(value_->get<double>() >= low && value_->get<double>() <= high)) {
    refuse(fmt::format("a number from {} to {}", low, high));
  }
  return value_->get<double>();
}

bool JsonNode::boolean() const {
  if (!value_->is_boolean()) refuse("true or false");
  return value_->get<bool>();
}

const std::string& JsonNode::text() const {
  if (!value_->is_string()) refuse("a string");
  return value_->get_ref<const std::string&>();
}

std::int64_t JsonNode::integer(const std::string& key, std::int64_t low, std::int64_t high) const {
  return at(key).integer(low, high);
}

std::int64_t JsonNode::integer_or(const std::string& key, std::int64_t otherwise, std::int64_t low,
                                  std::int64_t high) const {
  const auto found = find(key);
  return found ? found->integer(low, high) : otherwise;
}

double JsonNode::number_or(const std::string& key, double otherwise, double low, double high) const {
  const auto found = find(key);
  return found ? found->number(low, high) : otherwise;
}

bool JsonNode::boolean_or(const std::string& key, bool otherwise) const {
  const auto found = find(key);
  return found ? found->boolean() : otherwise;
}

const JsonNode& JsonNode::object() const {
  if (!value_->is_object()) refuse("an object");
  return *this;
}

void JsonNode::refuse(std::string_view accepted) const {
  constexpr std::size_t kShort = 4;  // such an array is shown, if nothing is in its elements
  const bool plain = std::ranges::none_of(*value_, [](const Json& part) { return part.is_structured(); });
  const std::string text = value_->is_structured() && !(value_->is_array() && value_->size() <= kShort && plain)
                               ? fmt::format("{} of {}", value_->is_array() ? "an array" : "an object", value_->size())
                               : shown(value_->dump(-1, ' ', false, Json::error_handler_t::replace));
  base::throw_bad_file(file_,
                       fmt::format("{} is {}; accepted: {}", path_.empty() ? "it" : shown(path_), text, accepted));
}

}  // namespace treeattn::model
