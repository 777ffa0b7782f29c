// SPDX-License-Identifier: Apache-2.0
// Where something begins, or ends, to hold.
#pragma once

#include <algorithm>
#include <numeric>

namespace treeattn::base {

// Of the whole numbers from `yes`, for which holds() is true, to `no`, for which it is not, on either side: the last
// before it changes. Neither of the two is asked.
template <class Number, class Holds>
Number bisect(Number yes, Number no, const Holds& holds) {
  while (std::max(yes, no) - std::min(yes, no) > 1) {
    const Number middle = std::midpoint(std::min(yes, no), std::max(yes, no));
    (holds(middle) ? yes : no) = middle;
  }
  return yes;
}

}  // namespace treeattn::base
