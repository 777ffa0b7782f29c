// SPDX-License-Identifier: Apache-2.0
// Replays the corpus of the fuzzers, as it is and with random damage: the parsers return or throw BadFile, and what
// they return holds together.
#include <gtest/gtest.h>

#include <cstdio>
#include <functional>
#include <set>

#include "fuzz/model_files_fuzz.h"
#include "fuzz/other_bytes_fuzz.h"
#include "kv_mirror.h"
#include "model/splitter.h"
#include "model_files.h"

namespace treeattn {
namespace {

using testing_kv::Random;
using Try = std::function<bool(std::string_view)>;

// One change of the kinds that find mistakes in parsers of text.
void mutate(Random& random, std::string& text) {
  static const std::vector<std::string> kPieces = {"0",
                                                   "-1",
                                                   "1e999",
                                                   "18446744073709551615",
                                                   "9223372036854775808",
                                                   "null",
                                                   "[]",
                                                   "{}",
                                                   "\"\"",
                                                   "[[",
                                                   "{\"a\":",
                                                   "\\u0000",
                                                   "\\ud800",
                                                   "\xff",
                                                   ",",
                                                   ":",
                                                   "\"",
                                                   "true",
                                                   "1e-400",
                                                   "0.5"};
  const auto size = static_cast<std::int64_t>(text.size());
  const auto at = static_cast<std::size_t>(random.integer(0, size));
  const auto length = static_cast<std::size_t>(random.integer(0, std::min<std::int64_t>(20, size)));
  switch (random.integer(0, 4)) {
    case 0:
      if (at < text.size()) text[at] = static_cast<char>(text[at] ^ (1 << random.integer(0, 7)));
      break;
    case 1:
      text.insert(at, random.pick(kPieces));
      break;
    case 2:
      text.erase(at, length);
      break;
    case 3:
      text.replace(at, std::min(length, text.size() - at), random.pick(kPieces));
      break;
    default:
      text.insert(static_cast<std::size_t>(random.integer(0, size)), text.substr(at, length));
  }
}

void replay(const char* name, const Try& taken, int rounds) {
  Random random(testing_kv::test_seed());
  std::vector<std::string> corpus;
  int sound = 0, still_sound = 0, tried = 0;
  const auto folder = std::filesystem::path(TREEATTN_TESTS_DIR) / "fuzz/corpus" / name;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    corpus.push_back(testing_model::read_file(entry.path()));
    sound += taken(corpus.back()) ? 1 : 0;
  }
  ASSERT_GT(sound, 0) << folder;
  for (const std::string& one : corpus) {
    for (int i = 0; i < rounds; ++i, ++tried) {
      std::string damaged = one;
      for (std::int64_t changes = random.integer(1, 3); changes > 0; --changes) mutate(random, damaged);
      still_sound += taken(damaged) ? 1 : 0;
    }
  }
  std::printf("%s: %zu files, %d sound; %d damaged, %d still sound\n", name, corpus.size(), sound, tried, still_sound);
}

TEST(ModelFilesFuzz, Config) { replay("config", fuzz::try_config, 300); }
TEST(ModelFilesFuzz, GenerationConfig) { replay("generation_config", fuzz::try_generation_config, 300); }
TEST(ModelFilesFuzz, Safetensors) { replay("safetensors", fuzz::try_safetensors, 300); }
TEST(ModelFilesFuzz, Index) { replay("index", fuzz::try_index, 300); }
TEST(ModelFilesFuzz, TokenizerConfig) { replay("tokenizer_config", fuzz::try_tokenizer_config, 300); }

TEST(OtherBytesFuzz, Session) { replay("session", fuzz::try_session, 300); }
TEST(OtherBytesFuzz, Cluster) { replay("cluster", fuzz::try_cluster, 300); }

TEST(OtherBytesFuzz, HeaderOverTcp) { replay("header", fuzz::try_header, 300); }
TEST(OtherBytesFuzz, NoteOfARank) { replay("note", fuzz::try_note, 300); }

TEST(OtherBytesFuzz, CardOfARankOverTcp) {
  replay("card", fuzz::try_card, 300);
  comm::TcpCard card;
  card.port = 1;
  EXPECT_TRUE(comm::is_sound(card));
  for (auto* text : {&card.job, &card.address, &card.machine}) {
    text->fill('x');
    EXPECT_FALSE(comm::is_sound(card)) << "a text without an end";
    comm::put_text(*text, std::string(100, 'x'));
    EXPECT_TRUE(comm::is_sound(card)) << "what is too long is cut";
  }
  // Jobs that are told apart, each as a text that fits and can be shown.
  std::set<comm::TcpText> jobs;
  for (const std::string& job : {std::string(), std::string("a"), std::string(100, 'x'), std::string(101, 'x'),
                                 std::string("a\nb"), std::string("a\rb"), std::string("a?b")}) {
    comm::put_job(card.job, job);
    EXPECT_TRUE(comm::is_sound(card));
    EXPECT_TRUE(jobs.insert(card.job).second) << job;
  }
  comm::put_text(card.job, "a\033[2Jb");
  EXPECT_EQ(comm::name_job(card.job), "job \"a?[2Jb\"");
  card.port = 65536;
  EXPECT_FALSE(comm::is_sound(card));
  card.port = 1;
  card.greeting.version += 1;
  EXPECT_FALSE(comm::is_sound(card)) << "another version";
}

TEST(ModelFilesFuzz, Tokenizer) {
  if (!model::splitter_available()) GTEST_SKIP() << "this build has no PCRE2";
  replay("tokenizer", fuzz::try_tokenizer, 50);
  const auto tokenizer = model::Tokenizer::parse(testing_model::fuzz_tokenizer().dump(), "fuzz");
  replay(
      "tokenizer_text", [&](std::string_view text) { return fuzz::check_text(tokenizer, text), true; }, 300);
}

}  // namespace
}  // namespace treeattn
