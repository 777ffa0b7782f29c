#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Attention on a GPU by others beside ours, on the same shapes in one run: torch's scaled_dot_product_attention (flash,
cuDNN) and jax's dot_product_attention (the better of XLA's own and cuDNN).

Usage: gpu_peers.py [--treeattn PATH] [--device cuda:N] [--only decode|prefill] [--repeat N] [--markdown] [--no-jax]

bfloat16. Decode: one query, milliseconds, and the limit is a plain read of K and V as `treeattn bench attention`
measures it. Prefill: causal, TFLOP/s by 4 h d (n (n + 1) / 2), and the limit is mma.sync alone. Everybody goes round
copies of K and V, more than 1 GiB in all, so that no call finds them in a cache, and is timed by a pair of events around
every call; medians. jax shows no events, and a call of it takes longer to start than to run: there several calls are one
compiled function, and such functions follow each other, by the clock. The others have the layout they like best,
[batch, heads, tokens, dim] in torch and [batch, tokens, heads, dim] in jax. Whoever is missing or refuses a shape has a
dash, and why is said below the table. Exit status 77: there is no GPU here.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

# jax takes most of the GPU's memory when it starts, unless told not to.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
COLD_BYTES = 1 << 30
WARM_UPS = 3
# Query heads, KV heads, elements of a head, sequences, tokens.
DECODE = [(16, 16, 128, 1, 16384), (16, 16, 128, 1, 65536), (16, 16, 128, 1, 131072), (16, 16, 128, 1, 655360),
          (32, 8, 128, 1, 4096), (32, 8, 128, 1, 16384), (32, 8, 128, 1, 65536), (32, 8, 128, 1, 131072),
          (32, 8, 128, 1, 655360), (64, 8, 128, 1, 131072), (32, 8, 64, 1, 131072), (32, 8, 128, 32, 8192),
          (32, 8, 128, 16, 32768)]
PREFILL = [(16, 16, 128, 1, 4096), (16, 16, 128, 1, 16384), (16, 16, 128, 1, 65536), (32, 8, 128, 1, 16384),
           (32, 8, 64, 1, 16384)]
reasons = {}


def sets_of(shape):
    _, kv_heads, dim, batch, tokens = shape
    return COLD_BYTES // (2 * batch * tokens * kv_heads * dim * 2) + 1


def repeats_of(arguments, queries):
    """A prefill takes long and varies little."""
    return arguments.repeat if queries == 1 else max(3, arguments.repeat // 3)


def refused(who, error):
    """Kept for the end, once."""
    text = str(error).strip().splitlines()
    reasons.setdefault(who, f"{type(error).__name__}: {text[0] if text else ''}"[:200])


def ours(arguments, shapes, prefill):
    """Shape -> its line. Shapes that differ in their tokens alone share a call, as decode can."""
    calls = {}
    for shape in shapes:
        calls.setdefault((shape[:4], shape[4] if prefill else 1), []).append(shape)
    lines = {}
    for ((heads, kv_heads, dim, batch), queries), members in calls.items():
        command = [arguments.treeattn, "bench", "attention", "--device", arguments.device, "--json", "--dtype", "bf16",
                   "--heads", heads, "--kv-heads", kv_heads, "--head-dim", dim, "--batch", batch, "--queries", queries,
                   "--tokens", ",".join(str(shape[4]) for shape in members),
                   "--repeat", repeats_of(arguments, queries)] + (["--causal"] if prefill else [])
        done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              timeout=600)
        if done.returncode != 0:
            reasons.setdefault(f"ours, {members}", done.stderr.strip())
        for line in map(json.loads, done.stdout.splitlines()):
            lines[(heads, kv_heads, dim, batch, line["tokens"])] = line
    return lines


class Torch:
    def __init__(self, arguments):
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        self.torch, self.sdpa_kernel, self.arguments = torch, sdpa_kernel, arguments
        self.device = arguments.device
        torch.cuda.set_device(arguments.device)
        self.backends = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}

    def make(self, shape, queries):
        heads, kv_heads, dim, batch, tokens = shape
        random = lambda *size: self.torch.randn(*size, dtype=self.torch.bfloat16, device=self.device)
        self.sets = [(random(batch, kv_heads, tokens, dim), random(batch, kv_heads, tokens, dim))
                     for _ in range(sets_of(shape))]
        self.q = random(batch, heads, queries, dim)
        self.repeat = repeats_of(self.arguments, queries)
        self.options = {"is_causal": queries > 1, "enable_gqa": heads != kv_heads}

    def drop(self):
        self.sets, self.q = [], None
        self.torch.cuda.empty_cache()

    def ms(self, name):
        attend = self.torch.nn.functional.scaled_dot_product_attention
        events = [self.torch.cuda.Event(enable_timing=True) for _ in range(2)]
        times = []
        with self.torch.inference_mode(), self.sdpa_kernel([self.backends[name]]):
            for i in range(self.repeat + WARM_UPS):
                k, v = self.sets[i % len(self.sets)]
                events[0].record()
                attend(self.q, k, v, **self.options)
                events[1].record()
                events[1].synchronize()
                times.append(events[0].elapsed_time(events[1]))
        return statistics.median(times[WARM_UPS:])


