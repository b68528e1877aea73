"""The table of rotary embeddings: computed once in fp64, rounded once to fp32, shipped with the policy."""

import hashlib
import math

import numpy as np

from isojax.policy.config import PolicyConfig, RopeConfig

# D: head dimension, P: positions.


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Angular frequencies in radians a token, fp64 [D/2].

    Kind `default` is theta ** (-2i / D) (Su et al., RoFormer, 2021). Kind `llama3` stretches wavelengths longer than
    `original_max_position / low_freq_factor` by `factor`, leaves those shorter than
    `original_max_position / high_freq_factor`, and interpolates between (Llama 3.1 reference code).
    """
    plain = rope.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "default":
        return plain
    assert rope.factor is not None
    assert rope.low_freq_factor is not None
    assert rope.high_freq_factor is not None
    assert rope.original_max_position is not None
    wavelength = 2.0 * math.pi / plain
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    # Clipping to [0, 1] covers the two outer bands: 0 is fully stretched, 1 is untouched.
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1.0 - smooth) * plain / rope.factor + smooth * plain


def rope_table(config: PolicyConfig) -> np.ndarray:
    """Cosines and sines of every position, fp32 [P, D]: cosines in [:, :D/2], sines in [:, D/2:]."""
    angles = np.outer(
        np.arange(config.max_position, dtype=np.float64), inverse_frequencies(config.rope, config.head_dim)
    )
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def rope_table_digest(table_PD: np.ndarray) -> str:
    """SHA-256 over the table's little-endian fp32 bytes in row-major order; what the contract stores."""
    return hashlib.sha256(np.ascontiguousarray(table_PD, dtype="<f4").tobytes()).hexdigest()
