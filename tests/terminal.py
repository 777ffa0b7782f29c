# SPDX-License-Identifier: Apache-2.0
"""A terminal for a command under test."""
import fcntl
import os
import pty
import select
import struct
import termios


class Terminal:
    """`its` goes to a child as one of its streams; once that is started, said() is to be called."""

    def __init__(self, columns=None):
        self.ours, self.its = pty.openpty()
        if columns:
            fcntl.ioctl(self.its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def said(self, *steps):
        """All that is written there until nobody can any more. steps: (word, then); then() is called when the word is
        there, and the next step's word is looked for behind it. Waits a minute at most for more."""
        os.close(self.its)
        said, looked = b"", 0
        try:
            while True:
                if not select.select([self.ours], [], [], 60)[0]:
                    raise AssertionError(f"silence for a minute, waiting for {steps[:1]} or the end, after {said}")
                piece = os.read(self.ours, 4096)
                if not piece:
                    break
                said += piece
                while steps and (at := said.find(steps[0][0], looked)) >= 0:
                    looked = at + len(steps[0][0])
                    steps[0][1]()
                    steps = steps[1:]
        except OSError:
            pass  # how Linux says that the last one that writes has gone
        os.close(self.ours)
        return said
