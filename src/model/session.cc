// SPDX-License-Identifier: Apache-2.0
#include "model/session.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <type_traits>
#include <utility>

#include "base/check.h"
#include "base/checksum.h"
#include "base/counting.h"
#include "base/sent.h"
#include "base/timing.h"
#include "model/agreement.h"
#include "model/sampler.h"
#include "model/session_file.h"
#include "model/stop_scanner.h"
#include "model/utf8.h"
#include "parallel/agree.h"
#include "treeattn/error.h"

namespace treeattn::model {
namespace {

using base::Clock, base::seconds_since;

bool contains(std::span<const std::int32_t> tokens, std::int32_t token) {
  return std::find(tokens.begin(), tokens.end(), token) != tokens.end();
}

template <class T>
std::uint32_t digest(std::span<const T> values) {
  return base::crc32c(std::as_bytes(values));
}
template <class T>
requires std::is_arithmetic_v<T> std::uint32_t digest(const T& value) { return digest(std::span(&value, 1)); }

}  // namespace

// What a listener, or another thread, changed under way would be taken for what the model said.
class Session::Generating {
 public:
  explicit Generating(std::atomic<bool>& flag) : flag_(flag) {
    if (!flag.exchange(true)) return;
    throw Error(
        "generate called by a listener of the same session, or by another thread; accepted: calls after it returns");
  }
  ~Generating() { flag_ = false; }
  Generating(const Generating&) = delete;
  Generating& operator=(const Generating&) = delete;

 private:
  std::atomic<bool>& flag_;
};

// One generate() under way.
struct Session::Call {
  const GenerateOptions& options;
  const TextListener& listener;
  const std::vector<std::int32_t> last_tokens;  // any of them ends the text
  StopScanner scanner;
  std::optional<TextStream> stream;
  std::size_t begin = 0;  // of the answer in known_
  std::size_t shown = 0;  // tokens of it that the listener has seen
  Clock::time_point last = Clock::now();
  GenerateResult result;

