#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A decoding loop over four MPI ranks of which one kills or stops itself. The other three must name it within the
deadline, rebuild its branches and end with the bits of the undisturbed run.

Usage: decode_loss_test.py kill|stop PROGRAM MPIRUN [OPTION...]
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading

RANKS = 4
DEADLINE = float(os.environ.get("TREEATTN_TEST_DEADLINE", 2))
OUTER_LIMIT = 60.0 + 2 * DEADLINE


def run(way, victim, program, mpirun):
    """What is wrong, as lines; none when all is well."""
    command = [*mpirun, "-n", str(RANKS), program, str(DEADLINE), way, str(victim)]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    wanted = {rank: f"rank {rank}: same bits, lost {victim}" for rank in range(RANKS) if rank != victim}
    lines = []
    # mpirun waits for the stopped rank, or forgets to end: what counts is what the survivors say.
    timer = threading.Timer(OUTER_LIMIT, lambda: os.killpg(job.pid, signal.SIGKILL))
    timer.start()
    for line in job.stdout:
        lines.append(line.rstrip("\n"))
        if set(wanted.values()) <= set(lines):
            break
    timer.cancel()
    try:
        os.killpg(job.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    subprocess.run(["pkill", "-KILL", "-f", f"{re.escape(program)} {DEADLINE} {way} {victim}"], check=False)
    missing = [text for text in wanted.values() if text not in lines]
    return missing and [f"missing: {text}" for text in missing] + lines


def main():
    way, program, *mpirun = sys.argv[1:]
    failed = False
    for victim in (0, 2):
        problems = run(way, victim, program, mpirun)
        print(f"{way} of rank {victim}: {'FAILED' if problems else 'the others went on with the same bits'}")
        for line in problems:
            print("   " + line)
        failed = failed or bool(problems)
    return 1 if failed else 0


if __name__ == "__main__":
    # Ranks that are killed leave files behind.
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tampi", ignore_cleanup_errors=True) as scratch:
        os.environ |= {"OMPI_MCA_orte_tmpdir_base": scratch, "OMPI_MCA_btl_vader_backing_directory": scratch}
        sys.exit(main())
