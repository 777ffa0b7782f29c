#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How long JAX takes for the first call of a compiled function, and for the next ones: the paper's Algorithm 3 with its
three collectives, and a ring, sharded over the devices there are.

Usage: jax_first_call.py tree|ring [--kernel none|xla|cudnn] [--tokens N] [--again N]

Attention to a device's share is left to --kernel. The paper calls a kernel that is compiled already, which `none` comes
closest to: next to nothing in its place, so that what is timed is tracing and compiling all the rest. `xla` writes it
out, `cudnn` has cuDNN build it. --again throws away what was compiled, and times so many further first calls. Needs jax
and, for `cudnn`, a GPU.
"""

import argparse
import functools
import os
import statistics
import time

# jax takes most of the GPU's memory when it starts, unless told not to.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

HEADS, HEAD_DIM = 16, 128
AXIS = "i"


def no_kernel(q, k, v):
    out, lse = q * k[:, :1] * v[:, :1], q[..., 0] * k[:, :1, :, 0]
    return out.transpose(0, 2, 1, 3).astype(jnp.float32), lse.transpose(0, 2, 1).astype(jnp.float32)


def xla_kernel(q, k, v):
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
    lse = jax.nn.logsumexp(logits, axis=-1)
    weights = jnp.exp(logits - lse[..., None]).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bhqd", weights, v, preferred_element_type=jnp.float32), lse


def cudnn_kernel(q, k, v):
    out, lse = jax.nn.dot_product_attention(q, k, v, implementation="cudnn", return_residual=True)
    return out.transpose(0, 2, 1, 3).astype(jnp.float32), lse.reshape(q.shape[:3]).transpose(0, 2, 1)


def tree(kernel, q, k, v):
    """As printed: (o, lse) of the share, then maximum, numerator and denominator."""
    res, lse = kernel(q, k, v)
    top = lax.pmax(lse, AXIS)
    numerator = lax.psum(res * jnp.exp(lse - top)[..., None], AXIS)
    denominator = lax.psum(jnp.exp(lse - top), AXIS)
    return numerator / denominator[..., None]


def ring(kernel, q, k, v):
    devices = jax.device_count()
    to_the_right = [(j, (j + 1) % devices) for j in range(devices)]

    def step(carry, _):
        numerator, denominator, top, k, v = carry
        res, lse = kernel(q, k, v)
        new = jnp.maximum(top, lse)
        numerator = numerator * jnp.exp(top - new)[..., None] + res * jnp.exp(lse - new)[..., None]
        denominator = denominator * jnp.exp(top - new) + jnp.exp(lse - new)
        k, v = (lax.ppermute(x, AXIS, to_the_right) for x in (k, v))
        return (numerator, denominator, new, k, v), None

    rows = (q.shape[0], HEADS, q.shape[1])
    empty = jnp.zeros((*rows, HEAD_DIM), jnp.float32), jnp.zeros(rows, jnp.float32), jnp.full(rows, -1e30, jnp.float32)
    (numerator, denominator, *_), _ = lax.scan(step, (*empty, k, v), None, length=devices)
    return numerator / denominator[..., None]


def compiled(function, mesh):
    """A new function each time: JAX knows nothing of it."""
    specs = dict(mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec(None, AXIS), PartitionSpec(None, AXIS)),
                 out_specs=PartitionSpec())
    try:
        return jax.jit(jax.shard_map(function, **specs, check_vma=False))
    except (AttributeError, TypeError):  # before JAX 0.7
        from jax.experimental.shard_map import shard_map
        return jax.jit(shard_map(function, **specs, check_rep=False))


def milliseconds(function, *arguments):
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return 1e3 * (time.perf_counter() - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=["tree", "ring"])
    parser.add_argument("--kernel", choices=["none", "xla", "cudnn"], default="none")
    parser.add_argument("--tokens", type=int, default=40000, help="of a device: 5.12M over 128")
    parser.add_argument("--again", type=int, default=0)
    options = parser.parse_args()
    kernel = {"none": no_kernel, "xla": xla_kernel, "cudnn": cudnn_kernel}[options.kernel]
    function = functools.partial({"tree": tree, "ring": ring}[options.kind], kernel)
    mesh = Mesh(numpy.array(jax.devices()), (AXIS,))

    def place(shape, spec):
        return jax.device_put(jnp.ones(shape, jnp.bfloat16), NamedSharding(mesh, spec))

    q = place((1, 1, HEADS, HEAD_DIM), PartitionSpec())
    kv_shape = (1, options.tokens * jax.device_count(), HEADS, HEAD_DIM)
    k, v = (place(kv_shape, PartitionSpec(None, AXIS)) for _ in range(2))
    jax.block_until_ready((jax.jit(lambda x: x + 1)(q), k, v))  # the device is up
    call = compiled(function, mesh)
    first = milliseconds(call, q, k, v)
    following = statistics.median(milliseconds(call, q, k, v) for _ in range(5))
    again = []
    for _ in range(options.again):
        jax.clear_caches()
        again.append(milliseconds(compiled(function, mesh), q, k, v))
    print(f"{options.kind}, kernel {options.kernel}, {jax.device_count()} x {jax.devices()[0].device_kind}, JAX "
          f"{jax.__version__}: first call {first:.1f} ms, next {following:.2f} ms"
          + (f", first calls again {', '.join(f'{ms:.1f}' for ms in again)} ms" if again else ""))


if __name__ == "__main__":
    main()
