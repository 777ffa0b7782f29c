# SPDX-License-Identifier: Apache-2.0
"""A decoding loop over ranks: python3 decode.py, or mpirun -n 4 python3 decode.py. Rank 0 prints a number."""

import numpy as np

import treeattn

HEADS, KV_HEADS, DIM, PROMPT, STEPS = 8, 2, 64, 5000, 8


def main():
    world = treeattn.mpi_communicator()
    cache = treeattn.KvCache(world, kv_heads=KV_HEADS, k_dim=DIM, v_dim=DIM)
    attention = treeattn.ParallelAttention(world)
    sequence = cache.add_sequence()
    random = np.random.default_rng(1)  # the same numbers on every rank
    out = np.zeros((1, 1, HEADS, DIM), np.float32)
    for step in range(1 + STEPS):
        tokens = PROMPT if step == 0 else 1
        k, v = random.standard_normal((2, 1, tokens, KV_HEADS, DIM), np.float32)
        cache.append(sequence, k, v)  # each rank keeps its share
        out, _ = attention.decode(cache, 0, [sequence], out + random.standard_normal(out.shape, np.float32))
    if world.rank == 0:
        print(repr(float(out.sum(dtype=np.float64))))


main()
