#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plants violations in a small tree and asks scripts/check_includes.py to find each of them, and nothing else."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parent.parent / "scripts" / "check_includes.py"
LICENCE = "// SPDX-License-Identifier: Apache-2.0\n"
PURPOSE = "// What it is for.\n"

CLEAN = {
    "include/treeattn/views.h": '#include <cstdint>\n#include "treeattn/dtype.h"\n',
    "src/base/buffer.h": '#include "treeattn/error.h"\n#include <fmt/format.h>\n',
    "src/kernels/cpu/a.cc": '#include "hwy/highway.h"\n#include "kernels/problem.h"\n#include "merge/operator.h"\n',
    "src/parallel/tree.cc": '#include "comm/comm.h"\n#include "kernels/problem.h"\n// #include "model/llama.h"\n',
    "tools/main.cc": '#include "commands.h"\n#include "base/buffer.h"\n#include <CLI/CLI.hpp>\n',
    "tests/a_test.cc": '#include "model/llama.h"\n#include <gtest/gtest.h>\n',
    "examples/one/main.cc": "#include <treeattn/treeattn.h>\n",
    # What is precompiled: by a header of ours, in a comment, declared here.
    "src/plan/lists.h": "#include <vector>\nstd::vector<int> list();\n",
    "src/plan/lists.cc": '#include "plan/lists.h"\n// std::map\nstd::vector<int> list() { return {}; }\n',
    "tools/options.h": "namespace CLI {\nclass App;\n}\nvoid add(CLI::App& app);\n",
}

# Each: the file, its text, the line that must be named; that of a header is one more, as it says what it is for.
PLANTED = [
    ("src/base/up.h", '#include "plan/tree_order.h"\n', 2),
    ("src/merge/side.h", '\n#include "plan/tree_order.h"\n', 3),
    ("src/plan/up.h", "#  include <kernels/problem.h>\n", 2),
    ("src/kernels/cpu/up.cc", '#include "parallel/tree.h"\n', 2),
    ("src/kernels/cuda/up.cu", '#include "model/llama.h"\n', 2),
    ("src/comm/mpi/op.cc", '#include "merge/operator.h"\n', 2),
    ("src/energy/up.cc", '#include "parallel/tree.h"\n', 2),
    ("src/plan/dots.h", '#include "../base/buffer.h"\n', 2),
    ("src/plan/bare.h", '#include "tree_order.h"\n', 2),
    ("src/attic/lost.h", '#include "base/buffer.h"\n', 2),
    ("tools/deep.cc", '#include "merge/operator.h"\n', 2),
    ("bench/deep.cc", '#include "model/llama.h"\n', 2),
    ("examples/one/deep.cc", '#include "base/buffer.h"\n', 2),
    ("include/treeattn/private.h", '#include "base/buffer.h"\n', 2),
    ("include/treeattn/mpi.h", "#include <mpi.h>\n", 2),
    ("include/treeattn/cuda.h", "#include <cuda_runtime.h>\n", 2),
    ("include/treeattn/nccl.h", "#include <nccl.h>\n", 2),
    ("include/treeattn/simd.h", "#include <hwy/highway.h>\n", 2),
    ("src/plan/map.cc", '#include "plan/lists.h"\nstd::vector<int> a;\nstd::map<int, int> b;\nstd::map<int, int> c;\n', 4),
    ("tools/parse.cc", "void parse(CLI::App& app);\n", 2),
    ("tests/c_test.cc", "#include <string>\nTEST(A, B) {}\n", 3),
]


def opening(name):
    return LICENCE + (PURPOSE if name.endswith((".h", ".cuh")) else "")


class CheckIncludes(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        for name, text in CLEAN.items():
            self.write(name, opening(name) + text)

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def check(self):
        done = subprocess.run([sys.executable, SCRIPT, "--root", self.root], capture_output=True, text=True)
        return done.returncode, done.stderr.splitlines()

    def test_clean_tree_passes(self):
        self.assertEqual(self.check(), (0, []))

    def test_every_planted_include_is_found(self):
        for name, text, line in PLANTED:
            with self.subTest(name):
                self.write(name, opening(name) + text)
                line += opening(name).count("\n") - 1
                status, errors = self.check()
                self.assertEqual(status, 1)
                self.assertEqual(len(errors), 1, errors)
                self.assertTrue(errors[0].startswith(f"{name}:{line}: "), errors[0])
                (self.root / name).unlink()

    def test_missing_licence_is_found(self):
        for suffix in ["h", "cc", "cu", "cuh"]:
            with self.subTest(suffix):
                name = f"src/base/bare.{suffix}"
                self.write(name, PURPOSE + PURPOSE + LICENCE)
                status, errors = self.check()
                self.assertEqual(status, 1)
                self.assertEqual([error.split(" ")[0] for error in errors], [f"{name}:1:"])
                (self.root / name).unlink()

    def test_header_without_a_purpose_is_found(self):
        for name in ["include/treeattn/bare.h", "src/base/bare.h", "src/kernels/cuda/bare.cuh", "tests/bare.h"]:
            for text in [LICENCE, LICENCE + "#pragma once\n// Too late.\n"]:
                with self.subTest(name):
                    self.write(name, text)
                    status, errors = self.check()
                    self.assertEqual(status, 1)
                    self.assertEqual([error.split(" ")[0] for error in errors], [f"{name}:2:"])
                    (self.root / name).unlink()


if __name__ == "__main__":
    unittest.main()
