#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares what we read from model files with what Hugging Face's packages read: tokens, chats, configs, weights.

Usage: hugging_face.py PROGRAM [ROUNDS]         PROGRAM: the built model_files
       hugging_face.py --golden FILE            writes the golden file that tests/model_chat_test.cc reads

Every round trains small tokenizers on fresh random text (unicode_corpus.py) and compares all tokens. TREEATTN_SEED
repeats a run. Exit status: 0 all equal, 1 not, 77 the packages are not here.
"""
import ctypes
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
import unicodedata

import peers_venv

os.environ["USE_TORCH"] = "0"  # not needed here, and half of the time
os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # else transformers says that torch is missing
os.environ["HF_HUB_OFFLINE"] = "1"

try:
    import tokenizers
    import transformers
    import safetensors
except (ImportError, OSError) as error:
    peers_venv.missing(error, "tokenizers 'transformers<5'")

import small_tokenizer
import unicode_corpus

# What the template of the Llama 3 family writes when nobody asks for tools or dates.
CHAT_TEMPLATE = ("{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>"
                 "{{ '\n\n' }}{{ message['content'] | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}"
                 "<|start_header_id|>assistant<|end_header_id|>{{ '\n\n' }}{% endif %}")

# The same with the lines that templates from Llama 3.1 on put before the system message, or in its place.
DATED_CHAT_TEMPLATE = ("{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
                       "{% set system_message = messages[0]['content'] | trim %}{% set messages = messages[1:] %}"
                       "{% else %}{% set system_message = '' %}{% endif %}"
                       "<|start_header_id|>system<|end_header_id|>{{ '\n\n' }}"
                       "{{ 'Cutting Knowledge Date: December 2023\n' }}{{ 'Today Date: ' + date_string + '\n\n' }}"
                       "{{ system_message }}<|eot_id|>" + CHAT_TEMPLATE.removeprefix("{{ bos_token }}"))


def with_added(rng, text):
    """The text with added tokens, and things that look like them, at random places."""
    names = small_tokenizer.SPECIAL + ["<plain>", "<late>", "<wide>", " <wide> ", "<|eot", "<|", "|>", "<|eot_id|",
                                       "\n<wide>\t", "\u0120own"]
    for _ in range(rng.randint(0, 4)):
        at = rng.randint(0, len(text))
        text = text[:at] + rng.choice(names) + text[at:]
    return text


def encode(tokenizer, text, special):
    tokenizer.encode_special_tokens = not special
    return tokenizer.encode(text, add_special_tokens=False).ids


def chats(rng):
    def content():
        space = ["", " ", "\n", "\t \r\n", "\x1c", "\u3000", "\u0085"]
        return rng.choice(space) + unicode_corpus.text(rng, rng.randint(0, 12)) + rng.choice(space)
    return [[{"role": role, "content": content()} for role in roles] for roles in (
        ["user"], ["system", "user"], ["system", "user", "assistant", "user"], ["user", "assistant", "ipython"])]


def chat_tokens(tokenizer, messages, **template):
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=small_tokenizer.SPECIAL[0])
    return fast.apply_chat_template(messages, **{"chat_template": CHAT_TEMPLATE, **template},
                                    add_generation_prompt=True, return_dict=False)


def old_merges(file):
    """The form that merges had before version 0.20 of the tokenizers package."""
    content = json.loads(pathlib.Path(file).read_text())
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    pathlib.Path(file).write_text(json.dumps(content, ensure_ascii=False))


def ask_ours(program, command, *arguments):
    output = subprocess.run([program, command, *arguments], check=True, timeout=120, capture_output=True).stdout
    return json.loads(output)


def compare(what, ours, theirs, shown):
    if ours == theirs:
        return 0
    print(f"FAILED: {what}: {shown!r}\n  ours   {ours}\n  theirs {theirs}")
    return 1


def cut_differently(program, folder, tokenizer, file, codes):
    """The characters of `codes` that are cut differently."""
    block = 512  # characters a text: few texts, and few to look at again where one differs

    def different(pieces):
        texts = ["\n".join(f"a{chr(code)}b {chr(code)}1'{chr(code)}" for code in piece) for piece in pieces]
        (folder / "ask.json").write_text(json.dumps({"texts": texts, "tokens": [], "chats": []}))
        ours = ask_ours(program, "tokenizer", file, folder / "ask.json")["texts"]
        return [piece for piece, text, answer in zip(pieces, texts, ours, strict=True)
                if answer["plain"] != encode(tokenizer, text, False)]

    blocks = different([codes[at:at + block] for at in range(0, len(codes), block)])
    return [code for (code,) in different([[code] for piece in blocks for code in piece])]


def every_character(program, folder):
    """Where each character may be cut. Those that Unicode got later than Python's tables may differ."""
    file = folder / "cuts.json"
    tokenizer = small_tokenizer.cuts_tokenizer()
    tokenizer.save(str(file))
    # All that have a meaning, and some of those that have none yet or never will.
    codes = [code for code in range(0x110000) if not 0xD800 <= code <= 0xDFFF
             and (unicodedata.category(chr(code)) not in ("Cn", "Co") or code % 61 == 0)]
    different = cut_differently(program, folder, tokenizer, file, codes)
    wrong = [code for code in different if unicode_corpus.assigned(code)]
    print(f"{len(codes)} characters: {len(different)} are cut differently, {len(wrong)} of them old enough to be known")
    for code in wrong[:20]:
        print(f"FAILED: U+{code:04X}")
    return len(wrong)


