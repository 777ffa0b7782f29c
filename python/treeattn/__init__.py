# SPDX-License-Identifier: Apache-2.0
"""Exact attention as a tree reduction.

    out, lse = treeattn.attention(q, k, v, causal=True)

Arrays are those of numpy, torch or jax, read where they lie. docs/python.md has more.
"""

from treeattn import _core
from treeattn._core import *  # noqa: F401,F403
from treeattn._core import __version__ as __version__  # as type checkers ask of what is passed on

for _thing in vars(_core).values():
    if isinstance(_thing, type):
        _thing.__module__ = "treeattn"  # as it is called
del _thing
