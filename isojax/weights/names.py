"""The one table between packed parameters and Hugging Face tensor names; load, export and sync all read it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from isojax.policy.config import PolicyConfig


@dataclass(frozen=True)
class TensorEntry:
    """Where one Hugging Face tensor lives.

    hugging_face: its name in a checkpoint. shape: its shape there, [out, in] for matrices. packed: the flat name of
    the packed parameter. layer: its index on that parameter's leading axis, None where there is none. rows: half-open
    range of the output axis that it fills, None where it fills all of it.
    """

    hugging_face: str
    shape: tuple[int, ...]
    packed: str
    layer: int | None = None
    rows: tuple[int, int] | None = None

    @property
    def index(self) -> tuple[int | slice, ...]:
        """Index expression of the tensor inside of the packed array, for NumPy, JAX and torch alike."""
        layer = () if self.layer is None else (self.layer,)
        return layer if self.rows is None else (*layer, slice(*self.rows))


@cache
def name_table(config: PolicyConfig) -> tuple[TensorEntry, ...]:
    """One entry for each Hugging Face tensor of the policy; together they cover every packed element exactly once.

    A packed qkv holds query, key and value rows in that order, gate_up the gate before the up projection.
    """
    hidden, ffn, query, key = config.hidden_size, config.intermediate_size, config.query_size, config.key_size
    norm = (hidden,)
    entries = [TensorEntry("model.embed_tokens.weight", (config.vocab_size, hidden), "embed")]
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."

        def add(
            name: str,
            shape: tuple[int, ...],
            packed: str,
            rows: tuple[int, int] | None = None,
            prefix: str = prefix,
            layer: int = layer,
        ) -> None:
            entries.append(TensorEntry(prefix + name, shape, packed, layer, rows))

        add("input_layernorm.weight", norm, "norms")
        start = 0
        for projection, size in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
            rows = (start, start + size)
            add(f"self_attn.{projection}.weight", (size, hidden), "layers.qkv", rows)
            if config.attention_bias:
                add(f"self_attn.{projection}.bias", (size,), "layers.qkv_bias", rows)
            start += size
        if config.qk_norm:
            add("self_attn.q_norm.weight", (config.head_dim,), "layers.q_norm")
            add("self_attn.k_norm.weight", (config.head_dim,), "layers.k_norm")
        add("self_attn.o_proj.weight", (hidden, query), "layers.o")
        if config.attention_bias:
            add("self_attn.o_proj.bias", norm, "layers.o_bias")
        add("post_attention_layernorm.weight", norm, "layers.post_attention_norm")
        add("mlp.gate_proj.weight", (ffn, hidden), "layers.gate_up", (0, ffn))
        add("mlp.up_proj.weight", (ffn, hidden), "layers.gate_up", (ffn, 2 * ffn))
        add("mlp.down_proj.weight", (hidden, ffn), "layers.down")
    entries.append(TensorEntry("model.norm.weight", norm, "norms", config.num_layers))
    if not config.tied_head:
        entries.append(TensorEntry("lm_head.weight", (config.vocab_size, hidden), "lm_head"))
    return tuple(entries)


def unpack(config: PolicyConfig, params: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each Hugging Face tensor as (name, view of its packed array). Arrays may be NumPy, JAX or torch."""
    for entry in name_table(config):
        packed = params[entry.packed]
        yield entry.hugging_face, packed[entry.index] if entry.index else packed
