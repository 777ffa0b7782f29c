// SPDX-License-Identifier: Apache-2.0
// The grammar of the command line. What parses it (CLI11) is seen by command_line.cc alone: it takes a compiler four
// seconds in every file.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace CLI {
class Option;
}

namespace treeattn::tools {

// One option or flag. All functions return the same option, so that they can be chained.
class Option {
 public:
  explicit Option(CLI::Option* option) : option_(option) {}

  Option* type_name(const std::string& name);    // what stands for its value in --help
  Option* group(const std::string& heading);     // where --help lists it; empty: nowhere
  Option* description(const std::string& what);  // instead of the one it was made with
  Option* excludes(const Option* other);         // not both
  Option* one_at_a_time();                       // of many values each has the option's name before it
  // What processes of a launcher may be told each in its own way; all else they must be told alike.
  Option* own_to_rank();        // the option
  Option* own_value_to_rank();  // its value, but all of them have one or none has

 private:
  friend class CommandLine;
  enum class Ranks { kSame, kOwnValue, kOwn };
  CLI::Option* option_;
  Ranks ranks_ = Ranks::kSame;
};

// A command with its options and its subcommands, which it owns. Values must live until it has been parsed.
class CommandLine {
 public:
  CommandLine(const std::string& what, const std::string& name, const std::string& version);
  ~CommandLine();
  CommandLine(const CommandLine&) = delete;
  CommandLine& operator=(const CommandLine&) = delete;

  CommandLine* add_subcommand(const std::string& name, const std::string& what);
  void require_subcommand();

  Option* add_option(const std::string& name, std::string& value, const std::string& what);
  Option* add_option(const std::string& name, std::vector<std::string>& values, const std::string& what);
  Option* add_flag(const std::string& name, bool& value, const std::string& what);
  Option* get_option(const std::string& name);
  void footer(const std::string& text);

  // What to print instead of running a command, if --help or --version was asked for. Bad usage: InvalidArgument.
  std::optional<std::string> parse(int argc, char** argv);
  // Whether this subcommand was named.
  bool parsed() const;
  // "treeattn bench decode".
  std::string full_name() const;
  // Every option by its name, and what was given for it, where processes of a launcher must be told the same.
  std::vector<std::pair<std::string, std::vector<std::string>>> told_to_all_ranks() const;

 private:
  struct Grammar;
  explicit CommandLine(std::unique_ptr<Grammar> grammar);
  Option* keep(CLI::Option* option);

  std::unique_ptr<Grammar> grammar_;
};

}  // namespace treeattn::tools
