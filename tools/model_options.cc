// SPDX-License-Identifier: Apache-2.0
#include "model_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/check.h"
#include "command_line.h"
#include "link_option.h"
#include "model/config.h"
#include "model/sampler.h"
#include "model/utf8.h"
#include "model/weights.h"
#include "option_errors.h"
#include "options.h"
#include "treeattn/error.h"

namespace treeattn::tools {
namespace {

// Ranks load their weights, and a piece of a prompt takes a while: longer than the library's default.
constexpr Seconds kModelDeadline{120.0};

}  // namespace

void require_utf8(const char* option, const std::string& text) {
  const std::size_t valid = model::valid_utf8(text);
  base::require(valid == text.size(), "{}: byte {} of {} is not UTF-8; accepted: UTF-8", option, valid, text.size());
}

void require_tokenizer(const ModelOptions& options, const ModelPlan& plan, const std::string& why) {
  base::require(plan.model.tokenizer != nullptr, "{} is \"{}\", which has no tokenizer; accepted{}: a model with one",
                options.model.empty() ? "--random-weights" : "--model",
                options.model.empty() ? options.random_weights : options.model, why);
}

void ModelOptions::add_to(CommandLine& app) {
  command = &app;
  const auto text = [&](const char* name, std::string& value, const std::string& what, const char* type) {
    return app.add_option(name, value, what)->type_name(type)->group("Model and ranks");
  };
  text("--model", model, "A directory as Hugging Face has them: config.json, *.safetensors, tokenizer.json", "DIR")
      ->own_value_to_rank();
  if (!must_have_tokenizer) {
    text("--random-weights", random_weights,
         fmt::format("Instead: random weights in the shape of {}", fmt::join(model::known_shapes(), ", ")), "SHAPE");
  }
  text("--weights", weights,
       "stored (mapped), bf16 (other types rounded at load) or int8 (quantised at load) (default stored)", "NAME");
  text("--kv-type", kv_type, "Of the cache: f32, f16, bf16, int8, fp8 (default bf16)", "NAME");
  const std::string names = "paper two_phase merge butterfly gather two_level ring auto";
  text("--strategy", strategy,
       many_strategies ? names + ", or a list (default auto,ring)" : "How ranks decode: " + names + " (default auto)",
       many_strategies ? "LIST" : "NAME");
  text("--ranks", ranks, "Threads that are ranks (default 1); under a launcher its processes", "N");
  text("--threads", threads, "Threads of each rank (default: the cores shared out over the ranks)", "N")->own_to_rank();
  text("--chunk", chunk, "Tokens of a chunk, a multiple of 64 (default 256)", "N");
  text("--branches", branches, "Leaves of the reduction tree, a power of two (default 256)", "N");
  text("--piece", piece, "Chunks of a prompt that a rank takes through the layers at once (default 4; on a GPU 32)",
       "N");
  text("--device", device, "cpu, cuda or cuda:N: where ranks compute (default cpu)", "NAME")->own_to_rank();
  text("--link", link, "How the states of ranks on GPUs travel in decode: host, peer, nccl, auto (default auto)",
       "NAME");
  text("--deadline", deadline, "A rank that does not answer for so long is lost (default 120)", "SECONDS");
  app.add_flag("--gather-kv", gather_kv,
               "Prefill: collect K and V of a layer first instead of passing them round; GPUs always do")
      ->group("Model and ranks");
}

ModelPlan make_model_plan(const ModelOptions& options) {
  base::require(!options.model.empty() || !options.random_weights.empty(),
                "--model is missing; accepted: a directory{}",
                options.must_have_tokenizer ? "" : ", or --random-weights instead");
  base::require(options.model.empty() || options.random_weights.empty(),
                "--model is \"{}\" and --random-weights is \"{}\"; accepted: one of the two", options.model,
                options.random_weights);
  ModelPlan plan;
  plan.command = options.command;
  plan.weights = with_option("--weights", options.weights, [&] {
    return model::parse_weight_format(options.weights.empty() ? "stored" : options.weights);
  });
  plan.llama.kv_type = parse_dtype_option("--kv-type", options.kv_type.empty() ? "bf16" : options.kv_type, true);
  const bool listed = options.many_strategies && options.strategy.find(',') != std::string::npos;
  if (!listed && !options.strategy.empty()) {
    plan.llama.attention.strategy = parse_strategy_option(options.strategy);
  }
  plan.llama.order = parse_order(options.chunk, options.branches);
  plan.llama.gather_kv = options.gather_kv;
  plan.ranks.deadline = parse_deadline(options.deadline, kModelDeadline);
  plan.rank_count = parse_count_or("--ranks", options.ranks, 1, 1024, 0);
  plan.threads = parse_count_or("--threads", options.threads, 1, 4096, 0);
  plan.device = parse_device(options.device);
  if (plan.device.on_gpu()) plan.llama.gather_kv = true;  // as it is there, whatever is asked for
  plan.llama.attention.link = parse_link_or_auto(options.link, plan.device.on_gpu());
  // A GPU wants more rows at once.
  plan.llama.chunks_per_piece = parse_count_or("--piece", options.piece, 1, 1 << 20, plan.device.on_gpu() ? 32 : 4);
  plan.model = options.model.empty()
                   ? with_option("--random-weights", options.random_weights,
                                 [&] { return model::describe_random_model(options.random_weights, 1); })
                   : inside_option("--model", [&] { return model::describe_model(options.model); });
  return plan;
}

void SamplingOptions::add_to(CommandLine& app, const char* default_max_tokens) {
  const auto text = [&](const char* name, std::string& value, const std::string& what, const char* type) {
    app.add_option(name, value, what)->type_name(type)->group("Text");
  };
  // generation_config.json may have them.
  const auto models_own = [&](const char* name, std::string& value, const char* what, const char* otherwise,
                              const char* type) {
    text(name, value, fmt::format("{} (default: the model's, else {})", what, otherwise), type);
  };
  models_own("-n,--max-tokens", max_tokens, "Tokens to generate at most", default_max_tokens, "N");
  models_own("--temperature", temperature, "0 takes the most likely token", "0", "X");
  models_own("--top-k", top_k, "Choose among the K most likely; 0: all", "0", "K");
  models_own("--top-p", top_p, "Choose among the most likely that have this probability together", "1", "X");
  models_own("--min-p", min_p, "Choose among those with at least this much of the most likely one's", "0", "X");
  models_own("--repetition-penalty", repetition_penalty, "Makes what was said before less likely", "1", "X");
  text("--seed", seed, "Of the draws (default 0)", "N");
  app.add_option("--stop", stop,
                 "End the text before this string, or at the special token of this name; may be given several times")
      ->one_at_a_time()  // what comes after it may be the prompt
      ->type_name("TEXT")
      ->group("Text");
  app.add_flag("--ignore-eos", ignore_eos, "Go on when the model says that it has finished")->group("Text");
  app.add_flag("--recover", recover, "When a rank is lost, the others compute what it had again and go on")
      ->group("Text");
}

GenerateOptions SamplingOptions::parse(const model::GenerationConfig& model, std::int64_t default_max_tokens) const {
  GenerateOptions out;
  out.max_tokens = max_tokens.empty() ? model.max_new_tokens.value_or(default_max_tokens)
                                      : parse_count("--max-tokens", max_tokens, 1, std::int64_t{1} << 30);
  SamplerOptions& s = out.sampler = model.sampler;
  if (!temperature.empty()) s.temperature = parse_real("--temperature", temperature, 0, 1000);
  if (!top_k.empty()) s.top_k = parse_count("--top-k", top_k, 0, 1 << 30);
  if (!top_p.empty()) s.top_p = parse_real("--top-p", top_p, 1e-9, 1);
  if (!min_p.empty()) s.min_p = parse_real("--min-p", min_p, 0, 1);
  if (!repetition_penalty.empty()) {
    s.repetition_penalty = parse_real("--repetition-penalty", repetition_penalty, 0.01, 100);
  }
  if (!seed.empty()) s.seed = static_cast<std::uint64_t>(parse_count("--seed", seed, 0, std::int64_t{1} << 62));
  if (!logprobs.empty()) s.logprobs = static_cast<int>(parse_count("--logprobs", logprobs, 0, 100));
  for (const std::string& one : stop) {
    base::require(!one.empty(), "--stop is empty; accepted: a text");
    require_utf8("--stop", one);
  }
  out.stop = stop;
  out.ignore_eos = ignore_eos;
  out.recover = recover;
  return out;
}

}  // namespace treeattn::tools
