// SPDX-License-Identifier: Apache-2.0
// treeattn generate: a prompt goes in, the model's text comes out, on one rank or many.
#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "base/check.h"
#include "command.h"
#include "files.h"
#include "json_line.h"
#include "launched_ranks.h"
#include "model/session.h"
#include "model/session_file.h"
#include "model_options.h"
#include "model_run.h"
#include "notes.h"
#include "option_errors.h"
#include "options.h"
#include "parallel/kv_files.h"
#include "rate_progress.h"
#include "table.h"

namespace treeattn::tools {
namespace {

struct GenerateCommand {
  ModelOptions model;
  SamplingOptions sampling;
  std::string prompt, file, load, save, logits;
  bool json = false;
  bool stats = false;
};

std::string read_prompt(const GenerateCommand& options) {
  base::require(options.prompt.empty() || options.file.empty(), "a prompt and --file {}; accepted: one of the two",
                options.file);
  if (!options.prompt.empty()) return options.prompt;
  if (options.file.empty()) {
    if (!options.load.empty()) return {};  // the text goes on
    base::require(!launched(), "there is no prompt; accepted under a launcher: as an argument, by --file");
    base::require(::isatty(STDIN_FILENO) == 0, "there is no prompt; accepted: as an argument, by --file, on stdin");
    return read_stdin();
  }
  return inside_option("--file", [&] { return read_text(options.file); });
}

// Without a tokenizer the bytes of the text stand for themselves.
std::vector<std::int32_t> tokens_of(const model::ModelDescription& model, const std::string& text, bool begin) {
  if (model.tokenizer) return model::encode_prompt(model, text, begin);
  std::vector<std::int32_t> out;
  for (const unsigned char byte : text) out.push_back(byte);
  return out;
}

// Tokens that a saved text has already; llama: gets the type and the order of its cache, which it keeps. Throws BadFile
// where there is none.
std::int64_t saved_tokens(const std::filesystem::path& directory, LlamaOptions& llama) {
  const parallel::Manifest cache = parallel::saved_manifest(directory);
  llama.kv_type = cache.config.k_type;
  llama.order = cache.config.order;
  const model::SavedText text = model::saved_text_of(directory, cache.generation);
  std::int64_t sum = static_cast<std::int64_t>(text.pending.size());
  for (const auto& [id, transcript] : text.transcripts) sum += transcript.length();
  return sum;
}

// What one rank says. Every rank knows the whole text, but only the first one speaks. Where that one is lost, the first
// of those that are left goes on.
class Voice {
 public:
  Voice(const GenerateCommand& options, const SamplerOptions& sampler, const ModelRank& rank, model::Session& session)
      : options_(options),
        sampler_(sampler),
        session_(session),
        has_text_(rank.model.description.tokenizer != nullptr) {
    if (speaks() && !options.logits.empty()) {
      inside_option("--logits", [&] { logits_.emplace(options.logits); });
    }
  }

  TextListener listener() {
    TextListener out;
    const auto shown_by = [this](RateProgress& progress) {
      return [this, &progress](std::int64_t done, std::int64_t total) {
        if (speaks()) progress.update(done, total);
      };
    };
    out.prefill = shown_by(prefill_);
    out.recovery = shown_by(recovery_);
    out.text = [this](std::string_view text) { say(text); };
    out.token = [this](const TokenChoice& choice) {
      if (!has_text_) say(fmt::format("{} ", choice.token));
      if (options_.json) choices_.push_back(choice);
    };
    if (logits_) {
      out.logits = [this](std::span<const float> logits) {
        logits_->write({reinterpret_cast<const char*>(logits.data()), logits.size_bytes()});
      };
    }
    return out;
  }

  void finish(const GenerateResult& result) {
    clear_progress();  // nothing may have been said
    if (logits_) logits_->finish();
    if (!speaks()) return;
    print_text(options_.json ? json(result) + "\n" : "\n");
    if (options_.stats) print_stats(result);
    print_losses(result.stats);
  }

 private:
  bool speaks() const { return session_.llama().communicator()->rank() == 0; }

