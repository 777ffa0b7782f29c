#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The command `treeattn simulate`, from outside: agreement with the closed form, keys, cluster files, messages.

Usage: simulate_test.py TREEATTN. Exit status 77 says that this build has no simulator.
"""

import csv
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time

from terminal import Terminal

KEYS = ["ranks", "ranks_per_node", "strategy", "tokens", "heads", "kv_heads", "head_dim", "us", "local_us",
        "reduce_us", "steps", "bytes_per_rank", "closed_form_us"]
STRATEGIES = ["paper", "two_phase", "merge", "butterfly", "gather", "two_level", "ring"]
CLUSTER = """# two slow boxes
name = boxes
devices_per_node = 4
device_memory = 1 GiB
device_rate = 10 GB/s
local_latency = 5 us
local_bandwidth = 8 GB/s
remote_latency = 50 us
remote_bandwidth = 1 Gb/s
"""
failures = []


def expect(holds, what):
    if not holds:
        failures.append(what)


def run(*options):
    return subprocess.run([sys.argv[1], "simulate", *map(str, options)], capture_output=True, text=True, timeout=300)


def lines_of(*options):
    done = run(*options, "--json")
    expect(done.returncode == 0, f"{options}: exit code {done.returncode}: {done.stderr}")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for line in lines:
        expect(list(line)[:len(KEYS)] == KEYS, f"{options}: keys {list(line)}")
    return lines


def by_strategy(lines):
    return {line["strategy"]: line for line in lines}


def check_agreement():
    """Powers of two, where messages do not meet on a link: within 5 % of the closed form, whatever the cluster."""
    trees = "paper,two_phase,merge,two_level"
    every = ",".join(STRATEGIES)
    for cluster, ranks, tokens, strategies in [("dgx-h100", "2,4,8,16,32,64", "80000,640000", every),
                                               ("mi300x", "2,8,64", "80000,640000", every),
                                               ("rtx4090", "2,4,16,64", "80000,640000", every),
                                               ("dgx-h100", "4096", "640000", trees),
                                               ("rtx4090", "1024", "640000", trees + ",butterfly")]:
        lines = lines_of("--cluster", cluster, "--ranks", ranks, "--tokens", tokens, "--strategy", strategies)
        expected = len(ranks.split(",")) * len(tokens.split(",")) * len(strategies.split(","))
        expect(len(lines) == expected, f"{cluster}: {len(lines)} lines")
        for line in lines:
            ratio = line["us"] / line["closed_form_us"]
            where = f"{cluster}, {line['ranks']} ranks, {line['tokens']} tokens, {line['strategy']}"
            expect(0.95 <= ratio <= 1.05, f"{where}: {ratio:.3f} of the closed form")
            parts = line["local_us"] + line["reduce_us"]
            expect(abs(parts - line["us"]) <= 1e-6 * line["us"] or line["strategy"] == "ring",
                   f"{where}: {parts} us in parts, {line['us']} us in all")


def check_memory():
    """No simulator that has run so far, 4,096 ranks among them, took more than a gigabyte."""
    held = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    expect(held < 1e9, f"the simulator held {held} bytes")


def check_progress():
    """On a terminal, whatever the strategy: a bar once two seconds have passed, one line of it, none on stdout."""
    columns = 60  # fewer than the line would have
    terminal = Terminal(columns)
    start = time.monotonic()
    child = subprocess.Popen([sys.argv[1], "simulate", "--ranks", "4096", "--strategy", "paper,merge", "--json"],
                             stdout=subprocess.PIPE, stderr=terminal.its, text=True)
    drawn = terminal.said()
    strategies = [json.loads(line)["strategy"] for line in child.stdout]
    expect(child.wait() == 0 and strategies == ["paper", "merge"], f"on a terminal: {strategies}")
    if time.monotonic() - start > 4:
        expect(re.search(rb"\] \d+ %  (paper|merge) on 4096", drawn), f"no progress on the terminal: {drawn}")
    longest = max(len(line) for line in drawn.split(b"\r\x1b[K"))
    expect(longest < columns, f"a progress line of {longest} characters on a terminal of {columns}")


def check_by_hand():
    """The ring on one DGX: seven times the transfer of a share, then the attention to the last one."""
    share = 5_120_000 // 8 * 16 * 128 * 2 * 2
    work = share / 3.35e12 * 1e6 + 5
    lines = by_strategy(lines_of("--ranks", 8, "--strategy", "ring,butterfly"))
    ring = 7 * (2 + share / 450e9 * 1e6) + work
    expect(abs(lines["ring"]["us"] / ring - 1) < 1e-6, f"ring of 8: {lines['ring']['us']} us, by hand {ring}")
    expect(lines["ring"]["bytes_per_rank"] == 7 * share, f"ring of 8: {lines['ring']['bytes_per_rank']} bytes")
    for ranks, shares in [(1, 1), (2, 2), (4, 2 + 1 / 16)]:  # its own, and slots for the pieces on their way
        held = lines_of("--ranks", ranks, "--strategy", "ring")[0]["device_bytes"]
        expect(held == shares * 5_120_000 * 16 * 128 * 2 * 2 // ranks + 16 * 128 * (2 + 4),
               f"ring of {ranks}: a device holds {held} bytes")
    butterfly = work + 3 * (2 + 16 * 130 * 4 / 450e9 * 1e6)
    expect(abs(lines["butterfly"]["us"] / butterfly - 1) < 1e-6,
           f"butterfly of 8: {lines['butterfly']['us']} us, by hand {butterfly}")


def check_odd_ranks():
    """Any number of ranks runs, sends what the plan says (the simulator checks it) and has the right result."""
    for line in lines_of("--ranks", "1,3,5,13,30", "--tokens", "10000", "--heads", 6, "--kv-heads", 2, "--head-dim",
                         64, "--batch", 2, "--queries", 3, "--dtype", "int8"):
        where = f"{line['ranks']} ranks, {line['strategy']}"
        expect(0.5 < line["us"] / line["closed_form_us"] < 2, f"{where}: {line['us']} us, {line['closed_form_us']}")
    canonical = by_strategy(lines_of("--ranks", 13, "--tokens", 10000, "--strategy", "merge"))["merge"]
    free = by_strategy(lines_of("--ranks", 13, "--tokens", 10000, "--strategy", "merge", "--free-order"))["merge"]
    expect(free["bytes_per_rank"] < canonical["bytes_per_rank"], "the free order sends no less than the canonical one")


def check_options():
    few = ["--ranks", 8, "--tokens", 80000, "--strategy", "merge,ring"]
    plain = by_strategy(lines_of(*few))
    slow = by_strategy(lines_of(*few, "--slow-rank", "3:4"))
    expect(abs(slow["merge"]["local_us"] / plain["merge"]["local_us"] - 4) < 1e-6, "a slow rank is not 4 times slower")
    expect(slow["merge"]["us"] > plain["merge"]["us"], "a slow rank costs nothing")
    late = by_strategy(lines_of(*few, "--overhead-us", 119000))
    for name in late:
        expect(abs(late[name]["us"] - plain[name]["us"] - 119000) < 0.01, f"{name}: overhead is not added once")
    done = run(*few, "--csv")
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    expect([row["strategy"] for row in rows] == ["merge", "ring"], f"--csv: {done.stdout}")
    expect(rows and float(rows[0]["us"]) == plain["merge"]["us"], "--csv has other numbers than --json")
    table = run(*few)
    expect("closed form" in table.stdout and "ring" in table.stdout, f"the table: {table.stdout}")


def check_cluster_files(folder):
    path = os.path.join(folder, "boxes.cluster")

    def lines_with(extra):
        with open(path, "w", encoding="utf-8") as file:
            file.write(CLUSTER + extra)
        return by_strategy(lines_of("--cluster", path, "--ranks", 8, "--tokens", 64000, "--strategy",
                                    "butterfly,ring"))

    plain = lines_with("")
    expect(plain["ring"]["cluster"] == "boxes", "the name is not the file's")
    # What the closed form does not know: links that are shared or slower than others.
    for extra in ["slow_remote = 1 10\n", "slow_local = 2 100\n", "local_shared = 100 MB/s\n",
                  "remote_shared = 100 Mb/s\n"]:
        changed = lines_with(extra)
        for name in ["butterfly", "ring"]:
            expect(changed[name]["reduce_us"] > 1.02 * plain[name]["reduce_us"],
                   f"{name}: {extra.strip()} costs nothing")
            expect(changed[name]["closed_form_us"] == plain[name]["closed_form_us"], f"{name}: another closed form")
    for name in ["dgx-h100", "mi300x", "rtx4090"]:
        with open(path, "w", encoding="utf-8") as file:
            file.write(run("--print-cluster", name).stdout)
        options = ["--ranks", 4, "--tokens", 80000, "--strategy", "merge"]
        expect(lines_of("--cluster", path, *options)[0]["us"] == lines_of("--cluster", name, *options)[0]["us"],
               f"{name}: printed and read again it is another cluster")
    with open(path, "w", encoding="latin-1") as file:  # not UTF-8, as an editor may write it
        file.write(CLUSTER + "# Ger\u00e4te\n")
    expect(lines_of("--cluster", path, "--ranks", 2, "--tokens", 64, "--strategy", "merge"), "a comment in Latin-1")
    with open(path, "w", encoding="utf-8") as file:
        file.write(CLUSTER + "local_latency = 5\n")
    done = run("--cluster", path)
    expect(done.returncode == 2 and ":10: local_latency" in done.stderr, f"a bad file: {done.returncode}, {done.stderr}")


def check_usage():
    for bad in [["--cluster", "nowhere"], ["--cluster", "n" * 5000], ["--ranks", "0"], ["--ranks", "x"],
                ["--ranks-per-node", "9"],
                ["--strategy", "star"], ["--strategy", "auto"], ["--strategy", "ring,ring"], ["--branches", "100"],
                ["--overhead-us", "-1"], ["--slow-rank", "3"], ["--slow-rank", "3:x"], ["--slow-rank", "3:0"],
                ["--slow-rank", "3:2,3:4"],
                ["--ranks", "8", "--slow-rank", "8:2"], ["--json", "--csv"],
                ["--print-cluster", "nowhere"], ["--print-cluster", "dgx-h100", "--json"],
                ["--heads", "5", "--kv-heads", "2"],
                ["--ranks", "2", "--tokens", "1000000000000", "--strategy", "ring"]]:
        done = run(*bad)
        named = any(word in done.stderr for word in bad if word.startswith("--")) and "; accepted: " in done.stderr
        expect(done.returncode == 2 and "treeattn: " in done.stderr and named,
               f"{bad}: exit code {done.returncode}, {done.stderr}")
    accepted = run("--strategy", "star").stderr.split("; accepted: ")[1].split(" (")[0].strip()
    expect(run("--ranks", 2, "--tokens", 64, "--strategy", accepted.replace(", ", ",")).returncode == 0,
           f"a message calls these accepted: {accepted}")


def check_limits():
    """Too few addresses for the stacks of the ranks, for K and V, for the simulator itself."""
    for ranks, kib in [(1024, 300000), (8, 300000), (8, 30000)]:
        limited = f"ulimit -v {kib}; exec {sys.argv[1]} simulate --ranks {ranks} --strategy paper,ring"
        done = subprocess.run(["sh", "-c", limited], capture_output=True, text=True, timeout=300)
        expect(done.returncode == 3 and "treeattn: " in done.stderr,
               f"{ranks} ranks in {kib} KiB: exit code {done.returncode}, {done.stderr}")


def check_too_large():
    """States that no memory holds are left out, before the machine ends the simulator or another program."""
    most = ["--ranks", "2", "--tokens", "1000", "--queries", "100m"]
    for options in [[*most, "--strategy", "merge"], ["--ranks", "1000", "--queries", "16", "--strategy", "gather"]]:
        done = run(*options, "--json")
        expect(done.returncode == 3 and done.stdout == "" and f"skipped {options[-1]} on {options[1]} ranks: the "
               "simulator " in done.stderr, f"{options}: exit code {done.returncode}, {done.stdout}{done.stderr}")
    done = run(*most, "--strategy", "paper,ring", "--json")
    expect(done.returncode == 0 and "skipped paper" in done.stderr and '"strategy":"ring"' in done.stdout,
           f"the ring has no states: exit code {done.returncode}, {done.stdout}{done.stderr}")


def check_mappings():
    """Ranks that the system has no mappings for are refused at once. SimGrid would abort, without a word of ours."""
    with open("/proc/sys/vm/max_map_count", encoding="ascii") as file:
        mappings = int(file.read())
    if mappings >= 2 * 65536:
        return
    done = run("--ranks", 65536)
    expect(done.returncode == 3 and f"a process {mappings}; accepted here: up to {mappings // 2 - 500}" in done.stderr,
           f"65536 ranks: exit code {done.returncode}, {done.stderr}")


def check_reader_gone():
    """As `treeattn simulate | head -1` can have it: it ends like any command, without a complaint."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.argv[1], "simulate", "--ranks", "2", "--tokens", "1000"], stdout=writing,
                          stderr=subprocess.PIPE, timeout=60)
    os.close(writing)
    expect(done.returncode == -signal.SIGPIPE and done.stderr == b"", f"nobody reads: {done.returncode}, {done.stderr}")