def tokenizer_round(program, folder, rng, kind):
    corpus = unicode_corpus.training_corpus(rng, 400)
    tokenizer = small_tokenizer.train(kind, corpus, rng.choice([300, 600, 2000]), rng.random() < 0.5)
    file = folder / "tokenizer.json"
    tokenizer.save(str(file))
    if rng.random() < 0.5:
        old_merges(file)
    texts = [with_added(rng, unicode_corpus.text(rng, rng.randint(0, 60))) for _ in range(300)]
    texts += ["", " ", "\n", "a" * 5000, " " * 5000, "ab" * 3000 + "\n" * 3000,
              "".join(rng.choices("aeot \n1'", k=8000))]
    tokens = [[rng.randrange(tokenizer.get_vocab_size()) for _ in range(rng.randint(0, 40))] for _ in range(100)]
    conversations, date = chats(rng), f"{rng.randint(1, 28)} May 2025"
    (folder / "ask.json").write_text(
        json.dumps({"texts": texts, "tokens": tokens, "chats": conversations, "date": date}))
    ours = ask_ours(program, "tokenizer", file, folder / "ask.json")
    failures = compare("vocabulary", ours["vocab"], tokenizer.get_vocab_size(), kind)
    failures += compare("bos", ours["bos"], tokenizer.token_to_id(small_tokenizer.SPECIAL[0]), kind)
    for text, answer in zip(texts, ours["texts"], strict=True):
        failures += compare("special", answer["special"], encode(tokenizer, text, True), text)
        failures += compare("plain", answer["plain"], encode(tokenizer, text, False), text)
    for ids, text in zip(tokens, ours["tokens"], strict=True):
        failures += compare("decode", text, tokenizer.decode(ids, skip_special_tokens=True), ids)
    tokenizer.encode_special_tokens = False
    for messages, ids, dated in zip(conversations, ours["chats"], ours["dated_chats"], strict=True):
        failures += compare("chat", ids, chat_tokens(tokenizer, messages), messages)
        theirs = chat_tokens(tokenizer, messages, chat_template=DATED_CHAT_TEMPLATE, date_string=date)
        failures += compare("chat with a date", dated, theirs, messages)
    total = sum(len(text.encode()) for text in texts)
    print(f"{kind}: {len(texts)} texts of {total} bytes, {len(tokens)} lists of tokens, {len(conversations)} chats: "
          f"{failures} failures")
    return failures


def of_config(config, key):
    """What transformers has read for a key. From version 5 on all about RoPE is in one place."""
    if not key.startswith("rope_") or not hasattr(config, "rope_parameters"):
        return getattr(config, key)
    parameters = dict(config.rope_parameters)
    theta = parameters.pop("rope_theta")
    return theta if key == "rope_theta" else None if parameters["rope_type"] == "default" else parameters


