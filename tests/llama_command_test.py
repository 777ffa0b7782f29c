#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""treeattn generate, chat and bench llama from outside, on the models of tests/golden/llama.

Usage: llama_command_test.py TREEATTN GOLDEN [LAUNCHER...]     GOLDEN: tests/golden/llama
"""
import array
import fcntl
import functools
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from terminal import Terminal

TREEATTN, GOLDEN, LAUNCHER = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3:]
# More ranks than cores, as root.
ENVIRONMENT = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
ORDER = ["--chunk", "64", "--branches", "16"]
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored, by all that is started here

# In the words of the published one.
LLAMA3_TEMPLATE = ("{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ "
                   "message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
                   "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}")


def treeattn(*arguments, expect=0, launcher=(), stdin=b""):
    command = [*launcher, TREEATTN, *map(str, arguments)]
    done = subprocess.run(command, input=stdin, capture_output=True, env=ENVIRONMENT, timeout=300)
    assert done.returncode == expect, f"{command} ended with {done.returncode}: {done.stdout} {done.stderr}"
    return done


def generated(model, *arguments, **keywords):
    return json.loads(treeattn("generate", "--model", model, "--json", "--ignore-eos", *ORDER, *arguments, **keywords).stdout)


def refused(says, *arguments, code=2, **keywords):
    done = treeattn(*arguments, expect=code, **keywords)
    assert says in done.stderr.decode(), f"{arguments}: {done.stderr} does not say {says!r}"
    assert not done.stdout, done.stdout


def byte_tokenizer(added):
    """tokenizer.json of the 256 bytes, and of added tokens, of which the first begins a text."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    vocabulary = {chr(b if b in printable else next(rest)): b for b in range(256)}
    return {"model": {"type": "BPE", "vocab": vocabulary, "merges": []},
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            "decoder": {"type": "ByteLevel"},
            "post_processor": {"type": "TemplateProcessing",
                               "single": [{"SpecialToken": {"id": added[0]}}, {"Sequence": {"id": "A"}}]},
            "added_tokens": [{"id": 256 + i, "content": text, "special": True} for i, text in enumerate(added)]}


def with_bytes(directory):
    """A model of 260 tokens with a tokenizer: the golden one, its table repeated."""
    source = GOLDEN / "untied_scaled_f32"
    config = json.loads((source / "config.json").read_text())
    data = (source / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8:8 + size]), data[8 + size:]
    header.pop("__metadata__", None)
    vocab, out, tensors = 260, {}, b""
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        values = body[begin:end]
        if entry["shape"][0] == config["vocab_size"]:
            row = len(values) // entry["shape"][0]
            # Rows that are not all equal in pairs: each repetition is scaled.
            rows = array.array("f", values)
            width = row // 4
            values = b"".join(
                array.array("f", [x * (1 + r // config["vocab_size"] / 8)
                                  for x in rows[r % config["vocab_size"] * width:][:width]]).tobytes()
                for r in range(vocab))
            entry = dict(entry, shape=[vocab, entry["shape"][1]])
        out[name] = dict(entry, data_offsets=[len(tensors), len(tensors) + len(values)])
        tensors += values
    text = json.dumps(out).encode()
    text += b" " * (-len(text) % 8)
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + tensors)
    config.update(vocab_size=vocab, bos_token_id=256, eos_token_id=[259])
    (directory / "config.json").write_text(json.dumps(config))
    special = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    (directory / "tokenizer.json").write_text(json.dumps(byte_tokenizer(special)))
    return directory


def check_ranks(model, scratch):
    prompt = "A text that is longer than a chunk of sixty-four tokens, so that two ranks have a part of it. " * 2
    warm = ["--temperature", "0.9", "--top-p", "0.9", "--seed", "5", "-n", "40"]
    logits = [scratch / "one", scratch / "three"]
    one = generated(model, prompt, *warm, "--logits", logits[0])
    assert one["prompt_tokens"] == len(prompt) + 1 and len(one["tokens"]) <= 40, one
    three = generated(model, prompt, *warm, "--ranks", 3, "--logits", logits[1])
    assert three["ranks"] == 3 and three["tokens"] == one["tokens"] and three["text"] == one["text"]
    assert logits[0].read_bytes() == logits[1].read_bytes() and logits[0].stat().st_size == len(one["tokens"]) * 260 * 4
    if LAUNCHER:
        mpi = generated(model, prompt, *warm, launcher=LAUNCHER)
        assert mpi["transport"] == "mpi" and mpi["tokens"] == one["tokens"], mpi
    other = generated(model, prompt, *warm[:-3], "6", "-n", "40")
    assert other["tokens"] != one["tokens"]
    return prompt


