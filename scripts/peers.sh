#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Gets what tests/peers compares with into build/peers-venv, unless python3 has it already: torch, Hugging Face's
# tokenizers and transformers (60 MB to fetch, half a minute), and Meta's llama-models for the tokenizer of Llama 3
# (20 MB, ten seconds). Optional: whatever happens here, the status is 0, and tests that miss a peer say so and are
# skipped.
# torch only on aarch64: there PyPI's torch before 2.11 is built for the CPU alone (150 MB to fetch, 0.7 GB on disk,
# under a minute). On x86-64, and from 2.11 on everywhere, it brings gigabytes of CUDA libraries.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
venv=build/peers-venv
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# has MODULES: whether one Python has all of them.
has() {
  local python
  for python in python3 "$venv/bin/python"; do
    if command -v "$python" >/dev/null && "$python" -c "import $1" >/dev/null 2>&1; then return 0; fi
  done
  return 1
}

without() {
  local name=$1
  shift
  echo "   *** no $name: $*; the tests that compare with it will be skipped ***"
}

# get NAME PACKAGE... Whether they can be imported is found out, and said, by the tests: it takes them seconds, too.
get() {
  local name=$1
  shift
  if { [ -x "$venv/bin/pip" ] || python3 -m venv "$venv"; } >"$log" 2>&1 &&
    timeout 120 "$venv/bin/pip" install --quiet --retries 1 --no-compile "$@" >>"$log" 2>&1; then
    return
  fi
  tail -n 5 "$log"
  without "$name" "its installation failed or took more than 120 s (see above)"
}

if has torch; then
  :
elif [ "$(uname -m)" = aarch64 ]; then
  get torch 'torch>=2.5,<2.11'
else
  without torch "not installed here because of its size. By hand: python3 -m venv $venv && $venv/bin/pip install torch" \
    "--index-url https://download.pytorch.org/whl/cpu"
fi
if ! has 'tokenizers, transformers, safetensors, jinja2'; then
  get "tokenizers and transformers" 'tokenizers>=0.20' 'transformers<5' jinja2
fi
if ! has 'llama_models.llama3.chat_format'; then
  get "Llama 3's own tokenizer" llama-models
fi
if ! has 'nanobind, numpy'; then
  get "nanobind, which the Python package is made with," nanobind numpy
fi
exit 0
