// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <mutex>
#include <string>
#include <string_view>

#include "treeattn/error.h"

namespace treeattn {

// Whether NCCL does not let ranks share a GPU, as before 2.30.
inline bool nccl_refuses_to_share(const Unavailable& error) {
  return std::string_view(error.what()).find("invalid usage") != std::string_view::npos;
}

// Why ranks that are threads could not have NCCL. One that was refused tells for all; anything else is a failure.
class NcclProblem {
 public:
  void add(const Unavailable& error) {
    const std::scoped_lock lock(mutex_);
    (nccl_refuses_to_share(error) ? refusal_ : failure_) = error.what();
  }
  const std::string& refusal() const { return refusal_; }
  std::string failure() const { return refusal_.empty() ? failure_ : ""; }

 private:
  std::mutex mutex_;
  std::string refusal_, failure_;
};

}  // namespace treeattn
