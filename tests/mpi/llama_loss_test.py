#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""treeattn generate --recover over three MPI ranks of which one is killed while the text grows. The text must be that of
one rank alone. Where another one is killed before the text is saved, the last one must say so.

Usage: llama_loss_test.py TREEATTN MODEL MPIRUN [OPTION...]     MODEL: one of tests/golden/llama, without a tokenizer
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
KILL_AFTER = 200  # tokens
OUTER_LIMIT = 120.0
PROMPT = "".join(chr(1 + i * 7 % 31) for i in range(200))


def arguments(treeattn, model):
    return [treeattn, "generate", "--model", model, PROMPT, "-n", str(TOKENS), "--ignore-eos", "--temperature", "1",
            "--chunk", "64", "--branches", "16"]


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


def same_text(got, want, victim):
    """Rank 0 prints. Where it is lost, the token that it was about to print may be missing or there twice."""
    places = range(len(want)) if victim == 0 else []
    return got == want or any(got in (want[:i] + want[i + 1:], want[:i + 1] + want[i:]) for i in places)


def run(victim, treeattn, model, mpirun, want, *, next_victim=None, save=None):
    """What is wrong; empty when all is well. next_victim: killed when the text is there, and waits to be saved."""
    mark = uuid.uuid4().hex
    command = [*mpirun, "-x", "TREEATTN_TEST_MARK", "-n", str(RANKS), *arguments(treeattn, model), "--recover",
               "--deadline", "5", *(["--save", save] if save else [])]
    with tempfile.TemporaryFile() as errors:
        job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
                               env=dict(os.environ, TREEATTN_TEST_MARK=mark))
        timer = threading.Timer(OUTER_LIMIT, lambda: end([*processes(mark), job.pid]))
        timer.start()
        text, killed = b"", False
        while not text.endswith(b"\n"):
            piece = os.read(job.stdout.fileno(), 65536)
            if not piece:
                break
            text += piece
            if not killed and text.count(b" ") >= KILL_AFTER:
                end(processes(mark, victim))
                killed = True
        if next_victim is not None:
            end(processes(mark, next_victim))
            while processes(mark):  # the rest end by themselves, or by the timer
                time.sleep(0.1)
        time.sleep(0.5)  # for the last words on stderr
        timer.cancel()
        end([*processes(mark), job.pid])  # mpirun may not end by itself after a loss
        job.wait()
        errors.seek(0)
        said = errors.read().decode(errors="replace")
    got = text.split()
    if not killed:
        return f"the text ended before a rank could be killed: {len(got)} tokens\n{said}"
    if not same_text(got, want, victim):
        return f"another text: {len(got)} tokens, {len(want)} wanted\n{said}"
    if f"went on without rank {victim}" not in said:
        return f"nobody missed rank {victim}\n{said}"
    if next_victim is not None and f"(rank {next_victim} of {RANKS} at first)" not in said:
        return f"nobody missed rank {next_victim} after rank {victim}\n{said}"
    return ""


def run_twice_lost(treeattn, model, mpirun, want):
    """A second one is lost from the two that are left, with no call to recover in: the last one names it."""
    with tempfile.TemporaryDirectory() as save:
        busy = os.open(save, os.O_RDONLY)
        fcntl.flock(busy, fcntl.LOCK_EX)
        problem = run(0, treeattn, model, mpirun, want, next_victim=1, save=save)
        os.close(busy)
    return problem


def main():
    treeattn, model, *mpirun = sys.argv[1:]
    want = subprocess.run(arguments(treeattn, model), stdout=subprocess.PIPE, check=True, timeout=120).stdout.split()
    assert len(want) == TOKENS, len(want)
    failed = False
    for victim in (0, 1, 2):
        problem = run(victim, treeattn, model, mpirun, want)
        print(f"kill of rank {victim}: {'FAILED: ' + problem if problem else 'the same text'}")
        failed = failed or bool(problem)
    problem = run_twice_lost(treeattn, model, mpirun, want)
    print(f"kill of rank 0, then of rank 1: {'FAILED: ' + problem if problem else 'both are named'}")
    failed = failed or bool(problem)
    return 1 if failed else 0


if __name__ == "__main__":
    # Ranks that are killed leave files behind.
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tampi", ignore_cleanup_errors=True) as scratch:
        os.environ |= {"OMPI_MCA_orte_tmpdir_base": scratch, "OMPI_MCA_btl_vader_backing_directory": scratch}
        sys.exit(main())