  void show(const std::string& text) const {
    if (!text.empty() && listener.text) listener.text(text);
  }
  bool interrupted() const { return options.interrupt && options.interrupt->load(std::memory_order_relaxed); }
};

Session::Session(std::unique_ptr<Llama> llama, const Tokenizer* tokenizer, std::vector<std::int32_t> pending)
    : llama_(std::move(llama)), tokenizer_(tokenizer), number_(llama_->communicator()->rank()) {
  const std::vector<SequenceId> sequences = llama_->sequences();
  base::require(sequences.size() <= 1, "the cache has {} sequences; accepted: one at most", sequences.size());
  sequence_ = sequences.empty() ? llama_->add_sequence() : sequences.front();
  const std::span<const std::int32_t> tokens = llama_->transcript(sequence_).tokens();
  known_.assign(tokens.begin(), tokens.end());
  prompt_end_ = static_cast<std::int64_t>(known_.size());
  known_.insert(known_.end(), pending.begin(), pending.end());
  // One is the last that was said; more, or one and nothing before it, are what was left of a prompt (save).
  if (pending.size() > 1 || tokens.empty()) prompt_end_ = static_cast<std::int64_t>(known_.size());
  prompt_logits_.resize(static_cast<std::size_t>(llama_->config().vocab));
  logits_ = prompt_logits_;
  members_ = base::counting(llama_->communicator()->size());
}

void Session::check(std::span<const std::int32_t> prompt, const GenerateOptions& options) const {
  check_sampler(options.sampler);
  base::require_address("the prompt", prompt);
  base::require(options.max_tokens >= 1, "max_tokens = {}; accepted: 1 or more", options.max_tokens);
  const std::size_t cached = llama_->transcript(sequence_).tokens().size();
  base::require(!prompt.empty() || known_.size() > cached, "the prompt is empty; accepted: one token or more");
  llama_->check_tokens(prompt, "the prompt");
  llama_->check_tokens(options.stop_tokens, "stop_tokens");
  const std::int64_t context = llama_->config().context;
  const auto all = static_cast<std::int64_t>(known_.size() + prompt.size());
  base::require(all < context, "the prompt makes a text of {} tokens; accepted: fewer than the model's context, {}",
                all, context);
  base::require(options.stop.empty() || tokenizer_, "stop strings need a tokenizer");
  for (const std::string& stop : options.stop) {
    base::require(!stop.empty(), "a stop string is empty; accepted: a text");
    // The text before a part of a character would end within it.
    const std::size_t valid = valid_utf8(stop);
    base::require(valid == stop.size(), "a stop string: byte {} of {} is not UTF-8; accepted: UTF-8", valid,
                  stop.size());
  }
}

// Those that end a text. A special token is not written into it, so one that is named as a string is among them.
std::vector<std::int32_t> Session::last_tokens(const GenerateOptions& options) const {
  std::vector<std::int32_t> last = options.stop_tokens;
  if (!options.ignore_eos) last.insert(last.end(), llama_->config().eos.begin(), llama_->config().eos.end());
  for (const std::string& stop : options.stop) {
    const auto named = tokenizer_ ? tokenizer_->find(stop) : std::nullopt;
    if (named && tokenizer_->is_special(*named)) last.push_back(*named);
  }
  return last;
}

// All that decides what the ranks do, and when they end.
std::vector<parallel::Given> Session::given(std::span<const std::int32_t> prompt, const GenerateOptions& options,
                                            std::span<const std::int32_t> last) const {
  const SamplerOptions& sampler = options.sampler;
  // Where there are stop strings, what they are looked for in decides, too.
  const std::uint32_t texts = options.stop.empty() || !tokenizer_ ? 0 : tokenizer_->digest();
  return {
      {"shape of the model", shape_digest(llama_->config())},
      {"context of the model", digest(llama_->config().context)},
      {"chunks_per_piece", digest(llama_->options().chunks_per_piece)},
      {"gather_kv", digest(llama_->options().gather_kv)},
      {"text so far", digest(std::span<const std::int32_t>(known_))},
      {"tokens in the prompt", digest(prompt)},
      {"max_tokens", digest(options.max_tokens)},
      {"temperature", digest(sampler.temperature)},
      {"top_k", digest(sampler.top_k)},
      {"top_p", digest(sampler.top_p)},
      {"min_p", digest(sampler.min_p)},
      {"repetition_penalty", digest(sampler.repetition_penalty)},
      {"seed", digest(sampler.seed)},
      {"stop strings or tokenizer",
       base::crc32c(std::as_bytes(std::span(&texts, 1)), base::crc32c_of_texts(options.stop))},
      {"tokens that end the text", digest(last)},
      {"recover", digest(options.recover)},
  };
}

GenerateResult Session::generate(std::span<const std::int32_t> prompt, const GenerateOptions& options,
                                 const TextListener& listener, std::string refusal) {
  const Generating scope(*generating_);
  Call call{options, listener, last_tokens(options), StopScanner(options.stop), {}, 0, 0, Clock::now(), {}};
  while (!in_step_) without_loss(call, [] {});  // the call before ended on the way
  if (tokenizer_) {
    // An answer that was left goes on, perhaps inside of a character.
    const bool goes_on = prompt.empty() && static_cast<std::int64_t>(known_.size()) > prompt_end_ &&
                         !contains(call.last_tokens, known_.back());
    call.stream.emplace(*tokenizer_, std::span<const std::int32_t>(known_).first(goes_on ? known_.size() : 0));
  }
  if (refusal.empty()) refusal = parallel::failure_of([&] { check(prompt, options); });
  if (!refusal.empty()) prompt = {};  // may be no memory at all
  const std::vector<parallel::Given> asked = given(prompt, options, call.last_tokens);
  ++calls_;
  // Nothing is computed before all have passed this once, so ranks that were asked for different things can go back to
  // where they were.
  const auto require_same_call = [&, known = known_.size(), prompt_end = prompt_end_] {
    try {
      Communicator& ranks = *llama_->communicator();
      if (const std::string why = parallel::failure_of_any(ranks, refusal); !why.empty()) throw InvalidArgument(why);
      parallel::require_same(ranks, asked);
    } catch (const InvalidArgument&) {
      known_.resize(std::min(known_.size(), known));
      prompt_end_ = prompt_end;
      throw;  // and the call counts: a rank that has not heard of the refusal is one behind (get_in_step)
    }
  };
  // What was said last and is not in the cache goes with the prompt; alone, it is decoded as if there had been no
  // break.
  if (!prompt.empty()) {
    known_.insert(known_.end(), prompt.begin(), prompt.end());
    prompt_end_ = static_cast<std::int64_t>(known_.size());
  }
  call.begin = known_.size();
  GenerateStats& stats = call.result.stats;
  stats.prompt_tokens = static_cast<std::int64_t>(prompt.size());
  const std::uint64_t sent = llama_->communicator()->traffic().bytes;

  for (bool more = true, same_call = false; more;) {
    same_call = without_loss(call, [&] {
      if (!same_call) require_same_call();
      more = next_token(call);
    });
  }
  stats.bytes_sent = llama_->communicator()->traffic().bytes - (stats.lost.empty() ? sent : 0);
  const StopReason reason = call.result.reason;
  if (call.stream && reason != StopReason::kStopString) {
    // Half of a character waits for the call that goes on, where there may be one.
    if (reason == StopReason::kStopToken || reason == StopReason::kContext) {
      call.show(call.scanner.next(call.stream->finish()));
    }
    call.show(call.scanner.finish());
  }
  call.result.tokens.assign(known_.begin() + static_cast<std::ptrdiff_t>(call.begin), known_.end());
  return std::move(call.result);
}

// One step with all ranks at the same place; false: some were lost, and it has to be done again.
template <class Step>
bool Session::without_loss(Call& call, const Step& step) {
  try {
    if (!in_step_) get_in_step(call);
    step();
    return true;
  } catch (const LostRanks&) {
    if (!llama_->communicator()->broken()) throw;  // of the caller's own ranks: a listener may have some
    in_step_ = false;                              // some may not have heard of all others
    if (!call.options.recover) throw;
    recover(call);
    return false;
  }
}

// Brings all that is known into the cache; then logits_ are those of its last token. False where a rank was interrupted
// before the end of the prompt: the rest of it waits for the next call.
bool Session::catch_up(const Call& call) {
  const auto length = [&] { return llama_->transcript(sequence_).length(); };
  const std::span<const std::int32_t> known = known_;
  if (length() < prompt_end_) {
    const auto from = static_cast<std::size_t>(length());
    const auto leave = [&] {
      const auto place = [&] { return static_cast<std::uint64_t>(length()); };
      return require_agreement(*llama_->communicator(), place, "the length of the text", call.interrupted());
    };
    llama_->prefill(sequence_, known.subspan(from, static_cast<std::size_t>(prompt_end_) - from), prompt_logits_,
                    Way::kBlocks, call.listener.prefill, leave);
    if (length() < prompt_end_) return false;
    logits_ = prompt_logits_;
  }
  while (length() < static_cast<std::int64_t>(known.size())) {
    logits_ = llama_->decode({&sequence_, 1}, known.subspan(static_cast<std::size_t>(length()), 1));
  }
  return true;
}

// One step, the same on every rank; false: it was the last one.
bool Session::next_token(Call& call) {
  const GenerateOptions& options = call.options;
  if (!catch_up(call)) {
    call.result.reason = StopReason::kInterrupted;
    return false;
  }
  const TokenChoice choice = choose(logits_, known_, static_cast<std::int64_t>(known_.size()), options.sampler);
  const auto digest = [&] { return digest_of(logits_, static_cast<std::uint64_t>(choice.token)); };
  const bool stop_all =
      require_agreement(*llama_->communicator(), digest, "the logits and the token taken", call.interrupted());
  known_.push_back(choice.token);
  const std::size_t said = known_.size() - call.begin;
  GenerateResult& result = call.result;
  const auto stopped = [&](bool now, StopReason why) {
    if (now) result.reason = why;
    return now;
  };
  // Computed again after a loss: this rank went on from here, but by now all may have been asked to stop.
  if (said <= call.shown) return !stopped(stop_all, StopReason::kInterrupted);
  call.shown = said;

  (said == 1 ? result.stats.first_token_seconds : result.stats.token_seconds.emplace_back()) = seconds_since(call.last);
  call.last = Clock::now();
  if (call.listener.logits) call.listener.logits(logits_);
  if (call.listener.token) call.listener.token(choice);
  const bool ends = contains(call.last_tokens, choice.token);
  if (call.stream && !ends) call.show(call.scanner.next(call.stream->next(choice.token)));

  return !(stopped(ends, StopReason::kStopToken) || stopped(call.scanner.stopped(), StopReason::kStopString) ||
           stopped(static_cast<std::int64_t>(said) >= options.max_tokens, StopReason::kMaxTokens) ||
           stopped(static_cast<std::int64_t>(known_.size()) >= llama_->config().context, StopReason::kContext) ||
           stopped(stop_all, StopReason::kInterrupted));
}

void Session::recover(Call& call) {
  const auto start = Clock::now();
  llama_->recover(call.listener.recovery);
  call.result.stats.recovery_seconds += seconds_since(start);
}

// Collective, after a recovery. A rank may have taken a token that another has not; both take it again. The last block
// goes through the layers once more, as some have lost its logits. Who is missing counts as lost by the number it had
// first: every group has numbers of its own, and a recovery may have lost more than the error before it named.
void Session::get_in_step(Call& call) {
  llama_->finish_recovery(call.listener.recovery);
  struct Place {
    std::int64_t calls, known, number;
  };
  std::int64_t known = static_cast<std::int64_t>(known_.size());
  std::vector<int> left;
  for (const Place& place : parallel::gathered(*llama_->communicator(), Place{calls_, known, number_})) {
    if (place.calls != calls_) throw Error("a rank was lost between two prompts: not all ranks have the last one");
    const auto rank = static_cast<int>(left.size());
    base::require_sent(place.known >= 0, rank, "{} as the tokens it knows; accepted: 0 or more", place.known);
    base::require_sent(
        std::ranges::binary_search(members_, place.number) && (left.empty() || place.number > left.back()), rank,
        "{} as its first number; accepted: those of the ranks that are left, ascending", place.number);
    known = std::min(known, place.known);
    left.push_back(static_cast<int>(place.number));
  }
  std::ranges::set_difference(members_, left, std::back_inserter(call.result.stats.lost));
  members_ = std::move(left);
  known_.resize(static_cast<std::size_t>(known));
  in_step_ = true;
  if (known > 0 && llama_->transcript(sequence_).length() >= known) cut_last_block();
}

// Of what is in the cache, which is not nothing: to be computed again.
void Session::cut_last_block() const {
  const Transcript& transcript = llama_->transcript(sequence_);
  const std::int64_t chunk = llama_->cache().config().order.chunk_tokens;
  const std::int64_t chunk0 = (transcript.length() - 1) / chunk * chunk;
  const Block last = transcript.blocks(chunk0, transcript.length() - chunk0, chunk).back();
  llama_->truncate(sequence_, last.first);
}

void Session::shorten(std::int64_t length) {
  const auto known = static_cast<std::int64_t>(known_.size());
  base::require(length >= prompt_end_ && length <= known, "length = {}; accepted: {} to {}, behind the last prompt",
                length, prompt_end_, known);
  known_.resize(static_cast<std::size_t>(length));
  if (llama_->transcript(sequence_).length() > length) llama_->truncate(sequence_, length);
}

void Session::save(const std::filesystem::path& directory) const {
  const auto cached = [&] { return llama_->transcript(sequence_).length(); };
  // Saving cuts off what is not finished: here the caller is about to go on with it.
  if (*generating_ && (!in_step_ || cached() < prompt_end_)) {
    throw Error(
        "save called by a listener before the prompt is in the cache; accepted: calls by listeners of tokens and text, "
        "or after generate returns");
  }
  // One token that waits would be taken for the last that was said, and decoded: this one is the end of a prompt.
  if (cached() > 0 && cached() + 1 == prompt_end_) cut_last_block();
  llama_->save(directory, std::span(known_).subspan(static_cast<std::size_t>(cached())));
}

Session Session::load(const std::filesystem::path& directory, std::shared_ptr<const Weights> weights,
                      std::shared_ptr<Communicator> communicator, kernels::ModelOps& ops, ThreadPool& pool,
                      const Tokenizer* tokenizer, const LlamaOptions& options) {
  std::vector<std::int32_t> pending;
  auto llama = Llama::load(directory, std::move(weights), std::move(communicator), ops, pool, options, &pending);
  return Session(std::move(llama), tokenizer, std::move(pending));
}

}  // namespace treeattn::model
