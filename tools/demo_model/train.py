#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains the demo model on one GPU in stages of growing length, then measures how well it finds a pass key.

    python3 tools/demo_model/train.py --out DIR [--budget SECONDS] [--time-limit SECONDS] [--resume DIR]

needs torch and numpy, and what prepare.py wrote. Stages are cut by time, not by steps: each has a share of the budget.
One that has learned its length leaves part of its share to the later ones, and one that has not may take more. When
the time limit of this call ends the training, its state is kept in DIR/state-*.pt (each below 16 MiB), for --resume.
DIR gets model.safetensors (after every stage), log.csv, loss.svg and, in the end, eval.json.
"""
import argparse
import csv
import dataclasses
import json
import pathlib
import time

import torch

import batches
import evaluate
import llama

CALL_START = time.time()
HERE = pathlib.Path(__file__).resolve().parent
LANGUAGE_WEIGHT = 0.3
WARM_UP_STEPS = 200
STATE_FILE_BYTES = 12 * 2**20


@dataclasses.dataclass(frozen=True)
class Stage:
    length: int
    tokens: int  # of one step
    share: float  # of the budget
    rate: float  # of learning
    facts: int  # numbers hidden in a sequence, the pass key among them
    stretch_share: float  # sequences whose positions are stretched to the full context
    compiled: bool = True


CONTEXT = 131072
STAGES = [
    Stage(256, 65536, 0.13, 1e-3, 1, 0.0),
    Stage(512, 65536, 0.10, 1e-3, 3, 0.0),
    Stage(2048, 65536, 0.12, 1e-3, 4, 0.5),
    Stage(8192, 65536, 0.13, 6e-4, 8, 0.5),
    Stage(32768, 65536, 0.15, 4e-4, 12, 0.5),
    Stage(65536, 65536, 0.14, 2.5e-4, 12, 0.5),
    Stage(CONTEXT, 131072, 0.23, 2e-4, 12, 0.0, compiled=False),
]
# Lengths and sizes that a CPU runs through in a minute, to try the script.
TOY_STAGES = [Stage(128, 512, 0.5, 1e-3, 1, 0.0), Stage(192, 384, 0.5, 5e-4, 2, 0.5, compiled=False)]


class Progress:
    """Where training stands, and its log."""
    FIELDS = ["step", "length", "seconds", "tokens", "language_loss", "key_loss", "key_accuracy", "fact_accuracy"]

    def __init__(self, out):
        self.step, self.stage, self.seconds, self.stage_seconds, self.tokens = 0, 0, 0.0, 0.0, 0
        self.rows = []
        self.pending = []
        self.path = out / "log.csv"
        self.accuracy = 0.0  # of the pass key, a moving average within the stage

    def as_dict(self):
        kept = ("step", "stage", "seconds", "stage_seconds", "tokens", "accuracy", "rows")
        return {k: getattr(self, k) for k in kept}

    def load(self, values):
        for key, value in values.items():
            setattr(self, key, value)

    def flush(self, stage):
        """Fetches the figures of the steps since the last flush (this waits for the GPU) and logs their mean."""
        language, key, key_right, fact_right = torch.stack(self.pending).mean(0).tolist()
        keep = 0.9 ** min(len(self.pending), 20)
        self.accuracy = keep * self.accuracy + (1 - keep) * key_right
        self.pending = []
        if not language < 20:
            raise RuntimeError(f"the loss is {language} at step {self.step}")
        row = [self.step, stage.length, round(self.seconds, 2), self.tokens, round(language, 4), round(key, 4),
               round(key_right, 4), round(fact_right, 4)]
        self.rows.append(row)
        print("  ".join(f"{n} {v}" for n, v in zip(self.FIELDS, row)), flush=True)

    def write(self):
        with open(self.path, "w", newline="") as file:
            csv.writer(file).writerows([self.FIELDS] + self.rows)


def write_curve(path, rows):
    """Language loss and accuracy of the pass key over time, as an SVG of two lines."""
    if len(rows) < 2:
        return
    width, height, margin = 800, 360, 45
    last, top = max(r[2] for r in rows) or 1, max(r[4] for r in rows) or 1
    x = lambda seconds: margin + (width - 2 * margin) * seconds / last
    y = lambda share: height - margin - (height - 2 * margin) * share
    line = lambda column, scale: " ".join(f"{x(r[2]):.1f},{y(r[column] / scale):.1f}" for r in rows)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
             'font-size="11"><rect width="100%" height="100%" fill="white"/>']
    for before, row in zip([None] + rows, rows):
        if before is None or before[1] != row[1]:
            parts.append(f'<path d="M{x(row[2]):.1f} {y(1)}V{y(0)}" stroke="#ccc"/>'
                         f'<text x="{x(row[2]) + 3:.1f}" y="{y(1) - 5}">{row[1]}</text>')
    for i in range(5):
        parts.append(f'<text x="{margin - 6}" y="{y(i / 4) + 4}" text-anchor="end" fill="#06c">{top * i / 4:.1f}</text>'
                     f'<text x="{width - margin + 6}" y="{y(i / 4) + 4}" fill="#c40">{25 * i} %</text>'
                     f'<text x="{x(last * i / 4):.1f}" y="{height - margin + 16}" text-anchor="middle">'
                     f'{last * i / 4:.0f} s</text>')
    parts.append(f'<polyline points="{line(4, top)}" fill="none" stroke="#06c" stroke-width="1.5"/>'
                 f'<polyline points="{line(6, 1)}" fill="none" stroke="#c40" stroke-width="1.5"/>'
                 f'<text x="{margin}" y="{height - 8}" fill="#06c">language loss, nats a token</text>'
                 f'<text x="{width - margin}" y="{height - 8}" text-anchor="end" fill="#c40">pass key right</text>'
                 f'<text x="{width / 2}" y="{height - 8}" text-anchor="middle">grey: sequence length</text></svg>')
    path.write_text("\n".join(parts) + "\n")


def make_optimizer(model, fused):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
                             lr=1e-3, betas=(0.9, 0.95), eps=1e-9, fused=fused)


def save_state(out, model, optimizer, progress):
    """Weights in f32 and the optimizer's moments in bf16, in files that each stay below STATE_FILE_BYTES."""
    entries = [(("weight", n), p.detach().cpu()) for n, p in model.named_parameters()]
    for name, p in model.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            entries.append(((moment, name), optimizer.state[p][moment].to(torch.bfloat16).cpu()))
    files, size = [{}], 0
    for key, tensor in entries:
        if size + tensor.nbytes > STATE_FILE_BYTES:
            files.append({})
            size = 0
        files[-1][key] = tensor.clone()
        size += tensor.nbytes
    for i, content in enumerate(files):
        torch.save({"tensors": content, "progress": progress.as_dict()}, out / f"state-{i}.pt")


