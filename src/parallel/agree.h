// SPDX-License-Identifier: Apache-2.0
// What all ranks must know before any of them goes on or gives up.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

#include "treeattn/communicator.h"

namespace treeattn::parallel {

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

// Collective. Throws BadFile on every rank when `failure` is not empty on one: the rank's own, or that of the lowest
// rank that has one, with its number.
void throw_if_any_failed(Communicator& communicator, const std::string& failure);

// Collective. Throws InvalidArgument on every rank unless the digest of what the caller gave is the same on all.
void require_same(Communicator& communicator, std::uint32_t digest, const char* what);

}  // namespace treeattn::parallel
