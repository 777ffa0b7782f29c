#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Kills or stops one of four MPI ranks in the middle of its work, and checks that each of the others names it within
the deadline, goes on without it and ends with status 0.

Usage: fault_test.py KILL|STOP PROGRAM MPIRUN [OPTION...]
"""

import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

RANKS = 4
DEADLINE = float(os.environ.get("TREEATTN_TEST_DEADLINE", 2))
SLACK = 0.25 * DEADLINE  # the machine may be busy
OUTER_LIMIT = 60.0 + 2 * DEADLINE

# Between mpirun and the program, to say with which status the program ended.
WRAPPER = '"$@"; status=$?; echo "status $OMPI_COMM_WORLD_RANK $status"; exit $status'


class Job:
    """mpirun, its output line by line, and a limit to how long it may take."""

    def __init__(self, command):
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                        start_new_session=True)
        self.end = time.monotonic() + OUTER_LIMIT
        self.lines = []
        self.queue = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self.queue.put(line.rstrip("\n"))
        self.queue.put(None)

    def matches(self, pattern):
        return [match for match in (re.fullmatch(pattern, line) for line in self.lines) if match]

    def read_until(self, pattern, count):
        """Reads on until `count` lines match, or the job or its time is over; returns the matches."""
        while len(self.matches(pattern)) < count:
            try:
                line = self.queue.get(timeout=max(0.0, self.end - time.monotonic()))
            except queue.Empty:
                break
            if line is None:
                break
            self.lines.append(line)
        return self.matches(pattern)

    def close(self):
        try:
            self.process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)


def parent(pid):
    with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
        return int(stat.read().rsplit(")", 1)[1].split()[1])


def send(pids, number):
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def run(way, victim, elements, program, mpirun):
    """What is wrong, as lines; none when all is well."""
    job = Job([*mpirun, "-n", str(RANKS), "sh", "-c", WRAPPER, "sh", program, str(DEADLINE), str(elements)])
    everybody = {}  # rank -> wrapper and program
    errors = []
    try:
        for match in job.read_until(r"ready (\d+) (\d+)", RANKS):
            pid = int(match[2])
            everybody[int(match[1])] = [parent(pid), pid]
        if len(everybody) < RANKS:
            return [f"only ranks {sorted(everybody)} started", *job.lines]
        time.sleep(0.5)
        send(everybody[victim], way)
        statuses = {int(match[1]): int(match[2]) for match in job.read_until(r"status (\d+) (\d+)", RANKS - 1)}

        lost = job.matches(rf"lost (\d+) of {RANKS} after ([\d.]+): (.*)")
        if len(lost) != RANKS - 1 or any(int(match[1]) != victim for match in lost):
            errors.append(f"not every survivor named rank {victim}, and nobody else")
        if any(float(match[2]) > DEADLINE + SLACK for match in lost):
            errors.append(f"a survivor took longer than {DEADLINE} s")
        message = f"rank {victim} of {RANKS} did not answer within {DEADLINE:.1f} s in allreduce"
        if any(match[3] != message for match in lost):
            errors.append(f"the message was not: {message}")
        survivors = [rank for rank in range(RANKS) if rank != victim]
        if sorted(int(match[1]) for match in job.matches(rf"done (\d+) {RANKS - 1}")) != survivors:
            errors.append(f"not every survivor went on with {RANKS - 1} ranks")
        if statuses != {rank: 0 for rank in survivors}:
            errors.append(f"statuses {statuses}; expected 0 of each survivor")
        return [*errors, *job.lines] if errors else []
    finally:
        for pids in everybody.values():
            send(pids, signal.SIGKILL)
        job.close()


def main():
    if len(sys.argv) < 4 or sys.argv[1] not in ("KILL", "STOP"):
        sys.exit(__doc__)
    way = signal.Signals["SIG" + sys.argv[1]]
    failed = False
    # The root of the tree and a leaf; states that go along with their header, and larger ones.
    for victim, elements in ((0, 1), (2, 1000), (3, 50000)):
        errors = run(way, victim, elements, sys.argv[2], sys.argv[3:])
        print(f"{sys.argv[1]} of rank {victim}, {elements} elements: {'FAILED' if errors else 'as it should be'}")
        for line in errors:
            print("  " + line)
        failed = failed or bool(errors)
    return 1 if failed else 0


if __name__ == "__main__":
    # Ranks that are killed leave files behind.
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tampi", ignore_cleanup_errors=True) as scratch:
        os.environ |= {"OMPI_MCA_orte_tmpdir_base": scratch, "OMPI_MCA_btl_vader_backing_directory": scratch}
        sys.exit(main())
