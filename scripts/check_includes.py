#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Who may include whom. Prints file:line of every include that points the wrong way and exits 1 if there is one.

The rooms of src/ are layers, and nothing below includes anything above. Public headers may be included from anywhere;
they include only each other and the standard library. Every source file also opens with its licence, and a header says
after that what it is for.

And who uses what is precompiled (treeattn_precompile in cmake/treeattn_target.cmake) includes it, itself or by a header
of ours: a build that precompiles does not notice, one that does not would fail.
"""

import argparse
import functools
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

# What is precompiled -> how it shows that it is used.
PRECOMPILED = {
    "algorithm": r"std::(sort|stable_sort|partial_sort|max_element|min_element|find_if|all_of|any_of|copy_n|fill_n)\b",
    "chrono": r"std::chrono::",
    "cmath": r"std::(sqrt|exp|log|log2|fabs|pow|isfinite|isnan|ceil|floor|cos|sin|ldexp)\(",
    "filesystem": r"std::filesystem::",
    "fstream": r"std::[io]?fstream\b",
    "functional": r"std::function\b",
    "map": r"std::map\b",
    "memory": r"std::(unique_ptr|shared_ptr|weak_ptr|make_unique|make_shared)\b",
    "optional": r"std::(optional|nullopt)\b",
    "random": r"std::(mt19937|normal_distribution|uniform_\w+_distribution|seed_seq|random_device)",
    "span": r"std::span\b",
    "string": r"std::(string|to_string)\b",
    "thread": r"std::(thread|this_thread)\b",
    "vector": r"std::vector\b",
    "fmt/format.h": r"\bfmt::",
    "CLI/CLI.hpp": r"\bCLI::",
    "gtest/gtest.h": r"\b(TEST|TEST_F|TEST_P|EXPECT_\w+|ASSERT_\w+)\(",
    "nlohmann/json.hpp": r"\bnlohmann::",
}
# Headers that give the same names, or enough of them.
INSTEAD = {"fmt/format.h": {"fmt/core.h", "fmt/ranges.h"}, "nlohmann/json.hpp": {"nlohmann/json_fwd.hpp"}}

HEADERS = {".h", ".cuh"}
SUFFIXES = HEADERS | {".cc", ".cu"}
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


@functools.cache
def includes_of(root, path):
    """What a file names, and which of these are files of ours."""
    targets = [match[2] for match in map(INCLUDE.match, path.read_text(encoding="utf-8").splitlines()) if match]
    places = [path.parent, *(root / folder for folder in ("include", "src", "tools", "tests", "bench"))]
    return targets, [place / target for target in targets for place in places if (place / target).is_file()]


def all_includes(root, path):
    """What a file includes, itself or by headers of ours."""
    found, files, seen = set(), [path], set()
    while files:
        file = files.pop()
        if file not in seen:
            seen.add(file)
            targets, ours = includes_of(root, file)
            found.update(targets)
            files += ours
    return found


def missing_includes(root, path, lines):
    """(line, header) of what is precompiled, used, and not included."""
    if path.suffix not in {".h", ".cc"}:
        return
    included = all_includes(root, root / path)
    missing = [header for header in PRECOMPILED if not ({header} | INSTEAD.get(header, set())) & included]
    code = "\n".join(line.split("//")[0] for line in lines)
    for header in missing:
        use = re.search(PRECOMPILED[header], code)
        declared = f"namespace {header.split('/')[0]} {{\n" in code  # what it needs of it, by itself
        if use and not declared:
            yield code.count("\n", 0, use.start()) + 1, header


def check_file(root, path):
    lines = (root / path).read_text(encoding="utf-8").splitlines()
    if not lines or lines[0] != LICENCE:
        yield f"{path}:1: the first line must be: {LICENCE}"
    if path.suffix in HEADERS and not "".join(lines[1:2]).startswith("// "):
        yield f"{path}:2: the second line of a header must be a comment that says what it is for"
    for number, line in enumerate(lines, start=1):
        match = INCLUDE.match(line)
        if match:
            reason = wrong_include(path, match[1] == '"', match[2])
            if reason:
                yield f"{path}:{number}: includes {match[2]}: {reason}"
    for number, header in missing_includes(root, path, lines):
        yield f"{path}:{number}: uses <{header}> and does not include it, nor does a header of ours that it includes"


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
