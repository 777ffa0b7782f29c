#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Gets torch, which tests/peers compares with, into build/peers-venv, unless python3 has it already. Optional: whatever
# happens here, the status is 0, and tests that miss a peer say so and are skipped.
# Only on aarch64: there PyPI's torch before 2.11 is built for the CPU alone (150 MB to fetch, 0.7 GB on disk, under a
# minute). On x86-64, and from 2.11 on everywhere, it brings gigabytes of CUDA libraries.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
venv=build/peers-venv

has_torch() { command -v "$1" >/dev/null && "$1" -c 'import torch' >/dev/null 2>&1; }
without() { echo "   *** no torch: $*; the peer tests will be skipped ***"; exit 0; }

for python in python3 "$venv/bin/python"; do
  if has_torch "$python"; then exit 0; fi
done
if [ "$(uname -m)" != aarch64 ]; then
  without "not installed here because of its size. By hand: python3 -m venv $venv && $venv/bin/pip install torch" \
    "--index-url https://download.pytorch.org/whl/cpu"
fi
rm -rf "$venv"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if python3 -m venv "$venv" >"$log" 2>&1 &&
  timeout 120 "$venv/bin/pip" install --quiet --retries 1 'torch>=2.5,<2.11' >>"$log" 2>&1 &&
  has_torch "$venv/bin/python"; then
  exit 0
fi
rm -rf "$venv"
tail -n 5 "$log"
without "its installation failed or took more than 120 s (see above)"
