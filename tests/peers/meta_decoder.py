#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the Llama decoder with Meta's own model.py, of PyPI's package llama-models, on small random models.

Usage: meta_decoder.py LOGITS DEVIATIONS [CASES]         the built llama_logits and llama_deviations

The same weights as a checkpoint of Hugging Face, which we read, and in Meta's order, in which a head's halves are
neighbours. Meta's code computes in float32. Both are held against double precision, each within the bound of what it
rounds, as in llama_transformers.py. TREEATTN_SEED repeats a run. Exit status: 0 all within their bounds, 1 not, 77 the
packages are not here.
"""
import random
import sys
import tempfile
import types

import peers_venv


def stand_in_for_fairscale(torch):
    """model.py takes its layers from fairscale, which splits them over GPUs. One process has them whole."""
    class Linear(torch.nn.Linear):
        def __init__(self, inputs, outputs, bias, **_):
            super().__init__(inputs, outputs, bias=bias)

    class Embedding(torch.nn.Embedding):
        def __init__(self, rows, columns, **_):
            super().__init__(rows, columns)

    contents = {"initialize": {"get_model_parallel_world_size": lambda: 1},
                "layers": {"ColumnParallelLinear": Linear, "RowParallelLinear": Linear,
                           "VocabParallelEmbedding": Embedding}}
    path = "fairscale.nn.model_parallel"
    for name in ("fairscale", "fairscale.nn", path, *(f"{path}.{part}" for part in contents)):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__dict__.update(contents.get(name.rpartition(".")[2], {}))
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[name])


try:
    import torch
    stand_in_for_fairscale(torch)
    from llama_models.llama3.args import ModelArgs
    from llama_models.llama3.model import Transformer
    from llama_transformers import Judge, check, make_model, save
except (ImportError, OSError) as error:
    peers_venv.missing(error, "torch transformers llama-models")

CASES = 4
MULTIPLE_OF = 32  # of the feed-forward's width
SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}  # the one that model.py knows


def draw(rng, index):
    kv_heads, head_dim = rng.choice([1, 2, 3]), rng.choice([16, 32, 64])
    heads = kv_heads * [1, 2, 3, 4][index % 4]
    hidden = heads * head_dim
    tokens = rng.choice([3, 65, 250])
    return {"vocab": rng.randint(50, 400), "hidden": hidden, "layers": rng.randint(1, 2), "heads": heads,
            "kv_heads": kv_heads, "head_dim": head_dim,
            "feed_forward": -(-int(8 * hidden / 3) // MULTIPLE_OF) * MULTIPLE_OF, "theta": 500000.0,
            "scaling": SCALING if index % 2 == 0 else None, "tied": False, "dtype": "float32", "tokens": tokens,
            "prompt": rng.randint(1, tokens - 1), "ranks": rng.choice([1, 2, 3])}


def in_meta_order(weight, heads):
    """Rows of a head: dim 0, dim 0 of the other half, dim 1, ..., as model.py rotates neighbours."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def meta_model(case, model):
    of = model.state_dict()
    meta = Transformer(ModelArgs(
        dim=case["hidden"], n_layers=case["layers"], n_heads=case["heads"], n_kv_heads=case["kv_heads"],
        vocab_size=case["vocab"], multiple_of=MULTIPLE_OF, norm_eps=1e-5, rope_theta=case["theta"],
        use_scaled_rope=case["scaling"] is not None, max_batch_size=1, max_seq_len=case["tokens"]))
    state = {"tok_embeddings.weight": of["model.embed_tokens.weight"], "norm.weight": of["model.norm.weight"],
             "output.weight": of["lm_head.weight"]}
    names = {"attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj",
             "feed_forward.w2": "mlp.down_proj", "feed_forward.w3": "mlp.up_proj", "attention_norm": "input_layernorm",
             "ffn_norm": "post_attention_layernorm"}
    for layer in range(case["layers"]):
        theirs, ours = f"layers.{layer}.", f"model.layers.{layer}."
        for name, known_as in names.items():
            state[f"{theirs}{name}.weight"] = of[f"{ours}{known_as}.weight"]
        for name, heads in (("q", case["heads"]), ("k", case["kv_heads"])):
            state[f"{theirs}attention.w{name}.weight"] = in_meta_order(of[f"{ours}self_attn.{name}_proj.weight"], heads)
    meta.load_state_dict(state)
    return meta.eval()


def compare(programs, case, seed):
    """Lines of (what, *Judge.deviations)."""
    rng = random.Random(seed)
    tokens = [rng.randrange(case["vocab"]) for _ in range(case["tokens"])]
    model = make_model(case, seed)
    with tempfile.TemporaryDirectory() as directory:
        save(model, case["dtype"], directory)
        judge = Judge(programs, directory, case, tokens)
        logits = meta_model(case, model)(torch.tensor([tokens]), 0)[0, case["prompt"] - 1:].double()
        yield "Meta's model.py, float32", *judge.deviations("float32", logits)
        yield "ours", *judge.deviations("ours/float32", judge.ours("float32", "stored", None))


if __name__ == "__main__":
    sys.exit(check(sys.argv[1:3], int(sys.argv[3]) if len(sys.argv) > 3 else CASES, draw, compare))
