#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Decoding over four hosts of two ranks each, with 1 Gbit/s between them (scripts/hosts.sh): the bits, the bytes, who
# wins, and that bytes between ranks of one host stay off the wire. Usage: hosts_test.sh TREEATTN
# Exit status 77: no hosts can be made here.
set -euo pipefail
treeattn=$(readlink -f "$1")
hosts_sh=$(cd "$(dirname "${BASH_SOURCE[0]}")/../scripts" && pwd)/hosts.sh
export TREEATTN_HOSTS=tatest$$
work=$(mktemp -d)
trap '"$hosts_sh" down || true; rm -rf "$work"' EXIT

"$hosts_sh" up 4 1gbit

on_hosts() { timeout --foreground -k 10 120 "$hosts_sh" mpirun 4 2 "$treeattn" bench decode --json --deadline 60 "$@"; }
sent() { local i sum=0; for i in 0 1 2 3; do sum=$((sum + $("$hosts_sh" bytes $i))); done; echo $sum; }

shape=(--quick --tokens 8k --heads 8 --kv-heads 4 --head-dim 64 --dtype f16 --chunk 64)
on_hosts "${shape[@]}" >"$work/hosts"
"$treeattn" bench decode --json "${shape[@]}" --ranks 1 --strategy merge >"$work/one"
"$treeattn" bench decode --json "${shape[@]}" --ranks 8 --strategy merge,two_level >"$work/eight"

# Large states, so that they outweigh what MPI says besides; and the difference between two runs, so that what both say
# cancels out.
large=(--quick --tokens 512 --batch 8 --queries 8 --heads 16 --strategy two_level)
for calls in 10 50; do
  before=$(sent)
  on_hosts "${large[@]}" --repeat $calls >"$work/wire"
  echo $(($(sent) - before)) >"$work/wire_$calls"
done

python3 - "$work" <<'PY'
import json, pathlib, sys

work = pathlib.Path(sys.argv[1])
read = lambda name: [json.loads(line) for line in (work / name).read_text().splitlines()]
failures = []
def expect(what, holds):
    if not holds:
        failures.append(what)

lines = {line["strategy"]: line for line in read("hosts")}
expect("all strategies",
       set(lines) == {"paper", "two_phase", "merge", "butterfly", "gather", "two_level", "ring", "auto"})
for name, line in lines.items():
    expect(f"{name}: 8 ranks on 4 hosts, not {line['ranks']} on {line['hosts']}",
           (line["transport"], line["ranks"], line["hosts"]) == ("mpi", 8, 4))
    expect(f"{name}: sent {line['bytes_sent']}, formula {line['formula_bytes_sent']}",
           line["bytes_sent"] == line["formula_bytes_sent"])
    if name != "ring":
        expect(f"{name}: {line['ms']} ms, ring {lines['ring']['ms']}", line["ms"] < lines["ring"]["ms"])
exact = [line for name, line in lines.items() if name not in ("paper", "two_phase")] + read("one") + read("eight")
expect("the same bits on 1 and 8 threads and 8 processes", len({line["out_hash"] for line in exact}) == 1)
state = lines["merge"]["heads"] * (lines["merge"]["head_dim"] + 2) * 4
remote = lines["two_level"]["remote_bytes_sent"]
expect(f"two_level sends {remote} bytes between hosts, at most {2 * 3 * state}", 0 < remote <= 2 * 3 * state)

wire = read("wire")[0]
calls = 40
on_wire = (int((work / "wire_50").read_text()) - int((work / "wire_10").read_text())) / calls
remote, all_bytes = wire["remote_bytes_sent"], wire["bytes_sent"] * wire["ranks"]
print(f"a call: {remote} of {all_bytes:.0f} bytes go to other hosts, {on_wire:.0f} were on the wire")
# Headers and acknowledgements come on top; messages inside a host would more than double it.
expect("the wire carries what goes to other hosts and no more",
       0.95 * remote < on_wire < 1.3 * remote < 0.7 * all_bytes)

for failure in failures:
    print("FAILED:", failure)
sys.exit(1 if failures else 0)
PY
