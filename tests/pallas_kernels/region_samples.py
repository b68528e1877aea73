"""Every region that maps rows to rows as one entry of a table: random operands, the call, and its NumPy reference."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import region_reference as reference

import pallas_kernels as pk

HIDDEN, INNER, VOCABULARY, HEADS, KEY_HEADS, HEAD = 192, 64, 1000, 6, 2, 64
EPS = 1e-5


@dataclass(frozen=True)
class Sample:
    """`rows` are operands with one row a token, `shared` the others; `call(rows, shared)` returns a tuple of arrays."""

    name: str
    rows: Callable[[np.random.Generator, int, Any], tuple[Any, ...]]
    shared: Callable[[np.random.Generator, Any], tuple[Any, ...]]
    call: Callable[[tuple[Any, ...], tuple[Any, ...]], tuple[Any, ...]]
    reference: Callable[[tuple[Any, ...], tuple[Any, ...]], tuple[Any, ...]]


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> Any:
    # NumPy's cast: an eager JAX one would be compiled for every shape.
    return jnp.asarray((rng.standard_normal(shape) * scale).astype(np.float32).astype(jnp.dtype(dtype)))


def operands(sample: Sample, tokens: int, dtype: Any, seed: int = 0) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    rng = np.random.default_rng(seed)
    shared = sample.shared(rng, dtype)
    return sample.rows(rng, tokens, dtype), shared


def _hidden(count: int = 1, width: int = HIDDEN) -> Callable[..., tuple[Any, ...]]:
    return lambda rng, tokens, dtype: tuple(normal(rng, (tokens, width), dtype) for _ in range(count))


def _weight(*shapes: tuple[int, ...], scale: float = 1.0) -> Callable[..., tuple[Any, ...]]:
    return lambda rng, dtype: tuple(normal(rng, shape, dtype, scale) for shape in shapes)


def _heads(rng: np.random.Generator, tokens: int, dtype: Any) -> tuple[Any, ...]:
    angle = rng.uniform(0, 6.28, (tokens, HEAD // 2))
    table = jnp.asarray(np.concatenate([np.cos(angle), np.sin(angle)], 1), jnp.float32)
    return normal(rng, (tokens, (HEADS + 2 * KEY_HEADS) * HEAD), dtype), table


def _matmul(name: str, columns: int, leaves: int, bias: bool = False) -> Sample:
    shapes = ((columns, HIDDEN), (columns,)) if bias else ((columns, HIDDEN),)
    return Sample(
        name,
        _hidden(),
        _weight(*shapes),
        lambda rows, shared: (pk.matmul(rows[0], *shared, leaves=leaves),),
        lambda rows, shared: (reference.matmul(rows[0], *shared, leaves=leaves, dtype=np.asarray(rows[0]).dtype),),
    )


def _rope_reference(rows: tuple[Any, ...], shared: tuple[Any, ...]) -> tuple[Any, ...]:
    qkv = np.asarray(rows[0]).reshape(rows[0].shape[0], -1, HEAD)
    *heads, values = np.split(qkv, (HEADS, HEADS + KEY_HEADS), axis=1)
    if shared:
        heads = [reference.rms_norm(x, w, eps=EPS) for x, w in zip(heads, shared, strict=True)]
    return *(reference.rotate(x, rows[1]) for x in heads), values


def _gated_reference(x: Any, w: Any) -> Any:
    return reference.swiglu(reference.matmul(x, w, leaves=1, dtype=np.asarray(x).dtype))


def _targets(rng: np.random.Generator, tokens: int, dtype: Any) -> tuple[Any, ...]:
    return normal(rng, (tokens, HIDDEN), dtype), jnp.asarray(rng.integers(0, VOCABULARY, tokens), jnp.int32)


def _token_reference(rows: tuple[Any, ...], shared: tuple[Any, ...]) -> tuple[Any, ...]:
    full = reference.log_prob_rows(rows[0], shared[0], 0.7, vocab_size=VOCABULARY)
    return (full[np.arange(full.shape[0]), np.asarray(rows[1])],)


_HEAD_WEIGHT = _weight((VOCABULARY + 24, HIDDEN), scale=0.1)

SAMPLES = (
    _matmul("matmul", 128, 1),
    _matmul("matmul_leaves_narrow", 40, 4),
    _matmul("matmul_bias", 128, 2, bias=True),
    Sample(
        "rms_norm",
        _hidden(),
        _weight((HIDDEN,)),
        lambda rows, shared: (pk.rms_norm(rows[0], shared[0], eps=EPS),),
        lambda rows, shared: (reference.rms_norm(rows[0], shared[0], eps=EPS),),
    ),
    Sample(
        "add_rms_norm",
        _hidden(2),
        _weight((HIDDEN,)),
        lambda rows, shared: pk.add_rms_norm(*rows, shared[0], eps=EPS),
        lambda rows, shared: reference.add_rms_norm(*rows, shared[0], eps=EPS),
    ),
    Sample(
        "residual_add",
        _hidden(2),
        _weight(),
        lambda rows, shared: (pk.residual_add(*rows),),
        lambda rows, shared: (reference.add(*rows),),
    ),
    Sample(
        "swiglu",
        _hidden(1, 2 * INNER),
        _weight(),
        lambda rows, shared: (pk.swiglu(rows[0]),),
        lambda rows, shared: (reference.swiglu(rows[0]),),
    ),
    Sample(
        "gated_matmul",
        _hidden(),
        _weight((2 * INNER, HIDDEN), scale=0.1),
        lambda rows, shared: (pk.gated_matmul(rows[0], shared[0]),),
        lambda rows, shared: (_gated_reference(rows[0], shared[0]),),
    ),
    Sample(
        "rope",
        _heads,
        _weight(),
        lambda rows, shared: pk.qk_norm_rope(*rows, key_heads=KEY_HEADS, eps=EPS),
        _rope_reference,
    ),
    Sample(
        "qk_norm_rope",
        _heads,
        _weight((HEAD,), (HEAD,)),
        lambda rows, shared: pk.qk_norm_rope(*rows, *shared, key_heads=KEY_HEADS, eps=EPS),
        _rope_reference,
    ),
    Sample(
        "cast",
        lambda rng, tokens, dtype: (normal(rng, (tokens, HIDDEN), jnp.float32),),
        _weight(),
        lambda rows, shared: (pk.cast(rows[0], dtype="bfloat16"),),
        lambda rows, shared: (np.asarray(rows[0]).astype(reference.BF16),),
    ),
    Sample(
        "log_prob_rows",
        _hidden(),
        _HEAD_WEIGHT,
        lambda rows, shared: (pk.log_prob_rows(rows[0], shared[0], 0.7, vocab_size=VOCABULARY),),
        lambda rows, shared: (reference.log_prob_rows(rows[0], shared[0], 0.7, vocab_size=VOCABULARY),),
    ),
    Sample(
        "token_log_probs",
        _targets,
        _HEAD_WEIGHT,
        lambda rows, shared: (pk.token_log_probs(rows[0], shared[0], rows[1], 0.7, vocab_size=VOCABULARY),),
        _token_reference,
    ),
)
BY_NAME = {sample.name: sample for sample in SAMPLES}
