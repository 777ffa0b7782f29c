#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The command `treeattn plan`, from outside: its JSON, its messages and exit codes.

Usage: plan_command_test.py TREEATTN
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

from terminal import Terminal

KEYS = ["model", "weights_type", "kv_type", "context", "batch", "cluster", "devices", "devices_needed", "nodes",
        "split_weights", "placement", "chunk_tokens", "branches", "weights_bytes", "kv_bytes", "states_bytes",
        "workspace_bytes", "total_bytes", "usable_bytes", "longest_context", "strategy", "us", "weights_us",
        "attention_us", "exchange_us", "split_weights_us", "memory_limit", "time_limit", "strategies"]
failures = []


def expect(holds, what):
    if not holds:
        failures.append(what)


def run(*options):
    return subprocess.run([sys.argv[1], "plan", *options], capture_output=True, text=True, timeout=120)


def plan(*options):
    done = run(*options, "--json")
    expect(done.returncode == 0, f"{options}: exit code {done.returncode}: {done.stderr}")
    out = json.loads(done.stdout)
    expect(list(out) == KEYS, f"{options}: keys {list(out)}")
    parts = [out[key] for key in ["weights_bytes", "kv_bytes", "states_bytes", "workspace_bytes"]]
    expect(sum(parts) == out["total_bytes"] <= out["usable_bytes"], f"{options}: bytes {parts}")
    times = [out[key] for key in ["weights_us", "attention_us", "exchange_us", "split_weights_us"]]
    expect(abs(sum(times) - out["us"]) < 1e-6 * out["us"], f"{options}: times {times}")
    expect(out["strategies"][0]["strategy"] == out["strategy"], f"{options}: another strategy is best")
    return out


def expect_error(options, *parts):
    done = run(*options)
    expect(done.returncode == 2 and done.stdout == "", f"{options}: exit code {done.returncode}, {done.stdout}")
    for part in parts:
        expect(part in done.stderr, f"{options}: \"{part}\" is not in: {done.stderr}")
    return done.stderr


def check_plans():
    found = plan("--model", "llama-3.1-8b", "--context", "1M")
    expect(found["weights_bytes"] == 16060522496, f"weights of 8B: {found['weights_bytes']}")
    expect(found["devices"] == found["devices_needed"] > 1, f"8B at 1M: {found['devices']} devices")
    given = plan("--model", "llama-3.1-8b", "--context", "1M", "--devices", "16")
    expect(given["devices_needed"] == found["devices"] and given["nodes"] == 2, "16 given: another need")
    expect(given["us"] < found["us"], "16 devices are slower than the fewest")
    smaller = plan("--model", "llama-3.1-8b", "--context", "1M", "--kv-type", "int8", "--weights-type", "int8")
    expect(smaller["devices"] < found["devices"], "int8 needs as many devices")
    bytes_of = {kv: plan("--model", "llama-3.1-8b", "--context", "128k", "--kv-type", kv)["kv_bytes"]
                for kv in ("int8", "fp8")}
    expect(bytes_of["fp8"] == bytes_of["int8"], f"both have a byte an element and a scale a row: {bytes_of}")

    # The inverse: what is said to be the longest fits, one token more does not.
    model = ["--model", "llama-3.2-1b", "--cluster", "rtx4090", "--devices", "2"]
    longest = plan(*model, "--longest")["context"]
    plan(*model, "--context", str(longest))
    error = expect_error([*model, "--context", str(longest + 1)], "does not fit", f"--context {longest}", "--devices 3")
    # What would work does work.
    plan(*model[:-2], "--context", str(longest + 1), *re.search(r"--devices \d+", error)[0].split())
    text = run("--model", "llama-3.1-8b", "--context", "1M")
    expect(all(word in text.stdout for word in ["devices", "placement", "K and V", "best", "limits"]), text.stdout)


