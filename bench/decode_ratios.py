#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds tree decoding against its targets, on threads and on four hosts that are network namespaces.

Usage: decode_ratios.py [--treeattn PATH] [--runs N] [--mpi-tokens N]

Every benchmark runs N times (3 unless said); a ratio is taken within one run, and its median counts. Prints a table:
target, measured, met. Exit code 1 when a target was missed. What cannot be run here is skipped, loudly.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

from arguments import counting_number

ROOT = pathlib.Path(__file__).resolve().parent.parent
HOSTS = ROOT / "scripts" / "hosts.sh"
FREE_ORDER = ("paper", "two_phase")
rows = []


def lines_of(command, env=None):
    """One run of the benchmark: strategy -> its line."""
    print("+", " ".join(map(str, command)), file=sys.stderr)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=900, env=env)
    if done.returncode != 0:
        sys.exit(f"decode_ratios.py: exit code {done.returncode} of {' '.join(map(str, command))}")
    return {line["strategy"]: line for line in map(json.loads, done.stdout.splitlines())}


def target(where, what, least, most, values):
    """values: one per run."""
    value = statistics.median(values)
    limit = f">= {least:g}" if most is None else f"<= {most:g}"
    met = value >= least if most is None else value <= most
    spread = f"{min(values):.3g} to {max(values):.3g}"
    rows.append((where, what, limit, f"{value:.3g}", spread, "yes" if met else "NO"))


def targets_of_all(where, runs):
    def auto_over_best(run):
        return run["auto"]["ms"] / min(line["ms"] for name, line in run.items() if name not in ("auto", "one_rank"))
    target(where, "auto / best strategy, ms", 0, 1.1, [auto_over_best(run) for run in runs])
    differ = [sum(line["bytes_sent"] != line["formula_bytes_sent"] for line in run.values()) for run in runs]
    target(where, "strategies whose bytes are not the formula's", 0, 0, differ)
    hashes = [len({line["out_hash"] for name, line in run.items() if name not in FREE_ORDER}) for run in runs]
    target(where, "different results of those that promise one", 0, 1, hashes)


def on_threads(treeattn, count):
    where = "threads, 4 ranks, 128k"
    command = [treeattn, "bench", "decode", "--json", "--ranks", "4", "--heads", "16", "--head-dim", "128",
               "--dtype", "bf16", "--tokens", "128k"]
    runs = [lines_of(command) for _ in range(count)]
    target(where, "merge / one_rank, ms", 0, 1.1, [run["merge"]["ms"] / run["one_rank"]["ms"] for run in runs])
    target(where, "ring / merge, ms", 3, None, [run["ring"]["ms"] / run["merge"]["ms"] for run in runs])
    targets_of_all(where, runs)


def on_hosts(treeattn, count, tokens):
    where = f"MPI, 4 hosts x 2, 1 Gbit/s, {tokens}"
    env = {**os.environ, "TREEATTN_HOSTS": f"taratio{os.getpid()}"}
    status = subprocess.run([HOSTS, "up", "4", "1gbit"], env=env).returncode
    if status != 0:
        rows.append((where, "*** SKIPPED: no hosts here ***", "", "", "", "-"))
        return
    try:
        command = [HOSTS, "mpirun", "4", "2", treeattn, "bench", "decode", "--json", "--deadline", "120",
                   "--tokens", tokens]
        runs = [lines_of(command, env) for _ in range(count)]
    finally:
        subprocess.run([HOSTS, "down"], env=env)
    target(where, "ring / merge, ms", 100, None, [run["ring"]["ms"] / run["merge"]["ms"] for run in runs])
    target(where, "paper / merge, reduce_ms", 1.6, None,
           [run["paper"]["reduce_ms"] / run["merge"]["reduce_ms"] for run in runs])
    line = runs[0]["two_level"]
    state = line["batch"] * line["queries"] * line["heads"] * (line["head_dim"] + 2) * 4
    target(where, "two_level: states between hosts", 0, 2 * (line["hosts"] - 1),
           [run["two_level"]["remote_bytes_sent"] / state for run in runs])
    targets_of_all(where, runs)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--treeattn", type=pathlib.Path, default=ROOT / "build/release/bin/treeattn")
    parser.add_argument("--runs", type=counting_number, default=3)
    parser.add_argument("--mpi-tokens", default="64k")
    options = parser.parse_args()
    treeattn = options.treeattn.resolve()
    if not treeattn.exists():
        sys.exit(f"decode_ratios.py: no {treeattn}; build it (./run --version) or name one with --treeattn")
    on_threads(treeattn, options.runs)
    on_hosts(treeattn, options.runs, options.mpi_tokens)

    table = [("where", "what", "target", "measured", "of runs", "met"), *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    sys.exit(1 if any(row[-1] == "NO" for row in rows) else 0)


if __name__ == "__main__":
    main()
