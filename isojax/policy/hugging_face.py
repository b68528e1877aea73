"""Hugging Face config.json to PolicyConfig and back: each field is read, known to be harmless, or refused by name."""

import sys
from collections.abc import Mapping
from typing import Any

from contracts.errors import BadConfig, UnsupportedModel
from isojax.policy.config import ARCHITECTURE_OF_FAMILY, EXPORTED_ARCHITECTURE, Family, PolicyConfig, RopeConfig
from isojax.policy.hugging_face_fields import HARMLESS, LLAMA3_ROPE, ONLY, READ, ROPE


def from_hugging_face(raw: Mapping[str, Any]) -> PolicyConfig:
    """Read a Hugging Face config.json of the llama or Qwen3 family (transformers 4 or 5 form).

    Raises `UnsupportedModel` for an architecture or a setting that isojax does not implement exactly, and for any field
    that it does not know; `BadConfig` for a field that is missing or of the wrong type.
    """
    family = _family(raw)
    for name, value in raw.items():
        if name in READ or name in HARMLESS:
            continue
        if name == "sliding_window":
            # Qwen3 configs carry the window's size even when `use_sliding_window` is off.
            if value is not None and not (family == "qwen3" and not raw.get("use_sliding_window", False)):
                raise _unsupported(name, value, [None], "Sliding-window attention is not implemented.")
        elif name == "layer_types":
            every = isinstance(value, list) and all(item == "full_attention" for item in value)
            if value is not None and not every:
                raise _unsupported(name, value, ["full_attention"], "Every layer attends to all keys.")
        elif name in ONLY:
            allowed, reason = ONLY[name]
            if value not in allowed or isinstance(value, bool) not in {isinstance(a, bool) for a in allowed}:
                raise _unsupported(name, value, list(allowed), reason)
        else:
            raise _unsupported(
                name, value, "no such field", "isojax does not know whether this field changes the forward."
            )
    hidden_size = _integer(raw, "hidden_size")
    num_heads = _integer(raw, "num_attention_heads")
    num_kv_heads = _optional_integer(raw, "num_key_value_heads")
    head_dim = _optional_integer(raw, "head_dim")
    if family == "qwen3":
        # transformers' Qwen3Config would fill in 32 and 128: nothing to do with the model at hand.
        num_kv_heads = _integer(raw, "num_key_value_heads")
        head_dim = _integer(raw, "head_dim")
    if head_dim is None:
        if hidden_size % num_heads:
            raise _unsupported("head_dim", None, "explicit", f"{hidden_size} over {num_heads} heads is uneven.")
        head_dim = hidden_size // num_heads
    return PolicyConfig(
        family=family,
        vocab_size=_integer(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_integer(raw, "intermediate_size"),
        num_layers=_integer(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads or num_heads,
        head_dim=head_dim,
        max_position=_integer(raw, "max_position_embeddings"),
        rms_norm_eps=_real(raw, "rms_norm_eps"),
        rope=_rope(raw),
        # Both families' Hugging Face configs default to no bias and to an untied head.
        attention_bias=_boolean(raw, "attention_bias", False),
        tied_head=_boolean(raw, "tie_word_embeddings", False),
        initializer_range=_real(raw, "initializer_range") if "initializer_range" in raw else 0.02,
        bos_token_id=_token(raw, "bos_token_id"),
        eos_token_ids=_tokens(raw, "eos_token_id"),
        pad_token_id=_token(raw, "pad_token_id"),
        **_numeric_choices(raw),
    )


def to_hugging_face(config: PolicyConfig, dtype: str) -> dict[str, Any]:
    """The config.json of an exported policy: what transformers and vLLM parse, plus isojax's own choices.

    `from_hugging_face(to_hugging_face(c, dtype)) == c`. Rope is written in both forms, transformers 4 and 5, since an
    engine of either age must find it (they say the same, and reading checks that).
    """
    rope: dict[str, Any] = {"rope_type": config.rope.kind}
    if config.rope.kind == "llama3":
        rope |= {
            "factor": config.rope.factor,
            "low_freq_factor": config.rope.low_freq_factor,
            "high_freq_factor": config.rope.high_freq_factor,
            "original_max_position_embeddings": config.rope.original_max_position,
        }
    stop = list(config.eos_token_ids)
    return {
        "architectures": [EXPORTED_ARCHITECTURE],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": None if config.rope.kind == "default" else rope,
        "rope_parameters": rope | {"rope_theta": config.rope.theta},
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": config.tied_head,
        "initializer_range": config.initializer_range,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": None if not stop else stop[0] if len(stop) == 1 else stop,
        "pad_token_id": config.pad_token_id,
        "torch_dtype": dtype,
        "isojax": {
            "architecture": config.architecture,
            "leaves": config.leaves,
            "attention_split": config.attention_split,
        },
    }


def _family(raw: Mapping[str, Any]) -> Family:
    """Which family the architecture belongs to; exported policies record theirs under `isojax`."""
    supported = [*ARCHITECTURE_OF_FAMILY.values(), EXPORTED_ARCHITECTURE]
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise _unsupported("architectures", architectures, supported, "A policy has exactly one architecture.")
    architecture = architectures[0]
    if architecture == EXPORTED_ARCHITECTURE:
        architecture = _section(raw).get("architecture")
    for family, name in ARCHITECTURE_OF_FAMILY.items():
        if architecture == name:
            if raw.get("model_type") != family:
                raise BadConfig(
                    field="model_type", found=raw.get("model_type"), allowed=family, reason=f"{name} is of that type."
                )
            return family  # type: ignore[return-value]
    raise _unsupported("architectures", architecture, supported, "isojax has no exact policy for it.")


def _section(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    section = raw.get("isojax", {})
    if not isinstance(section, Mapping) or not set(section) <= {"architecture", "leaves", "attention_split"}:
        raise BadConfig(
            field="isojax",
            found=section,
            allowed=["architecture", "leaves", "attention_split"],
            reason="This section is written by isojax export.",
        )
    return section


def _numeric_choices(raw: Mapping[str, Any]) -> dict[str, int]:
    section = _section(raw)
    return {name: _integer(section, name) for name in ("leaves", "attention_split") if name in section}


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    """Merge transformers 4's rope_theta + rope_scaling and transformers 5's rope_parameters; refuse contradictions."""
    merged: dict[str, Any] = {}
    for source in ("rope_theta", "rope_scaling", "rope_parameters"):
        value = raw.get(source)
        if value is None:
            continue
        section = {"rope_theta": value} if source == "rope_theta" else value
        if not isinstance(section, Mapping):
            raise BadConfig(field=source, found=value, allowed="an object", reason="It holds the rope settings.")
        for key, item in section.items():
            name = "rope_type" if key == "type" else key
            if key not in ROPE:
                raise _unsupported(f"{source}.{key}", item, sorted(ROPE), "isojax does not know this rope field.")
            if item is None:
                continue
            if name in merged and merged[name] != item:
                raise BadConfig(
                    field=f"{source}.{key}", found=item, allowed=merged[name], reason="The config says both values."
                )
            merged[name] = item
    if "rope_theta" not in merged:
        raise BadConfig(
            field="rope_theta",
            found=None,
            allowed="an explicit base",
            reason="transformers would fall back to 10000.0 without a word, and a wrong base passes every comparison "
            "between two sides that share it. Write rope_theta into config.json.",
        )
    if merged.get("partial_rotary_factor", 1.0) != 1.0:
        raise _unsupported("partial_rotary_factor", merged["partial_rotary_factor"], [1.0], "Heads rotate whole.")
    theta = _real(merged, "rope_theta")
    kind = merged.get("rope_type", "default")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind != "llama3":
        raise _unsupported("rope_type", kind, ["default", "llama3"], "isojax has no exact table for this rope type.")
    for key in LLAMA3_ROPE:
        if key not in merged:
            raise BadConfig(field=f"rope_scaling.{key}", found=None, allowed="a number", reason="llama3 needs it.")
    rope = RopeConfig(
        theta=theta,
        kind="llama3",
        factor=_real(merged, "factor"),
        low_freq_factor=_real(merged, "low_freq_factor"),
        high_freq_factor=_real(merged, "high_freq_factor"),
        original_max_position=_integer(merged, "original_max_position_embeddings"),
    )
    if not rope.low_freq_factor < rope.high_freq_factor:  # type: ignore[operator]
        raise BadConfig(
            field="rope_scaling.low_freq_factor",
            found=rope.low_freq_factor,
            allowed=f"below high_freq_factor = {rope.high_freq_factor}",
            reason="Between the two the frequencies are interpolated.",
        )
    return rope


def _unsupported(name: str, found: object, allowed: object, reason: str) -> UnsupportedModel:
    return UnsupportedModel(field=name, found=found, allowed=allowed, reason=reason)


def _integer(raw: Mapping[str, Any], name: str) -> int:
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise BadConfig(
            field=name,
            found=value,
            allowed="an integer above 0 that int32 holds",
            reason="The policy's shape needs it.",
        )
    return value


def _optional_integer(raw: Mapping[str, Any], name: str) -> int | None:
    return None if raw.get(name) is None else _integer(raw, name)


def _real(raw: Mapping[str, Any], name: str) -> float:
    value = raw.get(name)
    # The limit and not `isfinite`, which fails for an integer of four hundred digits. NaN is refused as well.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise BadConfig(field=name, found=value, allowed="a finite number above 0", reason="The forward uses it.")
    return float(value)


def _boolean(raw: Mapping[str, Any], name: str, default: bool) -> bool:
    value = raw.get(name, default)
    if not isinstance(value, bool):
        raise BadConfig(field=name, found=value, allowed=[True, False], reason="It decides which weights exist.")
    return value


def _token(raw: Mapping[str, Any], name: str) -> int | None:
    value = raw.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadConfig(field=name, found=value, allowed="a token id or null", reason="The engine stops on it.")
    # Some llama checkpoints write -1 for "no such token".
    return value if value >= 0 else None


def _tokens(raw: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = raw.get(name)
    items = value if isinstance(value, list) else [value]
    found = [_token({name: item}, name) for item in items]
    return tuple(token for token in found if token is not None)
