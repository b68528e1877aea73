"""The gates of the CPU form: what must hold for engine and trainer to give equal bits on XLA:CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from contracts.errors import DifferenceFound, UncoveredArithmetic
from contracts.weight_digest import weight_digest
from isojax.audit import audit
from isojax.evidence.bisect import find_parting
from isojax.evidence.capture import RegionOutput, capture_forward
from isojax.policy.batch import pack
from isojax.policy.config import PolicyConfig
from isojax.policy.policy import Policy
from isojax.rl.mismatch import different_bits
from isojax.weights.digest import digest
from pallas_kernels.attention.spec import DEFAULT_SPLIT

# T: tokens, K: key heads, D: head dimension, P: page size.

_SEQUENCES = ([5, 1, 7, 3, 9], [2, 8, 4], [6, 3, 1, 7, 2, 9, 4])


def audit_gate() -> str:
    """Every float operation of the forward is a region; a stray sin is refused."""
    regions = 0
    for family in ("llama", "qwen3"):
        policy, params = _policy(family, "bfloat16")
        batch = pack(_SEQUENCES)
        report = audit(policy.score, params, policy.buffers, batch, jnp.float32(1))
        regions += sum(report.regions.values())
        try:
            audit(
                lambda *args, policy=policy: jnp.sin(policy.score(*args)), params, policy.buffers, batch, jnp.float32(1)
            )
        except UncoveredArithmetic:
            continue
        raise _failed("audit", "a stray sin passed", "UncoveredArithmetic", "The audit sees nothing.")
    return f"{regions} region calls, all else moves; a stray sin is refused"


def batch_composition_gate() -> str:
    """A sequence's rows have the same bits in every region, alone, packed with others, and padded further."""
    policy, params = _policy("llama", "bfloat16")
    together = capture_forward(policy, params, pack(_SEQUENCES, length_multiple=64))
    longer = capture_forward(policy, params, pack(_SEQUENCES[::-1], length_multiple=192))
    rows, start, reverse = 0, 0, sum(map(len, _SEQUENCES))
    for sequence in _SEQUENCES:
        length = len(sequence)
        reverse -= length
        alone = _rows(capture_forward(policy, params, pack([sequence], length_multiple=64)), 0, length)
        _require_equal(alone, _rows(together, start, length), "packed with others")
        _require_equal(alone, _rows(longer, reverse, length), "padded to 192 rows")
        start += length
        rows += 2 * length
    return f"{rows} rows of every region"


def cases_agree_gate() -> str:
    """trainer_fwd, under gradients and remat, gives trainer_score's bits, and full rows hold the same values."""
    batch = pack(_SEQUENCES)
    policy, params = _policy("qwen3", "bfloat16", "layer")

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        log_probs_T = policy.score(params, policy.buffers, batch, 1.0)
        return jnp.sum(log_probs_T), log_probs_T

    (_, forward), _ = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    score = np.asarray(policy.log_probs(params, batch))
    _require_same_bits(np.asarray(forward), score, "trainer_fwd against trainer_score")
    rows = np.asarray(policy.log_prob_rows(params, batch, np.arange(len(score))))
    taken = np.take_along_axis(rows, np.asarray(batch.targets)[:, None], axis=1)[:, 0]
    _require_same_bits(taken, score, "full rows against sampled tokens")
    return f"{len(score)} tokens"


def attention_bindings_gate() -> str:
    """Paged attention gives packed attention's bits, for histories around every block, page and split."""
    lengths = (1, 15, 16, 17, 127, 128, 129, DEFAULT_SPLIT + 88)
    for page, dtype in ((16, "bfloat16"), (128, "bfloat16"), (128, "float32")):
        _check_paged(lengths, page, dtype)
    return f"histories of {', '.join(map(str, lengths))} tokens, pages of 16 and 128 in bfloat16, 128 in float32"


def column_shards_gate() -> str:
    """A matmul's columns have the same bits when the weights are cut over 2 or 4 ranks."""
    key_x, key_w = jax.random.split(jax.random.key(3))
    for dtype in ("bfloat16", "float32"):
        x_TK = jax.random.normal(key_x, (9, 256)).astype(dtype)
        w_NK = jax.random.normal(key_w, (192, 256)).astype(dtype)
        whole = np.asarray(pallas_kernels.matmul(x_TK, w_NK, leaves=4).astype(jnp.float32))
        for ranks in (2, 4):
            parts = [pallas_kernels.matmul(x_TK, part, leaves=4) for part in jnp.split(w_NK, ranks)]
            sharded = np.asarray(jnp.concatenate(parts, axis=1).astype(jnp.float32))
            _require_same_bits(sharded, whole, f"matmul {dtype} over {ranks} ranks")
    return "2 and 4 ranks, both dtypes"


def cast_gate() -> str:
    """float32 to bfloat16 rounds to nearest, ties to even."""
    # Exact midpoints of neighbouring bfloat16 values, odd and even, and values one ulp to either side.
    upper = np.arange(0x3F80, 0x3F90, dtype=np.uint32)
    words = np.concatenate([(upper << 16) + offset for offset in (0x7FFF, 0x8000, 0x8001)]).astype(np.uint32)
    expected = ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)
    found = np.asarray(pallas_kernels.cast(jnp.asarray(words.view(np.float32)), dtype="bfloat16")).view(np.uint16)
    if not np.array_equal(found, expected):
        raise _failed(
            "cast", f"{int((found != expected).sum())} of {len(words)} differ", "0", "It does not round to even."
        )
    return f"{len(words)} values, {len(upper)} of them exact midpoints"