def load_state(folder, model, optimizer, progress):
    tensors = {}
    for path in sorted(folder.glob("state-*.pt")):
        content = torch.load(path, map_location="cpu")
        tensors |= content["tensors"]
        progress.load(content["progress"])
    if not tensors:
        raise SystemExit(f"no state-*.pt in {folder}")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(tensors["weight", name])
            optimizer.state[p] = {m: tensors[m, name].float().to(p.device) for m in ("exp_avg", "exp_avg_sq")}
            optimizer.state[p]["step"] = torch.tensor(float(progress.step), device=p.device)


def train_step(model, optimizer, source, stage, dtype):
    """One update. Returns language loss, key loss, and the shares of right key and fact tokens, on the device."""
    tokens, positions, targets, kinds = source.make(stage.tokens // stage.length, stage.length, stage.facts, CONTEXT,
                                                    stage.stretch_share)
    losses, right = model.losses(tokens, positions, targets, dtype, stage.compiled)

    def mean(values, mask):
        return (values * mask).sum() / mask.sum().clamp(min=1)

    text, key, fact = (kinds == kind for kind in (batches.TEXT, batches.KEY_ANSWER, batches.FACT_ANSWER))
    language_loss, key_loss = mean(losses, text), mean(losses, key)
    loss = key_loss + mean(losses, fact) + LANGUAGE_WEIGHT * language_loss
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return torch.stack([language_loss.detach(), key_loss.detach(), mean(right, key), mean(right, fact)])


