#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds the simulator against a real run: ranks that are MPI processes on hosts that are network namespaces.

Usage: simulate_validity.py [--treeattn PATH] [--hosts N] [--per-host N] [--rate RATE] [--tokens N] [--runs N]

A run of `bench decode` measures the links (latency and bandwidth inside a host and between two) and how fast a rank
attends to what it carries. These numbers become a cluster file, `treeattn simulate` predicts the same calls, and the
table shows both: of the ring one call over a long sequence, of the others the reduction of states of 4 MB. (Small ones
pass a shaped link unshaped, in its burst, and wait for a core more than for the link.) The median of the runs' ratios
counts; the exit code is 1 when one is more than 25 % off. Exit status 77: no hosts, or no simulator, here.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
HOSTS = ROOT / "scripts" / "hosts.sh"
SHAPE = ["--heads", "16", "--head-dim", "128", "--dtype", "f32"]
LARGE_STATES = ["--tokens", "256", "--batch", "32", "--queries", "16"]
KV_BYTES = 2 * 16 * 128 * 4  # of a token
TREES = ["paper", "two_phase", "merge", "butterfly", "gather", "two_level"]
LINK = r"{}: ([0-9.]+) us, ([0-9.]+) GB/s"


def real_run(options, shape, strategies):
    """Strategy -> its line, and the text that says what the links are."""
    command = [HOSTS, "mpirun", options.hosts, options.per_host, options.treeattn, "bench", "decode", "--json", "--why",
               "--quick", "--strategy", ",".join(strategies), "--threads", 1, *SHAPE, *shape]
    command = [str(word) for word in command]
    print("+", " ".join(command), file=sys.stderr)
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode != 0:
        sys.exit(f"simulate_validity.py: exit code {done.returncode}\n{done.stderr}")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["strategy"]: line for line in lines}, done.stderr


def cluster_of(real, why, options):
    """The cluster file of what was measured."""
    def link(name, key):
        found = re.search(LINK.format(name), why)
        # Ranks that are alone on their host have no link inside it.
        latency, rate = (float(found[1]), float(found[2])) if found else (1.0, 100.0)
        return f"{key}_latency = {latency} us\n{key}_bandwidth = {max(rate, 0.005)} GB/s\n"

    share = options.tokens * KV_BYTES / (options.hosts * options.per_host)
    attending_s = 1e-3 * (real["merge"]["ms"] - real["merge"]["reduce_ms"])
    return (f"name = measured\ndevices_per_node = {options.per_host}\nadapters_per_node = 1\ndevice_memory = 1 TB\n"
            f"device_rate = {share / attending_s / 1e9} GB/s\n" + link("inside a node", "local") +
            link("between nodes", "remote"))


def simulated_run(cluster, options, shape):
    with tempfile.NamedTemporaryFile("w", suffix=".cluster") as file:
        file.write(cluster)
        file.flush()
        done = subprocess.run([options.treeattn, "simulate", "--json", "--cluster", file.name, "--ranks",
                               str(options.hosts * options.per_host), *SHAPE, *shape],
                              capture_output=True, text=True, timeout=300)
    if done.returncode == 3:
        print("SKIPPED:", done.stderr.strip(), file=sys.stderr)
        sys.exit(77)
    if done.returncode != 0:
        sys.exit(f"simulate_validity.py: {done.stderr}")
    return {line["strategy"]: line for line in map(json.loads, done.stdout.splitlines())}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--treeattn", default=str(ROOT / "build" / "release" / "bin" / "treeattn"))
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--per-host", type=int, default=2)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    os.environ.setdefault("TREEATTN_HOSTS", f"tavalid{os.getpid()}")
    long = ["--tokens", str(options.tokens)]
    up = subprocess.run([HOSTS, "up", str(options.hosts), options.rate])
    if up.returncode != 0:
        sys.exit(up.returncode)
    try:
        runs = [(real_run(options, long, ["merge", "ring", "auto"]), real_run(options, LARGE_STATES, TREES))
                for _ in range(options.runs)]
    finally:
        subprocess.run([HOSTS, "down"])

    ratios, shown = {}, {}
    for (calls, why), (reductions, _) in runs:
        cluster = cluster_of(calls, why, options)
        print(cluster, file=sys.stderr)
        ring = simulated_run(cluster, options, long)["ring"]
        trees = simulated_run(cluster, options, LARGE_STATES)
        pairs = {name: (reductions[name]["reduce_ms"], 1e-3 * trees[name]["reduce_us"]) for name in TREES}
        pairs["ring"] = (calls["ring"]["ms"], 1e-3 * ring["us"])
        for name, pair in pairs.items():
            ratios.setdefault(name, []).append(pair[1] / pair[0])
            shown.setdefault(name, []).append(pair)
    print(f"{options.hosts} hosts x {options.per_host} ranks, {options.rate}, {options.tokens} tokens, "
          f"{options.runs} runs; ms, ring: the call, others: the reduction\n")
    print(f"{'strategy':<12}{'real':>10}{'simulated':>12}{'ratio':>8}   within 25 %")
    missed = False
    for name, values in ratios.items():
        ratio = statistics.median(values)
        real, simulated = (statistics.median(column) for column in zip(*shown[name]))
        met = abs(ratio - 1) <= 0.25
        missed = missed or not met
        print(f"{name:<12}{real:>10.3f}{simulated:>12.3f}{ratio:>8.2f}   {'yes' if met else 'NO'}")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