def weight_digest_gate() -> str:
    """JAX's weight digest is the reference's; a permuted tensor has another one."""
    _, params = _policy("qwen3", "bfloat16")
    reference = weight_digest({name: np.asarray(value) for name, value in params.items()})
    if digest(params) != reference:
        raise _failed("weight digest", digest(params), reference, "JAX and the NumPy reference disagree.")
    swapped = {**params, "embed": params["embed"][::-1]}
    if digest(swapped) == reference:
        raise _failed("weight digest", "equal", "different", "A permuted tensor has the same digest.")
    return reference


def planted_fault_gate() -> str:
    """One bit flipped in one region's result is found where it is, although a later difference is larger."""
    policy, params = _policy("llama", "bfloat16")
    right = capture_forward(policy, params, pack(_SEQUENCES))
    left = list(right)
    place = next(index for index, output in enumerate(right) if output.region == "gated_matmul" and output.layer == 1)
    for index, value in ((place, None), (len(right) - 1, 100.0)):
        result = right[index].results[0].copy()
        if value is None:
            result.view(np.uint16)[2, 0] ^= 1
        else:
            result[0, 0] += value
        left[index] = dataclasses.replace(right[index], results=(result, *right[index].results[1:]))
    found = find_parting(left, right)
    if found is None or (found.region, found.layer, found.row) != ("gated_matmul", 1, 2):
        raise _failed("bisect", found, "gated_matmul of layer 1, row 2", "The planted fault was not named.")
    return "named gated_matmul of layer 1, row 2"


GATES: tuple[tuple[str, str, Callable[[], str]], ...] = tuple(
    (name, (check.__doc__ or "").strip(), check)
    for name, check in (
        ("audit", audit_gate),
        ("batch_composition", batch_composition_gate),
        ("cases_agree", cases_agree_gate),
        ("attention_bindings", attention_bindings_gate),
        ("column_shards", column_shards_gate),
        ("cast", cast_gate),
        ("weight_digest", weight_digest_gate),
        ("planted_fault", planted_fault_gate),
    )
)


@cache
def _policy(family: str, dtype: str, remat: Any = "none") -> tuple[Policy, dict[str, jax.Array]]:
    config = PolicyConfig.from_hugging_face(
        {
            "model_type": family,
            "architectures": ["LlamaForCausalLM" if family == "llama" else "Qwen3ForCausalLM"],
            "vocab_size": 100,
            "hidden_size": 96,
            "intermediate_size": 160,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": family == "llama",
        }
    )
    policy = Policy(config, dtype=dtype, remat=remat)
    return policy, policy.init(jax.random.key(1), 0.2)


def _check_paged(lengths: Sequence[int], page: int, dtype: str) -> None:
    """All histories in one packed batch, and the same tokens in shuffled pages."""
    total, heads = sum(lengths), (6, 2, 2)
    keys = jax.random.split(jax.random.key(7), 3)
    q, k, v = (jax.random.normal(key, (total, count, 16)).astype(dtype) for key, count in zip(keys, heads, strict=True))
    positions_T = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    request_T = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    packed = pallas_kernels.attention(q, k, v, jnp.asarray(positions_T), jnp.asarray(request_T), 0, scale=0.25)

    counts = [-(-length // page) for length in lengths]
    order = np.random.default_rng(page).permutation(sum(counts)).astype(np.int32)
    table_RP = np.zeros((len(lengths), max(counts)), np.int32)
    for request, (count, pages) in enumerate(zip(counts, np.split(order, np.cumsum(counts)[:-1]), strict=True)):
        table_RP[request, :count] = pages
    slots_T = table_RP[request_T, positions_T // page] * page + positions_T % page

    def cache_of(values_TKD: jax.Array) -> jax.Array:
        # NaN wherever no token is: those slots must never be read.
        empty = jnp.full((sum(counts) * page, *values_TKD.shape[1:]), jnp.nan, dtype)
        return empty.at[slots_T].set(values_TKD).reshape(-1, page, *values_TKD.shape[1:])

    paged = pallas_kernels.paged_attention(
        q, cache_of(k), cache_of(v), jnp.asarray(table_RP), jnp.asarray(request_T), jnp.asarray(positions_T), scale=0.25
    )
    _require_same_bits(
        np.asarray(paged.astype(jnp.float32)), np.asarray(packed.astype(jnp.float32)), f"{dtype}, pages of {page}"
    )


def _rows(outputs: list[RegionOutput], start: int, length: int) -> list[RegionOutput]:
    return [
        dataclasses.replace(output, results=tuple(result[start : start + length] for result in output.results))
        for output in outputs
    ]


def _require_equal(left: list[RegionOutput], right: list[RegionOutput], what: str) -> None:
    found = find_parting(left, right)
    if found is not None:
        raise _failed(what, found, "equal bits in every region", "The batch's composition moved bits.")


def _require_same_bits(left: np.ndarray, right: np.ndarray, what: str) -> None:
    different = int(different_bits(left, right).sum())
    if different:
        raise _failed(what, f"{different} of {left.size} values differ", "0", "Two forms of one schedule disagree.")


def _failed(field: str, found: object, allowed: object, reason: str) -> DifferenceFound:
    return DifferenceFound(field=field, found=found, allowed=allowed, reason=reason)
