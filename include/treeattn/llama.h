// SPDX-License-Identifier: Apache-2.0
// A Llama whose KV cache is spread over ranks: load a model, make a session on a communicator, generate.
//
//   auto model = treeattn::LlamaModel::load("Llama-3.2-1B");                  // once per process
//   treeattn::ThreadPool pool(treeattn::ThreadPool::available_cores());
//   treeattn::LlamaSession session(model, treeattn::self_communicator(), pool);
//   session.generate("Once upon a time", {}, {.text = [](std::string_view text) { std::cout << text; }});
//
// On several ranks every rank makes the same calls with the same arguments. The text, and every bit of its logits, is
// the same on any number of ranks (docs/llama.md).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "treeattn/communicator.h"
#include "treeattn/dtype.h"
#include "treeattn/order.h"
#include "treeattn/parallel_attention.h"
#include "treeattn/thread_pool.h"

namespace treeattn {

// ---- how a token is chosen

// Applied in this order: penalty, temperature, top_k, top_p, min_p.
struct SamplerOptions {
  double temperature = 0;         // 0: the largest logit, of equal ones the first
  std::int64_t top_k = 0;         // keep the k most likely; 0: all
  double top_p = 1;               // keep the most likely that together have this much; 1: all
  double min_p = 0;               // keep those with at least this much of the most likely one's probability
  double repetition_penalty = 1;  // logits of tokens said before are divided by it, negative ones multiplied
  std::uint64_t seed = 0;
  int logprobs = 0;  // report so many most likely tokens

  bool operator==(const SamplerOptions&) const = default;
};

struct TokenLogprob {
  std::int32_t token = 0;
  double logprob = 0;  // natural; of the model's own distribution, before penalty and temperature
};

struct TokenChoice {
  std::int32_t token = 0;
  double logprob = 0;             // 0 unless logprobs were asked for
  std::vector<TokenLogprob> top;  // [logprobs] most likely first
};

// ---- how a text is made

struct GenerateOptions {
  std::int64_t max_tokens = 256;
  SamplerOptions sampler{};
  // UTF-8. The text of this call ends before the first of them; needs a tokenizer. Special tokens are not in the text:
  // the name of one stands for it.
  std::vector<std::string> stop{};
  std::vector<std::int32_t> stop_tokens{};  // beside the model's own; of its vocabulary
  bool ignore_eos = false;                  // the model's own do not end the text
  bool recover = false;                     // go on without ranks that are lost
  // The caller's, read while the call lasts. true on any rank: all stop after the next token or piece of the prompt.
  const std::atomic<bool>* interrupt = nullptr;
};

enum class StopReason : std::uint8_t { kMaxTokens, kStopToken, kStopString, kContext, kInterrupted };
// "max_tokens", "stop_token", "stop_string", "context", "interrupted". Throws InvalidArgument for any other value.
std::string_view stop_reason_name(StopReason reason);

struct GenerateStats {
  std::int64_t prompt_tokens = 0;     // of this call; 0: the text went on
  double first_token_seconds = 0;     // the prompt and the first choice
  std::vector<double> token_seconds;  // of each one after it
  std::uint64_t bytes_sent = 0;       // by this rank
  std::vector<int> lost;              // ranks lost on the way, as the first group of the session numbered them
  double recovery_seconds = 0;
};

struct GenerateResult {
  std::vector<std::int32_t> tokens;  // the one that ended it included
  StopReason reason = StopReason::kMaxTokens;
  GenerateStats stats;
};

// Tokens done of all there are.
using TokenProgress = std::function<void(std::int64_t done, std::int64_t total)>;

// What is called as a text grows. Any may be empty. A rank whose listener throws must leave, and is lost to the others,
// unless those of all ranks throw at the same place: then the session can go on. A listener that calls generate() of
// the same session gets an Error, and so does save() by prefill and recovery.
struct TextListener {
  // Whole UTF-8 characters. One that max_tokens or an interrupt cuts waits for a call that goes on with the text.
  std::function<void(std::string_view)> text{};
  std::function<void(const TokenChoice&)> token{};
  std::function<void(std::span<const float>)> logits{};  // [vocab] that the token was chosen from
  TokenProgress prefill{};
  TokenProgress recovery{};
};

// ---- the model and its sessions

enum class WeightFormat : std::uint8_t {
  kAsStored,  // where the checkpoint has them: mapped files stay mapped
  kBFloat16,  // the same, but matrices of other types are rounded once: what GPUs and matrix instructions are fast with
  kInt8,      // every matrix but the embedding, quantised once
};

struct LlamaLoadOptions {
  WeightFormat weights = WeightFormat::kAsStored;
  int threads = 0;  // to load with; 0: one per core
  int gpu = -1;     // where the weights go, and sessions run; -1: CPU
  std::function<void(std::size_t done, std::size_t total)> progress{};  // in parameters
};

// The weights, shared by all sessions of a process, and the tokenizer.
class LlamaModel {
 public:
  // A directory as Hugging Face has them: config.json, model.safetensors or its shards, generation_config.json if there
  // is one, and, unless only tokens are used, tokenizer.json with tokenizer_config.json if there is one. Throws
  // BadFile; InvalidArgument for options that it does not take; Unavailable where there is no such GPU or no memory, or
  // for a tokenizer in a build without PCRE2.
  static std::shared_ptr<const LlamaModel> load(const std::filesystem::path& directory,
                                                const LlamaLoadOptions& options = {});
  // Random weights in the shape of "llama-3.2-1b" and others; no tokenizer. For benchmarks. Throws InvalidArgument;
  // Unavailable where there is no such GPU or no memory.
  static std::shared_ptr<const LlamaModel> random(std::string_view shape, std::uint64_t seed,
                                                  const LlamaLoadOptions& options = {});
  ~LlamaModel();

