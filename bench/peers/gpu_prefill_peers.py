#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Causal prefill by PyTorch's flash and cuDNN backends on the shapes of bench/cuda/gpu_prefill.cu.

usage: gpu_prefill_peers.py [path of gpu_prefill]    with a path, ours is run first, in the same run
"""
import statistics
import subprocess
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

SHAPES = [(16, 16, 128, 4096), (16, 16, 128, 16384), (16, 16, 128, 65536), (32, 8, 128, 16384), (32, 8, 64, 16384),
          (32, 8, 72, 16384), (32, 8, 112, 16384)]
BACKENDS = [("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)]


def median_ms(call, repeats):
    times = []
    for i in range(repeats + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def main():
    if len(sys.argv) > 1:
        subprocess.run([sys.argv[1]], check=True)
    if not torch.cuda.is_available():
        print("SKIPPED: no GPU")
        return 77
    print(f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    print(f"{'heads x dim':14s} {'tokens':>8s} {'ms':>9s} {'TFLOP/s':>9s} backend")
    for heads, kv_heads, dim, tokens in SHAPES:
        # Tokens first, as in the other program; torch wants heads before tokens and takes any strides.
        def make(count):
            numbers = torch.randn(1, tokens, count, dim, device="cuda", dtype=torch.bfloat16)
            return numbers.transpose(1, 2)

        q, k, v = make(heads), make(kv_heads), make(kv_heads)
        for name, backend in BACKENDS:
            def call():
                with sdpa_kernel(backend):
                    scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)

            try:
                ms = median_ms(call, 5 if tokens > 20000 else 15)
            except RuntimeError as error:
                print(f"{heads:2d}/{kv_heads} x {dim:<8d} {tokens:8d} refused by {name}: {str(error).splitlines()[0]}")
                continue
            rate = 2 * heads * dim * tokens * tokens / ms * 1e-9
            print(f"{heads:2d}/{kv_heads} x {dim:<8d} {tokens:8d} {ms:9.4f} {rate:9.1f} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
