// SPDX-License-Identifier: Apache-2.0
// Texts on ranks that are threads: stops, sampling, sessions.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/file.h"
#include "byte_tokenizer.h"
#include "model/session_file.h"
#include "model/utf8.h"
#include "session_rank.h"
#include "temporary_directory.h"
#include "treeattn/error.h"

namespace treeattn::model {
namespace {

using testing_model::byte_tokenizer;
using testing_model::generate_on;
using testing_model::random_tokens;
using testing_model::SessionRank;
using testing_model::small_options;
using testing_model::SmallModel;
using testing_model::tokens_of;

TEST(Session, SampledTextIsTheSameOnAnyNumberOfRanks) {
  const SmallModel model;
  const auto one = generate_on(1, model, tokens_of(60), 200);
  EXPECT_EQ(one.size(), 60u);
  for (const int ranks : {2, 3}) EXPECT_EQ(generate_on(ranks, model, tokens_of(60), 200), one) << ranks;
  GenerateOptions other = tokens_of(60);
  other.sampler.seed = 4;
  EXPECT_NE(generate_on(1, model, other, 200), one);
}

TEST(Session, GoesOnWhereItWasLeft) {
  const SmallModel model;
  const auto want = generate_on(1, model, tokens_of(50), 100);
  const TemporaryDirectory directory;
  std::vector<std::int32_t> first;
  run_ranks(3, [&](std::shared_ptr<Communicator> world) {
    SessionRank rank(model, world, nullptr);
    const auto result = rank.session.generate(random_tokens(100, 301, 7), tokens_of(20));
    if (world->rank() == 0) first = result.tokens;
    rank.session.save(directory.path());
  });
  run_ranks(2, [&](std::shared_ptr<Communicator> world) {
    ThreadPool pool(1);
    const auto ops = kernels::cpu_model_ops(pool);
    Session session = Session::load(directory.path(), model.weights, world, *ops, pool, nullptr);
    const auto rest = session.generate({}, tokens_of(30));
    EXPECT_EQ(rest.stats.prompt_tokens, 0);
    std::vector<std::int32_t> all = first;
    all.insert(all.end(), rest.tokens.begin(), rest.tokens.end());
    EXPECT_EQ(all, want);
  });
}

// Characters that calls cut are shown whole, and once.
TEST(Session, TheTextOfManyCallsIsThatOfOne) {
  const SmallModel model;
  const Tokenizer tokenizer = byte_tokenizer();
  constexpr std::int64_t kAll = 120;
  GenerateOptions options = tokens_of(kAll);
  options.sampler = {.temperature = 1.5};
  const auto prompt = random_tokens(20, 128, 9);
  const auto shows = [](std::string& text) {
    return TextListener{.text = [&text](std::string_view piece) { text += piece; }};
  };
  std::string whole;
  const auto in_one = [&] {
    whole.clear();
    SessionRank rank(model, self_communicator(), &tokenizer);
    return rank.session.generate(prompt, options, shows(whole)).reason;
  };
  // With characters of several bytes, which are as many tokens, and at the end of all none that is cut.
  const auto characters = [&] {
    int count = 0;
    for (std::size_t at = 0; at < whole.size(); at += next_utf8(std::string_view(whole).substr(at)).bytes) {
      const char32_t code = next_utf8(std::string_view(whole).substr(at)).code;
      count += code >= 0x80 && code != 0xfffd ? 1 : 0;
    }
    return count;
  };
  do {
    ASSERT_LT(++options.sampler.seed, 200u) << "such a text was never said";
  } while (in_one() != StopReason::kMaxTokens || characters() < 4);
  const TemporaryDirectory directory;
  for (const std::int64_t step : {1, 2, 7}) {
    run_ranks(2, [&](std::shared_ptr<Communicator> world) {
      SessionRank rank(model, world, &tokenizer);
      std::string text;
      GenerateOptions part = options;
      for (std::int64_t done = 0; done < kAll; done += part.max_tokens) {
        part.max_tokens = std::min(step, kAll - done);
        rank.session.generate(done == 0 ? prompt : std::vector<std::int32_t>(), part, shows(text));
      }
      EXPECT_EQ(text, whole) << step;
    });
  }
  // What was saved goes on so, too.
  std::string text;
  GenerateOptions one = options;
  one.max_tokens = 1;
  SessionRank rank(model, self_communicator(), &tokenizer);
  rank.session.generate(prompt, one, shows(text));
  rank.session.save(directory.path());
  for (std::int64_t done = 1; done < kAll; ++done) {
    Session loaded =
        Session::load(directory.path(), model.weights, self_communicator(), *rank.ops, rank.pool, &tokenizer);
    loaded.generate({}, one, shows(text));
    loaded.save(directory.path());
  }
  EXPECT_EQ(text, whole);
}

// A listener that has had enough, when the last piece is in the cache and not yet in the transcript.
TEST(Session, WhatIsSavedAfterACallThatThrewCanBeLoaded) {
  struct Enough {};
  const SmallModel model;
  const auto want = generate_on(1, model, tokens_of(20), 100);
  const TemporaryDirectory directory;
  SessionRank rank(model, self_communicator(), nullptr);
  TextListener listener;
  listener.prefill = [](std::int64_t done, std::int64_t total) {
    if (done == total) throw Enough();
  };
  EXPECT_THROW(rank.session.generate(random_tokens(100, 301, 7), tokens_of(20), listener), Enough);
  rank.session.save(directory.path());
  Session loaded = Session::load(directory.path(), model.weights, self_communicator(), *rank.ops, rank.pool, nullptr);
  EXPECT_EQ(loaded.generate({}, tokens_of(20)).tokens, want);
}

// What is there is told by the save it belongs to: two texts may be of the same length.
TEST(Session, ASaveThatWasCutOffLeavesTheOneBefore) {
  namespace fs = std::filesystem;
  const SmallModel model;
  const TemporaryDirectory old_one, new_one;
  const auto text_in = [](const TemporaryDirectory& directory) { return directory.path() / kSavedTextName; };
  const auto draft_in = [](const TemporaryDirectory& directory) { return directory.path() / kSavedDraftName; };
  SessionRank first(model, self_communicator(), nullptr), second(model, self_communicator(), nullptr);
  first.session.generate(random_tokens(10, 301, 1), tokens_of(1));
  first.session.save(old_one.path());
  second.session.generate(random_tokens(10, 301, 2), tokens_of(1));
  second.session.save(new_one.path());
  const auto tokens_in = [&](const TemporaryDirectory& directory) {
    return Session::load(directory.path(), model.weights, self_communicator(), *first.ops, first.pool, nullptr)
        .tokens();
  };
  // Before the cache of the new one was there, and after.
  fs::copy_file(text_in(new_one), draft_in(old_one));
  EXPECT_EQ(tokens_in(old_one), first.session.tokens());
  fs::rename(text_in(new_one), draft_in(new_one));
  fs::copy_file(text_in(old_one), text_in(new_one));
  EXPECT_EQ(tokens_in(new_one), second.session.tokens());
  fs::remove(draft_in(new_one));
  EXPECT_THROW(tokens_in(new_one), BadFile);
}

// The first when its cache was there and its text had no name yet, the second before its cache was there.
TEST(Session, TwoSavesThatWereCutOffLeaveTheOneBefore) {
  namespace fs = std::filesystem;
  const SmallModel model;
  const TemporaryDirectory directory;
  SessionRank rank(model, self_communicator(), nullptr);
  rank.session.generate(random_tokens(10, 301, 1), tokens_of(1));
  rank.session.save(directory.path());
  const std::vector<std::int32_t> want = rank.session.tokens();
  fs::rename(directory.path() / kSavedTextName, directory.path() / kSavedDraftName);
  fs::create_directory(directory.path() / "cache.manifest.tmp");  // cannot be written as a file
  rank.session.generate({}, tokens_of(1));
  EXPECT_THROW(rank.session.save(directory.path()), BadFile);
  Session loaded = Session::load(directory.path(), model.weights, self_communicator(), *rank.ops, rank.pool, nullptr);
  EXPECT_EQ(loaded.tokens(), want);
}

// A file that somebody changed may have a checksum that fits. Its tokens are computed again after a loss.
TEST(Session, SavedTokensThatTheModelDoesNotHaveAreRefused) {
  const SmallModel model;
  const TemporaryDirectory directory;
  SessionRank rank(model, self_communicator(), nullptr);
  rank.session.generate(random_tokens(3, 301, 7), tokens_of(1));
  rank.session.save(directory.path());
  const std::filesystem::path file = directory.path() / kSavedTextName;
  const SavedText good = read_saved_text(file);
  const auto load = [&](const SavedText& text) {
    base::File out = base::File::create(file);
    out.write(encode(text));
    out.finish();
    Session::load(directory.path(), model.weights, self_communicator(), *rank.ops, rank.pool, nullptr);
  };
  EXPECT_NO_THROW(load(good));
  for (const std::int32_t token : {-1, 301}) {
    SavedText waiting = good, cached = good;
    waiting.pending = {token};
    cached.transcripts.begin()->second.truncate(2);
    cached.transcripts.begin()->second.append(std::vector{token}, Way::kOneByOne);
    EXPECT_THROW(load(waiting), BadFile) << token;
    EXPECT_THROW(load(cached), BadFile) << token;
  }
}

TEST(Session, StopsAtTokensStringsContextAndTheFlag) {
  const SmallModel model;
  const Tokenizer tokenizer = byte_tokenizer();
  const auto run = [&](GenerateOptions options, std::string* text = nullptr) {
    SessionRank rank(model, self_communicator(), &tokenizer);
    TextListener listener;
    if (text) listener.text = [text](std::string_view piece) { *text += piece; };
    options.sampler.temperature = 0;
    return rank.session.generate(random_tokens(20, 256, 9), options, listener);
  };
  std::string text;
  const GenerateResult whole = run(tokens_of(80), &text);
  EXPECT_EQ(whole.reason, StopReason::kMaxTokens);
  ASSERT_EQ(whole.tokens.size(), 80u);

  GenerateOptions at_token = tokens_of(80);
  at_token.stop_tokens = {whole.tokens[30]};
  const GenerateResult stopped = run(at_token);
  EXPECT_EQ(stopped.reason, StopReason::kStopToken);
  EXPECT_EQ(stopped.tokens.back(), whole.tokens[30]);
  EXPECT_LE(stopped.tokens.size(), 31u);

  // A special token is in no text; named as a string it ends one all the same.
  GenerateOptions at_name = tokens_of(150);
  at_name.sampler.temperature = 1;
  const auto drawn = [&](std::vector<std::string> stop) {
    SessionRank rank(model, self_communicator(), &tokenizer);
    at_name.stop = std::move(stop);
    return rank.session.generate(random_tokens(20, 256, 9), at_name);
  };
  std::vector<std::int32_t> hot;
  auto named = hot.end();
  while (named == hot.end()) {
    ASSERT_LT(++at_name.sampler.seed, 50u) << "one token of 301 was never drawn";
    hot = drawn({}).tokens;
    named = std::find(hot.begin(), hot.end(), testing_model::kEndHeader);
  }
  const GenerateResult ended = drawn({"<|end_header_id|>"});
  EXPECT_EQ(ended.reason, StopReason::kStopToken);
  EXPECT_EQ(ended.tokens, std::vector(hot.begin(), named + 1));

  // A string that lies over several tokens, which are bytes here.
  ASSERT_GT(text.size(), 20u);
  const auto next_character = [&](std::size_t at) {
    while (at < text.size() && (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80) ++at;
    return at;
  };
  const std::size_t at = next_character(text.size() / 2), end = next_character(at + 9);
  GenerateOptions at_string = tokens_of(80);
  at_string.stop = {"never said at all", text.substr(at, end - at)};
  std::string before;
  EXPECT_EQ(run(at_string, &before).reason, StopReason::kStopString);
  EXPECT_EQ(before, text.substr(0, text.find(at_string.stop[1])));

  std::atomic<bool> flag = true;
  GenerateOptions interrupted = tokens_of(80);
  interrupted.interrupt = &flag;
  const GenerateResult cut = run(interrupted);
  EXPECT_EQ(cut.reason, StopReason::kInterrupted);
  EXPECT_EQ(cut.tokens.size(), 1u);

  LlamaConfig short_config = testing_model::small_config();
  short_config.context = 30;
  const SmallModel short_model(short_config);
  SessionRank rank(short_model, self_communicator(), &tokenizer);
  const GenerateResult full = rank.session.generate(random_tokens(20, 256, 9), tokens_of(80));
  EXPECT_EQ(full.reason, StopReason::kContext);
  EXPECT_EQ(full.tokens.size(), 10u);
}

TEST(Session, TheFlagOfOneRankStopsAll) {
  const SmallModel model;
  run_ranks(3, [&](std::shared_ptr<Communicator> world) {
    SessionRank rank(model, world, nullptr);
    const std::atomic<bool> mine = world->rank() == 2;
    GenerateOptions options = tokens_of(50);
    options.interrupt = &mine;
    const GenerateResult result = rank.session.generate(random_tokens(10, 301, 1), options);
    EXPECT_EQ(result.reason, StopReason::kInterrupted);
    EXPECT_EQ(result.tokens.size(), 1u);
  });
}

// A long prompt is left where a piece of it ends, and goes on there as if nothing had been.
TEST(Session, APromptCanBeLeftAndTakenUpAgain) {
  const SmallModel model;
  const std::vector<std::int32_t> prompt = random_tokens(900, 301, 4);
  for (const int ranks : {1, 3}) {
    run_ranks(ranks, [&](std::shared_ptr<Communicator> world) {
      SessionRank whole(model, world, nullptr), cut(model, world, nullptr);
      const GenerateResult expected = whole.session.generate(prompt, tokens_of(5));
      std::atomic<bool> flag = false;
      std::int64_t seen = 0;
      GenerateOptions options = tokens_of(5);
      options.interrupt = &flag;
      TextListener listener;
      listener.prefill = [&](std::int64_t done, std::int64_t total) {
        EXPECT_EQ(total, 900);
        EXPECT_GT(done, seen);
        seen = done;
        if (world->rank() == 0 && done > 300) flag = true;
      };
      const GenerateResult left = cut.session.generate(prompt, options, listener);
      EXPECT_EQ(left.reason, StopReason::kInterrupted);
      EXPECT_TRUE(left.tokens.empty());
      EXPECT_LT(seen, 900);
      EXPECT_EQ(cut.session.tokens(), prompt);
      EXPECT_EQ(cut.session.generate({}, tokens_of(5)).tokens, expected.tokens);
    });
  }
}

// The last token of a prompt goes through the layers as one of a prompt, also where it waited alone in a file: on a GPU
// that has other bits than decoding it.
TEST(Session, OneTokenThatIsLeftOfAPromptIsNotTakenForOneThatWasSaid) {
  const SmallModel model;
  const std::vector<std::int32_t> prompt = random_tokens(129, 301, 4);
  const TemporaryDirectory directory;
  SessionRank whole(model, self_communicator(), nullptr), cut(model, self_communicator(), nullptr);
  whole.session.generate(prompt, tokens_of(5));
  const auto blocks = [](Session& session) {
    const Transcript& text = session.llama().transcript(0);
    return text.blocks(0, text.length(), 64);
  };
  std::atomic<bool> flag = false;
  GenerateOptions options = tokens_of(5);
  options.interrupt = &flag;
  TextListener listener;
  listener.prefill = [&](std::int64_t done, std::int64_t) { flag = done == 128; };
  EXPECT_EQ(cut.session.generate(prompt, options, listener).reason, StopReason::kInterrupted);
  cut.session.save(directory.path());
  Session loaded = Session::load(directory.path(), model.weights, self_communicator(), *cut.ops, cut.pool, nullptr);
  for (Session* session : {&loaded, &cut.session}) {
    session->generate({}, tokens_of(5));
    EXPECT_EQ(session->tokens(), whole.session.tokens());
    EXPECT_EQ(blocks(*session), blocks(whole.session));
  }
}

TEST(Session, BadPromptsAreRefused) {
  const SmallModel model;
  SessionRank rank(model, self_communicator(), nullptr);
  EXPECT_THROW(rank.session.generate({}, {}), InvalidArgument);
  EXPECT_THROW(rank.session.generate(std::vector<std::int32_t>{301}, {}), InvalidArgument);
  EXPECT_THROW(rank.session.generate(std::vector<std::int32_t>(4096, 1), {}), InvalidArgument);
  GenerateOptions stop;
  stop.stop = {"x"};
  EXPECT_THROW(rank.session.generate(std::vector<std::int32_t>{1}, stop), InvalidArgument);
  GenerateOptions none;
  none.max_tokens = 0;
  EXPECT_THROW(rank.session.generate(std::vector<std::int32_t>{1}, none), InvalidArgument);
  GenerateOptions unknown;
  unknown.stop_tokens = {-1};
  EXPECT_THROW(rank.session.generate(std::vector<std::int32_t>{1}, unknown), InvalidArgument);
  EXPECT_THROW(rank.session.generate({static_cast<const std::int32_t*>(nullptr), 3}, {}), InvalidArgument);
  EXPECT_TRUE(rank.session.tokens().empty());
}

// The text before the second byte of a character would end in half of it.
TEST(Session, StopsAtNothingButCharacters) {
  const SmallModel model;
  const Tokenizer tokenizer = byte_tokenizer();
  SessionRank rank(model, self_communicator(), &tokenizer);
  GenerateOptions half = tokens_of(5);
  half.stop = {"x", "\xa9"};
  EXPECT_THROW(rank.session.generate(std::vector<std::int32_t>{1}, half), InvalidArgument);
  half.stop.back() = "\u00e9";
  EXPECT_NO_THROW(rank.session.generate(std::vector<std::int32_t>{1}, half));
}

// Its tokens would be taken for what the model said.
TEST(Session, AListenerCannotGenerate) {
  const SmallModel model;
  const auto prompt = random_tokens(20, 301, 1);
  SessionRank plain(model, self_communicator(), nullptr), rank(model, self_communicator(), nullptr);
  const auto want = plain.session.generate(prompt, tokens_of(5)).tokens;
  TextListener listener;
  int refused = 0;
  listener.prefill = [&](std::int64_t, std::int64_t) {
    EXPECT_THROW(rank.session.generate(prompt, tokens_of(5)), Error);
    ++refused;
  };
  listener.token = [&](const TokenChoice&) { listener.prefill(0, 0); };
  EXPECT_EQ(rank.session.generate(prompt, tokens_of(5), listener).tokens, want);
  EXPECT_GE(refused, 6);
  EXPECT_EQ(rank.session.generate({}, tokens_of(5)).tokens, plain.session.generate({}, tokens_of(5)).tokens);
}

TEST(Session, AnotherThreadHasToWait) {
  const SmallModel model;
  const auto prompt = random_tokens(100, 301, 1);
  SessionRank rank(model, self_communicator(), nullptr);
  std::string refusal;
  TextListener listener;
  listener.token = [&](const TokenChoice&) {
    std::thread([&] {
      try {
        rank.session.generate(prompt, tokens_of(5));
      } catch (const Error& error) {
        refusal = error.what();
      }
    }).join();
  };
  EXPECT_EQ(rank.session.generate(prompt, tokens_of(5), listener).tokens.size(), 5u);
  EXPECT_NE(refusal.find("by another thread"), std::string::npos) << refusal;
  EXPECT_EQ(rank.session.tokens().size(), 105u);
}

// As for a template that ends an answer by another token, or an answer of which the end is not to be seen.
TEST(Session, WhatWasSaidLastCanBeTakenBack) {
  const SmallModel model;
  const auto prompt = random_tokens(100, 301, 1), second = random_tokens(70, 301, 2);
  for (const int ranks : {1, 3}) {
    run_ranks(ranks, [&](std::shared_ptr<Communicator> world) {
      SessionRank rank(model, world, nullptr);
      EXPECT_THROW(rank.session.shorten(-1), InvalidArgument);
      rank.session.generate(prompt, tokens_of(5));
      const std::vector<std::int32_t> all = rank.session.tokens();
      EXPECT_THROW(rank.session.shorten(106), InvalidArgument);
      EXPECT_THROW(rank.session.shorten(99), InvalidArgument);  // a part of the prompt
      for (const std::int64_t length : {104, 102, 100}) {       // the last token is not in the cache yet
        rank.session.shorten(length);
        EXPECT_EQ(rank.session.tokens(), std::vector(all.begin(), all.begin() + length));
      }
      // As if it had not been said.
      const auto after = rank.session.generate(second, tokens_of(5)).tokens;
      SessionRank other(model, world, nullptr);
      other.session.generate(prompt, tokens_of(1));
      other.session.shorten(100);
      EXPECT_EQ(other.session.generate(second, tokens_of(5)).tokens, after);
      EXPECT_EQ(rank.session.tokens(), other.session.tokens());
    });
  }
}

// A save cuts off what is not finished, such as the piece of the prompt that the listener hears of.
TEST(Session, AListenerCanSaveOnceThePromptIsDone) {
  const SmallModel model;
  const auto prompt = random_tokens(100, 301, 1);
  const auto begun = tokens_of(5), rest = tokens_of(10);
  SessionRank plain(model, self_communicator(), nullptr);
  plain.session.generate(prompt, tokens_of(15));
  const TemporaryDirectory directory;
  SessionRank rank(model, self_communicator(), nullptr);
  TextListener listener;
  listener.prefill = [&](std::int64_t, std::int64_t) { EXPECT_THROW(rank.session.save(directory.path()), Error); };
  listener.token = [&](const TokenChoice&) { rank.session.save(directory.path()); };
  rank.session.generate(prompt, begun, listener);
  rank.session.generate({}, rest);
  EXPECT_EQ(rank.session.tokens(), plain.session.tokens());
  Session loaded = Session::load(directory.path(), model.weights, self_communicator(), *rank.ops, rank.pool, nullptr);
  loaded.generate({}, rest);
  EXPECT_EQ(loaded.tokens(), plain.session.tokens());
}

// As if the call had not been made, also where one rank has no prompt at all.
TEST(Session, PromptsThatDifferLeaveTheTextAsItWas) {
  const SmallModel model;
  const auto want = generate_on(1, model, tokens_of(30), 100);
  const TemporaryDirectory directory;
  run_ranks(3, [&](std::shared_ptr<Communicator> world) {
    const bool odd = world->rank() == 1;
    SessionRank rank(model, world, nullptr);
    EXPECT_THROW(rank.session.generate(random_tokens(odd ? 20 : 10, 301, 1), tokens_of(5)), InvalidArgument);
    EXPECT_TRUE(rank.session.tokens().empty());
    const auto prompt = random_tokens(100, 301, 7);
    rank.session.generate(prompt, tokens_of(20));
    const std::vector<std::int32_t> before = rank.session.tokens();
    const auto other = odd ? std::vector<std::int32_t>() : random_tokens(10, 301, 1);
    EXPECT_THROW(rank.session.generate(other, tokens_of(5)), InvalidArgument);
    EXPECT_EQ(rank.session.tokens(), before);
    rank.session.save(directory.path());
    const auto rest = rank.session.generate({}, tokens_of(10)).tokens;
    EXPECT_EQ(rest, std::vector<std::int32_t>(want.begin() + 20, want.end()));
  });
  ThreadPool pool(1);
  const auto ops = kernels::cpu_model_ops(pool);
  Session loaded = Session::load(directory.path(), model.weights, self_communicator(), *ops, pool, nullptr);
  EXPECT_EQ(loaded.generate({}, tokens_of(10)).tokens, std::vector<std::int32_t>(want.begin() + 20, want.end()));
}

// So are all other differences. Each is named on every rank, before any work.
TEST(Session, CallsThatDifferAreNamedAndLeaveTheTextAsItWas) {
  LlamaConfig config = testing_model::small_config();
  config.eos = {300};
  const SmallModel model(config);
  const Tokenizer tokenizer = byte_tokenizer();
  GenerateOptions usual = tokens_of(10);
  usual.ignore_eos = true;
  const auto prompt = random_tokens(100, 256, 7), second = random_tokens(70, 256, 8);
  SessionRank alone(model, self_communicator(), &tokenizer);
  alone.session.generate(prompt, usual);
  const auto want = alone.session.generate(second, usual).tokens;
  struct Difference {
    std::string named;
    std::function<void(GenerateOptions&)> make;
  };
  const std::vector<Difference> differences = {
      {"max_tokens", [](GenerateOptions& o) { o.max_tokens = 11; }},
      {"temperature", [](GenerateOptions& o) { o.sampler.temperature = 0.9; }},
      {"top_k", [](GenerateOptions& o) { o.sampler.top_k = 40; }},
      {"top_p", [](GenerateOptions& o) { o.sampler.top_p = 1; }},
      {"min_p", [](GenerateOptions& o) { o.sampler.min_p = 0.1; }},
      {"repetition_penalty", [](GenerateOptions& o) { o.sampler.repetition_penalty = 1; }},
      {"seed", [](GenerateOptions& o) { o.sampler.seed = 4; }},
      {"stop strings or tokenizer",
       [](GenerateOptions& o) {
         o.stop = {"ab", "c"};
       }},
      {"tokens that end the text", [](GenerateOptions& o) { o.stop_tokens = {7}; }},
      {"tokens that end the text", [](GenerateOptions& o) { o.ignore_eos = false; }},
      {"recover", [](GenerateOptions& o) { o.recover = true; }},
      {"max_tokens, seed",
       [](GenerateOptions& o) {
         o.max_tokens = 12;
         o.sampler.seed = 5;
       }},
  };
  run_ranks(3, [&](std::shared_ptr<Communicator> world) {
    SessionRank rank(model, world, &tokenizer);
    const auto refusal_of = [&](const auto& call) -> std::string {
      try {
        call();
      } catch (const InvalidArgument& error) {
        return error.what();
      }
      return "nothing is refused";
    };
    const std::string accepted = " than rank 0; accepted: the same on every rank";
    const auto check_all = [&](const std::vector<std::int32_t>& tokens) {
      const std::vector<std::int32_t> before = rank.session.tokens();
      for (const Difference& difference : differences) {
        for (const bool two : {false, true}) {
          GenerateOptions options = usual;
          if (world->rank() == 2 || (two && world->rank() == 1)) difference.make(options);
          EXPECT_EQ(refusal_of([&] { rank.session.generate(tokens, options); }),
                    (two ? "ranks 1, 2 have other " : "rank 2 has other ") + difference.named + accepted);
          EXPECT_EQ(rank.session.tokens(), before);
        }
      }
      // One that is wrong on one rank alone, and one whose caller has nothing to say.
      const bool odd = world->rank() == 1;
      GenerateOptions wrong = usual;
      if (odd) wrong.max_tokens = 0;
      const std::string of_rank = odd ? "" : "rank 1: ";
      EXPECT_EQ(refusal_of([&] { rank.session.generate(tokens, wrong); }),
                of_rank + "max_tokens = 0; accepted: 1 or more");
      EXPECT_EQ(refusal_of([&] { rank.session.generate(tokens, usual, {}, odd ? "no text" : ""); }),
                of_rank + "no text");
      EXPECT_EQ(rank.session.tokens(), before);
    };
    check_all(prompt);
    // What only one rank is told, and what is no part of the text, may differ.
    GenerateOptions first = usual;
    const std::atomic<bool> flag = false;
    if (world->rank() == 0) {
      first.sampler.logprobs = 3;
      first.interrupt = &flag;
    }
    rank.session.generate(prompt, first);
    check_all({});
    check_all(second);
    EXPECT_EQ(rank.session.generate(second, usual).tokens, want);
  });
  // What stop strings are looked for in.
  run_ranks(3, [&](std::shared_ptr<Communicator> world) {
    nlohmann::json json = nlohmann::json::parse(testing_model::byte_tokenizer_json());
    std::swap(json["model"]["vocab"]["y"], json["model"]["vocab"]["z"]);
    const Tokenizer other = Tokenizer::parse(json.dump(), "bytes");
    SessionRank rank(model, world, world->rank() == 1 ? &other : &tokenizer);
    GenerateOptions stops = usual;
    stops.stop = {"xyz"};
    try {
      rank.session.generate(prompt, stops);
      ADD_FAILURE() << "was accepted";
    } catch (const InvalidArgument& error) {
      EXPECT_STREQ(error.what(),
                   "rank 1 has other stop strings or tokenizer than rank 0; accepted: the same on every rank");
    }
    rank.session.generate(prompt, usual);
    EXPECT_EQ(rank.session.generate(second, usual).tokens, want);
  });
  // How the ranks go through a prompt.
  run_ranks(2, [&](std::shared_ptr<Communicator> world) {
    SessionRank rank(model, world, nullptr);
    LlamaOptions options = small_options();
    options.chunks_per_piece += world->rank();
    options.gather_kv = world->rank() == 1;
    Session other(std::make_unique<Llama>(model.weights, world, *rank.ops, rank.pool, options), nullptr);
    EXPECT_THROW(other.generate(prompt, usual), InvalidArgument);
  });
}

}  // namespace
}  // namespace treeattn::model
