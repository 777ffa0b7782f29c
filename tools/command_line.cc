// SPDX-License-Identifier: Apache-2.0
#include "command_line.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <deque>
#include <sstream>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "treeattn/error.h"

namespace treeattn::tools {
namespace {

// Lines of at most so many columns, broken between words.
std::string wrapped(std::string text, std::size_t columns) {
  for (std::size_t begin = 0; text.size() - begin > columns;) {
    std::size_t space = text.rfind(' ', begin + columns);
    if (space == std::string::npos || space <= begin) space = text.find(' ', begin + columns);
    if (space == std::string::npos) break;
    text[space] = '\n';
    begin = space + 1;
  }
  return text;
}

// What an option does goes on below itself where the line ends.
class HelpFormatter final : public CLI::Formatter {
 public:
  std::string make_option_desc(const CLI::Option* option) const override {
    return wrapped(option->get_description(), width() - get_column_width());
  }
  // Descriptions say what an option cannot go with.
  std::string make_option_opts(const CLI::Option* option) const override {
    const std::string text = CLI::Formatter::make_option_opts(option);
    return text.substr(0, text.find(" Excludes:"));
  }

 private:
  // Of the terminal, if it is one.
  static std::size_t width() {
    winsize size{};
    const bool known = ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
    return known ? std::clamp<std::size_t>(size.ws_col, 60, 120) : 100;
  }
};

// "info, verify, bench": the subcommands of an app.
std::string names_of(const CLI::App& app) {
  std::string out;
  for (const CLI::App* sub : app.get_subcommands({})) out += (out.empty() ? "" : ", ") + sub->get_name();
  return out;
}

// "-h,--help, --version": the options of an app.
std::string options_of(const CLI::App& app) {
  std::string out;
  for (const CLI::Option* option : app.get_options()) {
    if (!option->get_group().empty()) out += (out.empty() ? "" : ", ") + option->get_name();
  }
  return out;
}

// CLI11 says that a subcommand is missing; this says which word was taken for one and what would be. Nothing where a
// command was named, or an option that needs none, such as --help.
std::optional<std::string> missing_subcommand(const CLI::App& app, int argc, char** argv) {
  const CLI::App* deepest = &app;
  int next = 1;
  for (; next < argc; ++next) {
    const auto named = deepest->get_subcommands([&](const CLI::App* sub) { return sub->get_name() == argv[next]; });
    if (named.empty()) break;
    deepest = named.front();
  }
  const std::string names = names_of(*deepest);
  if (names.empty()) return std::nullopt;
  if (next == argc) return fmt::format("the subcommand of {} is missing; accepted: {}", deepest->get_name(), names);
  const std::string_view word = argv[next];
  if (deepest->get_option_no_throw(std::string(word)) != nullptr) return std::nullopt;
  if (word.starts_with('-')) {
    return fmt::format("{} does not know \"{}\"; accepted: {}, or a subcommand: {}", deepest->get_name(), word,
                       options_of(*deepest), names);
  }
  return fmt::format("the subcommand of {} is \"{}\"; accepted: {}", deepest->get_name(), word, names);
}

// The subcommand that was named, or the app itself.
const CLI::App& named_command(const CLI::App& app) {
  const std::vector<const CLI::App*> named = app.get_subcommands([](const CLI::App* sub) { return sub->parsed(); });
  return named.empty() ? app : named_command(*named.front());
}

// "treeattn bench decode".
std::string full_name(const CLI::App& app) {
  return (app.get_parent() == nullptr ? "" : full_name(*app.get_parent()) + " ") + app.get_name();
}

// CLI11 lists what is left over from the last word to the first, and does not say what would be taken.
std::string unknown_argument(const CLI::App& command) {
  std::vector<std::string> left = command.remaining();
  std::erase(left, "--");  // is known, but for CLI11 left over, too
  if (left.empty() && command.get_parent() != nullptr) return unknown_argument(*command.get_parent());
  return fmt::format("{} does not know \"{}\"; accepted: {}", full_name(command), left.empty() ? "" : left.front(),
                     options_of(command));
}

bool is_flag(const CLI::Option& option) { return option.get_items_expected_max() == 0; }

// Too many values, or none. What CLI11 says begins with the option's name, and that of a flag has lost its dashes.
std::string wrong_count(const CLI::App& command, const std::string& what, int argc, char** argv) {
  const std::string name = what.substr(0, what.find_first_of(": "));
  const CLI::Option* option = command.get_option_no_throw(name);
  if (option == nullptr) option = command.get_option_no_throw("--" + name);
  if (option == nullptr) return what;
  if (is_flag(*option)) {
    const std::string begin = option->get_name() + "=";
    char** const word =
        std::find_if(argv + 1, argv + argc, [&](std::string_view one) { return one.starts_with(begin); });
    return fmt::format("{} is a flag and is given as \"{}\"; accepted: no value", option->get_name(),
                       word == argv + argc ? "" : *word);
  }
  return option->count() > 1
             ? fmt::format("{} is given {} times; accepted: once", option->get_name(), option->count())
             : fmt::format("{} has no value; accepted: {}", option->get_name(), option->get_type_name());
}

std::string complaint(const CLI::App& app, const CLI::ParseError& error, int argc, char** argv) {
  switch (static_cast<CLI::ExitCodes>(error.get_exit_code())) {
    case CLI::ExitCodes::RequiredError:
      return missing_subcommand(app, argc, argv).value_or(error.what());
    case CLI::ExitCodes::ExtrasError:
      return unknown_argument(named_command(app));
    case CLI::ExitCodes::ArgumentMismatch:
      return wrong_count(named_command(app), error.what(), argc, argv);
    case CLI::ExitCodes::ExcludesError:
      return fmt::format("{}; accepted: one of them", error.what());
    default:
      return error.what();
  }
}

// CLI11 takes --json=0 for no --json, and any other number for one.
void refuse_values_of_flags(CLI::App& app) {
  for (CLI::Option* option : app.get_options()) {
    if (is_flag(*option)) option->disable_flag_override();
  }
  for (CLI::App* sub : app.get_subcommands({})) refuse_values_of_flags(*sub);
}

// A shell variable that is not set must not pass for an option that was not given.
void refuse_empty_values(const CLI::App& app) {
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& value : option->results()) {
      base::require(!value.empty(), "{} is empty; accepted: a value, or none of it", option->get_name());
    }
  }
  for (const CLI::App* sub : app.get_subcommands()) refuse_empty_values(*sub);
}

}  // namespace