  void clear_progress() {
    prefill_.clear();
    recovery_.clear();
  }

  void say(std::string_view text) {
    clear_progress();
    if (options_.json) {
      if (has_text_) text_ += text;
      return;
    }
    if (speaks()) print_text(text);
  }

  static double mean_seconds(const GenerateStats& stats) {
    if (stats.token_seconds.empty()) return 0;
    return std::accumulate(stats.token_seconds.begin(), stats.token_seconds.end(), 0.0) /
           static_cast<double>(stats.token_seconds.size());
  }

  std::string json(const GenerateResult& result) const {
    const Communicator& world = *session_.llama().communicator();
    nlohmann::ordered_json out;
    if (has_text_) out["text"] = text_;
    out["tokens"] = result.tokens;
    out["reason"] = stop_reason_name(result.reason);
    out["prompt_tokens"] = result.stats.prompt_tokens;
    out["first_token_ms"] = 1e3 * result.stats.first_token_seconds;
    const double mean = mean_seconds(result.stats);  // null where no token was timed
    out["token_ms"] = mean > 0 ? nlohmann::ordered_json(1e3 * mean) : nlohmann::ordered_json();
    out["ranks"] = world.size();
    out["transport"] = world.transport();
    out["bytes_sent"] = result.stats.bytes_sent;
    out["sampler"] = {{"temperature", sampler_.temperature},
                      {"top_k", sampler_.top_k},
                      {"top_p", sampler_.top_p},
                      {"min_p", sampler_.min_p},
                      {"repetition_penalty", sampler_.repetition_penalty},
                      {"seed", sampler_.seed}};
    out["lost"] = result.stats.lost;
    if (!choices_.empty() && !choices_.front().top.empty()) {
      for (const TokenChoice& choice : choices_) {
        nlohmann::ordered_json place{{"token", choice.token}, {"logprob", choice.logprob}};
        for (const TokenLogprob& top : choice.top) {
          place["top"].push_back({{"token", top.token}, {"logprob", top.logprob}});
        }
        out["logprobs"].push_back(std::move(place));
      }
    }
    return json_line(out);
  }

  void print_stats(const GenerateResult& result) const {
    const double mean = mean_seconds(result.stats);
    // After the first token there may be none to time.
    const std::string each =
        mean > 0 ? fmt::format(", {} ms each ({} a second)", format_number(1e3 * mean), format_number(1 / mean)) : "";
    print_note("{} of prompt, first token after {} s; {}{}; {} sent; {}\n",
               format_count(result.stats.prompt_tokens, "token"), format_number(result.stats.first_token_seconds),
               format_count(static_cast<std::int64_t>(result.tokens.size()), "token"), each,
               format_bytes(result.stats.bytes_sent), stop_reason_name(result.reason));
  }

