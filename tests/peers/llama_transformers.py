#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the Llama decoder with transformers on small random models.

Usage: llama_transformers.py PROGRAM [CASES]        PROGRAM: the built llama_logits
       llama_transformers.py --golden DIRECTORY     writes the models and logits of tests/golden/llama

The judge is transformers' LlamaForCausalLM in float64 on the same weights (bfloat16 ones widened, which is exact).
transformers in float32 is shown beside ours, and not judged. TREEATTN_SEED repeats a run. Exit status: 0 all within
tolerance, 1 not, 77 transformers is not here.

An error is given in units of the largest |logit| of its case. Float32 roundings, of sums of up to 160 products in each
of a few layers, come to about 1e-6. The judge's own error is larger: it makes angles in float32, position * frequency,
which are off by up to 2 * 2^-24 * 700 = 1e-4 radians at the positions here, and rotated queries and keys with them. So
the tolerance is 2^-11 = 4.9e-4 with float32 weights; a model whose frequencies are not scaled as they should be was off
by 1.35. What is rounded on purpose has its own tolerance, which a wrong formula still exceeds: activations that meet
bfloat16 weights in bfloat16 matrix instructions, and a bfloat16 cache, 2^-3; int8 weights, which activations meet in
int8 as well, 2^-1. bfloat16 weights without such instructions (TREEATTN_ISA=NEON on Arm) are held to 2^-11.
"""
import copy
import json
import os
import pathlib
import platform
import random
import subprocess
import sys
import tempfile
import time

import peers_venv

EXACT, NARROW, INT8 = 2.0**-11, 2.0**-3, 2.0**-1


def skip(why):
    print(f"*** SKIPPED: {why}. To get them: run scripts/peers.sh, or pip install torch transformers for "
          f"{sys.executable} ***")
    sys.exit(77)


try:
    import torch
    import transformers
except (ImportError, OSError) as error:
    peers_venv.try_again_there()
    skip(f"torch and transformers cannot be imported ({error})")
transformers.logging.set_verbosity_error()


def draw(rng, index):
    """One model and one text."""
    group = [1, 2, 3, 4, 7][index % 5]
    kv_heads = rng.choice([1, 2, 3])
    head_dim = rng.choice([16, 24, 32, 64])
    scaled = index % 2 == 0
    tokens = rng.choice([3, 65, 200, 700 if scaled else 300])
    return {
        "vocab": rng.randint(50, 400), "hidden": 32 * rng.randint(1, 5), "layers": rng.randint(1, 4),
        "heads": group * kv_heads, "kv_heads": kv_heads, "head_dim": head_dim,
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


def logits_of(model, tokens, dtype):
    """[tokens, vocab] of the model in another arithmetic."""
    with torch.no_grad():
        return model.to(dtype)(torch.tensor([tokens])).logits[0].double()


def variants(case):
    """(cache, weights, instruction set or None for the best, tolerance)"""
    wide = case["dtype"] == "float32"
    yield "float32", "bf16", None, EXACT if wide else NARROW
    yield "bfloat16", "bf16", None, NARROW
    if not wide and platform.machine() == "aarch64":
        yield "float32", "bf16", "NEON", EXACT
    if case["heads"] * case["head_dim"] % 32 == 0:  # whole groups in o_proj
        yield "float32", "int8", None, INT8


def ours(program, directory, case, tokens, kv_type, weights, isa):
    directory = pathlib.Path(directory)
    (directory / "tokens").write_text(" ".join(map(str, tokens)))
    environment = dict(os.environ, **({"TREEATTN_ISA": isa} if isa else {}))
    subprocess.run([program, directory, directory / "tokens", str(case["prompt"]), str(case["ranks"]), kv_type, weights,
                    directory / "out"], check=True, timeout=300, env=environment)
    data = torch.frombuffer(bytearray((directory / "out").read_bytes()), dtype=torch.float32)
    return data.view(-1, case["vocab"]).double()


def compare(program, case, seed):
    """Lines of (what, error, tolerance)."""
    rng = random.Random(seed)
    tokens = [rng.randrange(case["vocab"]) for _ in range(case["tokens"])]
    model = make_model(case, seed)
    with tempfile.TemporaryDirectory() as directory:
        save(model, case["dtype"], directory)
        want = logits_of(model, tokens, torch.float64)[case["prompt"] - 1:]
        unit = want.abs().max()
        single = logits_of(model, tokens, torch.float32)[case["prompt"] - 1:]
        yield "transformers float32", float((single - want).abs().max() / unit), None
        for kv_type, weights, isa, tolerance in variants(case):
            got = ours(program, directory, case, tokens, kv_type, weights, isa)
            error = float((got - want).abs().max() / unit) if got.shape == want.shape else float("inf")
            stored = "int8" if weights == "int8" else case["dtype"]
            yield f"weights {stored}, cache {kv_type}, {isa or 'best'}", error, tolerance


def check(program, cases):
    base = int(os.environ.get("TREEATTN_SEED", time.time_ns() % 10**6))
    print(f"TREEATTN_SEED={base}  torch {torch.__version__}, transformers {transformers.__version__}")
    worst, failed = {}, 0
    for index in range(cases):
        case = draw(random.Random(base + index), index)
        for what, error, tolerance in compare(program, case, base + index):
            worst[what] = max(worst.get(what, 0.0), error)
            if tolerance is not None and not error <= tolerance:
                failed += 1
                print(f"FAILED case {index}: {what}: {error:.2e} of the largest logit, tolerance {tolerance:.2e}: {case}")
    for what, error in worst.items():
        print(f"{what:42} worst {error:.2e}")
    print(f"{cases} models, {failed} failed")
    return 1 if failed else 0


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
        want = logits_of(model, tokens, torch.float64)[case["prompt"] - 1:]
        expected = {"made_by": f"tests/peers/llama_transformers.py --golden, transformers {transformers.__version__}, "
                               "float64", "prompt": case["prompt"], "tokens": tokens,
                    "logits": [[float(f"{x:.8g}") for x in row] for row in want.tolist()]}
        (folder / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "--golden":
        write_golden(sys.argv[2])
    elif len(sys.argv) in (2, 3):
        sys.exit(check(sys.argv[1], int(sys.argv[2]) if len(sys.argv) == 3 else 10))
    else:
        sys.exit(__doc__)
