#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""treeattn generate and chat --recover over three MPI ranks of which one is killed while the text grows. The text must be
that of one rank alone. Where another one is killed before the text is saved or the chat goes on, the last one must say
so.

Usage: llama_loss_test.py TREEATTN MODEL CHAT_MODEL MPIRUN [OPTION...]
       MODEL: one of tests/golden/llama, without a tokenizer; CHAT_MODEL: one that chats
"""

import fcntl
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid

RANKS = 3
TOKENS = 1500
KILL_AFTER = 500  # bytes of text
OUTER_LIMIT = 120.0
PROMPT = "".join(chr(1 + i * 7 % 31) for i in range(200))


MESSAGE = b"Hello.\n"


def arguments(treeattn, model, command="generate"):
    return [treeattn, command, "--model", model, *([PROMPT] if command == "generate" else []), "-n", str(TOKENS),
            "--ignore-eos", "--temperature", "1", "--chunk", "64", "--branches", "16"]


def processes(mark, rank=None):
    """Those that were started with the mark in their environment, of one rank or of all."""
    found = []
    for directory in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            environment = (directory / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        is_rank = any(entry.startswith(b"OMPI_COMM_WORLD_RANK=") for entry in environment)
        wanted = rank is None or f"OMPI_COMM_WORLD_RANK={rank}".encode() in environment
        if f"TREEATTN_TEST_MARK={mark}".encode() in environment and is_rank and wanted:
            found.append(int(directory.name))
    return found


def end(pids):
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def text_of_one(command):
    return subprocess.run(command, input=MESSAGE, capture_output=True, check=True, timeout=120).stdout


def same_text(got, want, victim):
    """Rank 0 prints. Where it is lost, the token that it was about to print may be missing or there twice."""
    places = range(len(want)) if victim == 0 else []
    return got == want or any(got in (want[:i] + want[i + 1:], want[:i + 1] + want[i:]) for i in places)


def text_in(file):
    return os.pread(file.fileno(), 1 << 20, 0).decode(errors="replace")


def misses(victim, said):
    return f"went on without rank {victim}" in said


def run(victim, command, mpirun, want, *, next_victim=None, save=None):
    """What is wrong; empty when all is well. next_victim: killed when the text is there; the last one must end."""
    mark = uuid.uuid4().hex
    command = [*mpirun, "-x", "TREEATTN_TEST_MARK", "-n", str(RANKS), *command, "--recover", "--deadline", "5",
               *(["--save", save] if save else [])]
    want = want.split()
    with tempfile.TemporaryFile() as errors:
        job = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                               start_new_session=True, env=dict(os.environ, TREEATTN_TEST_MARK=mark))
        job.stdin.write(MESSAGE)  # the end of the input would be that of a chat
        job.stdin.flush()
        timer = threading.Timer(OUTER_LIMIT, lambda: end([*processes(mark), job.pid]))
        timer.start()
        text, killed = b"", False
        while not (text.endswith(b"\n") and len(text.split()) >= len(want) - 1):
            piece = os.read(job.stdout.fileno(), 65536)
            if not piece:
                break
            text += piece
            if not killed and len(text) >= KILL_AFTER:
                end(processes(mark, victim))
                killed = True
        if next_victim is not None:
            while not save and processes(mark) and not misses(victim, text_in(errors)):
                time.sleep(0.1)
            end(processes(mark, next_victim))
            while processes(mark):  # the rest end by themselves, or by the timer
                time.sleep(0.1)
        time.sleep(0.5)  # for the last words on stderr
        timer.cancel()
        end([*processes(mark), job.pid])  # mpirun may not end by itself after a loss
        job.wait()
        said = text_in(errors)
    got = text.split()
    if not killed:
        return f"the text ended before a rank could be killed: {len(got)} words\n{said}"
    if not same_text(got, want, victim):
        return f"another text: {len(got)} words, {len(want)} wanted\n{said}"
    if not misses(victim, said):
        return f"nobody missed rank {victim}\n{said}"
    if next_victim is not None and f"(rank {next_victim} of {RANKS} at first)" not in said:
        return f"nobody missed rank {next_victim} after rank {victim}\n{said}"
    return ""


def run_twice_lost(command, mpirun, want):
    """A second one is lost from the two that are left, with no call to recover in: the last one names it."""
    with tempfile.TemporaryDirectory() as save:
        busy = os.open(save, os.O_RDONLY)
        fcntl.flock(busy, fcntl.LOCK_EX)
        problem = run(0, command, mpirun, want, next_victim=1, save=save)
        os.close(busy)
    return problem


def main():
    treeattn, model, chat_model, *mpirun = sys.argv[1:]
    generate, chat = arguments(treeattn, model), arguments(treeattn, chat_model, "chat")
    want, answer = text_of_one(generate), text_of_one(chat)
    assert len(want.split()) == TOKENS, want
    problems = {f"kill of rank {victim}": run(victim, generate, mpirun, want) for victim in (0, 2)}
    problems["kill of rank 0, then of rank 1"] = run_twice_lost(generate, mpirun, want)
    # Rank 0 waits for the next message by then.
    problems["kill of rank 1 in a chat, then of rank 0"] = run(1, chat, mpirun, answer, next_victim=0)
    for what, problem in problems.items():
        print(f"{what}: {'FAILED: ' + problem if problem else 'as it should be'}")
    return 1 if any(problems.values()) else 0


if __name__ == "__main__":
    # Ranks that are killed leave files behind.
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tampi", ignore_cleanup_errors=True) as scratch:
        os.environ |= {"OMPI_MCA_orte_tmpdir_base": scratch, "OMPI_MCA_btl_vader_backing_directory": scratch}
        sys.exit(main())
