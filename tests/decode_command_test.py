#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The command `treeattn bench decode`, from outside: its JSON, its bits, its messages and exit codes.

Usage: decode_command_test.py TREEATTN [MPIEXEC ARG...]; with MPIEXEC also under MPI.
"""

import json
import os
import subprocess
import sys

KEYS = ["transport", "ranks", "hosts", "strategy", "heads", "kv_heads", "head_dim", "dtype", "tokens", "ms",
        "reduce_ms", "steps", "bytes_sent", "formula_bytes_sent", "peak_bytes", "formula_peak_bytes", "out_hash",
        "max_error"]
STRATEGIES = ["paper", "two_phase", "merge", "butterfly", "gather", "two_level", "ring", "auto"]
FREE_ORDER = ["paper", "two_phase"]
ENVIRONMENT = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
failures = []


def expect(holds, what):
    if not holds:
        failures.append(what)


def run(command):
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)


def lines_of(command, name):
    done = run(command + ["--quick", "--repeat", "2", "--json"])
    expect(done.returncode == 0, f"{name}: exit code {done.returncode}: {done.stderr}")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for line in lines:
        where = f"{name}, {line['strategy']}"
        expect(list(line)[:len(KEYS)] == KEYS, f"{where}: keys {list(line)}")
        expect(line["bytes_sent"] == line["formula_bytes_sent"], f"{where}: bytes are not the formula's")
        expect(line["max_error"] < 1e-5, f"{where}: error {line['max_error']}")
        expect(line["peak_bytes"] >= line["formula_peak_bytes"] * 0.5, f"{where}: peak {line['peak_bytes']}")
    return lines


def limited(kind):
    """The start of a command that may have 1 GiB of something."""
    return [sys.executable, "-c", "import os, resource, sys\n"
            f"resource.setrlimit(resource.{kind}, (1 << 30, 1 << 30))\n"
            "os.execv(sys.argv[1], sys.argv[1:])"]


def check_limit(decode):
    """The machine has the memory, this process may not take it."""
    for kind in ["RLIMIT_AS", "RLIMIT_DATA"]:
        if run(limited(kind) + [decode[0], "--version"]).returncode != 0:
            continue  # the libraries alone take more
        done = run(limited(kind) + decode + ["--tokens", "256k", "--ranks", "1", "--threads", "1",
                                             "--strategy", "merge"])
        expect(done.returncode == 3 and "of memory can be used" in done.stderr,  # asked about before any work
               f"1 GiB, {kind}: exit code {done.returncode}, {done.stderr}")
        done = run(limited(kind) + [decode[0], "info", "--json"])
        expect(done.returncode == 0, f"info in 1 GiB, {kind}: exit code {done.returncode}, {done.stderr}")
    # Every sequence has whole pages, in the cache and in the one whose reductions are timed; every query has results.
    if run(limited("RLIMIT_AS") + [decode[0], "--version"]).returncode == 0:
        for many, needed in [(["--batch", "4k"], "16.4 GiB"), (["--queries", "64k"], "6.25 GiB")]:
            done = run(limited("RLIMIT_AS") + decode + ["--tokens", "1", *many, "--ranks", "1", "--threads", "1",
                                                        "--strategy", "merge"])
            expect(done.returncode == 3 and f"skipped merge: needs {needed} a host" in done.stderr,
                   f"{many}: exit code {done.returncode}, {done.stderr}")
    # Pages of which no sum of bytes may wrap round: it would look small.
    for options, expected in [(["--heads", "64k"], 2), (["--heads", "64", "--head-dim", "16"], 3)]:
        done = run([decode[0], "bench", "attention", "--page", "1048576m", "--tokens", "10", *options])
        says = "more bytes than fit in 64 bits: 64 * 1 * 1099511627786 * 65536 * 128;" if expected == 2 else "skipped"
        expect(done.returncode == expected and says in done.stderr,
               f"large pages, {options}: exit code {done.returncode}, {done.stderr}")
    done = run(decode + ["--chunk", "1024m", "--heads", "64k", "--head-dim", "256", "--batch", "64k", "--tokens", "1"])
    expect(done.returncode == 2 and "make more bytes" in done.stderr,
           f"large chunks: exit code {done.returncode}, {done.stderr}")
    # Every rank reserves addresses for its caches, and none may take those of the others.
    done = run(["sh", "-c", f"ulimit -v 8000000; exec {' '.join(decode)} --ranks 4 --tokens 4k --quick --repeat 1 "
                "--strategy merge,ring"])
    expect(done.returncode == 0, f"four ranks in 8 GB of addresses: exit code {done.returncode}, {done.stderr}")
    # Each thread needs addresses, and it is those that are short.
    done = run(["sh", "-c", f"ulimit -v 1000000; exec {decode[0]} bench attention --threads 4096 --tokens 64"])
    expect(done.returncode == 3 and "1000000 KiB of addresses" in done.stderr,
           f"threads: {done.returncode}, {done.stderr}")


def main():
    treeattn, mpiexec = sys.argv[1], sys.argv[2:]
    decode = [treeattn, "bench", "decode"]
    shape = ["--tokens", "3000", "--heads", "6", "--kv-heads", "2", "--head-dim", "64"]
    hashes = {}
    for dtype in ["bf16", "f32", "int8", "fp8"]:
        for ranks in [1, 3, 4]:
            name = f"{dtype} on {ranks} threads"
            lines = lines_of(decode + shape + ["--dtype", dtype, "--ranks", str(ranks)], name)
            expect([line["strategy"] for line in lines] == STRATEGIES + ["one_rank"], f"{name}: lines missing")
            same = {line["out_hash"] for line in lines if line["strategy"] not in FREE_ORDER}
            expect(len(same) == 1 and hashes.setdefault(dtype, same) == same, f"{name}: other bits")
    if mpiexec:
        lines = lines_of(mpiexec + decode + shape + ["--dtype", "f32"], "3 processes")
        expect([line["strategy"] for line in lines] == STRATEGIES, "3 processes: lines missing, or printed twice")
        expect({line["transport"] for line in lines} == {"mpi"}, "3 processes: not over MPI")
        expect({line["out_hash"] for line in lines if line["strategy"] not in FREE_ORDER} == hashes["f32"],
               "3 processes: other bits than threads")
        done = run(mpiexec + decode + ["--strategy", "star"])
        expect(done.stderr.count("treeattn: ") == 1, f"a usage error is said {done.stderr.count('treeattn: ')} times")

    # Memory against the paper's 2btd + 2bd + 2b n_h and 4btd + 2bd, where K and V are large against pages and scratch.
    for ranks in ["2", "4"]:
        for line in lines_of(decode + ["--tokens", "16k", "--ranks", ranks, "--strategy", "paper,merge,ring"], "memory"):
            share = line["peak_bytes"] / line["formula_peak_bytes"]
            expect(0.99 <= share <= 1.10, f"{line['strategy']} on {ranks} ranks: {share:.3f} of the formula's memory")

    # Other sequences, several queries, the paper's placement.
    few = decode + shape + ["--dtype", "f16", "--strategy", "merge,ring,paper"]
    for extra in [["--batch", "3", "--queries", "2"],
                  ["--placement", "contiguous", "--branches", "8", "--chunk", "64"]]:
        names = [line["strategy"] for line in lines_of(few + extra, " ".join(extra))]
        expect(names == ["merge", "ring", "paper", "one_rank"], f"{extra}: lines {names}")

    # Without the canonical order: one state a message, where three shares are no nodes of the tree (docs/strategies.md).
    few = decode + shape + ["--dtype", "f32", "--ranks", "3", "--strategy", "merge,ring"]
    sent = {}
    for order in [[], ["--free-order"]]:
        merge, ring, _ = lines_of(few + order, f"three ranks {order}")
        expect(merge["canonical"] == ring["canonical"] == (not order), f"{order}: canonical is {merge['canonical']}")
        expect(ring["out_hash"] in hashes["f32"], f"ring {order}: other bits")
        sent[bool(order)] = merge["bytes_sent"]
    expect(sent[True] * 14 == sent[False] * 4, f"merge on three ranks sends {sent[False]} bytes, freely {sent[True]}")

    table = run(decode + shape + ["--quick", "--ranks", "2", "--why"])
    for word in ["ring / merge", "merge / one_rank", "auto / best", "<- chosen"]:
        expect(word in table.stdout, f"the table has no \"{word}\"")
    # A volume is said of what was measured.
    for chosen, there, absent in [("merge", "tree 2(p-1)/p", "ring"), ("ring", "ring 2btd(p-1)", "tree")]:
        table = run(decode + shape + ["--quick", "--ranks", "2", "--repeat", "1", "--strategy", chosen]).stdout
        said = [line for line in table.splitlines() if "volume" in line]
        expect(len(said) == 1 and there in said[0] and absent not in said[0], f"{chosen} alone: {said}")
    for bad in [["--strategy", "star"], ["--strategy", "merge,merge"], ["--ranks", "0"], ["--tokens", "x"],
                ["--chunk", "100"], ["--branches", "3"], ["--placement", "here"], ["--deadline", "-1"],
                ["--layout", "heads_first"]]:
        done = run(decode + ["--heads", "4"] + bad)
        named = any(word in done.stderr for word in bad if word.startswith("--")) and "; accepted: " in done.stderr
        expect(done.returncode == 2 and "treeattn: " in done.stderr and named,
               f"{bad}: exit code {done.returncode}, {done.stderr}")
    # What the grammar itself refuses: the word that is wrong, and what would be right.
    for bad, says in [(["--tok", "4k"], 'treeattn bench decode does not know "--tok"; accepted: --help, --heads, '),
                      (["--ranks", "2", "3"], 'does not know "3"'),
                      (["--ranks", "2", "--tok", "2"], 'does not know "--tok"'),  # not the 2 that was there before
                      (["--ranks", "2", "--ranks", "3"], "--ranks is given 2 times; accepted: once"),
                      (["--tokens"], "--tokens has no value; accepted: LIST"),
                      (["--json=3"], '--json is a flag and is given as "--json=3"; accepted: no value'),
                      (["--quick=false"], '--quick is a flag and is given as "--quick=false"; accepted: no value'),
                      (["--help=0"], '--help is a flag and is given as "--help=0"; accepted: no value'),
                      (["--head-dim", "8"], '--head-dim is "8"; accepted: multiples of 8 from 16 to 256')]:
        done = run(decode + bad)
        expect(done.returncode == 2 and says in done.stderr, f"{bad}: exit code {done.returncode}, {done.stderr}")
    done = run([treeattn, "verify", "--isa", "MMX"])
    expect(done.returncode == 3 and '--isa: instruction set "MMX"' in done.stderr,
           f"MMX: {done.returncode}, {done.stderr}")
    done = run([treeattn, "--tok", "info"])
    expect(done.returncode == 2 and '"--tok"' in done.stderr, f"--tok: exit code {done.returncode}, {done.stderr}")
    for large in [["--tokens", "1000000m"], ["--tokens", "64", "--chunk", "1024m"]]:
        done = run(decode + large + ["--ranks", "2"])
        expect(done.returncode == 3 and "skipped" in done.stderr, f"{large}: exit code {done.returncode}, {done.stderr}")

    check_limit(decode)

    for failure in failures:
        print("FAILED:", failure)
    sys.exit(1 if failures else 0)


main()
