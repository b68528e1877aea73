"""Read a GGUF file of the llama architecture: config, dequantised tensors in Hugging Face layout, tokenizer."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize

from contracts.errors import BadCheckpoint, UnsupportedModel
from isojax.policy.config import PolicyConfig
from isojax.policy.hugging_face import from_hugging_face

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# Metadata of the llama architecture that is read below, or that changes no bit.
_KNOWN = frozenset(
    (
        *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
        *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
        *("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count", "rope.scaling.type"),
    )
)


@dataclass(frozen=True)
class GgufModel:
    """An opened GGUF file: the policy's config, the tensor names it holds, and a reader of one tensor (fp32)."""

    config: PolicyConfig
    names: tuple[str, ...]
    read: Callable[[str], np.ndarray]
    metadata: dict[str, Any]


def open_gguf(path: Path) -> GgufModel:
    """Open a GGUF file; tensors are dequantised to fp32 when they are read.

    llama.cpp stores the rows of the query and key projections in the order of interleaved rotation; `read` puts them
    back into the half-split order of the Hugging Face reference. Raises `BadCheckpoint` for a damaged file and
    `UnsupportedModel` for another architecture or a setting that the policy does not implement.
    """
    if not path.is_file():
        raise BadCheckpoint(
            field="policy", found=str(path), allowed="an existing file", reason="There is nothing to load."
        )
    try:
        reader = GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    # The reader parses offsets without checks: damage surfaces as whichever of these it trips over.
    except (ValueError, KeyError, IndexError, OverflowError, OSError, TypeError, MemoryError) as error:
        raise BadCheckpoint(
            field=str(path),
            found=f"{type(error).__name__}: {error}",
            allowed="a whole GGUF file",
            reason="It is damaged.",
        ) from error
    tensors = {_hugging_face_name(tensor.name): tensor for tensor in reader.tensors}
    # llama.cpp writes llama3 scaling as this tensor of factors; without the four numbers behind it, it is not exact.
    if "rope_freqs.weight" in tensors:
        raise UnsupportedModel(
            field="rope_freqs.weight",
            found="rope factors rounded to fp32",
            allowed="the original safetensors checkpoint with its config.json",
            reason="The rope table is computed in fp64 from rope_scaling, which GGUF does not keep.",
        )
    config = _config(metadata, tied_head="lm_head.weight" not in tensors)

    def read(name: str) -> np.ndarray:
        return _read(tensors[name], name, config)

    return GgufModel(config, tuple(tensors), read, metadata)


def _hugging_face_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{kind}"
    # Unknown tensors keep their names and are refused as extra by the packing.
    return name


def _config(metadata: dict[str, Any], tied_head: bool) -> PolicyConfig:
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedModel(
            field="general.architecture",
            found=architecture,
            allowed=["llama"],
            reason="Only this layout is read from GGUF.",
        )
    settings = {name.removeprefix("llama."): value for name, value in metadata.items() if name.startswith("llama.")}
    if unknown := sorted(set(settings) - _KNOWN):
        raise UnsupportedModel(
            field=f"llama.{unknown[0]}",
            found=settings[unknown[0]],
            allowed=sorted(_KNOWN),
            reason="isojax does not know whether this setting changes the forward.",
        )
    if settings.get("rope.scaling.type", "none") != "none":
        raise UnsupportedModel(
            field="llama.rope.scaling.type",
            found=settings["rope.scaling.type"],
            allowed=["none"],
            reason="No exact table for it from GGUF.",
        )
    heads = settings.get("attention.head_count")
    head_dim = settings.get("attention.key_length", settings.get("rope.dimension_count"))
    if not head_dim == settings.get("rope.dimension_count") == settings.get("attention.value_length", head_dim):
        raise UnsupportedModel(
            field="llama.rope.dimension_count",
            found=settings.get("rope.dimension_count"),
            allowed=head_dim,
            reason="The rotation covers the whole head, and values are as wide as keys.",
        )
    tokens = metadata.get("tokenizer.ggml.tokens")
    return from_hugging_face(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": settings.get("vocab_size", len(tokens) if isinstance(tokens, list) else None),
            "hidden_size": settings.get("embedding_length"),
            "intermediate_size": settings.get("feed_forward_length"),
            "num_hidden_layers": settings.get("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": settings.get("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": settings.get("context_length"),
            "rms_norm_eps": _shortest(settings.get("attention.layer_norm_rms_epsilon")),
            "rope_theta": _shortest(settings.get("rope.freq_base")),
            "tie_word_embeddings": tied_head,
            "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
            "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        }
    )


def _shortest(value: Any) -> Any:
    """The shortest decimal that rounds to this fp32: GGUF keeps 1e-05 as fp32, config.json as the decimal.

    Anything but a number is left as it is, to be refused by name.
    """
    return float(str(np.float32(value))) if isinstance(value, int | float) else value


def _read(tensor: ReaderTensor, name: str, config: PolicyConfig) -> np.ndarray:
    try:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    except (NotImplementedError, ValueError) as error:
        raise BadCheckpoint(
            field=name,
            found=f"{tensor.tensor_type.name}: {error}",
            allowed="a quantisation that the gguf package dequantises",
            reason="The weights can't be read.",
        ) from error
    # GGUF lists dimensions from the fastest to the slowest; NumPy the other way.
    values = values.reshape([int(size) for size in reversed(tensor.shape)])
    for projection, heads in (("q_proj", config.num_heads), ("k_proj", config.num_kv_heads)):
        if name.endswith(f"self_attn.{projection}.weight") and values.shape[0] == heads * config.head_dim:
            return _half_split(values, heads)
    return values


def _half_split(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's permutation: (heads, D/2, 2) interleaved pairs back to (heads, 2, D/2) halves."""
    paired = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return paired.swapaxes(1, 2).reshape(rows.shape)
