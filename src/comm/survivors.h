// SPDX-License-Identifier: Apache-2.0
// How the survivors of a group agree on the next one. A group is only made of ranks that all agree on who is in it, so
// what was left open by a roll call whose time was up cannot do harm.
#pragma once

#include <chrono>
#include <optional>
#include <vector>

#include "comm/roll_call.h"

namespace treeattn::comm {

struct Agreement {
  std::vector<int> survivors;  // the transport's numbers, in the order of the group
  int context = 0;             // for their new group
};

// Every survivor tells the others whom it holds for lost and takes over what it hears, until all who are left hold the
// same ranks for lost. Who says nothing in kCallAt of the deadline is lost too. Waits for all survivors, so those that
// were a step apart are in step again.
//
// One may have agreed already when another misses one more, whose last word came to the first alone. What was agreed
// holds: who has agreed says so, from any call, to those who think otherwise, and they take it over. That the one more
// is lost shows in the new group. No two agree otherwise, as each needs the word of all who are not lost to it.
//
// context and round: which group this is, and how many were made by shrinking it before.
//
// Nothing when this rank is among the lost, or when there is no agreement within the deadline; family.lost() then has
// those who did not agree.
std::optional<Agreement> agree_on_survivors(Endpoint& endpoint, Family& family, int context, int round,
                                            const std::vector<int>& members, std::chrono::duration<double> deadline);

}  // namespace treeattn::comm
