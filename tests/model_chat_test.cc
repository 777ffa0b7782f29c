// SPDX-License-Identifier: Apache-2.0
// Chats as tokens, tokenizer_config.json, and the tokens that the tokenizers package gave (tests/data).
#include <gtest/gtest.h>

#include "model/splitter.h"
#include "model/tokenizer.h"
#include "model/tokenizer_config.h"
#include "model_files.h"
#include "temporary_directory.h"

namespace treeattn {
namespace {

using namespace model;
using namespace testing_model;
using Tokens = std::vector<std::int32_t>;

TEST(Chat, WritesTheTemplate) {
  if (!splitter_available()) GTEST_SKIP() << "this build has no PCRE2";
  const Tokenizer tokenizer = Tokenizer::parse(small_tokenizer().dump(), "t");
  const std::vector<ChatMessage> messages = {{"system", "  Be brief.\n"}, {"user", "\u3000\x1c<|eot_id|> hi \t"}};
  const Tokens tokens = chat_tokens(tokenizer, messages, true);
  EXPECT_EQ(tokenizer.decode(tokens, true),
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\n<|eot_id|> hi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n");
  // What the user wrote is text, whatever it looks like.
  EXPECT_EQ(std::count(tokens.begin(), tokens.end(), *tokenizer.find("<|eot_id|>")), 2);
  const Tokens open = chat_tokens(tokenizer, messages, false);
  EXPECT_EQ(open, Tokens(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(open.size())));
  EXPECT_EQ(open.back(), *tokenizer.find("<|eot_id|>"));
  EXPECT_EQ(chat_tokens(tokenizer, {}, false), Tokens{*tokenizer.find("<|begin_of_text|>")});
  const std::vector<ChatMessage> empty = {{"user", " \n "}};
  EXPECT_EQ(tokenizer.decode(chat_tokens(tokenizer, empty, false)), "user\n\n");
}

TEST(Chat, BeginsWithTheDateWhereTheTemplateDoes) {
  if (!splitter_available()) GTEST_SKIP() << "this build has no PCRE2";
  const Tokenizer tokenizer = Tokenizer::parse(small_tokenizer().dump(), "t");
  const auto text = [&](const std::vector<ChatMessage>& messages) {
    return tokenizer.decode(chat_tokens(tokenizer, messages, false, "1 May 2025"), true);
  };
  const std::string head =
      "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
      "Cutting Knowledge Date: December 2023\nToday Date: 1 May 2025\n\n";
  const std::string question = "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>";
  EXPECT_EQ(text({{"user", "hi"}}), head + question);
  EXPECT_EQ(text({{"system", " Be brief.\n"}, {"user", "hi"}}), head + "Be brief." + question);
  expect_refused<InvalidArgument>([&] { text({{"root", "hi"}}); }, {"\"root\""});
}

TEST(Chat, RefusesRolesAndTokenizers) {
  if (!splitter_available()) GTEST_SKIP() << "this build has no PCRE2";
  const Tokenizer tokenizer = Tokenizer::parse(small_tokenizer().dump(), "t");
  const std::vector<ChatMessage> unknown = {{"root", "hi"}}, broken = {{"user", "\xff"}};
  expect_refused<InvalidArgument>([&] { chat_tokens(tokenizer, unknown, true); }, {"\"root\"", "ipython"});
  expect_refused<InvalidArgument>([&] { chat_tokens(tokenizer, broken, true); }, {"UTF-8"});
  Json json = small_tokenizer();
  json["added_tokens"][4]["content"] = "<|eot|>";
  const Tokenizer other = Tokenizer::parse(json.dump(), "t");
  expect_refused<InvalidArgument>([&] { chat_tokens(other, {}, true); }, {"<|eot_id|>"});
  // One that is not special would be found in what the user wrote.
  json = small_tokenizer();
  json["added_tokens"][4]["special"] = false;
  const Tokenizer open = Tokenizer::parse(json.dump(), "t");
  expect_refused<InvalidArgument>([&] { chat_tokens(open, {}, true); }, {"<|eot_id|>", "special"});
}

TEST(TokenizerConfig, ReadsTokensAndTemplates) {
  const std::string llama = "...<|start_header_id|>...<|end_header_id|>...<|eot_id|>";
  const auto parse = [](const Json& json) { return parse_tokenizer_config(json.dump(), "tokenizer_config.json"); };
  const TokenizerConfig plain =
      parse({{"bos_token", "<|begin_of_text|>"}, {"eos_token", "<|eot_id|>"}, {"chat_template", llama}});
  EXPECT_EQ(plain, (TokenizerConfig{"<|begin_of_text|>", "<|eot_id|>", llama}));
  const TokenizerConfig longer =
      parse({{"bos_token", {{"content", "<s>"}, {"lstrip", false}}},
             {"eos_token", nullptr},
             {"chat_template",
              Json::array({{{"name", "tool_use"}, {"template", "no"}}, {{"name", "default"}, {"template", llama}}})}});
  EXPECT_EQ(longer, (TokenizerConfig{"<s>", std::nullopt, llama}));
  EXPECT_EQ(parse(Json::object()), TokenizerConfig());

  TemporaryDirectory directory;
  const auto file = directory.path() / "tokenizer_config.json";
  write_file(file, "{}");
  EXPECT_FALSE(read_tokenizer_config(file).chat_template.has_value());
  write_file(directory.path() / "chat_template.jinja", llama);
  EXPECT_EQ(read_tokenizer_config(file).chat_template, llama);
}

TEST(TokenizerConfig, SaysWhoCannotChat) {
  expect_refused<Unavailable>([] { llama3_chat_form({}, "some.json"); }, {"some.json", "chat_template"});
  const TokenizerConfig other{std::nullopt, std::nullopt, "<|im_start|>{{ role }}"};
  expect_refused<Unavailable>([&] { llama3_chat_form(other, "some.json"); }, {"<|start_header_id|>", "Llama 3"});
  for (const char* text :
       {"", "[]", "{\"bos_token\": 1}", "{\"bos_token\": {}}", "{\"chat_template\": 3}", "{\"chat_template\": [{}]}",
        "{\"chat_template\": [{\"name\": \"default\", \"template\": 1}]}"}) {
    expect_refused([&] { parse_tokenizer_config(text, "some.json"); }, {"some.json"});
  }
}

// In the words of the published ones: those of Llama 3 have line breaks as they are, later ones escape them for Jinja.
TEST(TokenizerConfig, SeesWhatATemplateAdds) {
  const auto form = [](const std::string& text) { return llama3_chat_form({{}, {}, text}, "some.json"); };
  const std::string message =
      "{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ "
      "message['content'] | trim + '<|eot_id|>' }}{% endfor %}";
  const std::string answer = "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}";
  EXPECT_EQ(form(message + answer), ChatForm());

  const std::string system = R"({{- "<|start_header_id|>system<|end_header_id|>\n\n" }})";
  const std::string dates =
      R"({{- "Cutting Knowledge Date: December 2023\n" }}{{- "Today Date: " + date_string + "\n\n" }})";
  const std::string fixed = R"({%- set date_string = "26 Jul 2024" %})";
  const std::string today = R"({%- set date_string = strftime_now("%d %b %Y") %})";
  const std::string rest = R"({%- set system_message = "" %})" + message + answer;
  EXPECT_EQ(form(fixed + system + dates + rest), (ChatForm{true, true, "26 Jul 2024"}));
  EXPECT_EQ(form(today + fixed + system + dates + rest), (ChatForm{true, true, ""}));

  EXPECT_FALSE(form(system + dates + rest).published);  // whose date?
  EXPECT_FALSE(form(system + "Be kind.<|eot_id|>" + rest).published);
  EXPECT_FALSE(form(fixed + system + dates + message + answer).published);  // and without a message of the user?
  EXPECT_FALSE(form(message).published);
  EXPECT_FALSE(form(message + "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n<think>' }}").published);
  std::string other = rest;
  other.replace(other.find(" | trim"), 7, "");
  EXPECT_FALSE(form(other).published);
  EXPECT_FALSE(form("<|start_header_id|><|end_header_id|><|eot_id|>").published);
}

// Made by tests/peers/hugging_face.py --golden.
TEST(Golden, TokensOfTheTokenizersPackage) {
  if (!splitter_available()) GTEST_SKIP() << "this build has no PCRE2";
  const Json golden = Json::parse(read_file(std::filesystem::path(TREEATTN_TESTS_DIR) / "data/tokenizer_golden.json"));
  std::size_t cases = 0;
  for (const Json& set : golden.at("sets")) {
    const Tokenizer tokenizer = Tokenizer::parse(set.at("tokenizer").dump(), set.at("kind"));
    for (const Json& one : set.at("cases")) {
      const auto text = one.at(0).get<std::string>();
      EXPECT_EQ(tokenizer.encode(text, true), one.at(1).get<Tokens>()) << text;
      EXPECT_EQ(tokenizer.encode(text, false), one.at(2).get<Tokens>()) << text;
      ++cases;
    }
    for (const Json& chat : set.at("chats")) {
      std::vector<ChatMessage> messages;
      for (const Json& message : chat.at(0)) messages.push_back({message.at("role"), message.at("content")});
      EXPECT_EQ(chat_tokens(tokenizer, messages, true), chat.at(1).get<Tokens>()) << chat.at(0);
      ++cases;
    }
  }
  EXPECT_GE(cases, 300u);
}

}  // namespace
}  // namespace treeattn