def compile_model(model, source, stage, dtype):
    """Compiles all but attention, if this machine can; training goes on without if not."""
    start = time.time()
    model.compiled = tuple(torch.compile(f, dynamic=False) for f in model.eager)
    try:
        tokens, positions, targets, _ = source.make(stage.tokens // stage.length, stage.length, 1, 0, 0)
        model.losses(tokens, positions, targets, dtype, True)[0].mean().backward()
        print(f"compiled in {time.time() - start:.1f} s", flush=True)
    except Exception as error:  # whatever the compiler lacks here, the same functions run without it
        model.compiled = model.eager
        print(f"not compiled: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
    model.zero_grad(set_to_none=True)


def stage_over(progress, stages, budget):
    """Whether to go on to the next stage, from the time spent, what is left, and how well the length is known."""
    left = budget - progress.seconds + progress.stage_seconds
    fair = left * stages[progress.stage].share / sum(s.share for s in stages[progress.stage:])
    if progress.stage == len(stages) - 1:
        return progress.stage_seconds >= left
    if progress.accuracy > 0.998:
        return progress.stage_seconds >= 0.7 * fair
    return progress.stage_seconds >= (fair if progress.accuracy > 0.9 else 1.7 * fair)


def rate_now(progress, stages, budget):
    """Learning rate: a warm-up at the start, and down to a tenth in the course of the last stage."""
    stage = stages[progress.stage]
    rate = stage.rate * min(1.0, (progress.step + 1) / WARM_UP_STEPS)
    if progress.stage == len(stages) - 1:
        whole = budget - progress.seconds + progress.stage_seconds
        rate *= 1.0 - 0.9 * min(1.0, progress.stage_seconds / whole)
    return rate


def train(model, optimizer, source, stages, args, progress, dtype):
    """Runs the stages. Returns whether all are done (or the time limit of this call came first)."""
    clock = last_flush = time.time()
    while progress.stage < len(stages):
        stage = stages[progress.stage]
        for group in optimizer.param_groups:
            group["lr"] = rate_now(progress, stages, args.budget)
        progress.pending.append(train_step(model, optimizer, source, stage, dtype))
        progress.step += 1
        progress.tokens += stage.tokens
        if progress.step % 5 == 0 or stage.length >= 32768:
            torch.cuda.synchronize() if args.device == "cuda" else None
        now = time.time()
        progress.seconds, progress.stage_seconds = progress.seconds + now - clock, progress.stage_seconds + now - clock
        clock = now
        out_of_time = now - CALL_START > args.time_limit
        over = stage_over(progress, stages, args.budget)
        if over or out_of_time or now - last_flush > 2.0:
            progress.flush(stage)
            last_flush = time.time()
        if over:
            progress.stage, progress.stage_seconds, progress.accuracy = progress.stage + 1, 0.0, 0.0
            write_results(model, args.out, progress)
        elif out_of_time:
            return False
    return True


def write_results(model, out, progress):
    llama.write_safetensors(out / "model.safetensors", model.named_parameters())
    progress.write()
    write_curve(out / "loss.svg", progress.rows)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--budget", type=float, default=440, help="seconds of training, over all calls (440)")
    parser.add_argument("--time-limit", type=float, default=1e9, help="seconds after which this call ends")
    parser.add_argument("--resume", type=pathlib.Path, help="folder with the state of an earlier call")
    parser.add_argument("--eval-seconds", type=float, default=90, help="longest evaluation (90)")
    parser.add_argument("--eval-lengths", default="131072,16384,65536")
    parser.add_argument("--trials", type=int, default=32, help="trials per length and tenth of depth (32)")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--toy", action="store_true", help="two tiny stages and a tiny model, to try the script")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    return args


def main():
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    stages = TOY_STAGES if args.toy else STAGES
    config = json.loads((HERE / "model" / "config.json").read_text())
    if args.toy:
        config |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    on_gpu = args.device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    torch.set_float32_matmul_precision("high")
    model = llama.Llama(config, args.seed).to(args.device)
    optimizer = make_optimizer(model, on_gpu)
    progress = Progress(args.out)
    if args.resume:
        load_state(args.resume, model, optimizer, progress)
    corpus = evaluate.DATA / "corpus.npz"
    # A resumed call must not see the sequences of the first one again.
    source = batches.Batches(corpus, args.device, args.seed + progress.step)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if on_gpu else 'CPU'}, "
          f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    if on_gpu:
        llama.choose_attention(model, 32768, dtype)
    if not args.no_compile and progress.stage < len(stages) and stages[progress.stage].compiled:
        compile_model(model, source, stages[progress.stage], dtype)

    print(f"set up in {time.time() - CALL_START:.1f} s", flush=True)
    done = train(model, optimizer, source, stages, args, progress, dtype)
    write_results(model, args.out, progress)
    for path in args.out.glob("state-*.pt"):
        path.unlink()
    if not done:
        save_state(args.out, model, optimizer, progress)
        print(f"time limit reached in stage {stages[progress.stage].length}; continue with --resume {args.out}")
        return
    # What is measured is what was written: the weights rounded to bf16.
    model.load_state_dict(dict(evaluate.read_safetensors(args.out / "model.safetensors")))
    texts = evaluate.samples(model, json.loads((evaluate.DATA / "vocabulary.json").read_text()), args.device, dtype)
    for text in texts:
        print(f"[temperature {text['temperature']}] {text['text']}\n", flush=True)
    lengths = [int(n) for n in args.eval_lengths.split(",")]
    seconds = min(args.eval_seconds, args.time_limit - (time.time() - CALL_START))
    table = evaluate.evaluate(model, corpus, lengths, args.trials, seconds, args.device, dtype)
    (args.out / "eval.json").write_text(json.dumps({
        "device": torch.cuda.get_device_name() if on_gpu else "CPU", "torch": torch.__version__,
        "training_seconds": round(progress.seconds, 1), "steps": progress.step, "tokens": progress.tokens,
        "pass_key": table, "samples": texts}, indent=1) + "\n")
    print(f"all in {time.time() - CALL_START:.0f} s")


if __name__ == "__main__":
    main()