def check_prompts(model, scratch, prompt):
    (scratch / "prompt").write_text(prompt)
    want = generated(model, prompt, "-n", 8)
    assert generated(model, "--file", scratch / "prompt", "-n", 8)["tokens"] == want["tokens"]
    assert generated(model, "-n", 8, stdin=prompt.encode())["tokens"] == want["tokens"]
    plain = treeattn("generate", "--model", model, prompt, "-n", 8, "--ignore-eos", *ORDER).stdout.decode(errors="strict")
    assert plain == want["text"] + "\n", (plain, want)
    with_logprobs = generated(model, prompt, "-n", 4, "--logprobs", 3)["logprobs"]
    assert len(with_logprobs) == 4 and all(place["top"][0]["token"] == place["token"] for place in with_logprobs)
    half = generated(model, prompt, "-n", 4, "--save", scratch / "session", "--ranks", 3)
    rest = generated(model, "-n", 4, "--load", scratch / "session", "--ranks", 2)
    assert half["tokens"] + rest["tokens"] == want["tokens"], (half, rest, want)
    assert rest["prompt_tokens"] == 0, rest
    assert generated(model, "more", "-n", 1, "--load", scratch / "session")["prompt_tokens"] == len("more")
    # A first save may be cut off when its cache is there and its text has no name yet, or before that.
    (scratch / "session" / "session.tokens").rename(scratch / "session" / "session.tokens.tmp")
    assert generated(model, "-n", 4, "--load", scratch / "session")["tokens"] == rest["tokens"]
    (scratch / "draft").mkdir()
    shutil.copy(scratch / "session" / "session.tokens.tmp", scratch / "draft")
    refused(f"--load: {scratch}/draft/cache.manifest: cannot open", "generate", "--random-weights", "llama-3.1-405b",
            "--load", scratch / "draft")
    # Where only a save has left something, the next one takes its place; what lies beside a saved text stays.
    generated(model, prompt, "-n", 4, "--save", scratch / "draft")
    (scratch / "draft" / "notes").write_text("mine")
    generated(model, prompt, "-n", 4, "--save", scratch / "draft")
    assert generated(model, "-n", 4, "--load", scratch / "draft")["tokens"] == rest["tokens"]
    assert (scratch / "draft" / "notes").read_text() == "mine"
    # What is asked of memory counts what was said before.
    refused(f"{want['prompt_tokens'] + 4 + 5} tokens on 1 rank", "generate", "--random-weights", "llama-3.1-405b",
            "-n", 5, "--load", scratch / "session", code=3)
    # And in the type and the order of its cache, which go on.
    generated(model, "x", "-n", 1, "--kv-type", "f32", "--save", scratch / "wide")
    large = ["generate", "--random-weights", "llama-3.1-405b", "-n", 1000]
    complaints = (treeattn(*large, *more, expect=3).stderr for more in
                  (["x", *ORDER], ["x", *ORDER, "--kv-type", "f32"], ["--load", scratch / "wide"]))
    plain, wide, loaded = (re.search(rb", (\S+ \S+) of cache", complaint)[1] for complaint in complaints)
    assert plain != wide == loaded, (plain, wide, loaded)
    # What fits into the context of a model counts it, too.
    (scratch / "long").write_text("x" * 131071)
    refused("the prompt 131071; accepted: together fewer than the model's context, 131072", "generate",
            "--random-weights", "llama-3.1-405b", "--load", scratch / "session", "--file", scratch / "long")


