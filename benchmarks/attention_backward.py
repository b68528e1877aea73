"""Times attention's backward on packed sequences beside cuDNN's: python benchmarks/attention_backward.py OUT.json.

cuDNN's backward is timed with the forward that it needs, and that forward alone. `--heads 2 --key-heads 1 --sequences 2
--length 128 --forms chunked` runs on a CPU.
"""

from __future__ import annotations

import argparse
import statistics
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from train_step import Results, measure

import pallas_kernels
from pallas_kernels.attention.vjp import chunked_gradients

CALLS = 20
"""In one measurement, so that sending a call costs little beside it."""


def kernels(options: dict[str, int], scale: float, *operands: jax.Array) -> Any:
    from pallas_kernels.attention.hopper_backward import hopper_gradients

    return hopper_gradients(*operands, scale=scale, **options)


def _batched(count: int, *arrays: jax.Array) -> list[jax.Array]:
    return [array.reshape(count, -1, *array.shape[1:]) for array in arrays]


def cudnn_forward(count: int, scale: float, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    q, k, v = _batched(count, q, k, v)
    return jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=True, implementation="cudnn")


def packed_forward(count: int, scale: float, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """One batch row of `count` segments, which cuDNN is told as lengths and offsets."""
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    length = len(q) // count
    lengths = jnp.full((1, count), length, jnp.int32)
    offsets = (jnp.arange(count + 1, dtype=jnp.int32) * length)[None]
    q, k, v = (array[None] for array in (q, k, v))
    segments = {"q_seqlen": lengths, "kv_seqlen": lengths, "q_offsets": offsets, "kv_offsets": offsets}
    return dot_product_attention(q, k, v, **segments, scale=scale, mask_type=MaskType.PADDING_CAUSAL)


def forward_and_backward(forward: Callable[..., jax.Array], *operands: jax.Array) -> Any:
    q, k, v, _, _, _, g = operands
    out, pull = jax.vjp(forward, q, k, v)
    return tuple(
        gradient.reshape(own.shape) for gradient, own in zip(pull(g.reshape(out.shape)), (q, k, v), strict=True)
    )


def forms(count: int, scale: float) -> dict[str, Callable[..., Any]]:
    """By name, the gradients of q, k and v as a function of the backward's operands."""
    library, segments = partial(cudnn_forward, count, scale), partial(packed_forward, count, scale)
    return {
        "kernels": partial(kernels, {}, scale),
        "cudnn, forward and backward": partial(forward_and_backward, library),
        "cudnn, forward": lambda *operands: library(*operands[:3]),
        "kernels, keys in 64": partial(kernels, {"key_block": 64}, scale),
        "kernels, queries in 128": partial(kernels, {"query_block": 128}, scale),
        "cudnn packed, forward and backward": partial(forward_and_backward, segments),
        "cudnn packed, forward": lambda *operands: segments(*operands[:3]),
        "chunked": partial(chunked_gradients, scale=scale),
    }


def in_a_row(call: Callable[[], Any]) -> Callable[[], Any]:
    """`CALLS` calls, sent without waiting; the device runs them one after the other."""
    return lambda: [call() for _ in range(CALLS)][-1]


def _relative(found: jax.Array, expected: jax.Array) -> float:
    found, expected = found.astype(jnp.float32).ravel(), expected.astype(jnp.float32).ravel()
    return float(jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--key-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--forms", nargs="+", help="only forms whose names begin so")
    options = parser.parse_args(arguments)
    T, D, scale = options.sequences * options.length, options.head_size, options.head_size**-0.5
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(T, heads, D) for heads in (options.heads, options.key_heads, options.key_heads, options.heads)]
    q, k, v, g = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
    rows = np.arange(T, dtype=np.int32)
    place = (jnp.asarray(rows % options.length), jnp.asarray(rows // options.length))
    out = pallas_kernels.attention(q, k, v, *place, 0, scale=scale)
    operands = q, k, v, *place, out, g
    expected = jax.jit(partial(chunked_gradients, scale=scale))(*operands)
    results, calls, errors = Results(options.out), {}, {}
    for name, form in forms(options.sequences, scale).items():
        if options.forms and not any(name.startswith(wanted) for wanted in options.forms):
            continue
        try:
            compiled = jax.jit(form).lower(*operands).compile()
            found = compiled(*operands)
            if isinstance(found, tuple):
                errors[name] = [round(_relative(*pair), 5) for pair in zip(found, expected, strict=True)]
            calls[name] = in_a_row(partial(compiled, *operands))
            print(
                name, errors.get(name), f"{compiled.memory_analysis().temp_size_in_bytes / 2**20:.0f} MiB", flush=True
            )
        except Exception as error:
            traceback.print_exc()
            results.add(form=name, failed=f"{type(error).__name__}: {error}"[:500])
    size = {"sequences": options.sequences, "length": options.length, "heads": options.heads, "head_size": D}
    for name, times in measure(calls, options.rounds).items():
        us = [1000 * ms / CALLS for ms in times]
        row = {"form": name, "us": round(statistics.median(us), 1), "spread_us": round(max(us) - min(us), 1)}
        results.add(**row, relative_errors=errors.get(name), **size)


if __name__ == "__main__":
    main()