def config_round(program, folder, rng):
    scaling = rng.choice([None, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                 "original_max_position_embeddings": 8192}])
    heads = rng.choice([8, 24, 32])
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=heads * 64, num_hidden_layers=rng.randint(1, 90), num_attention_heads=heads,
        num_key_value_heads=8, intermediate_size=rng.randint(1, 9999), max_position_embeddings=131072,
        rope_theta=500000.0, rope_scaling=scaling, rms_norm_eps=1e-5, tie_word_embeddings=rng.random() < 0.5,
        eos_token_id=rng.choice([7, [7, 8, 9]]), architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder)
    ours = ask_ours(program, "config", folder / "config.json")
    failures = 0
    for key, value in ours.items():
        theirs = of_config(config, key)
        if key == "eos_token_id" and isinstance(theirs, int):
            theirs = [theirs]
        failures += compare(key, value, theirs, config)
    return failures


def serialize(tensors):
    """{name: (dtype, shape, bytes)} as a safetensors file. The interface changed in version 0.8."""
    if not hasattr(safetensors, "TensorSpec"):
        return safetensors.serialize({name: {"dtype": dtype, "shape": shape, "data": data}
                                      for name, (dtype, shape, data) in tensors.items()}, metadata={"format": "pt"})
    buffers = {name: ctypes.create_string_buffer(data, len(data)) for name, (_, _, data) in tensors.items()}
    return safetensors.serialize({name: safetensors.TensorSpec(
        dtype=dtype, shape=shape, data_ptr=ctypes.addressof(buffers[name]), data_len=len(data))
        for name, (dtype, shape, data) in tensors.items()}, metadata={"format": "pt"})


def checkpoint_round(program, folder, rng):
    """Two shards written by the safetensors package, with an index."""
    ask, expected, weight_map = [], {}, {}
    for shard in range(2):
        tensors = {}
        for index in range(rng.randint(1, 5)):
            name, dtype = f"layer.{shard}.{index}", rng.choice(["float32", "float16", "bfloat16"])
            shape = [rng.randint(1, 7) for _ in range(rng.randint(1, 3))]
            count = 4 if dtype == "float32" else 2
            for size in shape:
                count *= size
            data = rng.randbytes(count)
            tensors[name] = (dtype, shape, data)
            expected[name] = {"dtype": dtype, "hex": data.hex()}
            weight_map[name] = f"model-{shard + 1:05}-of-00002.safetensors"
            ask.append([name, shape])
        (folder / f"model-{shard + 1:05}-of-00002.safetensors").write_bytes(serialize(tensors))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "ask.json").write_text(json.dumps(ask))
    return compare("checkpoint", ask_ours(program, "checkpoint", folder, folder / "ask.json"), expected, ask)


def write_golden(file):
    """A tokenizer of each kind, texts and their tokens: for machines without the packages."""
    rng = random.Random(20240718)
    golden = {"made_by": f"tests/peers/hugging_face.py --golden, tokenizers {tokenizers.__version__}", "sets": []}
    for kind, ignore_merges in (("llama3", True), ("gpt2", False)):
        tokenizer = small_tokenizer.train(kind, unicode_corpus.training_corpus(rng, 200), 500, ignore_merges)
        cases = []
        for _ in range(150):
            text = with_added(rng, unicode_corpus.text(rng, rng.randint(1, 16)))
            cases.append([text, encode(tokenizer, text, True), encode(tokenizer, text, False)])
        tokenizer.encode_special_tokens = False
        conversations = [[messages, chat_tokens(tokenizer, messages)] for messages in chats(rng)]
        golden["sets"].append({"kind": kind, "tokenizer": json.loads(tokenizer.to_str()), "cases": cases,
                               "chats": conversations})
    pathlib.Path(file).write_text(json.dumps(golden, separators=(",", ":")) + "\n")


def main():
    if sys.argv[1] == "--golden":
        write_golden(sys.argv[2])
        return 0
    program, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1
    seed = int(os.environ.get("TREEATTN_SEED") or time.time_ns() % 10**9)
    rng = random.Random(seed)
    print(f"tokenizers {tokenizers.__version__}, transformers {transformers.__version__}, "
          f"safetensors {safetensors.__version__}, TREEATTN_SEED={seed}")
    failures = 0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for _ in range(rounds):
            for kind in ("llama3", "gpt2", "digits", "digits together"):
                failures += tokenizer_round(program, folder, rng, kind)
        failures += every_character(program, folder)
        for _ in range(10 * rounds):
            failures += config_round(program, folder, rng)
            failures += checkpoint_round(program, folder, rng)
    print(f"{failures} failures")
    return 1 if failures or rounds < 1 else 0


if __name__ == "__main__":
    sys.exit(main())