def check_refusals(model, scratch):
    here = ["generate", "--model", model]
    refused("the prompt is empty", *here, stdin=b"")
    refused("prompt is empty", *here, "", stdin=b"not asked for")
    refused("--max-tokens is empty", *here, "x", "-n", "")
    refused("UTF-8", *here, stdin=b"caf\xe9 society")
    (scratch / "empty").write_text("")
    for going_on in [], ["--load", scratch / "session"]:
        refused(f"--file: {scratch}/empty is empty", *here, *going_on, "--file", scratch / "empty")
    refused('generate does not know "b"', *here, "--", "a", "b")
    refused("--file: /dev/zero: has more than 1 GiB", *here, "--file", "/dev/zero")
    refused("context", *here, stdin=b"x" * 5000)
    refused('--weights is "int4"; accepted: stored, bf16, int8', *here, "x", "--weights", "int4")
    refused("accepted: cpu, cuda", *here, "x", "--device", "gpu")
    refused("1000", *here, "x", "--device", "cuda:1000", code=3)  # of so many GPUs, or of none
    refused('--strategy is "merge,ring"; accepted: paper', *here, "x", "--strategy", "merge,ring")
    refused("--kv-type is", *here, "x", "--kv-type", "int4")
    refused("--temperature is", *here, "x", "--temperature", "hot")
    # Before any weight is read, and before memory is asked for: there is none for these.
    large = ["generate", "--random-weights", "llama-3.1-405b", "x"]
    refused('--chunk is "65"; accepted: multiples of 64', *large, "--chunk", 65)
    refused('--branches is "3"; accepted: a power of two', *large, "--branches", 3)
    refused(f"--load: {scratch}/nothing/cache.manifest: cannot open", *large, "--load", scratch / "nothing")
    refused(f"--file: {scratch}: cannot read", *here, "--file", scratch)
    refused(f"--file: {scratch}/nothing: cannot open", *here, "--file", scratch / "nothing")
    # \udcff is how Python hands the byte 0xff over.
    refused("--stop: byte 1 of 2", *here, "x", "--stop", "a\udcff")
    refused("the prompt: byte 0 of 1 is not UTF-8", *here, "--stop", "a", "\udcff")  # not another string to stop at
    refused("without --json", *here, "x", "--logprobs", "2")
    for command in ["demo", "chat"]:  # what has no tokenizer is no choice
        refused(f'treeattn {command} does not know "--random-weights"', command, "--random-weights", "llama-3.2-1b")
    refused("--model is missing; accepted: a directory\n", "chat")
    refused('--strategy is ring; accepted by demo: another', "demo", "--strategy", "ring")
    refused('--tokens is "10"; accepted: at least', "demo", "--tokens", 10)
    refused(f"--stories: {scratch}/nothing: cannot open", "demo", "--stories", scratch / "nothing")
    refused(f"--stories: {scratch}: cannot read", "demo", "--stories", scratch)
    refused("--stories: /dev/zero: has more than 1 GiB", "demo", "--stories", "/dev/zero")
    (scratch / "stories").write_bytes(b"A story.\n\xff\n")
    refused("a paragraph of --stories: byte 0 of 1 is not UTF-8", "demo", "--stories", scratch / "stories")
    refused("--save: /dev/null/here", *here, "x", "--save", "/dev/null/here")  # before any text: stdout is empty
    # What lies there already would be mixed with what is saved.
    refused(f"--save: {model}: has other files, such as config.json; accepted: a directory that is new, is empty or has",
            *large, "--save", model)
    refused("--logprobs", "chat", "--model", model, "--logprobs", "2")
    refused("--system: byte 0 of 1", "chat", "--model", model, "--system", "\udcff")
    refused("--model is missing; accepted: a directory, or --random-weights instead", "generate", "x")
    refused("one of the two", "generate", "--model", "x", "--random-weights", "llama-3.2-1b", "x")
    refused('--random-weights is "llama-7"; accepted: llama-3.2-1b', "generate", "--random-weights", "llama-7", "x")
    refused(f"--model: {scratch}/nothing/config.json", "generate", "--model", scratch / "nothing", "x")
    refused("no number of machines like this one would do: each needs all weights", "generate", "--random-weights",
            "llama-3.1-405b", "x", code=3)
    refused("not even 4 ranks would do, one for each branch", "generate", "--model", model, "x", "--chunk", "1024m",
            "--branches", "4", code=3)
    refused("which has no tokenizer; accepted with --stop", "generate", "--model", GOLDEN / "untied_scaled_f32", "x",
            "--stop", "y")
    refused("which has no tokenizer; accepted by chat", "chat", "--model", GOLDEN / "untied_scaled_f32")


def check_incomplete_model(model, scratch):
    """What is not all there is not taken for what has been left out."""
    parts = scratch / "parts"
    parts.mkdir()
    ask = ["generate", "--model", parts, "x", "-n", "2"]
    refused(f"--model: {parts}/config.json: not there; accepted: a directory as Hugging Face has them", *ask)
    (parts / "snapshots").mkdir()
    refused("those in snapshots are such directories", *ask)
    shutil.copy(model / "config.json", parts)
    refused(f"{parts}: no checkpoint; accepted: a directory with model.safetensors or", *ask)
    # As in a cache of downloads, where names are links.
    weights = parts / "model.safetensors"
    weights.symlink_to("blob")
    refused(f"{weights}: cannot open: No such file or directory", *ask)
    shutil.copy(model / "model.safetensors", parts / "blob")
    without = treeattn(*ask)
    assert f"{parts} has no tokenizer.json" in without.stderr.decode(), without.stderr
    for name in ["tokenizer.json", "generation_config.json"]:
        (parts / name).symlink_to("nothing")
        refused(f"{parts}/{name}: cannot open: No such file or directory", *ask)
        (parts / name).unlink()
    shutil.copy(model / "tokenizer.json", parts)
    (parts / "tokenizer_config.json").symlink_to("nothing")
    refused("tokenizer_config.json: cannot open: No such file or directory", "chat", "--model", parts)
    (parts / "tokenizer_config.json").unlink()
    # Cut while it is in use.
    chat = subprocess.Popen([TREEATTN, "chat", "--model", parts, "-n", "2", *ORDER], stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
                            env=dict(ENVIRONMENT, ASAN_OPTIONS="handle_sigbus=0:detect_leaks=0"))
    chat.stdin.write(b"Hello.\n")
    chat.stdin.flush()
    chat.stdout.read(1)  # it answers
    os.truncate(weights, 0)
    error = chat.communicate(b"And?\n", timeout=60)[1].decode()
    assert chat.returncode == -signal.SIGBUS and "a file of the model was cut" in error, (chat.returncode, error)


