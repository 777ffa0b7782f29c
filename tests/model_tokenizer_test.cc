// SPDX-License-Identifier: Apache-2.0
// The tokenizer: byte pair encoding, added tokens, decoding, and files that are wrong.
#include "model/tokenizer.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <random>

#include "model/added_tokens.h"
#include "model/bpe.h"
#include "model/byte_alphabet.h"
#include "model/loaded_model.h"
#include "model/splitter.h"
#include "model/utf8.h"
#include "model_files.h"
#include "needs_pcre2.h"
#include "temporary_directory.h"
#include "thinning.h"

namespace treeattn {
namespace {

using namespace model;
using namespace testing_model;
using Tokens = std::vector<std::int32_t>;

Tokenizer make_tokenizer(const Json& json) { return Tokenizer::parse(json.dump(), "tokenizer.json"); }

// ---- UTF-8

TEST(Utf8, EveryCharacterAndItsCuts) {
  for (char32_t code = 0; code < 0x110000; code += code < 0x3000 ? 1 : 37) {
    if (code >= 0xd800 && code < 0xe000) continue;
    std::string text;
    put_utf8(code, text);
    const Utf8Step step = next_utf8(text + "a");
    ASSERT_EQ(step.kind, Utf8Step::kCharacter);
    ASSERT_EQ(step.code, code);
    ASSERT_EQ(step.bytes, text.size());
    for (std::size_t cut = 1; cut < text.size(); ++cut) {
      ASSERT_EQ(next_utf8(text.substr(0, cut)).kind, Utf8Step::kCut);
      const Utf8Step wrong = next_utf8(text.substr(0, cut) + "a");
      ASSERT_EQ(wrong.kind, Utf8Step::kWrong);
      ASSERT_EQ(wrong.bytes, cut);
    }
  }
}

TEST(Utf8, RefusesWhatIsNone) {
  for (const char* text : {"\x80", "\xc0\x80", "\xc1\xbf", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xed\xbf\xbf",
                           "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff"}) {
    EXPECT_EQ(next_utf8(text).kind, Utf8Step::kWrong);
    EXPECT_EQ(valid_utf8(std::string("ab") + text), 2u);
  }
  EXPECT_EQ(valid_utf8("a\xc3\xa9"), 3u);
  EXPECT_EQ(valid_utf8("a\xc3"), 1u);
}

// ---- byte pair encoding

// One merge at a time, the best rank first and of those the leftmost: the definition.
Tokens merge_slowly(const Tokens& bytes, const std::vector<BpeMerge>& merges) {
  Tokens tokens = bytes;
  while (true) {
    std::size_t best_rank = merges.size(), best_place = 0;
    for (std::size_t place = 0; place + 1 < tokens.size(); ++place) {
      for (std::size_t rank = 0; rank < best_rank; ++rank) {
        if (merges[rank].left == tokens[place] && merges[rank].right == tokens[place + 1]) {
          best_rank = rank;
          best_place = place;
        }
      }
    }
    if (best_rank == merges.size()) return tokens;
    tokens[best_place] = merges[best_rank].merged;
    tokens.erase(tokens.begin() + static_cast<std::ptrdiff_t>(best_place) + 1);
  }
}

TEST(Bpe, EqualsTheDefinition) {
  std::mt19937_64 random(std::random_device{}());
  const auto draw = [&](std::size_t below) { return static_cast<std::int32_t>(random() % below); };
  std::array<std::int32_t, 256> bytes{};
  for (std::int32_t i = 0; i < 256; ++i) bytes[static_cast<std::size_t>(i)] = i;
  for (int round = 0; round < 200; ++round) {
    const int letters = 1 + draw(4);
    std::vector<std::string> texts(256);
    for (int i = 0; i < 256; ++i) texts[static_cast<std::size_t>(i)] = std::string(1, static_cast<char>(i));
    Tokens usable;
    for (int i = 0; i < letters; ++i) usable.push_back('a' + i);
    std::vector<BpeMerge> merges;
    for (int i = draw(40); i > 0; --i) {
      const std::int32_t left = usable[static_cast<std::size_t>(draw(usable.size()))];
      const std::int32_t right = usable[static_cast<std::size_t>(draw(usable.size()))];
      const std::string text = texts[static_cast<std::size_t>(left)] + texts[static_cast<std::size_t>(right)];
      if (std::find(texts.begin(), texts.end(), text) != texts.end()) continue;  // one way to make each token
      merges.push_back({left, right, static_cast<std::int32_t>(texts.size())});
      usable.push_back(static_cast<std::int32_t>(texts.size()));
      texts.push_back(text);
    }
    std::shuffle(merges.begin(), merges.end(), random);
    const Bpe bpe(bytes, merges, static_cast<std::int64_t>(texts.size()));
    for (int word = 0; word < 20; ++word) {
      std::string text;
      Tokens plain;
      for (int i = draw(50); i > 0; --i) {
        text += static_cast<char>('a' + draw(static_cast<std::size_t>(letters)));
        plain.push_back(text.back());
      }
      Tokens tokens;
      bpe.encode(text, tokens);
      ASSERT_EQ(tokens, merge_slowly(plain, merges)) << text;
    }
  }
}

TEST(Bpe, OfTwoMergesOfOnePairTheLaterCounts) {
  std::array<std::int32_t, 256> bytes{};
  for (std::int32_t i = 0; i < 256; ++i) bytes[static_cast<std::size_t>(i)] = i;
  const std::vector<BpeMerge> merges = {{'a', 'b', 256}, {'b', 'c', 257}, {'a', 'b', 256}};
  Tokens tokens;
  Bpe(bytes, merges, 258).encode("abc", tokens);
  EXPECT_EQ(tokens, (Tokens{'a', 257}));
}

// A word of a megabyte: minutes if every merge looked at the whole word.
TEST(Bpe, OneLongWord) {
  NEEDS_PCRE2();
  std::vector<std::pair<std::string, std::string>> merges;
  std::string power = "a";
  for (int i = 0; i < 12; ++i, power += power) merges.emplace_back(power, power);
  const Tokenizer tokenizer = make_tokenizer(small_tokenizer(merges));
  const std::size_t most = (std::size_t{1} << 20) / thinning();
  for (const std::size_t size : {most, most + 5}) {
    const std::string text(size, 'a');
    const Tokens tokens = tokenizer.encode(text);
    EXPECT_EQ(tokens.size(), size / 4096 + (size % 4096 == 5 ? 2 : 0));
    EXPECT_EQ(tokenizer.decode(tokens), text);
  }
  for (const char* repeated : {" ", "\n", "1", "!", "é", "\xe2\x80\x83", "'"}) {
    std::string text;
    while (text.size() < most) text += repeated;
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
  }
}

// ---- encoding and decoding

TEST(Tokenizer, MergesAndWholeWords) {
  NEEDS_PCRE2();
  Json json = small_tokenizer();
  const auto id = [&](const char* token) { return json["model"]["vocab"][token].get<std::int32_t>(); };
  const Tokenizer tokenizer = make_tokenizer(json);
  EXPECT_EQ(tokenizer.encode("hello"), Tokens{id("hello")});
  EXPECT_EQ(tokenizer.encode("hell no"), (Tokens{id("hell"), ' ', 'n', 'o'}));
  EXPECT_EQ(tokenizer.encode(""), Tokens{});
  EXPECT_EQ(tokenizer.vocab(), 256 + 4 + 5);
  EXPECT_EQ(tokenizer.bos(), tokenizer.find("<|begin_of_text|>"));

  // "lo" is a token, and no merge makes it: found as a word, and only with ignore_merges.
  json["model"]["vocab"]["lo"] = 265;
  EXPECT_EQ(make_tokenizer(json).encode("lo"), Tokens{265});
  EXPECT_EQ(make_tokenizer(json).encode("hellolo"), (Tokens{id("hello"), 'l', 'o'}));
  json["model"]["ignore_merges"] = false;
  EXPECT_EQ(make_tokenizer(json).encode("lo"), (Tokens{'l', 'o'}));
  json["model"].erase("ignore_merges");
  EXPECT_EQ(make_tokenizer(json).encode("lo"), (Tokens{'l', 'o'}));
}

TEST(Tokenizer, BothFormsOfMerges) {
  NEEDS_PCRE2();
  Json json = small_tokenizer();
  const Tokens expected = make_tokenizer(json).encode("hell hello he");
  for (Json& merge : json["model"]["merges"]) {
    merge = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
  }
  json["model"]["merges"].insert(json["model"]["merges"].begin(), "#version: 0.2");
  json["model"].erase("type");  // as in older files
  EXPECT_EQ(make_tokenizer(json).encode("hell hello he"), expected);
}

TEST(Tokenizer, SpecialTokensAreTextUnlessAsked) {
  NEEDS_PCRE2();
  const Tokenizer tokenizer = make_tokenizer(small_tokenizer());
  const std::int32_t end = *tokenizer.find("<|eot_id|>");
  EXPECT_TRUE(tokenizer.is_special(end));
  EXPECT_FALSE(tokenizer.is_special('a') || tokenizer.is_special(-1) || tokenizer.is_special(1 << 30));
  EXPECT_EQ(tokenizer.encode("a<|eot_id|>b", true), (Tokens{'a', end, 'b'}));
  const Tokens plain = tokenizer.encode("a<|eot_id|>b");
  EXPECT_EQ(plain.size(), 12u);
  EXPECT_EQ(std::count(plain.begin(), plain.end(), end), 0);
  EXPECT_EQ(tokenizer.decode(plain), "a<|eot_id|>b");
  EXPECT_EQ(tokenizer.decode(Tokens{'a', end, 'b'}), "ab");
  EXPECT_EQ(tokenizer.decode(Tokens{'a', end, 'b'}, true), "a<|eot_id|>b");
  EXPECT_EQ(tokenizer.decode(Tokens{'a', 265, 'b', 1 << 30}, true), "ab");  // of a model that has more than 265
  EXPECT_FALSE(tokenizer.find("<|eot|>").has_value());
  EXPECT_FALSE(tokenizer.find("hello").has_value());
}

TEST(Tokenizer, RefusesTokensAndTextThatAreNone) {
  NEEDS_PCRE2();
  const Tokenizer tokenizer = make_tokenizer(small_tokenizer());
  expect_refused<InvalidArgument>([&] { tokenizer.encode("abc\xff"); }, {"byte 3"});
  expect_refused<InvalidArgument>([&] { tokenizer.encode("\xc3"); }, {"byte 0"});
  expect_refused<InvalidArgument>([&] { tokenizer.decode(Tokens{-1}); }, {"token -1"});
  const std::int32_t* const nowhere = nullptr;
  expect_refused<InvalidArgument>([&] { tokenizer.decode({nowhere, 2}); }, {"tokens = 0x0 with 2"});
}

TEST(Tokenizer, DecodesWhatItEncodes) {
  NEEDS_PCRE2();
  const Tokenizer tokenizer = make_tokenizer(small_tokenizer());
  std::mt19937_64 random(std::random_device{}());
  for (int round = 0; round < 300; ++round) {
    std::string text;
    for (std::uint64_t i = random() % 60; i > 0; --i) {
      const char32_t limits[] = {0x80, 0x800, 0xd800, 0x110000};
      char32_t code = static_cast<char32_t>(random() % limits[random() % 4]);
      if (code >= 0xd800 && code < 0xe000) code = ' ';
      put_utf8(code, text);
    }
    const Tokens tokens = tokenizer.encode(text, true);
    EXPECT_EQ(tokenizer.decode(tokens, true), text);
    TextStream stream(tokenizer);
    std::string streamed;
    for (const std::int32_t token : tokens) {
      const std::string more = stream.next(token);
      EXPECT_EQ(valid_utf8(more), more.size());
      streamed += more;
    }
    EXPECT_EQ(streamed + stream.finish(), text);
  }
}

TEST(TextStream, GoesOnInsideOfACharacter) {
  NEEDS_PCRE2();
  const Tokenizer tokenizer = make_tokenizer(small_tokenizer());
  const std::int32_t special = tokenizer.find("<|eot_id|>").value();
  const auto after = [&](const Tokens& before, std::int32_t token) {
    TextStream stream(tokenizer, before);
    const std::string text = stream.next(token);
    return text + "|" + stream.finish();
  };
  EXPECT_EQ(after({0xf0, 0x9f, 0x98}, 0x80), "😀|");
  EXPECT_EQ(after({'a', 0xe2, 0xf0, 0x9f, 0x98}, 0x80), "😀|");
  EXPECT_EQ(after({0xe2, 0x82}, 0xac), "€|");
  EXPECT_EQ(after({0xe2, 0x82}, 'x'), "\ufffdx|");
  EXPECT_EQ(after({0xf0, 0x9f}, 0x98), "|\ufffd");
  EXPECT_EQ(after({0xf0, 0x9f, 0x98, 0x80}, 0x80), "\ufffd|");   // it was whole
  EXPECT_EQ(after({0x82, 0x82, 0x82}, 'x'), "x|");               // and this was shown
  EXPECT_EQ(after({0xe2, special, 0x82, special}, 0xac), "€|");  // in which special tokens are not
  EXPECT_EQ(after({special, 0xc3}, 0xa9), "é|");
  EXPECT_EQ(after({}, 0xc3), "|\ufffd");
}

TEST(TextStream, HoldsBackHalfCharacters) {
  NEEDS_PCRE2();
  const Tokenizer tokenizer = make_tokenizer(small_tokenizer());
  TextStream stream(tokenizer);
  EXPECT_EQ(stream.next('a'), "a");
  EXPECT_EQ(stream.next(0xf0), "");
  EXPECT_EQ(stream.next(0x9f), "");
  EXPECT_EQ(stream.next(*tokenizer.find("<|eot_id|>")), "");
  EXPECT_EQ(stream.next(0x98), "");
  EXPECT_EQ(stream.next(0x80), "😀");
  EXPECT_EQ(stream.next(0xe2), "");
  EXPECT_EQ(stream.next('b'), "\ufffdb");  // what never becomes a character does not wait
  EXPECT_EQ(stream.next(0x80), "\ufffd");
  EXPECT_EQ(stream.next(0xe2), "");
  EXPECT_EQ(stream.next(0x82), "");
  EXPECT_EQ(stream.finish(), "\ufffd");
  EXPECT_EQ(stream.finish(), "");
}

// ---- added tokens

TEST(AddedTokens, TheLongestOfTheLeftmost) {
  const AddedTokens added({{"ab", 1, false, false, false, false},
                           {"abcd", 2, true, false, false, false},
                           {"bc", 3, false, false, false, false},
                           {"x", 4, false, false, false, true},
                           {"cx", 5, false, false, false, false}});
  const auto split = [&](std::string_view text, bool special) {
    std::string out;
    for (const TextPart& part : added.split(text, special)) {
      out += "[" + std::string(part.text) + (part.token ? "=" + std::to_string(*part.token) : "") + "]";
    }
    return out;
  };
  EXPECT_EQ(split("abcd", true), "[abcd=2]");
  EXPECT_EQ(split("abc", true), "[ab=1][c]");
  EXPECT_EQ(split("abcd", false), "[abcd]");  // found, and left alone
  EXPECT_EQ(split("zbcab", true), "[z][bc=3][ab=1]");
  EXPECT_EQ(split("xcxx", true), "[x=4][cx=5][x=4]");
  EXPECT_EQ(split("", true), "");
  EXPECT_EQ(split("bx", false), "[b][x=4]");
}

TEST(AddedTokens, StripTheSpaceAroundThem) {
  const AddedTokens added({{"<l>", 1, false, true, false, false},
                           {"<r>", 2, false, false, true, false},
                           {"<b>", 3, false, true, true, false}});
  const auto split = [&](std::string_view text) {
    std::string out;
    for (const TextPart& part : added.split(text, true)) {
      out += "[" + std::string(part.text) + (part.token ? "=" + std::to_string(*part.token) : "") + "]";
    }
    return out;
  };
  EXPECT_EQ(split("a \n<l> b"), "[a][ \n<l>=1][ b]");
  EXPECT_EQ(split("a <r> \tb"), "[a ][<r> \t=2][b]");
  EXPECT_EQ(split("a\u3000<b>\u00a0b"), "[a][\u3000<b>\u00a0=3][b]");
  EXPECT_EQ(split("<r>  <l>"), "[<r>  =2][<l>=1]");
  EXPECT_EQ(split(" <b> "), "[ <b> =3]");
}

// Texts come to it by merges as well.
TEST(AddedTokens, OneOfTheVocabularyKeepsItsBytes) {
  NEEDS_PCRE2();
  Json json = small_tokenizer();
  const std::string space = byte_character(' '), written = space + "x";
  json["model"]["vocab"][written] = 265;
  json["model"]["merges"].push_back({space, "x"});
  json["added_tokens"].push_back({{"id", 265}, {"content", written}});
  const Tokenizer tokenizer = make_tokenizer(json);
  ASSERT_EQ(tokenizer.encode("a x"), (Tokens{'a', 265}));
  EXPECT_EQ(tokenizer.decode(Tokens{'a', 265}), "a x");
}

// They are found in a text as they are written, and come back as the tokenizers package (0.22 and 0.23) gives them.
TEST(AddedTokens, ThoseInTheByteAlphabetAreDecodedThroughIt) {
  NEEDS_PCRE2();
  const std::pair<const char*, const char*> kTokens[] = {{"Ġfoo", " foo"}, {"Ã©x", "éx"},    {"ĠĊ", " \n"},
                                                         {"né", "n\xe9"},  {"日本", "日本"}, {"Ġ日", "Ġ日"},
                                                         {"a b", "a b"},   {"<y>", "<y>"}};
  Json json = small_tokenizer();
  for (const auto& [written, text] : kTokens) {
    json["added_tokens"].push_back(added_token(json["added_tokens"].back()["id"].get<std::int32_t>() + 1, written,
                                               written == std::string("Ġfoo")));
  }
  const Tokenizer tokenizer = make_tokenizer(json);
  std::int32_t id = 265;
  for (const auto& [written, text] : kTokens) {
    ASSERT_EQ(tokenizer.encode(written, true), Tokens{id}) << written;
    EXPECT_EQ(tokenizer.decode(Tokens{id}, true), text) << written;
    ++id;
  }
  // One that is half of a character waits for the other half.
  json["added_tokens"].push_back(added_token(id, "zÃ"));
  json["added_tokens"].back()["special"] = false;
  const Tokenizer halves = make_tokenizer(json);
  TextStream stream(halves);
  EXPECT_EQ(stream.next(id), "z");
  EXPECT_EQ(stream.next(0xa9), "é");
}

TEST(Tokenizer, WithoutPcre2SaysSo) {
  if (splitter_available()) {
    EXPECT_EQ(make_tokenizer(small_tokenizer()).vocab(), 265);
    return;
  }
  expect_refused<Unavailable>([] { make_tokenizer(small_tokenizer()); }, {"PCRE2", "libpcre2-dev"});
}

// ---- files

TEST(TokenizerFile, RefusesWhatIsNotSupported) {
  const struct {
    const char* key;
    Json value;
    std::vector<std::string> says;
  } kWrong[] = {
      {"/model/type", "Unigram", {"model.type", "Unigram", "BPE"}},
      {"/model/byte_fallback", true, {"byte_fallback", "false"}},
      {"/model/dropout", 0.1, {"dropout"}},
      {"/model/continuing_subword_prefix", "##", {"continuing_subword_prefix"}},
      {"/model/end_of_word_suffix", "</w>", {"end_of_word_suffix"}},
      {"/model/vocab/a", 1 << 20, {"model.vocab.a", "1048576"}},
      {"/model/vocab/a", -1, {"model.vocab.a", "-1"}},
      {"/model/vocab/a", "1", {"model.vocab.a"}},
      {"/model/vocab/a", 98, {"98", "another token"}},
      {"/model/vocab", Json::object(), {"no token for the byte 9"}},
      {"/model/vocab", Json::array(), {"an object"}},
      {"/model/merges", 1, {"model.merges"}},
      {"/model/merges/0", {"a"}, {"merge 0"}},
      {"/model/merges/1", "ab", {"merge 1"}},
      {"/model/merges/1", "a b c", {"merge 1"}},
      {"/model/merges/1", {"a", "zz"}, {"merge 1", "\"zz\"", "not in the vocabulary"}},
      {"/model/merges/1", {"a", "b"}, {"merge 1", "\"ab\"", "not in the vocabulary"}},
      {"/model/ignore_merges", 1, {"ignore_merges"}},
      {"/normalizer", {{"type", "NFC"}}, {"normalizer", "null"}},
      {"/decoder/type", "Metaspace", {"decoder.type", "Metaspace"}},
      {"/decoder", nullptr, {"decoder", "required"}},
      {"/pre_tokenizer", nullptr, {"pre_tokenizer", "required"}},
      {"/pre_tokenizer", {{"type", "Whitespace"}}, {"pre_tokenizer.type", "Whitespace", "ByteLevel"}},
      {"/pre_tokenizer/pretokenizers", Json::array(), {"pre_tokenizer"}},
      {"/pre_tokenizer/pretokenizers/0/behavior", "Removed", {"pretokenizers[0].behavior", "Removed", "Isolated"}},
      {"/pre_tokenizer/pretokenizers/0/invert", true, {"invert"}},
      {"/pre_tokenizer/pretokenizers/0/pattern", {{"String", " "}}, {"pattern.Regex", "required"}},
      {"/pre_tokenizer/pretokenizers/0/type", "Punctuation", {"Punctuation"}},
      {"/pre_tokenizer/pretokenizers/1/type", "Digits", {"Digits"}},
      {"/pre_tokenizer/pretokenizers/1/add_prefix_space", true, {"add_prefix_space"}},
      {"/post_processor/type", "RobertaProcessing", {"post_processor.type", "RobertaProcessing"}},
      {"/post_processor/single/0/SpecialToken/id", "<s>", {"<s>", "an added token"}},
      {"/added_tokens/0/single_word", true, {"added_tokens[0].single_word"}},
      {"/added_tokens/0/content", "", {"added_tokens[0].content"}},
      {"/added_tokens/0/content", std::string(600, 'x'), {"added_tokens[0].content", "512"}},
      {"/added_tokens/0/content", "<|eot_id|>", {"added_tokens[4].content", "once"}},
      {"/added_tokens/0/id", 97, {"97", "another token"}},
      {"/added_tokens/0/id", 264, {"264", "another token"}},
      {"/added_tokens/0/id", 1 << 24, {"added_tokens[0].id"}},
      {"/added_tokens/0/content", "hell", {"added_tokens[0].id", "258, its id in the vocabulary"}},
      {"/added_tokens", 3, {"added_tokens"}},
  };
  for (const auto& [key, value, says] : kWrong) {
    Json json = small_tokenizer();
    json[Json::json_pointer(key)] = value;
    SCOPED_TRACE(key);
    auto parts = says;
    parts.push_back("tokenizer.json");
    expect_refused([&] { make_tokenizer(json); }, parts);
  }
  Json strips = small_tokenizer();
  strips["added_tokens"][0]["rstrip"] = true;
  strips["added_tokens"][1]["content"] = " x";
  expect_refused([&] { make_tokenizer(strips); }, {"\" x\"", "white space"});
  for (const char* text : {"", "{}", "[]", "{\"model\": {}}", "{\"model\": 3}"}) {
    expect_refused([&] { Tokenizer::parse(text, "tokenizer.json"); }, {"tokenizer.json"});
  }
  TemporaryDirectory directory;
  expect_refused([&] { Tokenizer::read(directory.path() / "tokenizer.json"); }, {"No such file"});
}

TEST(TokenizerFile, PatternsAndHolesAndNoPostProcessor) {
  NEEDS_PCRE2();
  Json json = small_tokenizer();
  json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = R"(\w)";
  expect_refused([&] { make_tokenizer(json); }, {"tokenizer.json", "\\w"});
  json["pre_tokenizer"] = {{"type", "ByteLevel"}, {"add_prefix_space", false}};
  json.erase("post_processor");
  json["added_tokens"][4]["id"] = 1000;
  TemporaryDirectory directory;
  write_file(directory.path() / "t.json", json.dump());
  const Tokenizer tokenizer = Tokenizer::read(directory.path() / "t.json");
  EXPECT_EQ(tokenizer.encode("12345"), (Tokens{'1', '2', '3', '4', '5'}));
  EXPECT_EQ(tokenizer.vocab(), 1001);
  EXPECT_EQ(tokenizer.decode(Tokens{'a', 999, 'b'}), "ab");  // an id that is no token
  EXPECT_FALSE(tokenizer.bos().has_value());
}

TEST(TokenizerFile, DigitsByThemselves) {
  NEEDS_PCRE2();
  Json json = small_tokenizer();
  json["model"]["vocab"]["12"] = 265;
  json["model"]["merges"].push_back({"1", "2"});
  json["model"]["ignore_merges"] = false;
  const Json byte_level = {{"type", "ByteLevel"}, {"add_prefix_space", false}};
  json["pre_tokenizer"]["pretokenizers"] = {{{"type", "Digits"}, {"individual_digits", true}}, byte_level};
  EXPECT_EQ(make_tokenizer(json).encode("a12 12"), (Tokens{'a', '1', '2', ' ', '1', '2'}));
  json["pre_tokenizer"]["pretokenizers"][0].erase("individual_digits");
  EXPECT_EQ(make_tokenizer(json).encode("a12 12"), (Tokens{'a', 265, ' ', 265}));
}

TEST(TokenizerFile, BytesWithoutAToken) {
  NEEDS_PCRE2();
  Json json = small_tokenizer();
  json["model"]["ignore_merges"] = false;
  const Tokens hello = make_tokenizer(json).encode("hello");
  for (const int byte : {0x04, 0xf1, 0xff}) {
    json["model"]["vocab"].erase(byte_character(static_cast<unsigned char>(byte)));
  }
  // Left out before anything is merged.
  const std::string text = "\x04hello\x04";
  EXPECT_EQ(make_tokenizer(json).encode(text), hello);
  EXPECT_EQ(make_tokenizer(json).encode("\x04"), Tokens{});
  EXPECT_EQ(make_tokenizer(json).encode("\xf1\x80\x80\x80"), (Tokens{0x80, 0x80, 0x80}));
  json["model"]["unk_token"] = "?";
  EXPECT_EQ(make_tokenizer(json).encode("a\x04\x04"), (Tokens{'a', '?', '?'}));
  json["model"]["fuse_unk"] = true;
  expect_refused([&] { make_tokenizer(json); }, {"fuse_unk", "false"});
  json["model"]["unk_token"] = "<unk>";
  expect_refused([&] { make_tokenizer(json); }, {"unk_token", "<unk>"});
  json = small_tokenizer();
  json["model"]["vocab"].erase("~");
  expect_refused([&] { make_tokenizer(json); }, {"byte 126"});
}

TEST(Tokenizer, APromptBeginsAsTheTokenizerSays) {
  NEEDS_PCRE2();
  Json json = small_tokenizer();
  ModelDescription model;
  model.tokenizer = std::make_shared<Tokenizer>(make_tokenizer(json));
  const std::int32_t begin = model.tokenizer->bos().value();
  EXPECT_EQ(encode_prompt(model, "a"), (Tokens{begin, 'a'}));
  EXPECT_EQ(encode_prompt(model, "a", false), Tokens{'a'});
  json.erase("post_processor");
  model.tokenizer = std::make_shared<Tokenizer>(make_tokenizer(json));
  EXPECT_EQ(encode_prompt(model, "a"), Tokens{'a'});
}

TEST(Tokenizer, OfAnotherModelIsRefused) {
  NEEDS_PCRE2();
  TemporaryDirectory directory;
  const Json tokenizer = small_tokenizer();
  write_file(directory.path() / "tokenizer.json", tokenizer.dump());
  const auto describe = [&](std::int64_t vocab) {
    Json config = llama_config();
    config["vocab_size"] = vocab;
    config["eos_token_id"] = nullptr;
    write_file(directory.path() / "config.json", config.dump());
    return describe_model(directory.path());
  };
  const Tokenizer alone = make_tokenizer(tokenizer);
  const std::int64_t plain = alone.plain_vocab(), bos = alone.bos().value();
  ASSERT_GE(bos, plain);
  EXPECT_NO_THROW(describe(alone.vocab()));
  EXPECT_NO_THROW(describe(bos + 1));  // added tokens behind it may be without a row
  expect_refused([&] { describe(bos); }, {"tokenizer.json", fmt::format("token {}", bos), fmt::format("is {};", bos)});
  expect_refused([&] { describe(plain - 1); },
                 {"tokenizer.json", fmt::format("up to token {}", plain - 1), "vocab_size"});
}

// What AutoTokenizer of transformers 4.57 begins a text with.
TEST(Tokenizer, APromptBeginsAsTheClassOfTheTokenizerSays) {
  NEEDS_PCRE2();
  TemporaryDirectory directory;
  write_file(directory.path() / "config.json", llama_config().dump());
  const auto first = [&](const Json& tokenizer, const Json& config) -> std::string {
    write_file(directory.path() / "tokenizer.json", tokenizer.dump());
    write_file(directory.path() / "tokenizer_config.json", config.dump());
    const ModelDescription model = describe_model(directory.path());
    const Tokens tokens = encode_prompt(model, "a");
    EXPECT_EQ(tokens.back(), 'a');
    EXPECT_EQ(encode_prompt(model, "a", false), Tokens{'a'});
    return tokens.size() == 1 ? "" : model.tokenizer->decode(std::span(tokens).first(tokens.size() - 1), true);
  };
  const std::string begin = "<|begin_of_text|>", end = "<|end_of_text|>";
  const Json writes = small_tokenizer();  // its post-processor puts <|begin_of_text|> before a text
  Json silent = writes;
  silent["post_processor"] = {{"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", false}};
  for (const char* name : {"LlamaTokenizer", "LlamaTokenizerFast"}) {
    for (const Json& tokenizer : {writes, silent}) {
      Json config = {{"tokenizer_class", name}, {"bos_token", begin}};
      EXPECT_EQ(first(tokenizer, config), begin);
      config["bos_token"] = {{"content", end}, {"special", true}};
      EXPECT_EQ(first(tokenizer, config), end);
      config["add_bos_token"] = true;
      EXPECT_EQ(first(tokenizer, config), end);
      config["add_eos_token"] = false;
      config["add_bos_token"] = false;
      EXPECT_EQ(first(tokenizer, config), "");
      config["add_bos_token"] = nullptr;
      EXPECT_EQ(first(tokenizer, config), "");
    }
  }
  for (const char* name : {"PreTrainedTokenizerFast", "GPT2TokenizerFast", ""}) {
    for (const Json& add : std::vector<Json>{true, false, nullptr}) {
      Json config = {{"bos_token", end}, {"add_bos_token", add}, {"add_eos_token", true}};
      if (*name != '\0') config["tokenizer_class"] = name;
      EXPECT_EQ(first(writes, config), begin) << name;
      EXPECT_EQ(first(silent, config), "") << name;
    }
  }
  const auto refused = [&](const Json& config, const std::vector<std::string>& says) {
    expect_refused([&] { first(writes, config); }, says);
  };
  refused({{"tokenizer_class", "LlamaTokenizer"}}, {"tokenizer_config.json", "\"<s>\"", "add_bos_token false"});
  refused({{"tokenizer_class", "LlamaTokenizer"}, {"bos_token", "<bos>"}}, {"\"<bos>\"", "added token"});
  refused({{"tokenizer_class", "LlamaTokenizer"}, {"add_bos_token", 1}}, {"add_bos_token is 1", "true or false"});
  refused({{"tokenizer_class", "LlamaTokenizer"}, {"add_eos_token", true}}, {"add_eos_token is true", "false"});
  refused({{"tokenizer_class", 7}}, {"tokenizer_class is 7", "a string"});
  EXPECT_EQ(first(writes, {{"tokenizer_class", "LlamaTokenizer"}, {"add_bos_token", false}}), "");
}

TEST(TokenizerFile, PutsAtMostOneTokenBeforeAText) {
  NEEDS_PCRE2();
  const Json json = small_tokenizer();
  const Json begin = json["post_processor"]["single"][0], text = json["post_processor"]["single"][1];
  const Json end = {{"SpecialToken", {{"id", "<|eot_id|>"}, {"type_id", 0}}}};
  const auto with = [&](const char* key, const Json& value) {
    Json other = json;
    other["post_processor"][key] = value;
    return other;
  };
  EXPECT_EQ(make_tokenizer(with("single", {end, text})).bos(), make_tokenizer(json).find("<|eot_id|>"));
  EXPECT_FALSE(make_tokenizer(with("single", Json::array({text}))).bos().has_value());
  for (const Json& single : std::vector<Json>{{begin, end, text},
                                              {begin, text, end},
                                              {text, end},
                                              {begin, text, text},
                                              {text, text},
                                              {begin, end},
                                              Json::array({begin}),
                                              Json::array()}) {
    expect_refused([&] { make_tokenizer(with("single", single)); }, {"post_processor.single", "one special token"});
  }
  const auto ids = [&](const Json& list) {
    return with("special_tokens", {{"<|begin_of_text|>", {{"id", "<|begin_of_text|>"}, {"ids", list}}}});
  };
  const std::int32_t bos = make_tokenizer(json).bos().value();
  EXPECT_EQ(make_tokenizer(ids({bos})).bos(), bos);
  expect_refused([&] { make_tokenizer(ids(Json::array({bos + 1}))); }, {"ids", fmt::format("[{}]", bos)});
  expect_refused([&] { make_tokenizer(ids({bos, bos})); }, {"ids", fmt::format("[{}]", bos)});
}

}  // namespace
}  // namespace treeattn
