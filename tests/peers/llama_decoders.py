#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the Llama decoder with transformers and with Meta's own: llama_transformers.py and meta_decoder.py in one
process, as to import torch and transformers takes longer than either.

Usage: llama_decoders.py LOGITS DEVIATIONS         the built llama_logits and llama_deviations

TREEATTN_SEED repeats a run. Exit status: 0 all within their bounds, 1 not, 77 packages of one of the two are not here;
the other has passed then, where it was there.
"""
import sys

import llama_transformers

if __name__ == "__main__":
    programs = sys.argv[1:3]
    if llama_transformers.check(programs, llama_transformers.CASES) != 0:
        sys.exit(1)
    import meta_decoder  # ends the script where its packages are missing
    sys.exit(llama_transformers.check(programs, meta_decoder.CASES, meta_decoder.draw, meta_decoder.compare))
