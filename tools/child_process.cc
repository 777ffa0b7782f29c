// SPDX-License-Identifier: Apache-2.0
#include "child_process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <system_error>
#include <utility>

#include "treeattn/error.h"

extern char** environ;

namespace treeattn::tools {
namespace {

[[noreturn]] void fail(const char* what, int code) {
  const std::string text = fmt::format("cannot {}: {}", what, std::generic_category().message(code));
  if (code == EMFILE || code == ENFILE || code == ENOMEM || code == EAGAIN) throw Unavailable(text);
  throw Error(text);
}

// Both ends, closed at the end; neither reaches a child unless it is put there.
struct Pipe {
  Pipe() {
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) fail("make a pipe", errno);
  }
  ~Pipe() {
    close(0);
    close(1);
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  int read_end() const { return ends[0]; }
  int write_end() const { return ends[1]; }
  void close(std::size_t end) {
    if (ends[end] >= 0) ::close(std::exchange(ends[end], -1));
  }
  std::array<int, 2> ends{-1, -1};
};

pid_t start(const std::filesystem::path& program, int in, int out) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in, STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, out, STDOUT_FILENO);
  std::string name = program.string();
  std::array<char*, 2> arguments{name.data(), nullptr};
  pid_t child = 0;
  const int code = ::posix_spawn(&child, name.c_str(), &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (code != 0) fail(fmt::format("start {}", name).c_str(), code);
  return child;
}

void write_all(int to, const std::string& text) {
  for (std::size_t at = 0; at < text.size();) {
    const ssize_t written = ::write(to, text.data() + at, text.size() - at);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return;  // the child has gone; its exit status says why
    at += static_cast<std::size_t>(written);
  }
}

void read_lines(int from, const std::function<void(const std::string&)>& on_line) {
  std::string rest;
  std::array<char, 4096> buffer;
  while (true) {
    const ssize_t got = ::read(from, buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    rest.append(buffer.data(), static_cast<std::size_t>(got));
    for (std::size_t end = rest.find('\n'); end != std::string::npos; end = rest.find('\n')) {
      on_line(rest.substr(0, end));
      rest.erase(0, end + 1);
    }
  }
}

}  // namespace

std::filesystem::path program_folder() { return std::filesystem::read_symlink("/proc/self/exe").parent_path(); }

int run_child(const std::filesystem::path& program, const std::string& input,
              const std::function<void(const std::string&)>& on_line) {
  Pipe in, out;
  std::signal(SIGCHLD, SIG_DFL);  // where whoever started this ignores it, no child leaves a status
  const pid_t child = start(program, in.read_end(), out.write_end());
  in.close(0);
  out.close(1);
  // Writing to a child that has gone must not end this program; writing to a reader who has gone must.
  const auto before = std::signal(SIGPIPE, SIG_IGN);
  write_all(in.write_end(), input);
  std::signal(SIGPIPE, before);
  in.close(1);
  read_lines(out.read_end(), on_line);
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFSIGNALED(status)) {
    throw Error(fmt::format("{} was ended by signal {}", program.filename().string(), WTERMSIG(status)));
  }
  constexpr int kNotLoaded = 127;  // the system has said why: a library is missing, or there is no memory for it
  if (WEXITSTATUS(status) == kNotLoaded) throw Unavailable(fmt::format("cannot load {}", program.string()));
  return WEXITSTATUS(status);
}

}  // namespace treeattn::tools
