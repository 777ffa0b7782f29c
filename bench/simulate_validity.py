#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds the simulator against a real run: ranks that are MPI processes on hosts that are network namespaces.

Usage: simulate_validity.py [--treeattn PATH] [--layouts LIST] [--rate RATE] [--tokens N] [--runs N]

A layout is hosts x ranks on each. A run of `bench decode` measures the links (latency and bandwidth inside a host and
between two) and how fast a rank attends to what it carries. These numbers become a cluster file, `treeattn simulate`
predicts the same calls, and a table for each layout shows both: of the ring one call over a long sequence, of the others
the reduction of states of 4 MB. (Small ones pass a shaped link unshaped, in its burst, and wait for a core more than for
the link.) The median of the runs' ratios counts; the exit code is 1 when one of any layout is more than 25 % off. To be
run on an idle machine. Exit status 77: no hosts, or no simulator, here.
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

from arguments import counting_number

ROOT = pathlib.Path(__file__).resolve().parent.parent
HOSTS = ROOT / "scripts" / "hosts.sh"
SHAPE = ["--heads", "16", "--head-dim", "128", "--dtype", "f32"]
LARGE_STATES = ["--tokens", "256", "--batch", "32", "--queries", "16"]
KV_BYTES = 2 * 16 * 128 * 4  # of a token
TREES = ["paper", "two_phase", "merge", "butterfly", "gather", "two_level"]
LINK = r"{}: ([0-9.]+) us, ([0-9.e+-]+) GB/s"
MOST_OFF = 0.25


class Layout:
    def __init__(self, text):
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
        if not found or int(found[1]) < 2:
            raise argparse.ArgumentTypeError(f'"{text}"; accepted: hosts x ranks on each, from 2 hosts on, as in 4x2')
        self.hosts, self.per_host = int(found[1]), int(found[2])
        self.ranks = self.hosts * self.per_host


def real_run(layout, options, shape, strategies):
    """Strategy -> its line, and the text that says what the links are."""
    command = [HOSTS, "mpirun", layout.hosts, layout.per_host, options.treeattn, "bench", "decode", "--json", "--why",
               "--quick", "--strategy", ",".join(strategies), "--threads", 1, *SHAPE, *shape]
    command = [str(word) for word in command]
    print("+", " ".join(command), file=sys.stderr)
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode != 0:
        sys.exit(f"simulate_validity.py: exit code {done.returncode}\n{done.stderr}")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["strategy"]: line for line in lines}, done.stderr


def cluster_of(layout, real, why, tokens):
    """The cluster file of what was measured."""
    def link(name, key):
        found = re.search(LINK.format(name), why)
        # Ranks that are alone on their host have no link inside it.
        latency, rate = (float(found[1]), float(found[2])) if found else (1.0, 100.0)
        return f"{key}_latency = {latency} us\n{key}_bandwidth = {max(rate, 0.005)} GB/s\n"

    share = tokens * KV_BYTES / layout.ranks
    attending_s = 1e-3 * (real["merge"]["ms"] - real["merge"]["reduce_ms"])
    return (f"name = measured\ndevices_per_node = {layout.per_host}\nadapters_per_node = 1\ndevice_memory = 1 TB\n"
            f"device_rate = {share / attending_s / 1e9} GB/s\n" + link("inside a node", "local") +
            link("between nodes", "remote"))


def simulated_run(layout, cluster, options, shape):
    with tempfile.NamedTemporaryFile("w", suffix=".cluster") as file:
        file.write(cluster)
        file.flush()
        done = subprocess.run([options.treeattn, "simulate", "--json", "--cluster", file.name, "--ranks",
                               str(layout.ranks), *SHAPE, *shape],
                              capture_output=True, text=True, timeout=300)
    if done.returncode == 3:
        print("SKIPPED:", done.stderr.strip(), file=sys.stderr)
        sys.exit(77)
    if done.returncode != 0:
        sys.exit(f"simulate_validity.py: {done.stderr}")
    return {line["strategy"]: line for line in map(json.loads, done.stdout.splitlines())}


def compare(layout, options):
    """Strategy -> (real, simulated) milliseconds of every run."""
    long = ["--tokens", str(options.tokens)]
    up = subprocess.run([HOSTS, "up", str(layout.hosts), options.rate])
    if up.returncode != 0:
        sys.exit(up.returncode)
    try:
        runs = [(real_run(layout, options, long, ["merge", "ring", "auto"]),
                 real_run(layout, options, LARGE_STATES, TREES)) for _ in range(options.runs)]
    finally:
        subprocess.run([HOSTS, "down"])
    pairs = {}
    for (calls, why), (reductions, _) in runs:
        cluster = cluster_of(layout, calls, why, options.tokens)
        print(cluster, file=sys.stderr)
        ring = simulated_run(layout, cluster, options, long)["ring"]
        trees = simulated_run(layout, cluster, options, LARGE_STATES)
        pairs.setdefault("ring", []).append((calls["ring"]["ms"], 1e-3 * ring["us"]))
        for name in TREES:
            pairs.setdefault(name, []).append((reductions[name]["reduce_ms"], 1e-3 * trees[name]["reduce_us"]))
    return pairs


def print_table(layout, options, pairs):
    """Whether all are near enough."""
    print(f"{layout.hosts} hosts x {layout.per_host} ranks, {options.rate}, {options.tokens} tokens, "
          f"{options.runs} runs; ms, ring: the call, others: the reduction\n")
    print(f"{'strategy':<12}{'real':>10}{'simulated':>12}{'ratio':>8}   within 25 %")
    all_met = True
    for name, values in pairs.items():
        ratio = statistics.median(simulated / real for real, simulated in values)
        real, simulated = (statistics.median(column) for column in zip(*values))
        met = abs(ratio - 1) <= MOST_OFF
        all_met = all_met and met
        print(f"{name:<12}{real:>10.3f}{simulated:>12.3f}{ratio:>8.2f}   {'yes' if met else 'NO'}")
    print(flush=True)
    return all_met


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--treeattn", default=str(ROOT / "build" / "release" / "bin" / "treeattn"))
    parser.add_argument("--layouts", default="4x2,4x1,2x1", type=lambda text: [Layout(one) for one in text.split(",")],
                        help="hosts x ranks on each")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--tokens", type=counting_number, default=16384)
    parser.add_argument("--runs", type=counting_number, default=3)
    options = parser.parse_args()
    os.environ.setdefault("TREEATTN_HOSTS", f"tavalid{os.getpid()}")
    met = [print_table(layout, options, compare(layout, options)) for layout in options.layouts]
    print("all within 25 %" if all(met) else "NOT all within 25 %")
    sys.exit(0 if all(met) else 1)


if __name__ == "__main__":
    main()
