#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the Llama decoder with transformers on small random models.

Usage: llama_transformers.py LOGITS DEVIATIONS [CASES]   the built llama_logits and llama_deviations
       llama_transformers.py --golden DIRECTORY          writes the models and logits of tests/golden/llama

transformers' LlamaForCausalLM computes the same weights in float64, float32 and, where they are bfloat16, in bfloat16;
ours with caches of two types, on two instruction sets, and with int8 weights. All are held against double precision,
each within the bound of what it rounds (tests/rounded_llama.h; docs/exactness.md, "The logits of a Llama").
TREEATTN_SEED repeats a run. Exit status: 0 all within their bounds, 1 not, 77 transformers is not here.
"""
import copy
import json
import math
import os
import pathlib
import platform
import random
import subprocess
import sys
import tempfile
import time

import peers_venv


try:
    import torch
    import transformers
except (ImportError, OSError) as error:
    peers_venv.missing(error, "torch transformers")
transformers.logging.set_verbosity_error()


def takes_any_heads():
    """Some versions refuse a hidden size that is not a multiple of the heads, though a head has a size of its own."""
    try:
        transformers.LlamaConfig(hidden_size=32, num_attention_heads=3, num_key_value_heads=1, head_dim=16)
        return True
    except Exception:  # ValueError, or one of huggingface_hub's
        return False


ANY_HEADS = takes_any_heads()


def draw(rng, index):
    """One model and one text."""
    group = [1, 2, 3, 4, 7][index % 5]
    kv_heads = rng.choice([1, 2, 3])
    heads = group * kv_heads
    head_dim = rng.choice([16, 24, 32, 64])
    scaled = index % 2 == 0
    tokens = rng.choice([3, 65, 130, 250 if scaled else 190])
    vocab, hidden = rng.randint(50, 400), 32 * rng.randint(1, 5)
    if not ANY_HEADS:
        unit = math.lcm(32, heads)
        hidden = -(-hidden // unit) * unit
    return {
        "vocab": vocab, "hidden": hidden, "layers": rng.randint(1, 4),
        "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim,
        "feed_forward": 32 * rng.randint(1, 5), "theta": rng.choice([10000.0, 500000.0]),
        "scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": rng.choice([32, 64])} if scaled else None,
        "tied": rng.random() < 0.5, "dtype": ["float32", "bfloat16"][index // 2 % 2],
        "tokens": tokens, "prompt": rng.randint(1, tokens - 1) if tokens < 100 else tokens - rng.randint(0, 9),
        "ranks": rng.choice([1, 2, 3]),
    }


def make_model(case, seed):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=case["vocab"], hidden_size=case["hidden"], num_hidden_layers=case["layers"],
        num_attention_heads=case["heads"], num_key_value_heads=case["kv_heads"], head_dim=case["head_dim"],
        intermediate_size=case["feed_forward"], rope_theta=case["theta"], rope_scaling=case["scaling"],
        tie_word_embeddings=case["tied"], max_position_embeddings=4096, rms_norm_eps=1e-5, bos_token_id=1,
        eos_token_id=2, attn_implementation="eager")
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.copy_(1 + 0.2 * torch.randn_like(weight))
            else:
                weight.copy_(1.5 * torch.randn_like(weight) / weight.shape[-1] ** 0.5)
            weight.copy_(weight.to(getattr(torch, case["dtype"])))
    return model.eval()


def save(model, dtype, directory):
    # A copy: the frequencies of the model itself must not go through bfloat16.
    copy.deepcopy(model).to(getattr(torch, dtype)).save_pretrained(directory, safe_serialization=True)


def logits_of(model, tokens):
    """[tokens, vocab]"""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].double()


def variants(case):
    """(cache, weights, instruction set or None for the best)"""
    yield "float32", "stored", None
    yield "bfloat16", "stored", None
    if case["dtype"] == "bfloat16" and platform.machine() == "aarch64":
        yield "float32", "stored", "NEON"
    if case["heads"] * case["head_dim"] % 32 == 0:  # whole groups in o_proj
        yield "float32", "int8", None


class Judge:
    """One model and one text in a directory, and the programs that compute and judge its logits."""

    def __init__(self, programs, directory, case, tokens):
        self.logits_program, self.deviations_program = programs
        self.directory, self.case = pathlib.Path(directory), case
        (self.directory / "tokens").write_text(" ".join(map(str, tokens)))

    def call(self, program, arguments, isa):
        environment = dict(os.environ, **({"TREEATTN_ISA": isa} if isa else {}))
        common = [self.directory, self.directory / "tokens", str(self.case["prompt"])]
        return subprocess.run([program, *common, *arguments], check=True, timeout=600, env=environment,
                              stdout=subprocess.PIPE, text=True).stdout

    def ours(self, kv_type, weights, isa):
        self.call(self.logits_program, [str(self.case["ranks"]), kv_type, weights, self.directory / "out"], isa)
        data = torch.frombuffer(bytearray((self.directory / "out").read_bytes()), dtype=torch.float32)
        return data.view(-1, self.case["vocab"]).double()

    def deviations(self, who, logits, weights="stored", isa=None):
        """[deviations off, deviations allowed, error, one deviation], the last two in units of the largest logit."""
        (self.directory / "logits").write_bytes(logits.contiguous().numpy().tobytes())
        said = self.call(self.deviations_program, [weights, who, self.directory / "logits"], isa)
        return list(map(float, said.split()))


def compare(programs, case, seed):
    """Lines of (what, *Judge.deviations)."""
    rng = random.Random(seed)
    tokens = [rng.randrange(case["vocab"]) for _ in range(case["tokens"])]
    model = make_model(case, seed)
    last = slice(case["prompt"] - 1, None)
    with tempfile.TemporaryDirectory() as directory:
        save(model, case["dtype"], directory)
        judge = Judge(programs, directory, case, tokens)
        if case["dtype"] == "bfloat16":  # from the file: to(bfloat16) would round the frequencies too
            narrow = transformers.LlamaForCausalLM.from_pretrained(
                directory, dtype=torch.bfloat16, attn_implementation="eager").eval()
            yield "transformers bfloat16", *judge.deviations("bfloat16", logits_of(narrow, tokens)[last])
        for name in ("float64", "float32"):
            logits = logits_of(model.to(getattr(torch, name)), tokens)[last]
            yield f"transformers {name}", *judge.deviations(name, logits)
        for kv_type, weights, isa in variants(case):
            stored = "int8" if weights == "int8" else case["dtype"]
            got = judge.ours(kv_type, weights, isa)
            yield (f"ours: weights {stored}, cache {kv_type}, {isa or 'best'}",
                   *judge.deviations(f"ours/{kv_type}", got, weights, isa))


def check(programs, cases, draw=draw, compare=compare):
    """draw(rng, index): a case. compare(programs, case, seed): lines as compare() has them."""
    base = int(os.environ.get("TREEATTN_SEED", time.time_ns() % 10**6))
    print(f"TREEATTN_SEED={base}  torch {torch.__version__}, transformers {transformers.__version__}"
          + ("" if ANY_HEADS else ", which wants heads to divide the hidden size"))
    worst, failed = {}, 0
    for index in range(cases):
        case = draw(random.Random(base + index), index)
        for what, off, allowed, error, deviation in compare(programs, case, base + index):
            known = worst.get(what, (0.0, 0.0, 0.0))
            worst[what] = max(known[0], off), max(known[1], error), max(known[2], deviation)
            if not off <= allowed:
                failed += 1
                print(f"FAILED case {index}: {what}: off by {off:.1f} deviations, {error:.2e} of the largest logit; "
                      f"accepted: {allowed:.1f} deviations: {case}")
    for what, (off, error, deviation) in worst.items():
        print(f"{what:46} worst {off:5.2f} deviations; {error:.2e} of the largest logit, a deviation up to {deviation:.2e}")
    print(f"{cases} models, {failed} failed")
    return 1 if failed else 0


CASES = 10

GOLDEN = {
    "tied_scaled_bf16": {"vocab": 40, "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16,
                         "feed_forward": 64, "theta": 500000.0, "tied": True, "dtype": "bfloat16",
                         "scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                     "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
                         "tokens": 300, "prompt": 297},
    "untied_scaled_f32": {"vocab": 37, "hidden": 32, "layers": 2, "heads": 3, "kv_heads": 1, "head_dim": 24,
                          "feed_forward": 32, "theta": 10000.0, "tied": False, "dtype": "float32",
                          "scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                      "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
                          "tokens": 300, "prompt": 296},
}


def write_golden(directory):
    for seed, (name, case) in enumerate(GOLDEN.items()):
        rng = random.Random(seed)
        tokens = [rng.randrange(case["vocab"]) for _ in range(case["tokens"])]
        model = make_model(case, seed)
        folder = pathlib.Path(directory) / name
        save(model, case["dtype"], folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        want = logits_of(model.to(torch.float64), tokens)[case["prompt"] - 1:]
        expected = {"made_by": f"tests/peers/llama_transformers.py --golden, transformers {transformers.__version__}, "
                               "float64", "prompt": case["prompt"], "tokens": tokens,
                    "logits": [[float(f"{x:.8g}") for x in row] for row in want.tolist()]}
        (folder / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "--golden":
        write_golden(sys.argv[2])
    elif len(sys.argv) in (3, 4):
        sys.exit(check(sys.argv[1:3], int(sys.argv[3]) if len(sys.argv) == 4 else CASES))
    else:
        sys.exit(__doc__)