def check_interrupted():
    """Ctrl-C reaches both programs. Neither complains, and in the background, where it is ignored, neither ends."""
    for handling, ranks, code in [(signal.SIG_DFL, 1024, -signal.SIGINT), (signal.SIG_IGN, 512, 0)]:
        simulating = subprocess.Popen([sys.argv[1], "simulate", "--ranks", str(ranks), "--strategy", "ring"],
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                                      preexec_fn=lambda: signal.signal(signal.SIGINT, handling))
        time.sleep(1)  # until the simulator is at work
        os.killpg(simulating.pid, signal.SIGINT)
        out, complaint = simulating.communicate(timeout=60)
        expect(simulating.returncode == code and (out == b"") == (code != 0) and complaint == b"",
               f"interrupted: {simulating.returncode}, {out}, {complaint}")


def main():
    done = run("--ranks", 2, "--tokens", 1000, "--strategy", "merge")
    if done.returncode == 3 and "libsimgrid-dev" in done.stderr:
        print("SKIPPED: this build has no simulator:", done.stderr.strip())
        sys.exit(77)
    check_agreement()
    check_progress()
    check_memory()
    check_by_hand()
    check_odd_ranks()
    check_options()
    with tempfile.TemporaryDirectory() as folder:
        check_cluster_files(folder)
    check_usage()
    check_limits()
    check_too_large()
    check_mappings()
    check_reader_gone()
    check_interrupted()
    for failure in failures:
        print("FAILED:", failure)
    sys.exit(1 if failures else 0)


main()