  std::int64_t vocab() const;
  std::int64_t context() const;
  bool has_tokenizer() const;
  // What generation_config.json says: the sampler and the most tokens. Without the file, or for random weights,
  // GenerateOptions{}.
  GenerateOptions generate_options() const;
  // With the token that begins a text in front, as the model was trained. Throws InvalidArgument for text that is not
  // UTF-8; Unavailable without a tokenizer.
  std::vector<std::int32_t> encode(std::string_view text) const;
  // The bytes of the tokens; special ones, and those of the model that the tokenizer does not have, are left out.
  // Throws InvalidArgument for one that is not in [0, vocab()); Unavailable without a tokenizer.
  std::string decode(std::span<const std::int32_t> tokens) const;

  // For sessions.
  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  explicit LlamaModel(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

struct LlamaOptions {
  DType kv_type = DType::kBFloat16;
  ReductionOrder order{};
  ParallelOptions attention{};
  int chunks_per_piece = 4;  // of one rank; a prompt goes through the layers piece by piece. Changes no bits
  bool gather_kv = false;    // prefill: collect K and V of a layer first instead of passing them round
};

// A text that grows, on one rank of a group that makes the same calls. Not thread-safe: a second generate() at the
// same time gets an Error, other calls are not looked after. Different sessions may share a model and a pool, from
// different threads too. One that was moved from may be destroyed, nothing else.
class LlamaSession {
 public:
  // Holds the model and the communicator; the pool is the caller's and must outlive it. Throws InvalidArgument,
  // Unavailable.
  LlamaSession(std::shared_ptr<const LlamaModel> model, std::shared_ptr<Communicator> communicator, ThreadPool& pool,
               const LlamaOptions& options = {});
  // Collective. What save() wrote, on any number of ranks; the type and the order of the cache are the file's. Throws
  // on every rank: BadFile, also for the text of a model of another shape; Unavailable where one of them has too little
  // memory.
  static LlamaSession load(const std::filesystem::path& directory, std::shared_ptr<const LlamaModel> model,
                           std::shared_ptr<Communicator> communicator, ThreadPool& pool,
                           const LlamaOptions& options = {});
  ~LlamaSession();
  LlamaSession(LlamaSession&&) noexcept;

  // Collective. Adds the prompt and what the model says to it. An empty prompt goes on where the text was left; the
  // first one may not be empty. Throws InvalidArgument before any work, on every rank, where the call is refused on one
  // or the ranks were given different prompts or options (logprobs and interrupt may differ): the text stays as it was,
  // and the ranks can go on. Throws Unavailable for text without a tokenizer (InvalidArgument on ranks that have one),
  // LostRanks when a rank is lost and not recovered from; the prompt then stays in the text, and a later call may
  // recover.
  GenerateResult generate(std::string_view prompt, const GenerateOptions& options = {},
                          const TextListener& listener = {});
  GenerateResult generate(std::span<const std::int32_t> prompt, const GenerateOptions& options = {},
                          const TextListener& listener = {});
  // All tokens so far, prompts and answers.
  const std::vector<std::int32_t>& tokens() const;
  // Collective. All ranks must see the directory. Throws BadFile.
  void save(const std::filesystem::path& directory) const;

 private:
  struct Impl;
  explicit LlamaSession(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace treeattn
