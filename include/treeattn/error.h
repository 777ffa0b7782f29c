// SPDX-License-Identifier: Apache-2.0
// What treeattn throws. Every message names the offending value and what would be accepted.
#pragma once

#include <stdexcept>
#include <string>

namespace treeattn {

// Base of everything the library throws on purpose.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A shape, size, pointer, type or option the callee cannot work with. Thrown before any work is done.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

// Something asked for is not on this machine: an instruction set, a device, a transport.
class Unavailable : public Error {
 public:
  using Error::Error;
};

}  // namespace treeattn
