#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Decoding over three hosts of two ranks each (scripts/hosts.sh), of which the last has its link cut at step 10. Nobody
# dies and no connection is closed: messages stop coming. On either side of the cut every rank must name exactly the
# ranks of the other side, within the deadline, rebuild their branches and end with the bits of the undisturbed run.
# Usage: cut_link_test.sh PROGRAM, which is decode_loss_mpi_test; it says nothing of "same bits" after a late error.
# Exit status 77: no hosts can be made here.
set -euo pipefail
program=$(readlink -f "$1")
hosts_sh=$(cd "$(dirname "${BASH_SOURCE[0]}")/../scripts" && pwd)/hosts.sh
export TREEATTN_HOSTS=tacut$$
deadline=${TREEATTN_TEST_DEADLINE:-2}
limit=120  # seconds for everything
work=$(mktemp -d)
trap '"$hosts_sh" down || true; rm -rf "$work"' EXIT

# said COUNT PATTERN: so many lines of the job are like this.
said() { [ "$(grep -cxE "$2" "$work/out")" -eq "$1" ]; }
fail() { echo "FAILED: $1"; cat "$work/out"; exit 1; }
# Ranks that leave without MPI_Finalize may hold mpirun up for ever: what counts is what they say.
wait_until_said() {
  until said "$@"; do
    if [ $SECONDS -ge $limit ]; then fail "not within $limit s, $1 times: $2"; fi
    if ! kill -0 $job 2>/dev/null && ! said "$@"; then fail "mpirun ended before, $1 times: $2"; fi
    sleep 0.05
  done
}

"$hosts_sh" up 3 none
"$hosts_sh" mpirun 3 2 --enable-recovery -- "$program" "$deadline" none 0 </dev/null >"$work/out" 2>&1 &
job=$!
disown  # the shell need not report its end
wait_until_said 1 "step 10"
"$hosts_sh" cut 2
wait_until_said 6 "rank [0-5]: same bits.*"

for rank in 0 1 2 3 4 5; do
  lost="4 5"
  [ $rank -lt 4 ] || lost="0 1 2 3"
  said 1 "rank $rank: [0-9.]+ s: .*" || fail "rank $rank should have seen one loss"
  said 1 "rank $rank: [0-9.]+ s: ranks ${lost// /, } of 6 did not answer.*" || fail "rank $rank should have named $lost"
  said 1 "rank $rank: same bits, lost $lost" || fail "rank $rank should have ended without $lost"
done
grep '^rank' "$work/out"
