#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares attention() with torch's scaled_dot_product_attention on fresh random shapes.

Usage: torch_sdpa.py PROGRAM [CASES]     PROGRAM: the built attention_file

The judge is torch in float64 on the same numbers. torch in float32 is shown beside ours, and not judged.
TREEATTN_SEED repeats a run. Exit status: 0 all within tolerance, 1 not, 77 there is no torch here.

An error is given in units of the largest |value| for out, and of 1 + |lse| for lse. Weights that are off by a factor of
1 + e move an average by at most 2 e times the largest value. What e is made of:
    a logit of size x, from d products summed in float32     about sqrt(d) * 2^-24 * x, with x up to about 6 here
    2^x in float32                                           2^-22
    float16 and bfloat16 on some processors: stored weights  2^-17
so the tolerance is 2^-18 for float32 and 2^-16 for the other two. lse is not touched by how weights are stored: 2^-18.
"""
import ctypes
import json
import math
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
import warnings

import peers_venv

OUT_TOLERANCE = {"float32": 2.0**-18, "float16": 2.0**-16, "bfloat16": 2.0**-16}
LSE_TOLERANCE = 2.0**-18


# Without the CUDA libraries.
PACKAGES = "torch --index-url https://download.pytorch.org/whl/cpu"

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # not needed here
try:
    import torch
except (ImportError, OSError) as error:
    peers_venv.missing(error, PACKAGES)
if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 5):
    peers_venv.skip(f"torch {torch.__version__} has no enable_gqa; needed: 2.5 or newer", PACKAGES)


def draw(rng, index):
    """One call: the fields that attention_file reads, and `kind`, the sort of mask."""
    group = rng.choice([1, 1, 2, 3, 4, 5, 7, 8])
    kv_heads = rng.choice([1, 1, 2, 3, 5])
    queries = rng.choice([1, 1, 2, 3, 5, 13, 37])
    tokens = queries + int(2 ** rng.uniform(0, 10.7))
    head_dim = 8 * rng.randint(2, 32)
    batch = rng.choice([1, 2, 3])
    kind = ["full", "causal, first", "causal, last", "window", "causal window", "lengths"][index // 3 % 6]
    call = {
        "kind": kind,
        "dtype": ["float32", "float16", "bfloat16"][index % 3],
        "batch": batch, "queries": queries, "heads": kv_heads * group, "kv_heads": kv_heads, "tokens": tokens,
        "head_dim": head_dim, "v_dim": rng.choice([head_dim, 8 * rng.randint(2, 32)]),
        "heads_first": rng.random() < 0.5,
        "causal": "causal" in kind, "window": rng.randint(1, tokens) if "window" in kind else 0,
        # rounded to float32, which is what we take it as
        "scale": ctypes.c_float(rng.choice([1.0, 0.5, 1.7]) / math.sqrt(head_dim)).value,
        "lengths": [], "first_query": [], "threads": rng.choice([1, 2, 3]),
    }
    if kind == "causal, first":  # what is_causal means to torch: query 0 is the first token
        call["first_query"] = [0] * batch
    if kind == "lengths":
        call["lengths"] = [rng.randint(queries, tokens) for _ in range(batch)]
    return call


def visible(call):
    """The mask [batch, 1, queries, tokens], by the definitions in treeattn/attention.h; None where torch needs none."""
    if call["kind"] in ("full", "causal, first"):
        return None
    key = torch.arange(call["tokens"])
    masks = []
    for length in call["lengths"] or [call["tokens"]] * call["batch"]:
        query = torch.arange(call["queries"])[:, None] + length - call["queries"]
        seen = (key < length).expand(call["queries"], -1)
        if call["causal"]:
            seen = seen & (key <= query)
        if call["window"] > 0:
            seen = seen & (key > query - call["window"])
            if not call["causal"]:
                seen = seen & (key < query + call["window"])
        masks.append(seen)
    return torch.stack(masks)[:, None]


def sdpa(call, q, k, v, mask):
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=call["kind"] == "causal, first", scale=call["scale"], enable_gqa=True)


def logsumexp(call, q, k, mask):
    """lse in float64: torch does not return it."""
    logits = call["scale"] * q @ k.repeat_interleave(call["heads"] // call["kv_heads"], dim=1).transpose(-1, -2)
    if call["kind"] == "causal, first":
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
    return torch.logsumexp(logits if mask is None else logits.masked_fill(~mask, -math.inf), dim=-1)


def ours(call, program, folder, q, k, v):
    """out [batch, heads, queries, v_dim] and lse [batch, heads, queries] from the program."""
    files = {name: str(folder / name) for name in ("q", "k", "v", "out", "lse")}
    kv = (lambda x: x) if call["heads_first"] else (lambda x: x.transpose(1, 2))
    for name, tensor in (("q", q.transpose(1, 2)), ("k", kv(k)), ("v", kv(v))):
        tensor = tensor.contiguous()
        pathlib.Path(files[name]).write_bytes(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))
    (folder / "call.json").write_text(json.dumps(call | files))
    subprocess.run([program, folder / "call.json"], check=True, timeout=120)

    def read(name):
        return torch.frombuffer(bytearray(pathlib.Path(files[name]).read_bytes()), dtype=torch.float32)

    rows = (call["batch"], call["queries"], call["heads"])
    return read("out").view(*rows, -1).transpose(1, 2), read("lse").view(rows).transpose(1, 2)


def largest(difference):
    """The largest entry, NaN if there is one, so that no comparison passes by accident."""
    return math.nan if difference.isnan().any() else difference.abs().max().item()


def main():
    program = sys.argv[1]
    cases = int(sys.argv[2]) if len(sys.argv) > 2 else 54
    seed = int(os.environ.get("TREEATTN_SEED") or time.time_ns() % 10**9)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, TREEATTN_SEED={seed}")
    print(f"{'':>3} {'dtype':8} {'mask':13} {'batch':>5} {'queries':>7} {'heads':>7} {'tokens':>6} {'dims':>7}"
          f"  {'out: ours':>9} {'torch f32':>9} {'tolerance':>9}  {'lse: ours':>9} {'tolerance':>9}")
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        for index in range(cases):
            call = draw(rng, index)
            dtype = getattr(torch, call["dtype"])
            shapes = [("heads", "queries", "head_dim"), ("kv_heads", "tokens", "head_dim"),
                      ("kv_heads", "tokens", "v_dim")]
            q, k, v = (torch.randn(call["batch"], *(call[name] for name in shape)).to(dtype) for shape in shapes)
            mask = visible(call)
            exact = sdpa(call, q.double(), k.double(), v.double(), mask)
            single = sdpa(call, q.float(), k.float(), v.float(), mask)
            exact_lse = logsumexp(call, q.double(), k.double(), mask)
            out, lse = ours(call, program, pathlib.Path(folder), q, k, v)
            unit = v.double().abs().max()
            out_error, single_error = largest((out - exact) / unit), largest((single - exact) / unit)
            lse_error = largest((lse - exact_lse) / (1 + exact_lse.abs()))
            tolerance = OUT_TOLERANCE[call["dtype"]]
            good = out_error <= tolerance and lse_error <= LSE_TOLERANCE
            failures += not good
            heads, dims = f"{call['heads']}/{call['kv_heads']}", f"{call['head_dim']}/{call['v_dim']}"
            print(f"{index:3} {call['dtype']:8} {call['kind']:13} {call['batch']:5} {call['queries']:7} {heads:>7} "
                  f"{call['tokens']:6} {dims:>7}  {out_error:9.1e} {single_error:9.1e} {tolerance:9.1e}  "
                  f"{lse_error:9.1e} {LSE_TOLERANCE:9.1e}{'' if good else '  FAILED: ' + json.dumps(call)}")
    print(f"{cases - failures} of {cases} calls agree with torch in float64")
    return 1 if failures or cases < 1 else 0


if __name__ == "__main__":
    sys.exit(main())