class Jax:
    CALLS_AT_ONCE = 16  # no two with the same K and V: the compiler would make one of them

    def __init__(self, arguments):
        import jax
        import jax.numpy
        self.jax, self.arguments = jax, arguments
        self.device = jax.devices("gpu")[int(arguments.device.partition(":")[2] or 0)]

    def make(self, shape, queries):
        heads, kv_heads, dim, batch, tokens = shape
        keys = iter(self.jax.random.split(self.jax.random.key(1), 1 + 2 * sets_of(shape)))
        random = self.jax.jit(lambda key, size: self.jax.random.normal(key, size, self.jax.numpy.bfloat16),
                              static_argnums=1)
        with self.jax.default_device(self.device):
            self.sets = [(random(next(keys), (batch, tokens, kv_heads, dim)),
                          random(next(keys), (batch, tokens, kv_heads, dim))) for _ in range(sets_of(shape))]
            self.q = random(next(keys), (batch, queries, heads, dim))
        self.repeat = repeats_of(self.arguments, queries)
        self.causal = queries > 1

    def drop(self):
        self.sets, self.q = [], None

    def ms(self, name):
        attend = self.jax.jit(lambda q, sets: [self.jax.nn.dot_product_attention(
            q, k, v, is_causal=self.causal, implementation=name) for k, v in sets])
        count = min(len(self.sets), self.CALLS_AT_ONCE)
        groups = [self.sets[i:i + count] for i in range(0, len(self.sets) - count + 1, count)]
        rounds = max(3, -(-self.repeat // count))
        for i in range(WARM_UPS):
            self.jax.block_until_ready(attend(self.q, groups[i % len(groups)]))
        start = time.perf_counter()
        last = None
        for i in range(rounds):
            last = attend(self.q, groups[i % len(groups)])
        self.jax.block_until_ready(last)
        return 1e3 * (time.perf_counter() - start) / (rounds * count)


def best_ms(peer, who, names, shape):
    """Of several ways of one peer; None where all refuse."""
    times = []
    for name in names:
        try:
            times.append(peer.ms(name))
        except Exception as error:  # whatever it throws: the table goes on
            refused(f"{who} {name}, {shape}", error)
    return min(times, default=None)


def peers_of(arguments):
    """Column -> (peer, its names)."""
    out = {}
    try:
        torch = Torch(arguments)
        out.update({"torch flash": (torch, ["flash"]), "torch cuDNN": (torch, ["cuDNN"])})
    except Exception as error:
        refused("torch", error)
    if not arguments.no_jax:
        try:
            out["jax"] = (Jax(arguments), ["xla", "cudnn"])
        except Exception as error:
            refused("jax", error)
    return out


def row_of(peers, shape, prefill, line):
    """line: ours, None where we refused."""
    heads, kv_heads, dim, batch, tokens = shape
    queries = tokens if prefill else 1
    flops = 4 * heads * dim * batch * tokens * (tokens + 1) / 2
    show = (lambda ms: f"{1e-9 * flops / ms:.0f}") if prefill else (lambda ms: f"{ms:.4f}")
    row = [f"{heads}/{kv_heads} x {dim}", f"{batch}", f"{tokens:,}"]
    bytes_read = 2 * batch * tokens * kv_heads * dim * 2
    if line is None:
        row += ["-", "-"]
    else:
        row.append(f"{line['peak_gflops'] / 1e3:.0f}" if prefill else f"{1e-6 * bytes_read / line['limit_gb_s']:.4f}")
        row.append(show(line["ms"]))
    times = []
    for who in ["torch flash", "torch cuDNN", "jax"]:
        ms = None
        if who in peers:
            peer, names = peers[who]
            if prefill and who == "jax":
                names = ["cudnn"]  # the other one holds all logits
            try:
                peer.make(shape, queries)
                ms = best_ms(peer, who, names, shape)
            except Exception as error:
                refused(f"{who}, {shape}", error)
            peer.drop()
        times.append(ms)
        row.append("-" if ms is None else show(ms))
    best = min((ms for ms in times if ms is not None), default=None)
    row.append("-" if best is None or line is None else f"{best / line['ms']:.2f}")
    row.append("-" if line is None else line["isa"])
    return row


def print_table(title, rows, markdown):
    print(f"\n{title}\n")
    if markdown:
        print("\n".join(["| " + " | ".join(row) + " |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]]]))
        return
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--treeattn", default=ROOT / "build" / "cuda" / "bin" / "treeattn")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--only", choices=["decode", "prefill"])
    parser.add_argument("--repeat", type=int, default=31)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--no-jax", action="store_true")
    arguments = parser.parse_args()
    check = subprocess.run([arguments.treeattn, "bench", "attention", "--device", arguments.device, "--tokens", "16",
                            "--json"], capture_output=True, text=True)
    if check.returncode != 0:
        print(f"*** SKIPPED: {check.stderr.strip()} ***")
        sys.exit(77 if check.returncode == 3 else 1)
    print(json.loads(check.stdout)["device"])
    peers = peers_of(arguments)
    heads = ["heads x dim", "batch", "tokens"]
    tail = ["ours", "torch flash", "torch cuDNN", "jax", "best peer / ours", "kernel"]
    if arguments.only != "prefill":
        lines = ours(arguments, DECODE, False)
        rows = [heads + ["limit"] + tail] + [row_of(peers, shape, False, lines.get(shape)) for shape in DECODE]
        print_table("Decode, ms", rows, arguments.markdown)
    if arguments.only != "decode":
        lines = ours(arguments, PREFILL, True)
        rows = [heads + ["mma.sync"] + tail] + [row_of(peers, shape, True, lines.get(shape)) for shape in PREFILL]
        print_table("Prefill, causal, TFLOP/s (the last but one: in time)", rows, arguments.markdown)
    for who, why in reasons.items():
        print(f"{who}: {why}")


main()
