// SPDX-License-Identifier: Apache-2.0
#include "comm/tcp_card.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "base/checksum.h"

namespace treeattn::comm {

namespace {

std::string printable(std::string_view text) {
  std::string out(text);
  std::replace_if(
      out.begin(), out.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return out;
}

}  // namespace

bool is_of_other_version(const TcpGreeting& greeting) {
  return greeting.magic == TcpGreeting::kMagic && greeting.version != TcpGreeting::kVersion;
}

bool is_sound(const TcpCard& card) {
  const auto ends = [](const TcpText& text) { return std::find(text.begin(), text.end(), '\0') != text.end(); };
  return card.greeting.magic == TcpGreeting::kMagic && card.greeting.version == TcpGreeting::kVersion &&
         card.port >= 1 && card.port <= 65535 && ends(card.job) && ends(card.address) && ends(card.machine);
}

void put_text(TcpText& field, std::string_view text) {
  field.fill('\0');
  text.copy(field.data(), field.size() - 1);
}

void put_job(TcpText& field, std::string_view job) {
  std::string shown = printable(job);
  if (shown != job || job.size() >= field.size()) {
    const std::uint32_t checksum = base::crc32c(std::as_bytes(std::span(job)));
    const std::string tail = fmt::format("~{:08x}", checksum);
    shown.resize(std::min(shown.size(), field.size() - 1 - tail.size()));
    shown += tail;
  }
  put_text(field, shown);
}

std::string name_job(const TcpText& job) {
  const std::string_view text(job.data(),
                              static_cast<std::size_t>(std::find(job.begin(), job.end(), '\0') - job.begin()));
  return text.empty() ? "no job" : fmt::format("job \"{}\"", printable(text));
}

}  // namespace treeattn::comm
