"""Tiny policies, their translated graphs, and packed batches to run them on."""

from dataclasses import dataclass
from functools import cache, cached_property

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import fx

from bridge.arrays import to_torch
from bridge.translate import bind_parameters, merge_segments, translate
from isojax.policy.config import PolicyConfig, RopeConfig
from isojax.policy.policy import Policy

SETTINGS = {
    "llama": {"family": "llama", "tied_head": True},
    "qwen3": {"family": "qwen3", "attention_bias": True},
}
DTYPES = {"llama": "bfloat16", "qwen3": "float32"}
LAYERS = 2


@dataclass(frozen=True, eq=False)
class Tiny:
    """A policy with random parameters, in JAX and in torch."""

    policy: Policy
    parameters: dict[str, jax.Array]

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers as torch tensors of their own, by their dotted names."""
        return {name: to_torch(value).clone() for name, value in {**self.parameters, **self.policy.buffers}.items()}

    @cached_property
    def hidden(self) -> fx.GraphModule:
        """The translated `Policy.hidden`, token count symbolic."""
        (tokens,) = jax.export.symbolic_shape("t")
        integers = jax.ShapeDtypeStruct((tokens,), jnp.int32)
        buffers = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in self.policy.buffers.items()}
        return translate(self.policy.hidden, self.policy.parameter_shapes, buffers, integers, integers, integers)

    @cached_property
    def bound(self) -> fx.GraphModule:
        """The same over the parameters: takes tokens, positions and segment ids."""
        return bind_parameters(self.hidden, self.tensors)

    @cached_property
    def merged(self) -> fx.GraphModule:
        """The same with a jitted call a segment."""
        return merge_segments(self.bound)

    @cached_property
    def head(self) -> fx.GraphModule:
        """The translated `Policy.head_rows`."""
        (tokens,) = jax.export.symbolic_shape("t")
        hidden = jax.ShapeDtypeStruct((tokens, self.policy.config.hidden_size), jnp.dtype(self.policy.dtype))
        return translate(
            self.policy.head_rows, self.policy.parameter_shapes, hidden, jax.ShapeDtypeStruct((), jnp.float32)
        )

    @cache  # noqa: B019 (there are two of them)
    def in_jax(self, tokens: int) -> torch.Tensor:
        """`Policy.hidden` of the batch of this many tokens, by JAX alone."""
        arrays = [x.numpy() for x in batch(tokens)]
        return to_torch(jax.jit(self.policy.hidden)(self.parameters, self.policy.buffers, *arrays))


@cache
def tiny(name: str) -> Tiny:
    """The llama (bf16, tied head) or the Qwen3 (fp32, biases, QK-norm) policy, made once."""
    config = PolicyConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_layers=LAYERS,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position=32,
        rms_norm_eps=1e-5,
        rope=RopeConfig(10000.0),
        **SETTINGS[name],
    )
    policy = Policy(config, dtype=DTYPES[name])
    random = np.random.default_rng(0)
    parameters = {
        key: jnp.asarray(random.normal(size=shape.shape) * 0.5 + ("norm" in key), shape.dtype)
        for key, shape in policy.parameter_shapes.items()
    }
    return Tiny(policy, parameters)


def batch(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, positions and segment ids of two packed sequences (of one for a single token), int32."""
    first = (tokens + 1) // 3 or tokens
    lengths = [first, tokens - first]
    positions = torch.cat([torch.arange(length) for length in lengths]).to(torch.int32)
    segments = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths)).to(torch.int32)
    ids = torch.randint(40, (tokens,), generator=torch.Generator().manual_seed(tokens)).to(torch.int32)
    return ids, positions, segments


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal shape, dtype and bit patterns."""
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        return False
    one, other = (x.contiguous().reshape(-1).view(torch.uint8) for x in (left, right))
    return one.equal(other)
