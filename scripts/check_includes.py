#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Who may include whom. Prints file:line of every include that points the wrong way and exits 1 if there is one.

The rooms of src/ are layers, and nothing below includes anything above. Public headers may be included from anywhere;
they include only each other and the standard library. Every source file also opens with its licence.
"""

import argparse
import pathlib
import re
import sys

# Room of src/ -> the other rooms it may include.
ROOMS = {
    "base": set(),
    "plan": {"base"},
    "merge": {"base"},
    "kernels": {"base", "plan", "merge"},
    "comm": {"base", "plan"},  # never merge: it is handed a function
    "parallel": {"base", "plan", "merge", "kernels", "comm"},
    "energy": {"base", "plan", "merge", "kernels"},
    "model": {"base", "plan", "merge", "kernels", "comm", "parallel"},
}

# Folders beside src/ -> the rooms they may include, beyond the public headers.
OUTSIDE = {
    "tools": {"base", "plan", "kernels", "parallel", "model"},
    "bench": {"base", "plan", "kernels", "parallel"},
    "examples": set(),
    "python": set(),
    "tests": set(ROOMS),
}

SUFFIXES = {".h", ".cc", ".cu", ".cuh"}
LICENCE = "// SPDX-License-Identifier: Apache-2.0"
INCLUDE = re.compile(r'\s*#\s*include\s*([<"])([^>"]+)[>"]')


def source_files(root):
    for folder in ["include", "src", *OUTSIDE]:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                yield path.relative_to(root)


def wrong_include(path, quoted, target):
    """Why `path` may not include `target`, or None."""
    top = target.split("/")[0]
    if ".." in target.split("/"):
        return "names a file by '..'; start at a room, as in \"plan/tree_order.h\""

    if path.parts[0] == "include":
        standard = not quoted and re.fullmatch(r"[a-z0-9_]+", target)
        if top == "treeattn" or standard:
            return None
        return "public headers include only public and standard headers (no MPI, CUDA, NCCL, Highway or SIMD)"

    if path.parts[0] == "src":
        if len(path.parts) < 3 or path.parts[1] not in ROOMS:
            return f"{path.parts[1]} is not a room of src/: {', '.join(ROOMS)}"
        owner = path.parts[1]
        allowed = ROOMS[owner] | {owner}
        if quoted and "/" not in target:
            return f'start at a room, as in "{owner}/{target}"'
    else:
        owner = path.parts[0]
        allowed = OUTSIDE[owner]

    if top in ROOMS and "/" in target and top not in allowed:
        return f"{owner} may include public headers" + "".join(f", {room}/" for room in ROOMS if room in allowed)
    return None


def check_file(root, path):
    lines = (root / path).read_text(encoding="utf-8").splitlines()
    if not lines or lines[0] != LICENCE:
        yield f"{path}:1: the first line must be: {LICENCE}"
    for number, line in enumerate(lines, start=1):
        match = INCLUDE.match(line)
        if match:
            reason = wrong_include(path, match[1] == '"', match[2])
            if reason:
                yield f"{path}:{number}: includes {match[2]}: {reason}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent,
                        help="the tree to check (default: the one this script is in)")
    root = parser.parse_args().root
    errors = [error for path in source_files(root) for error in check_file(root, path)]
    for error in errors:
        print(error, file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