def check_other_tensors(model, scratch):
    """Weights that would be left out make another model; what is not of the model does no harm."""
    data = (model / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    want = generated(model, "x", "-n", 4)["tokens"]
    other = scratch / "other"
    shutil.copytree(model, other)

    def with_tensor(name):
        body = data[8 + size:] + bytes(4)
        offsets = [len(body) - 4, len(body)]
        header = dict(json.loads(data[8:8 + size]), **{name: {"dtype": "F32", "shape": [1], "data_offsets": offsets}})
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        (other / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)

    for name in ["model.layers.0.self_attn.q_proj.bias", "model.layers.9.input_layernorm.weight", "model.norm.bias"]:
        with_tensor(name)
        refused(f"{other}: has the tensor {name}, which", "generate", "--model", other, "x")
    for name in ["model.layers.0.self_attn.rotary_emb.inv_freq", "score.weight"]:
        with_tensor(name)
        assert generated(other, "x", "-n", 4)["tokens"] == want, name
    # The same from shards.
    with_tensor("model.norm.bias")
    (other / "model.safetensors").rename(other / "all.safetensors")
    names = [name for name in json.loads(data[8:8 + size]) if name != "__metadata__"]
    index = other / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "all.safetensors")}))
    assert generated(other, "x", "-n", 4)["tokens"] == want
    index.write_text(json.dumps({"weight_map": dict.fromkeys([*names, "model.norm.bias"], "all.safetensors")}))
    refused("has the tensor model.norm.bias, which", "generate", "--model", other, "x")


def check_other_head(model, scratch):
    """A tied model may have the embedding a second time, but no other matrix in its place."""
    other = scratch / "head"
    shutil.copytree(model, other)
    config = json.loads((other / "config.json").read_text())
    tied, untied = (json.dumps(dict(config, tie_word_embeddings=tie)) for tie in (True, False))
    (other / "config.json").write_text(tied)
    refused("has lm_head.weight that is not model.embed_tokens.weight", "generate", "--model", other, "x")
    data = bytearray((other / "model.safetensors").read_bytes())
    body = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:body])
    head, table = (slice(*(body + at for at in header[name]["data_offsets"]))
                   for name in ("lm_head.weight", "model.embed_tokens.weight"))
    data[head] = data[table]
    (other / "model.safetensors").write_bytes(data)
    got = generated(other, "x", "-n", 4)["tokens"]
    (other / "config.json").write_text(untied)
    assert generated(other, "x", "-n", 4)["tokens"] == got


def check_stats(model):
    said = [treeattn("generate", "--model", model, "x", "--ignore-eos", "--stats", "-n", n).stderr for n in (1, 2)]
    # One token is the first: there is none after it to time.
    assert b"1 token; 0 B sent" in said[0] and b"2 tokens, " in said[1] and b" a second); " in said[1], said


