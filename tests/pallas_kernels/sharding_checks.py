"""Run as a program on 8 virtual CPU devices: prints how many elements differ between sharded and whole, as JSON.

The digests of `process_checks` come with them, since this is also the process with many threads. tp ranks hold columns
of a weight, contiguous leaves of K, or contiguous leaves of the vocabulary.
"""

import json
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import process_checks
import region_reference as reference
from attention_samples import sequence
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from region_samples import SAMPLES, normal, operands

import pallas_kernels as pk
from pallas_kernels.lm_head import cpu as lm_head
from pallas_kernels.loops import hidden_zero, map_row_tiles
from pallas_kernels.matmul import cpu as matmul

DEVICES = np.array(jax.devices())
TOKENS = process_checks.TOKENS


def mesh(size: int) -> Mesh:
    return Mesh(DEVICES[:size], ("x",))


def differing(results, expected) -> int:
    return sum(reference.unequal(a, b) for a, b in zip(results, expected, strict=True))


def row_shards(sample) -> int:
    """Rows over 8 devices against all rows on one."""
    rows, shared = operands(sample, TOKENS, jnp.bfloat16)
    sharded = jax.shard_map(
        sample.call,
        mesh=mesh(8),
        in_specs=(jax.tree.map(lambda _: P("x"), rows), jax.tree.map(lambda _: P(), shared)),
        out_specs=P("x"),
    )
    return differing(jax.jit(sharded)(rows, shared), sample.call(rows, shared))


def sharded_gradient() -> float:
    """Largest difference of a replicated weight's gradient under sharded rows, relative to the whole one."""
    rng = np.random.default_rng(1)
    x, w = normal(rng, (TOKENS, 64), jnp.float32), normal(rng, (128, 64), jnp.float32)

    def loss(w, x):
        def local(x, w):
            return jax.lax.psum((pk.matmul(x, w) ** 2).sum(), "x")

        return jax.shard_map(local, mesh=mesh(8), in_specs=(P("x"), P()), out_specs=P())(x, w)

    found, expected = jax.jit(jax.grad(loss))(w, x), jax.grad(lambda w: ((x @ w.T) ** 2).sum())(w)
    return float(jnp.abs(found - expected).max() / jnp.abs(expected).max())


def column_shards(size: int) -> int:
    """Columns of the weight over ranks, 72 a rank at 8: no multiple of the column tile."""
    rng = np.random.default_rng(2)
    x, w = normal(rng, (TOKENS, 576), jnp.bfloat16), normal(rng, (576, 576), jnp.bfloat16)
    call = jax.shard_map(pk.matmul, mesh=mesh(size), in_specs=(P(), P("x")), out_specs=P(None, "x"))
    return differing([jax.jit(call)(x, w)], [pk.matmul(x, w)])


def leaf_shards(size: int, gather: bool = True) -> int:
    """K over ranks: each makes its own leaves, all gather them and fold the same tree."""
    rng = np.random.default_rng(3)
    x, w = normal(rng, (TOKENS, 1536), jnp.bfloat16), normal(rng, (192, 1536), jnp.bfloat16)

    def rank(x, w):
        own = 8 // size
        wide = w.astype(jnp.float32)

        def tile(zero, rows):
            return tuple(matmul.leaf_dots(rows, wide, own, zero))

        partials = jnp.stack(map_row_tiles(tile, [x], [((192,), jnp.float32)] * own, 64))
        if not gather:
            return jax.lax.psum(matmul.fold(list(partials)).astype(jnp.bfloat16), "x")
        leaves = jax.lax.all_gather(partials, "x", tiled=True)
        return matmul.fold(list(leaves)).astype(jnp.bfloat16)

    specs = {"in_specs": (P(None, "x"), P(None, "x")), "out_specs": P(), "check_vma": False}
    return differing([jax.jit(jax.shard_map(rank, mesh=mesh(size), **specs))(x, w)], [pk.matmul(x, w, leaves=8)])


def vocabulary_shards(size: int) -> int:
    """Leaves of the vocabulary over ranks, the last leaf partly empty: maxima and sums are gathered."""
    vocabulary, hidden, temperature = 30_000, 64, jnp.float32(0.8)
    rng = np.random.default_rng(4)
    x, w = normal(rng, (16, hidden), jnp.bfloat16), normal(rng, (vocabulary, hidden), jnp.bfloat16)
    width = 8 // size * lm_head.leaf_size(vocabulary)
    padded = jnp.pad(w, ((0, width * size - vocabulary), (0, 0)))

    def rank(x, w):
        zero = hidden_zero(x)
        columns = jnp.minimum(vocabulary - width * jax.lax.axis_index("x"), width)
        scaled = lm_head.divide(lm_head.chain_dot(*(a.astype(jnp.float32) for a in (x, w))), temperature)
        scaled = jnp.where(jnp.arange(width) < columns, scaled, -jnp.inf)
        maximum = jax.lax.all_gather(scaled.max(1), "x").max(0)
        sums = jax.lax.all_gather(lm_head.leaf_sums(scaled, maximum, 8 // size, zero), "x", tiled=True)
        return (scaled - maximum[:, None]) - lm_head.log_sum(sums, zero)[:, None]

    call = jax.shard_map(rank, mesh=mesh(size), in_specs=(P(), P("x")), out_specs=P(None, "x"), check_vma=False)
    found = jax.jit(call)(x, padded)[:, :vocabulary]
    return differing([found], [pk.log_prob_rows(x, w, temperature, vocab_size=vocabulary)])


def head_shards() -> int:
    """Attention heads over 2 ranks."""
    own = sequence(5, 150, 6, 2)
    positions = jnp.arange(150, dtype=jnp.int32)

    def call(q, k, v):
        return pk.attention(q, k, v, positions, positions, 0, scale=0.125)

    specs = {"in_specs": (P(None, "x"),) * 3, "out_specs": P(None, "x")}
    return differing([jax.jit(jax.shard_map(call, mesh=mesh(2), **specs))(*own)], [call(*own)])


def main() -> None:
    found = {f"rows {sample.name}": row_shards(sample) for sample in SAMPLES}
    found |= {f"columns {size}": column_shards(size) for size in (2, 8)}
    found |= {f"leaves {size}": leaf_shards(size) for size in (2, 4, 8)}
    found |= {f"vocabulary {size}": vocabulary_shards(size) for size in (2, 4)}
    found |= {"heads": head_shards(), "psum of leaves": leaf_shards(4, gather=False), "gradient": sharded_gradient()}
    print(json.dumps(found | {"digests": process_checks.digests()}))


if __name__ == "__main__":
    main()
