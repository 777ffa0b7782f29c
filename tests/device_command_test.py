#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""--device of the command, from outside: what is accepted, and what is said where there is no GPU. Where there is one,
that verify, bench attention and bench decode compute on it.

Usage: device_command_test.py TREEATTN
"""

import json
import subprocess
import sys

SHAPE = ["--heads", "8", "--kv-heads", "2", "--head-dim", "64", "--quick", "--repeat", "3"]
COMMANDS = [["verify", "--random", "0"], ["bench", "attention", "--tokens", "3000", *SHAPE],
            ["bench", "decode", "--tokens", "3000", "--ranks", "2", *SHAPE]]
GENERATE = ["generate", "--random-weights", "llama-3.2-1b", "x"]
failures = []


def expect(holds, what):
    if not holds:
        failures.append(what)


def run(*options):
    return subprocess.run([sys.argv[1], *options], capture_output=True, text=True, timeout=300)


def expect_error(options, code, *parts):
    done = run(*options)
    expect(done.returncode == code and done.stdout == "", f"{options}: exit code {done.returncode}, {done.stdout}")
    for part in ("treeattn: ", *parts):
        expect(part in done.stderr, f"{options}: \"{part}\" is not in: {done.stderr}")


def json_lines(*options):
    done = run(*options, "--json")
    expect(done.returncode == 0, f"{options}: exit code {done.returncode}, {done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_grammar():
    for command in [*COMMANDS, GENERATE]:
        for bad in ["foo", "cuda:", "cuda:x", "cuda:-1", "cuda:1x", "gpu", "CUDA"]:
            expect_error([*command, "--device", bad], 2, f'"{bad}"', "accepted: cpu, cuda, cuda:N")
    decode = COMMANDS[2]
    expect_error([*decode, "--link", "wire"], 2, '"wire"', "host, peer, nccl")
    expect_error([*decode, "--link", "peer"], 2, "--device cpu", "accepted: host, or --device cuda")
    expect_error([*GENERATE, "--link", "wire"], 2, '"wire"', "auto, host, peer, nccl")
    expect_error([*GENERATE, "--link", "peer"], 2, "--device cpu", "accepted: auto, host, or --device cuda")


def check_lengths():
    """Mixed lengths and pages, which CPU and GPU share."""
    attention = ["bench", "attention", "--heads", "8", "--quick"]
    for bad, part in [(["--lengths", "1k:4k"], "--page"), (["--lengths", "4k", "--page", "16"], "MIN:MAX"),
                      (["--lengths", "4k:1k", "--page", "16"], "4096"), (["--page", "0"], '"0"'),
                      (["--lengths", "1k:4k", "--tokens", "1k", "--page", "16"], "one of them"),
                      (["--page", "16", "--layout", "heads_first"], "tokens_first")]:
        expect_error([*attention, *bad], 2, part)
    for dtype in ["bf16", "int8"]:
        line, = json_lines(*COMMANDS[1][:2], *SHAPE, "--batch", "3", "--lengths", "100:1000", "--page", "16", "--dtype",
                           dtype)
        tokens = 100 + 316 + 1000
        row = 2 * 2 * 64 * (2 if dtype == "bf16" else 1)
        expect((line["tokens"], line["shortest"], line["page_tokens"]) == (1000, 100, 16), f"mixed lengths: {line}")
        expect(line["formula_bytes"] == tokens * row + 2 * 3 * 8 * 65 * (2 if dtype == "bf16" else 1), f"bytes: {line}")
        expect(line["peak_bytes"] > line["formula_bytes"], f"bytes: {line}")


def check_memory():
    """Decode holds nothing that grows with the tokens once every branch, 256 of 256 tokens, has its state."""
    def held(tokens):
        line, = json_lines("bench", "attention", "--heads", "1", "--head-dim", "16", "--dtype", "f32", "--tokens",
                           str(tokens), "--threads", "2", "--repeat", "2", "--quick")
        return line["peak_bytes"] - 2 * 16 * 4 * tokens
    few, many = held(1 << 17), held(1 << 18)
    expect(abs(many - few) < 1 << 15, f"beside K and V: {few} bytes with 131072 tokens, {many} with twice as many")


def check_without_gpu(why):
    for command in [*COMMANDS, GENERATE]:
        for device in ["cuda", "cuda:0", "cuda:7"]:
            expect_error([*command, "--device", device], 3, f'--device is "{device}"', why, "--device cpu")


def check_with_gpu(gpus):
    expect(gpus[0]["read_gb_s"] > 0 and 0 < gpus[0]["free_bytes"] <= gpus[0]["memory_bytes"], f"gpus: {gpus}")
    for command in [*COMMANDS, GENERATE]:
        expect_error([*command, "--device", f"cuda:{len(gpus)}"], 3, "accepted here: cpu, cuda")
    name = f"cuda:0 {gpus[0]['name']}"
    *rows, total = json_lines("verify", "--random", "50", "--device", "cuda")
    expect({row["backend"] for row in rows} == {"cuda"} and {"mma", "generic"} <= {row["isa"] for row in rows},
           f"verify: {rows}")
    expect(total["failed"] == 0 and sum(row["cases"] for row in rows) == total["cases"], f"verify: {total}")
    expect_error(["verify", "--device", "cuda", "--isa", "X"], 2, "--device cpu")
    for extra in [[], ["--dtype", "int8"], ["--queries", "64", "--causal"],
                  ["--batch", "3", "--page", "16"]]:
        line, = json_lines(*COMMANDS[1], "--device", "cuda:0", *extra)
        expect(line["device"] == name and line["isa"] and line["ms"] > 0 and line["ratio"] > 0, f"{extra}: {line}")
        expect(line["peak_bytes"] > line["formula_bytes"], f"{extra}: {line}")
    for link in ["host", "peer"]:
        lines = json_lines(*COMMANDS[2], "--device", "cuda", "--link", link)
        expect({line["device"] for line in lines} == {name} and lines[0]["link"] == link, f"decode by {link}: {lines}")
        expect(max(line["max_error"] for line in lines) < 1e-5, f"decode by {link}: errors")
    done = run("bench", "attention", "--device", "cuda", "--tokens", "4000m")
    expect(done.returncode == 3 and "free" in done.stderr, f"no memory: exit code {done.returncode}, {done.stderr}")


def check_backends(info):
    """info names what may be left out of a build, and says of each whether it can be used."""
    backends = {backend["name"]: backend for backend in info["backends"]}
    for name in ["cpu", "reference", "mpi", "simulator", "nccl"]:
        backend = backends.get(name)
        expect(backend and backend["usable"] == ("why" not in backend), f"backend {name}: {backend}")
    if failures:
        return
    done = run("simulate", "--ranks", "2", "--tokens", "1000", "--strategy", "merge")
    expect(done.returncode == (0 if backends["simulator"]["usable"] else 3), f"simulator: {done}")
    if not info["gpus"]:
        expect(not backends["nccl"]["usable"], f"NCCL without a GPU: {backends['nccl']}")


def main():
    info, = json_lines("info")
    check_backends(info)
    check_grammar()
    check_lengths()
    check_memory()
    if info["gpus"]:
        check_with_gpu(info["gpus"])
    else:
        check_without_gpu(next(b["why"] for b in info["backends"] if b["name"] == "cuda"))
    for failure in failures:
        print("FAILED:", failure)
    sys.exit(1 if failures else 0)


main()
