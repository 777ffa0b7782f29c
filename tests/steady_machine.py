#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a test of deadlines, and runs it again with longer ones when it failed while the machine stood still.

Who answers late is given up, so a test that knows who will be given up, and when, says something only while processes
run when they are due. On a machine that others use they may not run for a second. A failure while every processor was
there in time is a failure.

Usage: steady_machine.py SECONDS COMMAND...     The command finds its deadline in TREEATTN_TEST_DEADLINE, first SECONDS.
"""

import os
import subprocess
import sys
import threading
import time

LONGER = 4           # times the deadline before, ...
LONGEST = 16         # ... up to so many times the first
TOLERATED = 0.05     # of the deadline
NAP = 0.005          # seconds
SKIPPED = 77


class Watch:
    """How late a thread on each processor was, at most, when it had slept a moment."""

    def __init__(self):
        self.latest = 0.0
        self.over = threading.Event()
        self.threads = [threading.Thread(target=self._watch, args=(cpu,)) for cpu in os.sched_getaffinity(0)]

    def _watch(self, cpu):
        os.sched_setaffinity(0, {cpu})  # of this thread alone
        while not self.over.is_set():
            start = time.monotonic()
            time.sleep(NAP)
            self.latest = max(self.latest, time.monotonic() - start - NAP)

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        for thread in self.threads:
            thread.join()


def main():
    first, command = float(sys.argv[1]), sys.argv[2:]
    deadline = first
    while True:
        with Watch() as watch:
            status = subprocess.run(command, env={**os.environ, "TREEATTN_TEST_DEADLINE": str(deadline)}, check=False)
        if status.returncode in (0, SKIPPED) or watch.latest < TOLERATED * deadline or deadline >= LONGEST * first:
            return status.returncode if status.returncode >= 0 else 128 - status.returncode
        print(f"*** failed with a deadline of {deadline:g} s, while a processor came {watch.latest:.2f} s late: again "
              "with a longer one", flush=True)
        deadline *= LONGER


if __name__ == "__main__":
    sys.exit(main())
