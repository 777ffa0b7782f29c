// SPDX-License-Identifier: Apache-2.0
// A text that grows: prompts go in, tokens come out, on every rank alike.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model/llama.h"
#include "model/tokenizer.h"
#include "parallel/agree.h"
#include "treeattn/error.h"
#include "treeattn/llama.h"

namespace treeattn::model {

class Session {
 public:
  // tokenizer: null where there is none; must outlive this.
  Session(std::unique_ptr<Llama> llama, const Tokenizer* tokenizer, std::vector<std::int32_t> pending = {});

  // Collective. Adds the prompt and what the model says to it. An empty prompt goes on where the text was left.
  // Throws InvalidArgument before any work, on every rank, where one rank refuses its call or was asked for something
  // else than rank 0: the text stays as it was. refusal: why the caller of this rank cannot say what it wants.
  GenerateResult generate(std::span<const std::int32_t> prompt, const GenerateOptions& options,
                          const TextListener& listener = {}, std::string refusal = {});

  const std::vector<std::int32_t>& tokens() const { return known_; }
  // Takes back what was said behind the first `length` tokens; prompts stay. On every rank.
  void shorten(std::int64_t length);
  Llama& llama() { return *llama_; }
  // Collective.
  void save(const std::filesystem::path& directory) const;
  static Session load(const std::filesystem::path& directory, std::shared_ptr<const Weights> weights,
                      std::shared_ptr<Communicator> communicator, kernels::ModelOps& ops, ThreadPool& pool,
                      const Tokenizer* tokenizer, const LlamaOptions& options = {});

 private:
  struct Call;
  class Generating;
  void check(std::span<const std::int32_t> prompt, const GenerateOptions& options) const;
  std::vector<std::int32_t> last_tokens(const GenerateOptions& options) const;
  std::vector<parallel::Given> given(std::span<const std::int32_t> prompt, const GenerateOptions& options,
                                     std::span<const std::int32_t> last) const;
  bool catch_up(const Call& call);
  bool next_token(Call& call);
  template <class Step>
  bool without_loss(Call& call, const Step& step);
  void recover(Call& call);
  void get_in_step(Call& call);
  void cut_last_block() const;

  std::unique_ptr<Llama> llama_;
  const Tokenizer* tokenizer_;
  SequenceId sequence_ = 0;
  std::vector<std::int32_t> known_;  // in the cache, and behind that what was said or asked since
  std::int64_t prompt_end_ = 0;      // known_ up to here is computed by prefill, from here on by decode
  std::vector<float> prompt_logits_;
  std::span<const float> logits_;  // of the last of known_, once caught up
  std::int64_t calls_ = 0;
  std::int64_t number_;       // of this rank in the group that the session began with
  std::vector<int> members_;  // the ranks that are left, as that group numbered them
  bool in_step_ = true;       // false from a loss until those that are left have the same text
  // Threads may ask at the same time; behind a pointer because a session moves.
  std::unique_ptr<std::atomic<bool>> generating_ = std::make_unique<std::atomic<bool>>(false);
};

}  // namespace treeattn::model
