#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares tokens, chats and known shapes with Meta's own: the vocabulary of Llama 3 with its 128,256 tokens, and code.

Usage: meta_llama.py PROGRAM         PROGRAM: the built model_files

PyPI's package llama-models carries the tokenizer of Llama 3 as Meta made it, for tiktoken. transformers turns it into
the tokenizer.json that models come with on Hugging Face; we read that. Texts are fresh random ones (unicode_corpus.py)
and the files of this project. TREEATTN_SEED repeats a run. Exit status: 0 all equal, 1 not, 77 the packages are not
here.
"""
import json
import os
import pathlib
import random
import sys
import tempfile
import time

import peers_venv
import unicode_corpus
from hugging_face import ask_ours, chats, compare  # before transformers, whose settings it makes

try:
    import llama_models.llama3
    from llama_models.datatypes import RawMessage
    from llama_models.sku_list import all_registered_models
    from llama_models.llama3.chat_format import ChatFormat
    from llama_models.llama3.tokenizer import Tokenizer
    from transformers.convert_slow_tokenizer import TikTokenConverter
except (ImportError, OSError) as error:
    peers_venv.missing(error, "llama-models 'transformers<5'")

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = pathlib.Path(llama_models.llama3.__file__).with_name("tokenizer.model")


def texts_of(rng, special):
    """Random texts, a third of them with special tokens and what looks like them, and files of several languages."""
    texts = [unicode_corpus.text(rng, rng.randint(0, 120)) for _ in range(600)]
    for i in range(0, len(texts), 3):
        at = rng.randint(0, len(texts[i]))
        texts[i] = texts[i][:at] + rng.choice([*special, "<|", "|>", "<|eot_id|"]) + texts[i][at:]
    files = [path for folder, kind in (("docs", "*.md"), ("src", "*.cc"), ("src", "*.h"), ("tests/peers", "*.py"),
                                       ("scripts", "*"), ("tools/demo_model", "*.txt"))
             for path in sorted((ROOT / folder).rglob(kind)) if path.is_file()]
    texts += [path.read_text() for path in rng.sample(files, min(60, len(files)))]
    return texts + ["", " ", "\n", "a" * 5000, " " * 5000, "ab" * 3000 + "\n" * 3000]


def as_meta_writes(messages):
    """Templates on Hugging Face strip contents, Meta's code leaves that to its caller."""
    return [RawMessage(role={"ipython": "tool"}.get(message["role"], message["role"]),
                       content=message["content"].strip()) for message in messages]


def feed_forward(args):
    """As Meta's model.py computes it."""
    hidden = int(args["ffn_dim_multiplier"] * int(8 * args["dim"] / 3))
    return -(-hidden // args["multiple_of"]) * args["multiple_of"]


def compare_shapes(ours):
    """What `--random-weights NAME` makes, with Meta's list of models."""
    theirs = {model.core_model_id.value.lower().replace("llama", "llama-"): model.arch_args
              for model in all_registered_models() if not model.variant}  # some hold KV heads twice
    failures = 0
    for name, shape in ours.items():
        args = theirs[name]
        failures += compare("shape", shape, shape | {
            "vocab_size": args["vocab_size"], "hidden_size": args["dim"], "num_hidden_layers": args["n_layers"],
            "num_attention_heads": args["n_heads"], "num_key_value_heads": args["n_kv_heads"],
            "head_dim": args["dim"] // args["n_heads"], "intermediate_size": feed_forward(args),
            "rms_norm_eps": args["norm_eps"], "rope_theta": args["rope_theta"]}, name)
        failures += compare("scaled rope", shape["rope_scaling"] is not None, args["use_scaled_rope"], name)
    return failures


def main():
    program = sys.argv[1]
    seed = int(os.environ.get("TREEATTN_SEED") or time.time_ns() % 10**9)
    rng = random.Random(seed)
    meta = Tokenizer(MODEL)
    special = sorted(meta.special_tokens, key=meta.special_tokens.get)
    texts = texts_of(rng, special)
    tokens = [[rng.randrange(meta.special_tokens[special[0]]) for _ in range(rng.randint(0, 60))] for _ in range(300)]
    conversations = [conversation for _ in range(20) for conversation in chats(rng)]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        TikTokenConverter(vocab_file=str(MODEL), pattern=meta.pat_str,
                          additional_special_tokens=special).converted().save(str(folder / "tokenizer.json"))
        (folder / "ask.json").write_text(json.dumps({"texts": texts, "tokens": tokens, "chats": conversations}))
        ours = ask_ours(program, "tokenizer", folder / "tokenizer.json", folder / "ask.json")
    failures = compare("vocabulary", ours["vocab"], meta.n_words, MODEL)
    for text, answer in zip(texts, ours["texts"], strict=True):
        failures += compare("special", answer["special"],
                            meta.encode(text, bos=False, eos=False, allowed_special="all"), text)
        failures += compare("plain", answer["plain"], meta.encode(text, bos=False, eos=False), text)
    for ids, text in zip(tokens, ours["tokens"], strict=True):
        failures += compare("decode", text, meta.decode(ids), ids)
    chat_format = ChatFormat(meta)
    for messages, ids in zip(conversations, ours["chats"], strict=True):
        failures += compare("chat", ids, chat_format.encode_dialog_prompt(as_meta_writes(messages)).tokens, messages)
    shapes = ask_ours(program, "shapes")
    failures += compare_shapes(shapes)
    total = sum(len(text.encode()) for text in texts)
    print(f"{meta.n_words} tokens of Meta's, TREEATTN_SEED={seed}: {len(texts)} texts of {total} bytes, {len(tokens)} "
          f"lists of tokens, {len(conversations)} chats, {len(shapes)} shapes: {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
