// SPDX-License-Identifier: Apache-2.0
// What all ranks must know before any of them goes on or gives up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "treeattn/communicator.h"

namespace treeattn::parallel {

// Collective. One value of every rank, by rank.
template <class T>
std::vector<T> gathered(Communicator& communicator, const T& mine) {
  std::vector<T> all(static_cast<std::size_t>(communicator.size()));
  communicator.allgather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
  return all;
}

// Collective. values[i] becomes combine(lower, higher) over the ranks' values[i], the same on every rank.
template <class T, class Combine>
void combine_over_ranks(Communicator& communicator, std::span<T> values, const Combine& combine) {
  communicator.allreduce(std::as_writable_bytes(values), sizeof(T),
                         [&](std::byte* lower, const std::byte* higher, std::size_t count) {
                           auto* a = reinterpret_cast<T*>(lower);
                           const auto* b = reinterpret_cast<const T*>(higher);
                           for (std::size_t i = 0; i < count; ++i) a[i] = combine(a[i], b[i]);
                         });
}

// The larger; a NaN on either side reaches the result.
template <class T>
T larger(T a, T b) {
  return a > b || a != a ? a : b;
}

// Collective. The largest value of all ranks.
template <class T>
T largest_of_ranks(Communicator& communicator, T value) {
  combine_over_ranks(communicator, std::span(&value, 1), larger<T>);
  return value;
}

// Collective. What rank `root` has, on every rank. How much that is, it says: room is made for what has come.
void share(Communicator& communicator, std::vector<std::byte>& bytes, int root);

// The text in a field that `rank` has filled, up to the zero behind it. Throws Error where there is none.
std::string text_of(int rank, std::span<const char> field);

// What body() throws, as text; empty when it does not. For work of this rank alone: body must not communicate.
template <class Body>
std::string failure_of(const Body& body) {
  try {
    body();
    return {};
  } catch (const std::exception& error) {
    return *error.what() != '\0' ? error.what() : "unknown error";
  }
}

// Collective. The lowest rank that has failed; nothing where none has.
std::optional<int> first_failed(Communicator& communicator, bool failed);
// Collective. Where `failure` is not empty on some rank: the rank's own, or that of the lowest rank that has one, with
// its number.
std::string failure_of_any(Communicator& communicator, const std::string& failure);
// Collective. Where `failure` is not null on some rank: every rank throws, its own or that of the lowest rank that has
// one, as what that one's is: InvalidArgument, Unavailable (also for want of memory), else BadFile.
void throw_if_any_failed(Communicator& communicator, const std::exception_ptr& failure);
// Collective. work() of this rank alone, which must not communicate, and what any rank's threw on every rank.
template <class Work>
void on_all_or_none(Communicator& communicator, const Work& work) {
  std::exception_ptr failure;
  try {
    work();
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  throw_if_any_failed(communicator, failure);
}

// Something that every rank must be given alike.
struct Given {
  const char* what;
  std::uint32_t digest;
};

// Collective. Throws InvalidArgument on every rank unless the digests are the same on all, with what is other where.
void require_same(Communicator& communicator, std::span<const Given> given);
inline void require_same(Communicator& communicator, std::uint32_t digest, const char* what) {
  const Given given{what, digest};
  require_same(communicator, {&given, 1});
}

}  // namespace treeattn::parallel
