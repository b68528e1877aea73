"""Fill packed parameters from named tensors, refusing whatever is missing, extra, misshapen or of a wrong dtype."""

from collections.abc import Callable, Iterable

import jax
import ml_dtypes
import numpy as np

from contracts.errors import BadCheckpoint
from isojax.policy.policy import Policy
from isojax.weights.names import name_table

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# A float16 value is exact in fp32 and rounds once to bf16.
_READABLE = {BFLOAT16, np.dtype(np.float32), np.dtype(np.float16)}
# Buffers that old exporters wrote next to the weights; the policy computes its own.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".self_attn.bias", ".self_attn.masked_bias")


def pack_tensors(
    policy: Policy, names: Iterable[str], read: Callable[[str], np.ndarray], source: str
) -> dict[str, jax.Array]:
    """Packed parameters in the policy's dtype from Hugging Face tensors.

    names: every tensor in the source. read: returns one as a NumPy array. source: for messages. Raises `BadCheckpoint`
    naming the tensor.
    """
    config = policy.config
    available = {name for name in names if not name.endswith(_IGNORED_SUFFIXES)}
    table = name_table(config)
    wanted = {entry.hugging_face for entry in table}
    if missing := sorted(wanted - available):
        raise _bad(missing, "missing", source, "The policy has parameters that the checkpoint does not hold.")
    extra = sorted(available - wanted)
    if config.tied_head and "lm_head.weight" in extra:
        # Some exporters write the tied head a second time. Equal bits are harmless, anything else is a contradiction.
        if not same_bits(read("lm_head.weight"), read("model.embed_tokens.weight")):
            raise BadCheckpoint(
                field="lm_head.weight",
                found=f"a head in {source} that differs from model.embed_tokens.weight",
                allowed="equal bits, or tie_word_embeddings: false",
                reason="config.json says that the head is the embedding, the checkpoint that it is not.",
            )
        extra.remove("lm_head.weight")
    if extra:
        raise _bad(extra, "not part of the policy", source, "An ignored tensor would be silently lost arithmetic.")
    packed = {name: np.empty(shape.shape, shape.dtype) for name, shape in policy.parameter_shapes.items()}
    for entry in table:
        tensor = read(entry.hugging_face)
        if tensor.shape != entry.shape:
            raise BadCheckpoint(
                field=entry.hugging_face,
                found=f"shape {list(tensor.shape)} in {source}",
                allowed=list(entry.shape),
                reason="config.json and the checkpoint disagree.",
            )
        if tensor.dtype not in _READABLE:
            raise BadCheckpoint(
                field=entry.hugging_face,
                found=f"dtype {tensor.dtype} in {source}",
                allowed=sorted(str(dtype) for dtype in _READABLE),
                reason="Quantised or integer weights have no exact counterpart in the trainer.",
            )
        target = packed[entry.packed]
        # ml_dtypes rounds to nearest even, once; widening is exact.
        target[entry.index if entry.index else ...] = tensor.astype(target.dtype)
    for name, array in packed.items():
        if not np.isfinite(array.astype(np.float32) if array.dtype == BFLOAT16 else array).all():
            raise BadCheckpoint(
                field=name,
                found=f"NaN or infinity in {source}",
                allowed="finite numbers",
                reason="One such weight makes every log-probability NaN.",
            )
    return {name: jax.numpy.asarray(array) for name, array in packed.items()}


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether two arrays have equal dtype, shape and bit patterns (so +0 and -0 differ, and NaN may be equal)."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return np.ascontiguousarray(left).tobytes() == np.ascontiguousarray(right).tobytes()


def _bad(names: list[str], what: str, source: str, reason: str) -> BadCheckpoint:
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return BadCheckpoint(
        field=shown or "tensors", found=f"{what} ({source})", allowed="exactly the policy's", reason=reason
    )
