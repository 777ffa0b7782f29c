#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes what train.py needs, on a CPU: the text, the tokenizer, the configuration and the tokenised corpus.

    python3 tools/demo_model/prepare.py [--paragraphs N]

needs numpy and tokenizers. Everything follows from the seeds below: two runs write the same text and tokens.

    tools/demo_model/stories.txt           held-out paragraphs: haystacks of the evaluation and of the C++ demo
    tools/demo_model/model/*.json          tokenizer and configuration in Hugging Face format
    build/demo_model/corpus.npz            tokenised paragraphs and needles (not in the repository)
"""
import argparse
import json
import pathlib
import random

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

import needles
import stories

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
VOCABULARY = 1536
CONTEXT = 131072
SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
# How Llama 3 cuts text before it merges bytes.
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
         r"|\s+(?!\S)|\s+")
CHAT_TEMPLATE = (
    "{{ '<|begin_of_text|>' }}"
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim }}"
    "{{ '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}")
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 896, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_act": "silu",
    "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "rope_theta": 1e7, "rope_scaling": None,
    "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
    "initializer_range": 0.02, "use_cache": True, "bos_token_id": 0, "eos_token_id": 1,
}


def train_tokenizer(paragraphs):
    """Byte-level BPE. Digits never follow each other in what it learns from, so each digit stays one token."""
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL, show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    one_digit = ("".join(c for i, c in enumerate(p) if not (c.isdigit() and p[i - 1:i].isdigit())) for p in paragraphs)
    tokenizer.train_from_iterator(one_digit, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", pair="<|begin_of_text|> $A <|begin_of_text|> $B",
        special_tokens=[("<|begin_of_text|>", 0)])
    return tokenizer


def write_model_folder(folder, tokenizer):
    folder.mkdir(parents=True, exist_ok=True)

    def write(name, value):
        (folder / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    tokenizer.save(str(folder / "tokenizer.json"))
    write("config.json", CONFIG | {"vocab_size": tokenizer.get_vocab_size()})
    write("generation_config.json", {"bos_token_id": 0, "eos_token_id": [1, 4], "do_sample": False})
    write("tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[0], "eos_token": SPECIAL[1],
        "clean_up_tokenization_spaces": False, "model_max_length": CONTEXT, "chat_template": CHAT_TEMPLATE,
        "added_tokens_decoder": {
            str(i): {"content": t, "special": True, "lstrip": False, "rstrip": False, "normalized": False,
                     "single_word": False} for i, t in enumerate(SPECIAL)}})


def encode_all(tokenizer, texts):
    return [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]


def encode_patterns(tokenizer, patterns):
    """Rows of token ids in which the i-th digit of the number is -1-i; the rest of a row is needles.PAD."""
    digit_ids = [tokenizer.token_to_id(d) for d in "01234"]
    rows = []
    for ids in encode_all(tokenizer, [p.replace("#", "01234") for p in patterns]):
        rows.append([-1 - digit_ids.index(i) if i in digit_ids else i for i in ids])
    out = np.full((len(rows), max(map(len, rows))), needles.PAD, np.int16)
    for row, ids in zip(out, rows):
        row[:len(ids)] = ids
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--paragraphs", type=int, default=240000, help="paragraphs of the training corpus")
    parser.add_argument("--held-out-bytes", type=int, default=150_000, help="size of stories.txt")
    args = parser.parse_args()

    rng = random.Random(20240817)
    corpus = [stories.paragraph(rng) for _ in range(args.paragraphs)]
    seen = set(corpus)
    rng = random.Random(77)
    held_out, size = [], 0
    while size < args.held_out_bytes:
        text = stories.paragraph(rng)
        if text not in seen:
            seen.add(text)
            held_out.append(text)
            size += len(text) + 2
    (HERE / "stories.txt").write_text("\n\n".join(held_out) + "\n")

    every_pattern = [p for f in needles.all_patterns().values() for p in f]
    known = [p.replace("#", "7") for p in every_pattern * 20 + needles.KEY_NEEDLES * 500]
    tokenizer = train_tokenizer(corpus[:20000] + known)  # the words of the needles shall be whole tokens, too
    write_model_folder(HERE / "model", tokenizer)

    paragraph_ids = encode_all(tokenizer, [p + "\n\n" for p in corpus])
    lengths = np.array([len(p) for p in paragraph_ids], np.uint16)
    tokens = np.concatenate([np.array(p, np.uint16) for p in paragraph_ids])
    held_out_ids = encode_all(tokenizer, [p + "\n\n" for p in held_out])
    whole = tokenizer.encode("".join(p + "\n\n" for p in held_out), add_special_tokens=False).ids
    assert whole == [i for p in held_out_ids for i in p], "paragraphs must tokenise alone as they do in a row"

    target = ROOT / "build" / "demo_model"
    target.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        target / "corpus.npz", tokens=tokens, lengths=lengths, held_out_tokens=np.array(whole, np.uint16),
        held_out_lengths=np.array([len(p) for p in held_out_ids], np.uint16),
        digits=np.array([tokenizer.token_to_id(d) for d in "0123456789"], np.int16),
        **{name: encode_patterns(tokenizer, patterns) for name, patterns in needles.all_patterns().items()})
    vocabulary = [tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size())]
    (target / "vocabulary.json").write_text(json.dumps(vocabulary))
    print(f"{len(corpus)} paragraphs, {len(tokens)} tokens, {lengths.mean():.0f} a paragraph, longest {lengths.max()}")
    print(f"held out: {len(held_out)} paragraphs, {len(whole)} tokens, {size / len(whole):.2f} bytes a token")
    print(f"vocabulary {tokenizer.get_vocab_size()}, corpus {(target / 'corpus.npz').stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
