#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How often the model finds the pass key, by length and depth, on haystacks of held-out stories.

    python3 tools/demo_model/evaluate.py [--lengths 16384,65536,131072] [--trials 32] [--out DIR]

reads tools/demo_model/model and build/demo_model/corpus.npz. A trial is right when the space and all five digits are
each the likeliest next token, which is when greedy decoding writes the key.
"""
import argparse
import json
import pathlib
import time

import numpy as np
import torch

import llama
import needles

HERE = pathlib.Path(__file__).resolve().parent
DATA = HERE.parent.parent / "build" / "demo_model"


class Trials:
    """Prompts with one pass key each, from the same haystacks as the C++ demo's."""

    def __init__(self, path):
        data = np.load(path)
        self.lengths = data["held_out_lengths"].astype(int).tolist()
        ends = np.cumsum(self.lengths)
        self.paragraphs = np.split(data["held_out_tokens"].astype(np.int64), ends[:-1])
        self.digits = data["digits"].astype(np.int64)
        self.needles, self.questions = data["key_needles"].astype(np.int64), data["key_questions"].astype(np.int64)

    def _filled(self, row, key):
        row = row[row != needles.PAD]
        digits = self.digits[[int(d) for d in str(key)]]
        return np.where(row < 0, digits[np.clip(-1 - row, 0, 4)], row)

    def make(self, length, depth_percent, seed):
        """Tokens [length], padded at the end, and the positions of the answer: the space and five digits."""
        key = needles.key_of(seed)
        needle = self._filled(self.needles[seed % len(self.needles)], key)
        asked = self.questions[seed % len(self.questions)]
        end = int(np.argmax(asked == -5)) + 1
        question = self._filled(asked[:end], key)
        room = length - 1 - len(needle) - len(question)
        order, before = needles.haystack(self.lengths, room, depth_percent, seed)
        parts = [self.paragraphs[i] for i in order]
        tokens = np.concatenate([np.zeros(1, np.int64)] + parts[:before] + [needle] + parts[before:] + [question])
        answer = np.arange(len(tokens) - 6, len(tokens))
        return np.pad(tokens, (0, length - len(tokens))), answer


@torch.no_grad()
def found(model, trials, length, cases, device, dtype):
    """For each case (depth in percent, seed): whether the key was found."""
    made = [trials.make(length, depth, seed) for depth, seed in cases]
    tokens = torch.from_numpy(np.stack([t for t, _ in made])).to(device)
    answer = torch.from_numpy(np.stack([a for _, a in made])).to(device)
    return (model.logits(tokens, answer - 1, dtype).argmax(-1) == tokens.gather(1, answer)).all(-1).tolist()


def evaluate(model, path, lengths, trials, seconds, device, dtype, tokens_at_once=131072):
    """Share found per length and tenth of depth. Stops after `seconds`; what was counted is in the answer."""
    start, source, table = time.time(), Trials(path), []
    for index, length in enumerate(lengths):
        hits, tried = [0] * 10, [0] * 10
        cases = [(10 * tenth + (7 * trial) % 10, 1000 * length + 10 * trial + tenth)
                 for trial in range(trials) for tenth in range(10)]
        step = max(1, tokens_at_once // length)
        begun = time.time()
        for i in range(0, len(cases), step):
            if time.time() - start > seconds:
                break
            part = cases[i:i + step]
            for (depth, _), hit in zip(part, found(model, source, length, part, device, dtype)):
                hits[depth // 10] += hit
                tried[depth // 10] += 1
        table.append({"length": length, "tried": tried, "found": hits, "seconds": round(time.time() - begun, 1)})
        shares = " ".join(f"{100 * h / t:5.1f}" if t else "    -" for h, t in zip(hits, tried))
        if index == 0:
            print("pass key found, % per tenth of depth")
            print(" length  trials " + " ".join(f"{d * 10:4}-" for d in range(10)))
        print(f"{length:7} {sum(tried):7} {shares}   {table[-1]['seconds']} s", flush=True)
    return table


@torch.no_grad()
def continue_text(model, prompt_ids, count, device, dtype, temperature=0.0, seed=0):
    """Plain generation without a cache, for a look at the English. One shape throughout: some attention backends
    prepare for every new one."""
    generator = torch.Generator(device=device).manual_seed(seed)
    begin, end = len(prompt_ids), len(prompt_ids) + count
    tokens = torch.zeros((1, end + -end % 64), dtype=torch.long, device=device)
    tokens[0, :begin] = torch.tensor(prompt_ids)
    for at in range(begin, end):
        logits = model.logits(tokens, torch.tensor([[at - 1]], device=device), dtype)[0, 0]
        if temperature > 0:
            tokens[0, at] = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[0]
        else:
            tokens[0, at] = logits.argmax(-1)
    return tokens[0, :end].tolist()


def samples(model, vocabulary, device, dtype, count=140):
    """Texts as the model writes them from nothing, one per temperature and seed."""
    texts = []
    for temperature, seed in ((0.0, 0), (0.7, 1), (0.7, 2), (1.0, 3)):
        ids = continue_text(model, [0], count, device, dtype, temperature, seed)
        texts.append({"temperature": temperature, "seed": seed, "text": "".join(vocabulary[i] for i in ids[1:])})
    return texts


def read_safetensors(path):
    raw = pathlib.Path(path).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:8 + size])
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            bits = torch.frombuffer(bytearray(raw[8 + size + begin:8 + size + end]), dtype=torch.bfloat16)
            yield name, bits.view(entry["shape"]).float()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=pathlib.Path, default=HERE / "model")
    parser.add_argument("--weights", type=pathlib.Path, help="model.safetensors, if not in the folder of the model")
    parser.add_argument("--data", type=pathlib.Path, default=DATA)
    parser.add_argument("--lengths", default="16384,65536,131072")
    parser.add_argument("--trials", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = llama.Llama(json.loads((args.model / "config.json").read_text())).to(device)
    model.load_state_dict(dict(read_safetensors(args.weights or args.model / "model.safetensors")))
    table = evaluate(model, args.data / "corpus.npz", [int(n) for n in args.lengths.split(",")], args.trials,
                     args.seconds, device, dtype)
    texts = samples(model, json.loads((args.data / "vocabulary.json").read_text()), device, dtype)
    for text in texts:
        print(f"[temperature {text['temperature']}] {text['text']}\n")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "eval.json").write_text(json.dumps({"pass_key": table, "samples": texts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
