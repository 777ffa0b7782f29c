# SPDX-License-Identifier: Apache-2.0
"""A terminal for a command under test."""
import fcntl
import os
import pty
import struct
import termios


class Terminal:
    """`its` goes to a child as one of its streams; once that is started, said() is to be called."""

    def __init__(self, columns=None):
        self.ours, self.its = pty.openpty()
        if columns:
            fcntl.ioctl(self.its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def said(self, word=b"", then=None):
        """All that is written there until nobody can any more. then() is called once, when `word` is in it."""
        os.close(self.its)
        said = b""
        try:
            while piece := os.read(self.ours, 4096):
                said += piece
                if then and word in said:
                    then()
                    then = None
        except OSError:
            pass  # how Linux says that the last one that writes has gone
        os.close(self.ours)
        return said