def check_streams(model, scratch):
    """What the shell connects may not work; then the text and the exit code are the same, or say so."""
    command = [TREEATTN, "generate", "--model", model, "-n", "4", "--ignore-eos"]
    text = subprocess.run([*command, "x"], capture_output=True, timeout=60, check=True).stdout
    with open("/dev/full", "wb") as full:
        deaf = subprocess.run([*command, "x", "--stats"], stdout=subprocess.PIPE, stderr=full, timeout=60)
        assert deaf.returncode == 0 and deaf.stdout == text, deaf
        assert subprocess.run([*command, "x", "--nonsense"], stderr=full, timeout=60).returncode == 2
    folder = os.open(scratch, os.O_RDONLY)
    unread = subprocess.run(command, stdin=folder, capture_output=True, timeout=60)
    assert unread.returncode == 2 and b"standard input: cannot read" in unread.stderr, unread
    chat = [TREEATTN, "chat", "--model", model, "--ranks", "2"]
    unread = subprocess.run(chat, stdin=folder, capture_output=True, timeout=60)  # no end of a conversation
    os.close(folder)
    assert unread.returncode == 2 and b"standard input cannot be read" in unread.stderr, unread
    with open("/dev/zero", "rb") as endless:
        unread = subprocess.run(chat, stdin=endless, capture_output=True, timeout=60)
    assert unread.returncode == 2 and b"a line of more than 16 MiB" in unread.stderr, unread
    # stdout is closed: no file that is opened may take its number and get the text.
    closed = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command, "x", "--save", scratch / "quiet"],
                            stderr=subprocess.PIPE, timeout=60)
    assert closed.returncode == 1 and b"standard output cannot be written" in closed.stderr, closed
    treeattn("generate", "--model", model, "-n", 1, "--load", scratch / "quiet")
    # Who saves where another one does waits for it.
    folder = os.open(scratch / "quiet", os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    second = subprocess.Popen([*command, "x", "--save", scratch / "quiet"], stdout=subprocess.PIPE)
    assert second.stdout.read(len(text)) == text and second.poll() is None, second
    time.sleep(0.3)
    assert second.poll() is None, "saved into a directory that another one held"
    os.close(folder)
    assert second.wait(timeout=60) == 0
    # Saving fails when the text is there.
    (scratch / "blocked" / "session.tokens.tmp").mkdir(parents=True)
    unsaved = treeattn("generate", "--model", model, "x", "-n", 4, "--json", "--save", scratch / "blocked", expect=2)
    assert len(json.loads(unsaved.stdout)["tokens"]) <= 4 and b"session.tokens.tmp" in unsaved.stderr, unsaved


def check_generation_config(model):
    """What is not said on the command line is as the model's file says."""
    file, prompt = model / "generation_config.json", "Once upon a time"
    greedy = generated(model, prompt, "-n", 9)
    drawn = generated(model, prompt, "-n", 9, "--temperature", 5, "--top-k", 50, "--top-p", 0.99)
    turn = prompt.encode() + b"\n"
    chatted = treeattn("chat", "--model", model, "-n", 9, "--ignore-eos", *ORDER, stdin=turn).stdout
    file.write_text(json.dumps({"do_sample": True, "temperature": 5, "top_p": 0.99, "max_new_tokens": 9}))
    as_told = generated(model, prompt, "--ranks", 2)
    assert as_told["tokens"] == drawn["tokens"] != greedy["tokens"], (as_told, drawn, greedy)
    assert as_told["sampler"] == drawn["sampler"] == {"temperature": 5, "top_k": 50, "top_p": 0.99, "min_p": 0,
                                                      "repetition_penalty": 1, "seed": 0}, as_told
    assert generated(model, prompt, "--temperature", 0)["tokens"] == greedy["tokens"]
    chat = ["chat", "--model", model, "--ignore-eos", *ORDER]
    assert treeattn(*chat, "--temperature", 0, stdin=turn).stdout == chatted != treeattn(*chat, stdin=turn).stdout
    file.unlink()


def check_without_tokenizer():
    done = treeattn("generate", "--model", GOLDEN / "untied_scaled_f32", "\x01\x02\x03", "-n", 5, "--ignore-eos")
    assert len(done.stdout.split()) == 5 and all(0 <= int(x) < 37 for x in done.stdout.split()), done.stdout


def check_chat(model):
    turns = "Hello there.\n\nAnd again, with more to say.\n".encode()
    one = treeattn("chat", "--model", model, "--system", "Be brief.", "-n", 12, *ORDER, stdin=turns).stdout
    many = treeattn("chat", "--model", model, "--system", "Be brief.", "-n", 12, *ORDER, "--ranks", 3,
                    stdin=turns).stdout
    assert one == many and one.count(b"\n") >= 2, (one, many)
    # As other systems end lines: one without words is no message there either.
    theirs = turns.replace(b"\n", b"\r\n") + b" \t\r\n"
    assert treeattn("chat", "--model", model, "--system", "Be brief.", "-n", 12, *ORDER, stdin=theirs).stdout == one
    # A model that says how it chats, but not in Llama 3's way, or that it does not.
    described = model / "tokenizer_config.json"
    described.write_text(json.dumps({"chat_template": "<|im_start|>{{ message['role'] }}"}))
    refused("<|start_header_id|>", "chat", "--model", model, code=3)
    described.write_text("{}")
    refused("does not chat", "chat", "--model", model, code=3)
    described.write_text(json.dumps({"chat_template": "<|start_header_id|><|end_header_id|><|eot_id|>"}))
    other = treeattn("chat", "--model", model, "--system", "Be brief.", "-n", 12, *ORDER, stdin=turns)
    assert other.stdout == one and b"none of those published" in other.stderr, other
    described.write_text(json.dumps({"chat_template": LLAMA3_TEMPLATE}))
    same = treeattn("chat", "--model", model, "--system", "Be brief.", "-n", 12, *ORDER, stdin=turns)
    assert same.stdout == one and not same.stderr, same
    check_dated_chat(model, described, turns)
    described.unlink()


def check_dated_chat(model, described, turns):
    """The lines that templates from Llama 3.1 on write before the system message."""
    def chat(*arguments):
        done = treeattn("chat", "--model", model, "-n", 12, *ORDER, *arguments, stdin=turns)
        assert not done.stderr, done
        return done.stdout

    lines = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\nBe brief."
    expected = chat("--system", lines)  # the template has no date yet
    undated = chat("--system", "Be brief.")
    refused('--date is "1 May"', "chat", "--model", model, "--date", "1 May")
    dated = LLAMA3_TEMPLATE + """{%- set date_string = "26 Jul 2024" %}{%- set system_message = "" %}
        {{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}{{- "Cutting Knowledge Date: December 2023\\n" }}
        {{- "Today Date: " + date_string + "\\n\\n" }}"""
    described.write_text(json.dumps({"chat_template": dated}))
    assert chat("--system", "Be brief.") == chat("--system", "Be brief.", "--ranks", 3) == expected != undated
    assert chat() == chat("--date", "26 Jul 2024") != chat("--date", "Doomsday")
    described.write_text(json.dumps({"chat_template": '{%- set date_string = strftime_now("%d %b %Y") %}' + dated}))
    before = time.strftime("%d %b %Y")
    today = chat()
    assert today in [chat("--date", date) for date in (before, time.strftime("%d %b %Y"))]


def check_interrupted_load():
    """Ctrl-C ends the program while weights are read, as there is no text yet."""
    loading = subprocess.Popen([TREEATTN, "generate", "--random-weights", "llama-3.2-1b", "x"], stderr=subprocess.PIPE)
    time.sleep(0.3)
    loading.send_signal(signal.SIGINT)
    complaint = loading.communicate(timeout=60)[1]
    assert loading.returncode in (-signal.SIGINT, 3), (loading.returncode, complaint)  # 3: too little memory


def after_progress(*arguments, stdin=subprocess.DEVNULL, interrupt=True):
    """What is on a terminal after the progress was last wiped; interrupt: by Ctrl-C as soon as there is any."""
    terminal = Terminal()
    reading = subprocess.Popen([TREEATTN, *arguments], stdin=stdin, stdout=terminal.its, stderr=terminal.its,
                               env=dict(os.environ, TERM="xterm"))
    said = terminal.said(*[(b"reading", lambda: reading.send_signal(signal.SIGINT))] if interrupt else [])
    assert reading.wait(timeout=60) == 0, said
    return said.split(b"\r\x1b[K")[-1]


def check_progress(scratch):
    """What is printed when nothing was said yet begins a line: the progress is gone."""
    (scratch / "book").write_text("x" * 120000)
    # One thread: what is waited for are two seconds.
    model = ["--threads", "1", "--model", GOLDEN.parents[2] / "tools" / "demo_model" / "model"]
    said = after_progress("generate", *model, "--file", scratch / "book", "--json")
    assert said.startswith(b'{"text":"","tokens":[],"reason":"interrupted"'), said
    with open(scratch / "book", "rb") as book:
        said = after_progress("chat", *model, stdin=book)
    assert said == b"\r\n", said
    said = after_progress("demo", "--tokens", "8k", "--ranks", "1", "--threads", "1", "--json", interrupt=False)
    assert said.startswith(b'{"tokens":'), said


def check_history(answer, model, *arguments):
    """That a chat goes on as the template writes it with this answer, as is printed."""
    question = "x" * 5000  # too long: the refusal counts the tokens
    message = "#{}#\n\n{}#"  # one byte for each token of the template
    text = "#" + "".join(message.format(*one) for one in
                         [("user", "Hello."), ("assistant", answer), ("user", question)]) + "#assistant#\n\n"
    chat = treeattn("chat", "--model", model, *arguments, *ORDER, stdin=f"Hello.\n{question}\n".encode())
    assert chat.stdout.decode() == answer + "\n", (chat.stdout, answer)
    count = len(text.encode())
    assert f"a text of {count} tokens" in chat.stderr.decode(), (count, chat.stderr)


def check_ends_of_answers(model, scratch):
    """An answer is in the history as the template writes it, whatever has ended it."""
    other = scratch / "ends"
    shutil.copytree(model, other)
    config = json.loads((model / "config.json").read_text())
    config["eos_token_id"] = list(range(195, 259))  # not <|eot_id|>; the first token that is said is one of them
    (other / "config.json").write_text(json.dumps(config))
    check_history("", other)
    # A string of --stop, which nobody has seen, and which may begin with the answer.
    whole = treeattn("chat", "--model", model, "--ignore-eos", "-n", 40, *ORDER, stdin=b"Hello.\n").stdout.decode()[:-1]
    for at in (0, len(whole) // 2):
        stop = whole[at:at + 4]
        for ranks in (1, 3):
            check_history(whole[:whole.index(stop)], model, "--ignore-eos", "-n", 40, "--stop", stop, "--ranks", ranks)
    # The template's own token ends an answer also where the model does not name it.
    config["eos_token_id"] = None
    (other / "config.json").write_text(json.dumps(config))
    warm = ["--temperature", "2", "--seed", "1", "-n", "1000", *ORDER]
    named, unnamed, endless = (treeattn("chat", "--model", *chat, *warm, stdin=b"Hello.\n").stdout
                               for chat in ([model], [other], [other, "--ignore-eos"]))
    assert named == unnamed != endless, (named, unnamed, endless)


def check_interrupted_chat(model):
    """Ctrl-C while nothing is said ends nothing: the next answer is whole. In the background none ends anything."""
    command = [TREEATTN, "chat", "--model", str(model), "-n", "12", "--ignore-eos", *ORDER]
    first, both = (subprocess.run(command, input=turns, capture_output=True, timeout=60, check=True).stdout
                   for turns in (b"Hello.\n", b"Hello.\nAgain.\n"))
    for handling, interrupts in [(signal.SIG_DFL, 1), (signal.SIG_IGN, 2)]:
        chat = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                preexec_fn=lambda: signal.signal(signal.SIGINT, handling))
        chat.stdin.write(b"Hello.\n")
        chat.stdin.flush()
        said = chat.stdout.read(len(first))
        for _ in range(interrupts):
            time.sleep(0.2)
            chat.send_signal(signal.SIGINT)
        time.sleep(0.2)
        said += chat.communicate(b"Again.\n", timeout=60)[0]
        assert chat.returncode == 0 and said == both, (handling, chat.returncode, said, both)
    # A person at the prompt is told that another one ends it, unless there is a line between them.
    terminal = Terminal()
    chat = subprocess.Popen(command, stdin=terminal.its, stdout=terminal.its, stderr=terminal.its)
    interrupt = functools.partial(chat.send_signal, signal.SIGINT)
    hint = b"Ctrl-C once more ends the conversation.\r\n> "
    said = terminal.said((b"> ", interrupt), (hint, lambda: os.write(terminal.ours, b"\n")), (b"\r\n> ", interrupt),
                         (hint, interrupt))
    assert chat.wait(timeout=60) == -signal.SIGINT and said.count(hint) == 2, (chat.returncode, said)


def check_one_that_differs(model, scratch):
    """One rank of several was started in another way, or lacks something: somebody says which and what."""
    if not LAUNCHER:
        return
    here = ["generate", "--model", model, "x", "-n", "4", "--deadline", "20"]
    for says, others in [
            ("rank 3 has other --top-k, --seed than rank 0", [*here, "--seed", "4", "--top-k", "3"]),
            ("rank 3 has other --stop than rank 0", [*here, "--stop", "y"]),
            ("rank 3 has other --weights, --piece than rank 0", [*here, "--piece", "2", "--weights", "int8"]),
            ("rank 3 has other --save than rank 0", [*here, "--save", scratch / "saved by one"]),
            ("rank 3 has other --ranks than rank 0", [*here, "--ranks", "3"]),
            ("rank 3 has other command than rank 0", ["bench", "decode", "--quick"]),
            ("rank 3 has other tokens in the prompt than rank 0", [*here[:3], "y", *here[4:]]),
            ("rank 3: ", [*here[:2], scratch / "nowhere", *here[3:]])]:
        command = [*LAUNCHER, TREEATTN, *map(str, here), ":", "-n", "1", TREEATTN, *map(str, others)]
        done = subprocess.run(command, capture_output=True, env=ENVIRONMENT, timeout=120)
        said = done.stderr.decode()
        assert done.returncode == 2 and said.count("treeattn: ") == 1 and says in said, (says, done)
    # A limit of addresses on one of them: caches leave enough for the rest.
    alone = ["sh", "-c", 'ulimit -v 1000000; exec "$@"', "sh", TREEATTN, *map(str, here)]
    command = [*LAUNCHER, TREEATTN, *map(str, here), ":", "-n", "1", *alone]
    done = subprocess.run(command, capture_output=True, env=ENVIRONMENT, timeout=120)
    assert done.returncode == 0, done
    # Going on with a text on some of them only; and what each may have of its own.
    saved = [*here[:3], "--load", scratch / "session", *here[4:]]
    own = [*here, "--threads", "1"]
    for code, first, second in [(2, saved, here), (0, here, own)]:
        command = [*LAUNCHER, TREEATTN, *map(str, first), ":", "-n", "1", TREEATTN, *map(str, second)]
        done = subprocess.run(command, capture_output=True, env=ENVIRONMENT, timeout=120)
        assert done.returncode == code, done
        assert code == 0 or b"rank 3 has other --load than rank 0" in done.stderr, done


def check_bench(model, scratch):
    done = treeattn("bench", "llama", "--model", model, "--tokens", "70,200", "--runs", 2, "--new-tokens", 4, "--ranks",
                    2, "--strategy", "merge,ring", "--json", *ORDER)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["tokens"], line["strategy"]) for line in lines] == [
        (70, "merge"), (70, "ring"), (200, "merge"), (200, "ring")], lines
    for line in lines:
        assert line["total_ms"] >= line["first_token_ms"] > 0 and line["runs"] == 2 and line["limit_gb_s"] > 0, line
    assert lines[2]["digest"] == lines[3]["digest"]
    # A token reads the keys and values that there are, not the pages they lie in.
    config = json.loads((model / "config.json").read_text())
    token_bytes = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * config["head_dim"] * 2
    assert lines[2]["token_bytes"] - lines[0]["token_bytes"] == (200 - 70) * token_bytes, lines
    table = treeattn("bench", "llama", "--model", model, "--tokens", "70", "--runs", 1, *ORDER).stdout.decode()
    assert "total s" in table and "ring" in table, table
    done = treeattn("bench", "llama", "--model", model, "--steps", "--tokens", "0,200", "--batch", "1,2", "--new-tokens",
                    4, "--json", *ORDER)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    steps = [line for line in lines if line["what"] == "step"]
    assert [(line["batch"], line["tokens"]) for line in steps] == [(1, 0), (1, 200), (2, 0), (2, 200)], lines
    assert all(abs(line["of_limit"] * line["ms"] - line["limit_ms"]) < 1e-6 and line["ms"] > 0 for line in lines), lines
    assert steps[1]["limit_ms"] * steps[1]["read_gb_s"] > steps[0]["limit_ms"] * steps[0]["read_gb_s"], steps
    # Scales are read with what they are for.
    done = treeattn("bench", "llama", "--model", model, "--steps", "--tokens", "0,200", "--new-tokens", 4, "--json",
                    "--kv-type", "int8", *ORDER)
    steps = [line for line in map(json.loads, done.stdout.splitlines()) if line["what"] == "step"]
    empty, full = (1e6 * line["limit_ms"] * line["read_gb_s"] for line in steps)
    token_bytes = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * (config["head_dim"] + 4)
    assert abs(full - empty - 200 * token_bytes) < 1, (full - empty, token_bytes)
    # The usual lengths as far as the model has room.
    done = treeattn("bench", "llama", "--model", model, "--runs", 1, "--strategy", "merge", "--json")
    assert [json.loads(line)["tokens"] for line in done.stdout.splitlines()] == [512, 1024, 2048], done.stdout
    # A cache that does not fit is left out, and the rest is measured.
    steps = [TREEATTN, "bench", "llama", "--model", str(model), "--steps", "--tokens", "4000", "--batch", "1024"]
    done = subprocess.run(["sh", "-c", 'ulimit -v 700000; exec "$@"', "sh", *steps], capture_output=True, timeout=60)
    assert done.returncode == 0 and b"skipped 1024 sequences with 4000 tokens" in done.stderr, done
    # So is a prompt, on every rank.
    roomy = scratch / "roomy"
    shutil.copytree(model, roomy)
    (roomy / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1 << 30}))
    for arguments in [{"launcher": LAUNCHER}, {}] if LAUNCHER else [{}]:
        done = treeattn("bench", "llama", "--model", roomy, "--tokens", "900m,70", "--runs", 1, "--new-tokens", 2,
                        "--strategy", "merge", "--json", **arguments)
        assert [json.loads(line)["tokens"] for line in done.stdout.splitlines()] == [70], done.stdout
        assert b"skipped 943718400 tokens: needs" in done.stderr, done.stderr
    refused("would do", "bench", "llama", "--model", roomy, "--tokens", "900m", code=3)
    # What is said by then has room, too; and what is said of it begins a line of a terminal.
    terminal = Terminal()
    steps = [*steps[:7], "0", "--batch", "64,1024", "--new-tokens", "2000", "--kv-type", "f32"]
    bench = subprocess.Popen(["sh", "-c", 'ulimit -v 700000; exec "$@"', "sh", *steps], stdout=subprocess.DEVNULL,
                             stderr=terminal.its, env=dict(os.environ, TERM="xterm"))
    said = terminal.said().split(b"\r\x1b[K")[-1]
    assert bench.wait(timeout=60) == 0 and said.startswith(b"skipped 1024 sequences with 0 tokens: needs"), said
    # A context that is shorter than what is decoded otherwise.
    brief = scratch / "brief"
    shutil.copytree(model, brief)
    config["max_position_embeddings"] = 64
    (brief / "config.json").write_text(json.dumps(config))
    treeattn("bench", "llama", "--model", brief, "--steps")
    # Beyond the context of a model; random weights have none, and what stops them is memory.
    refused("accepted: whole numbers from 1 to", "bench", "llama", "--model", model, "--tokens", "256k")
    refused("would do", "bench", "llama", "--random-weights", "llama-3.1-405b", "--tokens", "256k", code=3)
    refused("--steps with --ranks 2", "bench", "llama", "--model", model, "--steps", "--ranks", 2)
    refused("only with --steps", "bench", "llama", "--model", model, "--batch", 2)
    for option, value in [("--runs", 3), ("--strategy", "ring"), ("--strategy", "no,such")]:
        refused(f"{option} is {value}; accepted: only without --steps", "bench", "llama", "--model", model, "--steps",
                option, value)
    refused('names "ring" twice', "bench", "llama", "--model", model, "--tokens", 70, "--strategy", "ring,ring")


with tempfile.TemporaryDirectory() as name:
    scratch_directory = pathlib.Path(name)
    small = with_bytes(scratch_directory / "model")
    text = check_ranks(small, scratch_directory)
    check_prompts(small, scratch_directory, text)
    check_refusals(small, scratch_directory)
    check_incomplete_model(small, scratch_directory)
    check_other_tensors(small, scratch_directory)
    check_other_head(small, scratch_directory)
    check_stats(small)
    check_streams(small, scratch_directory)
    check_without_tokenizer()
    check_generation_config(small)
    check_chat(small)
    check_ends_of_answers(small, scratch_directory)
    check_interrupted_load()
    check_progress(scratch_directory)
    check_interrupted_chat(small)
    check_one_that_differs(small, scratch_directory)
    check_bench(small, scratch_directory)
    shutil.rmtree(scratch_directory / "session")
print("all is well")