Option* Option::type_name(const std::string& name) {
  option_->type_name(name);
  return this;
}

Option* Option::group(const std::string& heading) {
  option_->group(heading);
  return this;
}

Option* Option::description(const std::string& what) {
  option_->description(what);
  return this;
}

Option* Option::excludes(const Option* other) {
  option_->excludes(other->option_);
  return this;
}

Option* Option::one_at_a_time() {
  option_->allow_extra_args(false);
  return this;
}

Option* Option::own_to_rank() {
  ranks_ = Ranks::kOwn;
  return this;
}

Option* Option::own_value_to_rank() {
  ranks_ = Ranks::kOwnValue;
  return this;
}

struct CommandLine::Grammar {
  std::unique_ptr<CLI::App> owned;  // of the first command; CLI11 owns the others
  CLI::App* app = nullptr;
  std::deque<Option> options;  // their addresses are given away
  std::vector<std::unique_ptr<CommandLine>> subcommands;
};

CommandLine::CommandLine(const std::string& what, const std::string& name, const std::string& version)
    : grammar_(std::make_unique<Grammar>()) {
  grammar_->owned = std::make_unique<CLI::App>(what, name);
  grammar_->app = grammar_->owned.get();
  grammar_->app->set_version_flag("--version", version);
  grammar_->app->formatter(std::make_shared<HelpFormatter>());  // that of all subcommands, too
}

CommandLine::CommandLine(std::unique_ptr<Grammar> grammar) : grammar_(std::move(grammar)) {}

CommandLine::~CommandLine() = default;

CommandLine* CommandLine::add_subcommand(const std::string& name, const std::string& what) {
  auto grammar = std::make_unique<Grammar>();
  grammar->app = grammar_->app->add_subcommand(name, what);
  grammar_->subcommands.push_back(std::unique_ptr<CommandLine>(new CommandLine(std::move(grammar))));
  return grammar_->subcommands.back().get();
}

void CommandLine::require_subcommand() { grammar_->app->require_subcommand(1); }

Option* CommandLine::keep(CLI::Option* option) { return &grammar_->options.emplace_back(option); }

Option* CommandLine::add_option(const std::string& name, std::string& value, const std::string& what) {
  return keep(grammar_->app->add_option(name, value, what));
}

Option* CommandLine::add_option(const std::string& name, std::vector<std::string>& values, const std::string& what) {
  return keep(grammar_->app->add_option(name, values, what));
}

Option* CommandLine::add_flag(const std::string& name, bool& value, const std::string& what) {
  return keep(grammar_->app->add_flag(name, value, what));
}

Option* CommandLine::get_option(const std::string& name) {
  const CLI::Option* wanted = grammar_->app->get_option(name);
  for (Option& option : grammar_->options) {
    if (option.option_ == wanted) return &option;
  }
  return nullptr;  // CLI11 has thrown already
}

void CommandLine::footer(const std::string& text) { grammar_->app->footer(text); }

std::optional<std::string> CommandLine::parse(int argc, char** argv) {
  const CLI::App& app = *grammar_->app;
  refuse_values_of_flags(*grammar_->app);
  try {
    grammar_->app->parse(argc, argv);
    refuse_empty_values(app);
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    // Help and version arrive as exceptions, too, also behind a word that is no command.
    const bool help = error.get_exit_code() == 0;
    if (help && !missing_subcommand(app, argc, argv)) {
      std::ostringstream text;
      app.exit(error, text, text);
      return text.str();
    }
    throw InvalidArgument(fmt::format("{}\nRun treeattn --help, or --help after a subcommand, for all there is.",
                                      help ? *missing_subcommand(app, argc, argv) : complaint(app, error, argc, argv)));
  }
}

bool CommandLine::parsed() const { return grammar_->app->parsed(); }

std::string CommandLine::full_name() const { return tools::full_name(*grammar_->app); }

std::vector<std::pair<std::string, std::vector<std::string>>> CommandLine::told_to_all_ranks() const {
  std::vector<std::pair<std::string, std::vector<std::string>>> out;
  for (const Option& option : grammar_->options) {
    if (option.ranks_ == Option::Ranks::kOwn) continue;
    std::vector<std::string> given = option.option_->results();
    if (option.ranks_ == Option::Ranks::kOwnValue) given.assign(given.empty() ? 0 : 1, "");
    out.emplace_back(option.option_->get_name(), std::move(given));
  }
  return out;
}

}  // namespace treeattn::tools
