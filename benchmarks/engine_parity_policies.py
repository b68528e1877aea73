"""The policies of the comparison: sealed without weights, and weights made where they are needed.

Random weights are scaled until a token's entropy is a real model's: at the usual initialisation every token would be
nearly as likely as any other, and sampled tokens would all have about the same log-probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isojax import Policy, PolicyConfig, export_policy, pack, tokenizer_files
from isojax.evidence import small_policy
from isojax.evidence.engine_parity import entropy
from isojax.kernels import KernelShapes
from isojax.policy import RopeConfig
from isojax.weights.gguf import open_gguf

# N: rows, V: vocabulary.

DEVIATION = 0.02
"""Of a random weight. It keeps the embedding's own share of the residual stream small against the layers'; else a tied
head would predict the token that it was just given."""
PROBE_TOKENS, PROBE_ROWS = 128, 256


def qwen3(hidden: int, ffn: int, layers: int, heads: int, *, tied: bool) -> PolicyConfig:
    """Shapes of the Qwen3 family with a context for prompts of 8192 tokens and their completions."""
    return PolicyConfig(
        family="qwen3",
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        max_position=8704,
        rms_norm_eps=1e-6,
        rope=RopeConfig(1e6),
        tied_head=tied,
    )


SHAPES: dict[str, Callable[[], PolicyConfig]] = {
    "small": lambda: small_policy.CONFIG,
    "qwen3_1b7": lambda: qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3_8b": lambda: qwen3(4096, 12288, 36, 32, tied=False),
}


def prepare(folder: Path, source: str, processes: int, page_size: int | None = None) -> None:
    """Seals a policy's kernels into a folder. source: a name of `SHAPES`, or a .gguf file whose shapes it takes.
    page_size: tokens a page, by default the one that a user would get.

    The small policy gets its weights and few kernels, the others no weights and the kernels that a user would get.
    """
    from isojax.kernels.sealing import seal_policy

    if source.endswith(".gguf"):
        policy, tokenizer = Policy(open_gguf(Path(source)).config), tokenizer_files(source)
    else:
        policy, tokenizer = Policy(SHAPES[source]()), {}
    shapes, params = KernelShapes(), None
    if source == "small":
        shapes, params = small_policy.SHAPES, small_policy.small_parameters(policy)
    if page_size is not None:
        shapes = replace(shapes, page_size=page_size)
    kernels = seal_policy(policy, shapes, processes=processes, show_progress=True)
    export_policy(folder, policy, params, tokenizer, arch="sm90", kernels=kernels)
    print(f"{len(kernels.modules)} kernels in {folder}")


def random_parameters(policy: Policy, seed: int) -> dict[str, jax.Array]:
    """Random weights made on the device, a piece at a time; norms around 1, so that a missing multiply would show."""
    params = {}
    for number, (name, shape) in enumerate(sorted(policy.parameter_shapes.items())):
        key = jax.random.fold_in(jax.random.key(seed), number)
        middle, deviation = (1.0, 0.1) if "norm" in name else (0.0, DEVIATION)
        params[name] = _normal(key, shape.shape, shape.dtype, middle, deviation)
    return params


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any, middle: float, deviation: float) -> jax.Array:
    # All at once would hold fp32 numbers of twice the size of the largest parameter.
    pieces = math.gcd(shape[0], 128) if len(shape) == 2 else shape[0]
    piece = (shape[0] // pieces, *shape[1:])

    def draw(one: jax.Array) -> jax.Array:
        return (middle + deviation * jax.random.normal(one, piece)).astype(dtype)

    return jax.lax.map(draw, jax.random.split(key, pieces)).reshape(shape)


def scaled_to_entropy(
    policy: Policy,
    params: Mapping[str, jax.Array],
    target: float,
    *,
    packing: Mapping[str, Any],
    rows: int = PROBE_ROWS,
) -> dict[str, jax.Array]:
    """These parameters with the final norm multiplied so that a token's mean entropy is `target` nats.

    The final norm scales all logits alike, so one forward is enough: its rows are the logits up to a constant, and the
    factor is found by bisection on them. rows: probed, at random tokens behind at least 32 others.
    """
    generator = np.random.default_rng(0)
    vocabulary = policy.config.vocab_size
    batch = pack([generator.integers(3, vocabulary, PROBE_TOKENS).tolist() for _ in range(8)], **packing)
    behind = np.flatnonzero((np.asarray(batch.positions) >= 32) & (np.asarray(batch.segment_ids) >= 0))
    probed_NV = policy.log_prob_rows(params, batch, generator.permutation(behind)[:rows])
    factor = float(_entropy_factor(probed_NV, target))
    norms = params["norms"]
    scaled = (norms[-1].astype(jnp.float32) * factor).astype(norms.dtype)
    return {**params, "norms": norms.at[-1].set(scaled)}


@jax.jit
def _entropy_factor(log_probs_NV: jax.Array, target: jax.Array | float) -> jax.Array:
    """The factor on these rows' logits at which their mean entropy is `target`, which falls as the factor grows."""

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = jnp.sqrt(low * high)
        wide = entropy(jax.nn.log_softmax(middle * log_probs_NV)).mean() > target
        return jnp.where(wide, middle, low), jnp.where(wide, high, middle)

    low, high = jax.lax.fori_loop(0, 40, halve, (jnp.float32(1e-2), jnp.float32(1e4)))
    return jnp.sqrt(low * high)


def other_parameters(params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Other weights of the same policy: every layer's matrices belong to the layer after it."""
    return {name: jnp.roll(value, 1, axis=0) if name.startswith("layers.") else value for name, value in params.items()}


def corpus(folder: Path, vocabulary: int) -> np.ndarray:
    """Tokens to cut prompts from: this project's own text where the policy has a tokenizer, else random ones."""
    file = folder / "tokenizer.json"
    if not file.exists():
        return np.random.default_rng(1).integers(3, vocabulary, 1 << 18)
    from tokenizers import Tokenizer

    root = Path(__file__).parents[1]
    sources = [*sorted(root.glob("*.md")), *sorted(root.glob("docs/*.md")), *sorted(root.glob("isojax/**/*.py"))]
    text = "\n".join(path.read_text() for path in sources)
    return np.array(Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids)
