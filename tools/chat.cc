// SPDX-License-Identifier: Apache-2.0
// treeattn chat: a conversation with a Llama 3 model. The cache keeps what was said; a turn adds only its own tokens.
#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/file.h"
#include "base/sent.h"
#include "command.h"
#include "model/session.h"
#include "model/tokenizer_config.h"
#include "model_options.h"
#include "model_run.h"
#include "notes.h"
#include "parallel/agree.h"
#include "rate_progress.h"
#include "treeattn/error.h"

namespace treeattn::tools {
namespace {

struct ChatCommand {
  ModelOptions model;
  SamplingOptions sampling;
  std::string system, date;
};

// Instead of the length of a line.
constexpr std::int64_t kEnd = -1, kUnreadable = -2, kNothingYet = -3, kTooLong = -4;
// No context is so long, and a device may have no end.
constexpr std::size_t kMostBytes = std::size_t{16} << 20;
// Bytes that are read at once: a line may be so much longer when its end is found.
constexpr std::size_t kPart = 4096;

// Standard input, line by line.
class Input {
 public:
  // The next line's length, or what there is instead: kNothingYet when it took longer than that. asks: at a prompt.
  std::int64_t next(std::string& line, Seconds within, bool asks) {
    constexpr double kMostMilliseconds = 1e9;
    for (bool ended = false; !ended;) {
      if (const std::size_t end = unread_.find('\n'); end != std::string::npos) {
        line = unread_.substr(0, end);
        unread_.erase(0, end + 1);
        warned_ = false;
        return static_cast<std::int64_t>(line.size());
      }
      if (unread_.size() > kMostBytes) return kTooLong;
      if (asks && interrupt_flag() && !warned_) {
        print_note("\nCtrl-C once more ends the conversation.\n");
        print_text("> ");
        warned_ = true;
      }
      pollfd input{STDIN_FILENO, POLLIN, 0};
      const int waited = ::poll(&input, 1, static_cast<int>(std::min(within.count() * 1e3, kMostMilliseconds)));
      if (waited == 0) return kNothingYet;
      std::array<char, kPart> part{};
      const ssize_t got = waited < 0 ? waited : ::read(STDIN_FILENO, part.data(), part.size());
      if (got < 0 && errno != EINTR) return kUnreadable;
      ended = got == 0;
      unread_.append(part.data(), static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
    }
    line = std::exchange(unread_, {});
    return line.empty() ? kEnd : static_cast<std::int64_t>(line.size());
  }

 private:
  std::string unread_;
  bool warned_ = false;  // since the last line
};

// The next line of the user, on every rank; nothing at the end. The one that speaks reads it. A person may take long:
// other processes hear of that now and then, and so miss one that is gone. (Threads go with it. No deadline for them:
// their process may be stopped for a while.)
std::optional<std::string> next_line(const std::shared_ptr<Communicator>& world, Input& input) {
  constexpr Seconds kLong{1e6};
  constexpr Seconds kSoon{0.5};  // a Ctrl-C just before it waits interrupts nothing
  const bool threads = world->transport() == "threads" || world->transport() == "self";
  const bool reads = world->rank() == 0;
  const bool asks = reads && ::isatty(STDIN_FILENO) != 0;
  if (asks) fmt::print("> ");
  if (reads) std::fflush(stdout);
  std::string line;
  std::int64_t length = kNothingYet;
  while (length == kNothingYet) {
    if (reads) length = input.next(line, std::min(threads ? kLong : world->deadline() / 4, asks ? kSoon : kLong), asks);
    world->broadcast(std::as_writable_bytes(std::span(&length, 1)), 0, threads ? kLong : world->deadline());
  }
  if (length == kUnreadable) throw BadFile("standard input cannot be read");
  if (length == kTooLong) throw BadFile("standard input has a line of more than 16 MiB; accepted: a message a line");
  if (length == kEnd) {
    if (asks) fmt::print("\n");  // whoever reads the terminal next begins a line
    return {};
  }
  base::require_sent(length >= 0 && length <= static_cast<std::int64_t>(kMostBytes + kPart), 0,
                     "a line of {} bytes; accepted: 0 to {}", length, kMostBytes + kPart);
  line.resize(static_cast<std::size_t>(length));
  if (length > 0) world->broadcast(std::as_writable_bytes(std::span(line)), 0);
  return line;
}

// As templates write it, e.g. 26 Jul 2024; the same on every rank, wherever that is.
std::string date_of_today(Communicator& world) {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  ::localtime_r(&now, &local);
  std::array<char, sizeof "26 Jul 2024"> date{};
  std::strftime(date.data(), date.size(), "%d %b %Y", &local);
  world.broadcast(std::as_writable_bytes(std::span(date)), 0);
  return parallel::text_of(0, date);
}

constexpr const char* kEndOfTurn = "<|eot_id|>";

// The tokens that the conversation gains by these messages. Only the first turn begins the text, and has the date where
// the template has one; the turn before is ended if the model did not end it itself. cut: an answer that is not in the
// text yet.
std::vector<std::int32_t> turn_tokens(const model::Tokenizer& tokenizer, std::span<const model::ChatMessage> messages,
                                      const std::string& date, std::span<const std::int32_t> so_far,
                                      const std::string& cut) {
  if (so_far.empty()) return model::chat_tokens(tokenizer, messages, true, date);
  std::vector<std::int32_t> tokens = tokenizer.encode(cut);
  const std::optional<std::int32_t> end = tokenizer.find(kEndOfTurn);
  if (end && so_far.back() != *end) tokens.push_back(*end);
  const std::vector<std::int32_t> turn = model::chat_tokens(tokenizer, messages, true);
  tokens.insert(tokens.end(), turn.begin() + 1, turn.end());
  return tokens;
}

// Takes out of the text what ended an answer: templates end every one by the same token, and nobody has seen a string
// of --stop. As that may begin within a token, such an answer is to be written again as it was shown, and is returned.
std::string take_back_end(model::Session& session, const GenerateResult& answer, const std::string& shown) {
  const auto length = static_cast<std::int64_t>(session.tokens().size());
  if (answer.reason == StopReason::kStopToken) session.shorten(length - 1);
  if (answer.reason != StopReason::kStopString) return {};
  session.shorten(length - static_cast<std::int64_t>(answer.tokens.size()));
  return shown;
}

int converse(const ChatCommand& options, const ModelPlan& plan, const model::ChatForm& form,
             const GenerateOptions& text, const ModelRank& rank) {
  const model::Tokenizer& tokenizer = *rank.model.description.tokenizer;
  model::Session session(rank.make_llama(plan.llama), &tokenizer);
  std::vector<model::ChatMessage> messages;
  if (!options.system.empty()) messages.push_back({"system", options.system});
  // Where the rank that spoke is lost, the first of the others goes on.
  const auto speaks = [&] { return session.llama().communicator()->rank() == 0; };
  if (!form.published && speaks()) {
    print_note(
        "treeattn: the chat_template is none of those published with Llama 3 to 3.3; messages are written as theirs\n");
  }
  std::string cut;  // the last answer, where --stop ended it
  std::string date = options.date.empty() ? form.date : options.date;
  if (form.dated && date.empty()) date = date_of_today(*rank.world);
  catch_interrupt();
  Input input;
  while (const auto line = next_line(session.llama().communicator(), input)) {
    catch_interrupt();  // a Ctrl-C from before the message is none for the answer
    if (line->find_first_not_of(" \t\r\v\f") == std::string::npos) continue;  // also where lines end in CR LF
    RateProgress reading("reading", "tokens"), recovery("recovering", "tokens");
    const auto clear_progress = [&] {
      reading.clear();
      recovery.clear();
    };
    std::string shown;
    TextListener listener;
    listener.prefill = [&](std::int64_t done, std::int64_t total) {
      if (speaks()) reading.update(done, total);
    };
    listener.recovery = [&](std::int64_t done, std::int64_t total) {
      if (speaks()) recovery.update(done, total);
    };
    listener.text = [&](std::string_view piece) {
      shown += piece;
      if (!speaks()) return;
      clear_progress();
      print_text(piece);
    };
    messages.push_back({"user", *line});
    GenerateResult answer;
    try {
      require_utf8("the message", *line);
      answer = session.generate(turn_tokens(tokenizer, messages, date, session.tokens(), cut), text, listener);
    } catch (const InvalidArgument& error) {
      // Refused on every rank before any work: too long, or not UTF-8.
      if (speaks()) print_note("treeattn: {}\n", error.what());
      messages.pop_back();
      continue;
    }
    messages.clear();  // they are in the cache now
    cut = take_back_end(session, answer, shown);
    clear_progress();  // nothing may have been said
    if (speaks()) {
      print_text("\n");
      print_losses(answer.stats);
    }
    catch_interrupt();  // Ctrl-C ends an answer, not the conversation
  }
  return kOk;
}

// Where a model says how it chats, that must be the way we write. One without a word on it is taken at its tokens.
model::ChatForm read_chat_form(const std::filesystem::path& directory) {
  const std::filesystem::path file = directory / "tokenizer_config.json";
  if (!base::is_there(file)) return {};
  return model::llama3_chat_form(model::read_tokenizer_config(file), file.string());
}

int run(const ChatCommand& options) {
  const ModelPlan plan = make_model_plan(options.model);
  require_tokenizer(options.model, plan, " by chat");
  const model::ChatForm form = read_chat_form(plan.model.directory);
  const std::vector<model::ChatMessage> greeting = {{"user", "?"}};
  model::chat_tokens(*plan.model.tokenizer, greeting, true);  // throws if it has no template's tokens
  GenerateOptions text = options.sampling.parse(plan.model.generation, 1024);
  require_utf8("--system", options.system);
  require_utf8("--date", options.date);
  base::require(options.date.empty() || form.dated,
                "--date is \"{}\"; accepted: none for this model, whose chat_template has no date", options.date);
  // Not every model names the token among its own.
  if (!text.ignore_eos) text.stop_tokens.push_back(*plan.model.tokenizer->find(kEndOfTurn));
  text.interrupt = &interrupt_flag();
  const std::int64_t room = std::min<std::int64_t>(plan.model.config.context, 8192);
  return run_model(plan, room, [&](const ModelRank& rank) { return converse(options, plan, form, text, rank); });
}

constexpr char kFooter[] =
    R"(A line of input is a message; the end of the input ends the conversation, and so does Ctrl-C twice where a message is
waited for. While an answer is written Ctrl-C ends the answer. The model needs the tokenizer of Llama 3.

Examples:
  treeattn chat --model Llama-3.2-1B-Instruct
  treeattn chat --model Llama-3.2-1B-Instruct --system "Answer in one sentence." --temperature 0.6 --top-p 0.9
  mpirun -n 4 treeattn chat --model Llama-3.2-1B-Instruct --recover)";

}  // namespace

Command add_chat(CommandLine& parent) {
  CommandLine* app = parent.add_subcommand("chat", "A conversation with a Llama whose KV cache is spread over ranks");
  auto options = std::make_shared<ChatCommand>();
  options->model.must_have_tokenizer = true;
  options->model.add_to(*app);
  options->sampling.add_to(*app, "1024");
  app->add_option("--system", options->system, "What the model is told first")->type_name("TEXT");
  app->add_option("--date", options->date,
                  "From Llama 3.1 on: the date the model is told (default: what its chat_template says)")
      ->type_name("TEXT");
  app->footer(kFooter);
  return {app, [options] { return run(*options); }};
}

}  // namespace treeattn::tools
