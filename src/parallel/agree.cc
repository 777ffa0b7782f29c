// SPDX-License-Identifier: Apache-2.0
#include "parallel/agree.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <exception>
#include <map>
#include <new>
#include <span>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "base/sent.h"
#include "comm/roll_call.h"
#include "treeattn/error.h"

namespace treeattn::parallel {

void share(Communicator& communicator, std::vector<std::byte>& bytes, int root) {
  constexpr std::uint64_t kAtOnce = std::uint64_t{16} << 20;
  std::uint64_t size = bytes.size();
  communicator.broadcast(std::as_writable_bytes(std::span(&size, 1)), root);
  if (communicator.rank() != root) bytes.clear();
  for (std::uint64_t done = 0; done < size;) {
    const auto count = static_cast<std::size_t>(std::min(size - done, kAtOnce));
    if (communicator.rank() != root) bytes.resize(bytes.size() + count);
    communicator.broadcast(std::span(bytes).subspan(static_cast<std::size_t>(done), count), root);
    done += count;
  }
}

std::string text_of(int rank, std::span<const char> field) {
  const auto end = std::find(field.begin(), field.end(), '\0');
  base::require_sent(end != field.end(), rank, "a text of {} bytes without an end; accepted: a zero behind it",
                     field.size());
  return {field.begin(), end};
}

std::optional<int> first_failed(Communicator& communicator, bool failed) {
  const std::vector<std::uint8_t> all = gathered<std::uint8_t>(communicator, failed ? 1 : 0);
  for (std::size_t r = 0; r < all.size(); ++r) {
    base::require_sent(all[r] <= 1, static_cast<int>(r), "{} for whether it has failed; accepted: 0 or 1", all[r]);
  }
  const auto first = std::find(all.begin(), all.end(), 1);
  return first == all.end() ? std::nullopt : std::optional(static_cast<int>(first - all.begin()));
}

namespace {

// Collective. The rank's own failure, or, where it has none, that of rank `first`.
std::string own_or_first(Communicator& communicator, const std::string& own, int first) {
  std::array<char, 1024> text{};  // zero at the end
  if (communicator.rank() == first) std::memcpy(text.data(), own.data(), std::min(own.size(), text.size() - 1));
  communicator.broadcast(std::as_writable_bytes(std::span(text)), first);
  return own.empty() ? fmt::format("rank {}: {}", first, text_of(first, text)) : own;
}

enum class Kind : std::uint8_t { kBadFile, kInvalidArgument, kUnavailable };

Kind kind_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const InvalidArgument&) {
    return Kind::kInvalidArgument;
  } catch (const Unavailable&) {
    return Kind::kUnavailable;
  } catch (const std::bad_alloc&) {
    return Kind::kUnavailable;
  } catch (...) {
    return Kind::kBadFile;
  }
}

}  // namespace

std::string failure_of_any(Communicator& communicator, const std::string& failure) {
  const std::optional<int> first = first_failed(communicator, !failure.empty());
  return first ? own_or_first(communicator, failure, *first) : std::string();
}

void throw_if_any_failed(Communicator& communicator, const std::exception_ptr& failure) {
  const std::string own = !failure ? std::string() : failure_of([&] { std::rethrow_exception(failure); });
  Kind kind = failure ? kind_of(failure) : Kind::kBadFile;
  const std::optional<int> first = first_failed(communicator, !own.empty());
  if (!first) return;
  communicator.broadcast(std::as_writable_bytes(std::span(&kind, 1)), *first);
  base::require_sent(kind <= Kind::kUnavailable, *first, "{} for what its failure is; accepted: 0 to 2",
                     static_cast<int>(kind));
  const std::string text = own_or_first(communicator, own, *first);
  if (kind == Kind::kInvalidArgument) throw InvalidArgument(text);
  if (kind == Kind::kUnavailable) throw Unavailable(text);
  throw BadFile(text);
}

void require_same(Communicator& communicator, std::span<const Given> given) {
  std::vector<std::uint32_t> mine;
  for (const Given& one : given) mine.push_back(one.digest);
  std::vector<std::uint32_t> all(mine.size() * static_cast<std::size_t>(communicator.size()));
  communicator.allgather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
  std::map<std::vector<int>, std::vector<std::string_view>> others;  // ranks, and what they have other than rank 0
  for (std::size_t i = 0; i < given.size(); ++i) {
    std::vector<int> ranks;
    for (int r = 1; r < communicator.size(); ++r) {
      if (all[static_cast<std::size_t>(r) * given.size() + i] != all[i]) ranks.push_back(r);
    }
    if (!ranks.empty()) others[ranks].push_back(given[i].what);
  }
  if (others.empty()) return;
  std::string text;
  for (const auto& [ranks, what] : others) {
    text += fmt::format("{}{} {} other {} than rank 0", text.empty() ? "" : ", ", comm::name_ranks(ranks),
                        ranks.size() == 1 ? "has" : "have", fmt::join(what, ", "));
  }
  base::throw_invalid("{}; accepted: the same on every rank", text);
}

}  // namespace treeattn::parallel
