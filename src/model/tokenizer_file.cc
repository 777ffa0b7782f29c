// SPDX-License-Identifier: Apache-2.0
#include "model/tokenizer_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/file.h"
#include "model/byte_alphabet.h"
#include "model/json.h"
#include "model/split_pattern.h"
#include "model/token_ids.h"
#include "model/utf8.h"

namespace treeattn::model {
namespace {

constexpr std::int64_t kMostTokens = std::int64_t{1} << 20;
constexpr std::size_t kMostMerges = std::size_t{1} << 21;
constexpr std::size_t kMostAdded = std::size_t{1} << 16;
constexpr std::size_t kMostSteps = 16;  // of a pre-tokenizer or post-processor

// As the file writes them: merges and added tokens name tokens so.
using Ids = std::unordered_map<std::string, std::int32_t>;

void require_absent(const JsonNode& node, const std::string& key, std::string_view accepted) {
  if (const auto found = node.find(key)) found->refuse(accepted);
}

// ---- the model

void check_model(const JsonNode& model) {
  if (const auto type = model.find("type"); type && type->text() != "BPE") type->refuse("\"BPE\"");
  if (model.boolean_or("byte_fallback", false)) model.at("byte_fallback").refuse("false");
  if (const auto dropout = model.find("dropout"); dropout && dropout->number(0, 1) != 0) dropout->refuse("null or 0");
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (const auto found = model.find(key); found && !found->text().empty()) found->refuse("null or \"\"");
  }
}

// Makes room for the token, which must not be there yet.
void claim(TokenizerFile& file, std::vector<bool>& claimed, std::int32_t id, const std::string& token,
           const std::string& name) {
  const auto at = static_cast<std::size_t>(id);
  if (at >= file.token_bytes.size()) {
    file.token_bytes.resize(at + 1);
    claimed.resize(at + 1);
  }
  if (claimed[at]) {
    base::throw_bad_file(
        name, fmt::format("the id {} of \"{}\" is that of another token; accepted: one token an id", id, shown(token)));
  }
  claimed[at] = true;
}

Ids read_vocab(const JsonNode& model, TokenizerFile& file, std::vector<bool>& claimed) {
  const JsonNode vocab = model.at("vocab").object();
  if (vocab.value().size() > static_cast<std::size_t>(kMostTokens)) {
    vocab.refuse(fmt::format("at most {} tokens", kMostTokens));
  }
  const bool whole_words = model.boolean_or("ignore_merges", false);
  Ids ids;
  ids.reserve(vocab.value().size());
  for (const auto& [token, value] : vocab.value().items()) {
    const auto id = static_cast<std::int32_t>(vocab.member(token, value).integer(0, kMostTokens - 1));
    claim(file, claimed, id, token, model.file());
    const auto bytes = bytes_of_alphabet(token);
    file.token_bytes[static_cast<std::size_t>(id)] = bytes.value_or(token);
    if (bytes && whole_words) file.words.emplace(*bytes, id);
    ids.emplace(token, id);
  }
  return ids;
}

// What stands for a byte without a token of its own: nothing, or "unk_token".
std::int32_t read_unknown(const JsonNode& model, const Ids& ids) {
  const auto name = model.find("unk_token");
  if (!name) return kNoToken;
  const auto found = ids.find(name->text());
  if (found == ids.end()) name->refuse("null or a token of the vocabulary");
  if (model.boolean_or("fuse_unk", false)) model.at("fuse_unk").refuse("false");
  return found->second;
}

// A vocabulary that was trained on text, and not begun with all bytes, has none for some that are rare: to leave them
// out is what the tokenizers package does. One without letters is not byte-level.
void read_bytes(const JsonNode& model, const Ids& ids, TokenizerFile& file) {
  std::optional<std::int32_t> unknown;
  for (int byte = 0; byte < 256; ++byte) {
    const std::string character = byte_character(static_cast<unsigned char>(byte));
    auto& token = file.byte_tokens[static_cast<std::size_t>(byte)];
    if (const auto found = ids.find(character); found != ids.end()) {
      token = found->second;
      continue;
    }
    const bool common = (byte >= ' ' && byte <= '~') || byte == '\n' || byte == '\t' || (byte >= 0x80 && byte < 0xc0);
    if (common) {
      base::throw_bad_file(model.file(), fmt::format("the vocabulary has no token for the byte {} alone (\"{}\"); "
                                                     "accepted: a byte-level vocabulary, in which only control "
                                                     "characters and first bytes of rare ones may be missing",
                                                     byte, character));
    }
    if (!unknown) unknown = read_unknown(model, ids);
    token = *unknown;
  }
}

// "left right" or ["left", "right"].
std::pair<std::string, std::string> read_merge(const Json& value, const std::string& place) {
  if (value.is_array() && value.size() == 2 && value[0].is_string() && value[1].is_string()) {
    return {value[0].get<std::string>(), value[1].get<std::string>()};
  }
  if (value.is_string()) {
    const auto& text = value.get_ref<const std::string&>();
    const std::size_t space = text.find(' ');
    if (space != std::string::npos && text.find(' ', space + 1) == std::string::npos) {
      return {text.substr(0, space), text.substr(space + 1)};
    }
  }
  JsonNode(value, place).refuse("\"left right\" or [\"left\", \"right\"]");
}

void read_merges(const JsonNode& model, const Ids& ids, TokenizerFile& file) {
  const JsonNode merges = model.at("merges");
  if (!merges.value().is_array() || merges.value().size() > kMostMerges) {
    merges.refuse(fmt::format("an array of at most {}", kMostMerges));
  }
  for (const Json& value : merges.value()) {
    // The first line of the older form, as in merges.txt.
    if (value.is_string() && value.get_ref<const std::string&>().starts_with("#version")) continue;
    const std::string place = model.file() + ", merge " + std::to_string(file.merges.size());
    const auto [left, right] = read_merge(value, place);
    const auto id = [&](const std::string& token) {
      const auto found = ids.find(token);
      if (found == ids.end()) {
        base::throw_bad_file(place, fmt::format("\"{}\" is not in the vocabulary; accepted: its tokens", shown(token)));
      }
      return found->second;
    };
    file.merges.push_back({id(left), id(right), id(left + right)});
  }
}

// ---- added tokens

// Two that both want the same white space would share it.
void check_strips(const std::vector<AddedToken>& tokens, const std::string& name) {
  bool strips = false;
  for (const AddedToken& token : tokens) strips = strips || token.strip_before || token.strip_after;
  if (!strips) return;
  for (const AddedToken& token : tokens) {
    if (space_at_begin(token.text) != 0 || space_at_end(token.text) != token.text.size()) {
      base::throw_bad_file(name, fmt::format("the added token \"{}\" begins or ends with white space, and others have "
                                             "lstrip or rstrip; accepted: one or the other",
                                             shown(token.text)));
    }
  }
}

void read_added(const JsonNode& json, const Ids& ids, TokenizerFile& file, std::vector<bool>& claimed) {
  const auto list = json.find("added_tokens");
  if (!list) return;
  Ids seen;
  for (const JsonNode& node : list->elements(kMostAdded)) {
    AddedToken token;
    const JsonNode content = node.at("content");
    token.text = content.text();
    if (token.text.empty() || token.text.size() > kLongestAddedToken) {
      content.refuse(fmt::format("1 to {} bytes", kLongestAddedToken));
    }
    token.id = static_cast<std::int32_t>(node.integer("id", 0, kMostTokens - 1));
    token.special = node.boolean_or("special", false);
    token.strip_before = node.boolean_or("lstrip", false);
    token.strip_after = node.boolean_or("rstrip", false);
    token.normalized = node.boolean_or("normalized", !token.special);
    if (node.boolean_or("single_word", false)) node.at("single_word").refuse("false");
    if (!seen.emplace(token.text, token.id).second) content.refuse("every added token once");
    // Found in a text as it is written, but the decoder takes it for one of the vocabulary.
    if (const auto known = ids.find(token.text); known == ids.end()) {
      claim(file, claimed, token.id, token.text, json.file());
      file.token_bytes[static_cast<std::size_t>(token.id)] = bytes_of_alphabet(token.text).value_or(token.text);
    } else if (known->second != token.id) {
      node.at("id").refuse(fmt::format("{}, its id in the vocabulary", known->second));
    }
    file.added.push_back(std::move(token));
  }
  check_strips(file.added, json.file());
}

void find_plain_vocab(const Ids& ids, TokenizerFile& file) {
  std::set<std::string_view> added;
  for (const AddedToken& token : file.added) added.insert(token.text);
  for (const auto& [token, id] : ids) {
    if (!added.contains(token)) file.plain_vocab = std::max(file.plain_vocab, std::int64_t{id} + 1);
  }
}

// ---- what comes before and after

void read_split(const JsonNode& node, TokenizerFile& file) {
  const JsonNode behavior = node.at("behavior");
  if (behavior.text() != "Isolated") behavior.refuse("\"Isolated\"");
  if (node.boolean_or("invert", false)) node.at("invert").refuse("false");
  file.patterns.push_back(node.at("pattern").at("Regex").text());
}

// As one piece each, or those that follow each other as one.
void read_digits(const JsonNode& node, TokenizerFile& file) {
  file.patterns.emplace_back(node.boolean_or("individual_digits", false) ? "\\p{N}" : "\\p{N}+");
}

void read_byte_level(const JsonNode& node, TokenizerFile& file) {
  if (node.boolean_or("add_prefix_space", true)) node.at("add_prefix_space").refuse("false");
  if (node.boolean_or("use_regex", true)) file.patterns.emplace_back(kGpt2Pattern);
}

// Split or Digits, ..., ByteLevel.
void read_pre_tokenizer(const JsonNode& node, TokenizerFile& file) {
  constexpr std::string_view kAccepted = "ByteLevel, or a Sequence of Split and Digits and at its end ByteLevel";
  std::vector<JsonNode> steps;
  if (const JsonNode type = node.at("type"); type.text() == "Sequence") {
    steps = node.at("pretokenizers").elements(kMostSteps);
  } else {
    steps.push_back(node);
  }
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const bool last = i + 1 == steps.size();
    const JsonNode type = steps[i].at("type");
    if (type.text() == "Split" && !last) {
      read_split(steps[i], file);
    } else if (type.text() == "Digits" && !last) {
      read_digits(steps[i], file);
    } else if (type.text() == "ByteLevel" && last) {
      read_byte_level(steps[i], file);
    } else {
      type.refuse(kAccepted);
    }
  }
  if (steps.empty()) node.refuse(kAccepted);
}

