"""Whether a trainer and its engine fit on one card, reckoned before either allocates anything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from contracts.errors import BadConfig

_FLOAT32 = 4


@dataclass(frozen=True)
class MemorySplit:
    """Bytes of everything with a size of its own, and a reserve for what has none.

    weights: the trainer's copies that compute, and those that replace them in an update. reference: the frozen policy
    of a KL term. master, moments: float32 weights, and AdamW's two moments. gradients: one micro-batch's, in the
    policy's dtype, and their float32 sum. whole: on a mesh the weights that a sync gathers. engine_weights, kv_cache:
    the engine's.
    reserve: activations, workspaces, captured graphs.
    """

    weights: int
    reference: int
    master: int
    moments: int
    gradients: int
    whole: int
    engine_weights: int
    kv_cache: int
    reserve: int

    @property
    def trainer(self) -> int:
        """What the trainer's own allocator must give, the reserve aside."""
        return self.weights + self.reference + self.master + self.moments + self.gradients + self.whole

    @property
    def total(self) -> int:
        """All of it."""
        return self.trainer + self.engine_weights + self.kv_cache + self.reserve

    def __str__(self) -> str:
        """The sum, part by part, in GiB."""
        parts = (
            ("weights twice", self.weights),
            ("reference", self.reference),
            ("float32 master", self.master),
            ("Adam moments", self.moments),
            ("gradients", self.gradients),
            ("weights gathered for a sync", self.whole),
            ("engine's weights", self.engine_weights),
            ("KV cache", self.kv_cache),
            ("reserve", self.reserve),
        )
        return " + ".join(f"{name} {_gib(size)}" for name, size in parts if size) + f" = {_gib(self.total)} GiB"

    def require_fit(self, card_bytes: int, trainer_bytes: int | None = None) -> None:
        """Raise BadConfig, with the arithmetic, if the card cannot hold it.

        card_bytes: memory of the card. trainer_bytes: most that the trainer's allocator takes of it, where it has such
        a limit.
        """
        if self.total > card_bytes:
            raise BadConfig(
                field="engine.memory",
                found=str(self),
                allowed=f"at most the card's {_gib(card_bytes)} GiB",
                reason=f"Trainer and engine share it, and {_gib(self.total - card_bytes)} GiB are missing. Make "
                "engine.settings.kv_cache_bytes or engine.memory.reserve_bytes smaller, or take a larger card.",
            )
        if trainer_bytes is not None and self.trainer > trainer_bytes:
            raise BadConfig(
                field="engine.memory",
                found=f"{_gib(self.trainer)} GiB of the trainer's own, in {self}",
                allowed=f"at most {_gib(trainer_bytes)} GiB, the share that JAX takes of the card",
                reason="XLA_PYTHON_CLIENT_MEM_FRACTION sets that share.",
            )


def memory_split(
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    *,
    kv_cache_bytes: int,
    reserve_bytes: int,
    with_reference: bool,
    devices: int = 1,
    pieces: int = 1,
) -> MemorySplit:
    """The split for a policy's parameters (`Policy.parameter_shapes`), on the card that the engine shares.

    with_reference: whether there is a KL term. devices: that train. pieces: into which their arrays are cut.
    """
    whole = sum(math.prod(shape.shape) * shape.dtype.itemsize for shape in shapes.values())
    elements = sum(math.prod(shape.shape) for shape in shapes.values()) // pieces
    weights = whole // pieces
    return MemorySplit(
        weights=2 * weights,
        reference=weights if with_reference else 0,
        master=_FLOAT32 * elements,
        moments=2 * _FLOAT32 * elements,
        gradients=weights + _FLOAT32 * elements,
        # Also where nothing is cut: a copy on one device of what lies on several.
        whole=whole if devices > 1 else 0,
        engine_weights=whole,
        kv_cache=kv_cache_bytes,
        reserve=reserve_bytes,
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"