def check_directory():
    shape = {"model_type": "llama", "vocab_size": 1024, "hidden_size": 256, "num_hidden_layers": 6,
             "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 704,
             "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": True,
             "hidden_act": "silu"}
    with tempfile.TemporaryDirectory() as folder:
        done = run("--model", folder)
        expect(done.returncode in (1, 2) and "config.json" in done.stderr, f"no config.json: {done.returncode}, {done.stderr}")
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(shape))
        small = plan("--model", folder, "--context", "1024", "--batch", "3")
        layer = 256 * 256 * 2 + 256 * 64 * 2 + 3 * 256 * 704 + 2 * 256
        expect(small["weights_bytes"] == 2 * (6 * layer + 256 + 1024 * 256), f"weights: {small['weights_bytes']}")
        # As `generate --weights int8` keeps them: the table stays as it is stored, and the head is a copy of it.
        table = 1024 * 256
        for tied in (True, False):
            (pathlib.Path(folder) / "config.json").write_text(json.dumps(dict(shape, tie_word_embeddings=tied)))
            int8 = plan("--model", folder, "--context", "1024", "--weights-type", "int8")["weights_bytes"]
            expect(int8 == (6 * layer + 256 + table) * 36 // 32 + 2 * table, f"int8 weights, tied {tied}: {int8}")
        expect(small["kv_bytes"] == 3 * 1024 * 6 * 2 * 2 * 32 * 2, f"K and V: {small['kv_bytes']}")


def check_cluster_file():
    """A name in another encoding than UTF-8 is not a fault of the plan."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "two_boxes.txt"
        done = subprocess.run([sys.argv[1], "simulate", "--print-cluster", "rtx4090"], capture_output=True, timeout=120)
        file.write_bytes(done.stdout.replace(b"= rtx4090", b"= ger\xe4t"))
        out = plan("--model", "llama-3.2-1b", "--cluster", str(file))
        expect(out["cluster"] == "ger\ufffdt", f"cluster: {out['cluster']}")


def check_examples():
    """Every example of the help holds; the last one needs files."""
    examples = re.findall(r"^  treeattn plan (.*?)(?:  .*)?$", run("--help").stdout, re.MULTILINE)
    expect(len(examples) >= 5, f"examples: {examples}")
    for example in examples[:-1]:
        done = run(*example.split())
        expect(done.returncode == 0, f"{example}: exit code {done.returncode}: {done.stderr}")


def help_on_terminal(columns):
    """The help as a terminal of that width gets it."""
    terminal = Terminal(columns)
    with subprocess.Popen([sys.argv[1], "plan", "--help"], stdout=terminal.its) as process:
        text = terminal.said()
        expect(process.wait() == 0, "help on a terminal")
    return text.decode().replace("\r\n", "\n")


def check_help():
    """What options do is broken between words where the line ends, and none is lost."""
    for columns, text in [(100, run("--help").stdout), (60, help_on_terminal(60)), (120, help_on_terminal(200))]:
        options = text[text.index("Options:") : text.index("\n\n", text.index("--model"))]
        longest = max(options.splitlines(), key=len)
        expect(len(longest) <= columns, f"{columns} columns: {longest}")
        said = " ".join(options.split())
        for words in ["llama-3.1-405b, or a directory with config.json (default llama-3.1-8b)", "--json"]:
            expect(words in said, f"{columns} columns: no {words} in {said}")


def check_errors():
    error = expect_error(["--model", "llama-3.1-70b"], "does not fit", "weights", "--split-weights", "--cluster mi300x")
    expect("--kv-type" not in error, f"70B does not fit by another type of K and V: {error}")
    plan("--model", "llama-3.1-70b", "--split-weights")
    # On any number of devices: a shorter context, if that is what is too long.
    expect("--context" not in error, f"70B does not fit with any context: {error}")
    for few in [["--model", "llama-3.1-8b"], ["--model", "llama-3.1-70b", "--split-weights"]]:
        error = expect_error([*few, "--context", "1000000M"], "does not fit", "what would work: --context ")
        context = int(re.search(r"--context (\d+)", error)[1])
        plan(*few, "--context", str(context))
        expect_error([*few, "--context", str(context + 1)], f"--context {context}")
    # Fewer sequences; and more devices with another change, where neither does alone.
    many = ["--model", "llama-3.1-8b", "--context", "1"]
    batch = int(re.search(r"--batch (\d+)", expect_error([*many, "--batch", "65536"], "does not fit"))[1])
    plan(*many, "--batch", str(batch))
    expect_error([*many, "--batch", str(batch + 1)], f"--batch {batch}")
    large = ["--model", "llama-3.1-405b"]
    works = re.search(r"would work: ([^;\n]*)", expect_error([*large, "--devices", "4"], "does not fit"))[1]
    expect("--devices" in works and "--weights-type" in works, f"what would work for 405B: {works}")
    plan(*large, *works.split())
    expect_error(["--model", "llama-7"], "llama-7", "llama-3.1-8b", "config.json")
    expect_error(["--context", "12x"], "--context", "12x", "accepted")
    expect_error(["--context", "0"], "--context", "accepted")
    expect_error(["--batch", "0"], "--batch", "accepted")
    expect_error(["--devices", "5000"], "--devices", "4096")
    expect_error(["--cluster", "nowhere"], "--cluster", "nowhere", "dgx-h100")
    for option in ["--cluster", "--model"]:
        expect_error([option, "n" * 5000], option, "accepted")  # longer than any file's name
    expect_error(["--kv-type", "int4"], "--kv-type", "int4", "fp8")
    expect_error(["--weights-type", "fp8"], "--weights-type", "fp8", "int8")
    expect_error(["--longest", "--context", "1M"], "--longest", "--context")
    # What is printed into a full disk is lost, and that is no success.
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.argv[1], "plan"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    expect(done.returncode == 1 and "standard output" in done.stderr, f"full: {done.returncode}, {done.stderr}")


check_plans()
check_directory()
check_cluster_file()
check_examples()
check_help()
check_errors()
for failure in failures:
    print(failure, file=sys.stderr)
sys.exit(1 if failures else 0)