// The template for one text: [{"SpecialToken": {"id": ...}}, {"Sequence": ...}], or the text alone. Other tokens would
// be missing in our prompts.
void read_template(const JsonNode& node, TokenizerFile& file) {
  const JsonNode single = node.at("single");
  const auto parts = single.elements(kMostSteps);
  const bool begins = parts.size() == 2 && parts[0].find("SpecialToken");
  if (parts.size() != (begins ? 2 : 1) || !parts.back().find("Sequence")) {
    single.refuse("the text alone, or one special token and the text");
  }
  if (!begins) return;
  const JsonNode id = parts[0].at("SpecialToken").at("id");
  for (const AddedToken& token : file.added) {
    if (token.text == id.text()) file.bos = token.id;
  }
  if (!file.bos) id.refuse("an added token");
  // Which tokens a name stands for may be told apart from it.
  const auto table = node.find("special_tokens");
  const auto entry = table ? table->find(id.text()) : std::nullopt;
  if (!entry) return;
  const JsonNode ids = entry->at("ids");
  if (read_token_ids(ids, kMostTokens - 1) != std::vector{*file.bos}) ids.refuse(fmt::format("[{}]", *file.bos));
}

void read_post_processor(const JsonNode& node, TokenizerFile& file) {
  std::vector<JsonNode> steps;
  if (node.at("type").text() == "Sequence") {
    steps = node.at("processors").elements(kMostSteps);
  } else {
    steps.push_back(node);
  }
  for (const JsonNode& step : steps) {
    const JsonNode type = step.at("type");
    if (type.text() == "TemplateProcessing") {
      read_template(step, file);
    } else if (type.text() != "ByteLevel") {  // which only moves offsets
      type.refuse("TemplateProcessing, ByteLevel, or a Sequence of them");
    }
  }
}

}  // namespace

TokenizerFile parse_tokenizer_file(std::string_view text, const std::string& name) {
  const Json value = parse_json(text, name);
  const JsonNode json(value, name);
  require_absent(json, "normalizer", "null");
  TokenizerFile file;
  std::vector<bool> claimed;
  const JsonNode model = json.at("model");
  check_model(model);
  read_pre_tokenizer(json.at("pre_tokenizer"), file);
  if (const JsonNode type = json.at("decoder").at("type"); type.text() != "ByteLevel") type.refuse("\"ByteLevel\"");
  const Ids ids = read_vocab(model, file, claimed);
  read_bytes(model, ids, file);
  read_merges(model, ids, file);
  read_added(json, ids, file, claimed);
  find_plain_vocab(ids, file);
  if (const auto node = json.find("post_processor")) read_post_processor(*node, file);
  return file;
}

}  // namespace treeattn::model
