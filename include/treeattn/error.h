// SPDX-License-Identifier: Apache-2.0
// What treeattn throws. Every message names the offending value and what would be accepted.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

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

// Other ranks did not answer within the deadline, or are known to be gone. Thrown on every surviving rank.
class LostRanks : public Error {
 public:
  LostRanks(const std::string& what, std::vector<int> ranks, std::vector<int> lost_so_far)
      : Error(what), ranks_(std::move(ranks)), lost_so_far_(std::move(lost_so_far)) {}
  // Ascending, in the numbering of the communicator that threw.
  const std::vector<int>& ranks() const { return ranks_; }
  // With those that were lost before them. Ascending, by the numbers that they were started with.
  const std::vector<int>& lost_so_far() const { return lost_so_far_; }

 private:
  std::vector<int> ranks_;
  std::vector<int> lost_so_far_;
};

// A file that is missing, damaged, not what it should be, or cannot be written.
class BadFile : public Error {
 public:
  using Error::Error;
};

}  // namespace treeattn