  const GenerateCommand& options_;
  const SamplerOptions& sampler_;
  model::Session& session_;
  bool has_text_;
  RateProgress prefill_{"reading the prompt", "tokens"}, recovery_{"recovering", "tokens"};
  std::optional<ResultFile> logits_;
  std::string text_;
  std::vector<TokenChoice> choices_;
};

int run(const GenerateCommand& options) {
  ModelPlan plan = make_model_plan(options.model);
  GenerateOptions text = options.sampling.parse(plan.model.generation, 256);
  base::require(text.sampler.logprobs == 0 || options.json,
                "--logprobs is {} without --json, which would print them; accepted: both", text.sampler.logprobs);
  if (!text.stop.empty()) require_tokenizer(options.model, plan, " with --stop");
  const std::string prompt = read_prompt(options);
  const std::string source = options.file.empty() ? "the prompt" : "--file: " + options.file;
  if (plan.model.tokenizer) require_utf8(source.c_str(), prompt);
  const bool goes_on = options.file.empty() && !options.load.empty();
  base::require(!prompt.empty() || goes_on, "{} is empty; accepted: a text", source);
  const bool first = options.load.empty();
  const std::vector<std::int32_t> tokens = tokens_of(plan.model, prompt, first);
  if (!plan.model.tokenizer && !plan.model.directory.empty() && launch_rank() == 0) {
    print_note("treeattn: {} has no tokenizer.json: the bytes of the prompt are its tokens, and tokens are numbers\n",
               plan.model.directory.string());
  }
  const std::int64_t context = plan.model.config.context;
  const auto length = static_cast<std::int64_t>(tokens.size());
  base::require(length < context, "the prompt has {} tokens; accepted: fewer than the model's context, {}", length,
                context);
  const std::int64_t before =
      first ? 0 : inside_option("--load", [&] { return saved_tokens(options.load, plan.llama); });
  base::require(
      before + length < context,
      "--load: {} has a text of {} tokens, the prompt {}; accepted: together fewer than the model's context, {}",
      options.load, before, length, context);
  // Now, not when the text is there and cannot be kept.
  if (!options.save.empty()) {
    inside_option("--save", [&] {
      make_directory(options.save);
      model::require_no_other_files(options.save);
    });
  }
  text.interrupt = &interrupt_flag();
  std::once_flag ready;
  return run_model(plan, std::min(context, before + length + text.max_tokens), [&](const ModelRank& rank) {
    std::call_once(ready, catch_interrupt);
    const model::Tokenizer* tokenizer = rank.model.description.tokenizer.get();
    model::Session session = first ? model::Session(rank.make_llama(plan.llama), tokenizer)
                                   : model::Session::load(options.load, rank.model.weights, rank.world, rank.ops,
                                                          rank.pool, tokenizer, plan.llama);
    Voice voice(options, text.sampler, rank, session);
    voice.finish(session.generate(tokens, text, voice.listener()));
    if (!options.save.empty()) session.save(options.save);  // last: where the disk is full, the text has been said
    return kOk;
  });
}

constexpr char kFooter[] =
    R"(The text goes to stdout as it is made. Ctrl-C ends it after the next token or piece of the prompt; a second one ends
the program. Without a tokenizer.json the bytes of the prompt are its tokens, and tokens are printed as numbers.

Examples:
  treeattn generate --model Llama-3.2-1B "The sea is"
  treeattn generate --model Llama-3.2-1B --file report.txt --ranks 2 --temperature 0.7 --seed 3 --stats
  echo "Once upon a time" | treeattn generate --model Llama-3.2-1B --weights int8 -n 100
  treeattn generate --model Llama-3.2-1B "A story:" --save story && treeattn generate --model Llama-3.2-1B --load story
  mpirun -n 4 --enable-recovery treeattn generate --model Llama-3.2-1B --file book.txt --recover
  treeattn generate --random-weights llama-3.2-1b abc -n 10)";

}  // namespace

Command add_generate(CommandLine& parent) {
  CommandLine* app = parent.add_subcommand("generate", "Text from a Llama whose KV cache is spread over ranks");
  auto options = std::make_shared<GenerateCommand>();
  app->add_option("prompt", options->prompt, "The prompt; else --file, else stdin, which --load leaves alone")
      ->type_name("TEXT")
      ->own_to_rank();
  app->add_option("--file", options->file, "A file with the prompt")->type_name("FILE")->own_to_rank();
  options->model.add_to(*app);
  options->sampling.add_to(*app, "256");
  app->add_option("--logprobs", options->sampling.logprobs,
                  "With --json: the N most likely tokens at each place (default 0)")
      ->type_name("N")
      ->group("Text");
  app->add_option("--load", options->load, "Go on with the text of this directory, on any number of ranks")
      ->type_name("DIR")
      ->own_value_to_rank();
  app->add_option("--save", options->save, "Keep cache and text in this directory, new or of an earlier save")
      ->type_name("DIR")
      ->own_value_to_rank();
  app->add_option("--logits", options->logits, "")->type_name("FILE")->group("")->own_to_rank();  // for tests
  app->add_flag("--stats", options->stats, "Times and bytes on stderr");
  app->add_flag("--json", options->json, "One JSON object at the end; docs/cli.md explains the keys");
  app->footer(kFooter);
  return {app, [options] { return run(*options); }};
}

}  // namespace treeattn::tools
