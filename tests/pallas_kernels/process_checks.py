"""Run as a program: prints one digest per region over all its result bits, as JSON. The test compares processes."""

import hashlib
import json

import jax.numpy as jnp
import numpy as np
from attention_samples import packed_attention, paged_attention, sequence
from region_samples import SAMPLES, normal, operands

import pallas_kernels as pk

TOKENS = 72
"""Divides by 8 devices, so that sharded rows are compared with the results that are digested."""


def digest(results) -> str:
    return hashlib.sha256(b"".join(np.asarray(result).tobytes() for result in results)).hexdigest()


def wide_results(leaves: int):
    """Large enough for XLA to share the work among threads: 300 rows, 1,536 deep, 2,048 columns; some subnormals."""
    rng = np.random.default_rng(0)
    x, w = normal(rng, (300, 1536), jnp.bfloat16), normal(rng, (2048, 1536), jnp.bfloat16)
    w = w.at[:64].multiply(1e-38)
    norm = normal(rng, (2048,), jnp.bfloat16)
    y = pk.matmul(x, w, leaves=leaves)
    return [y, *pk.add_rms_norm(y, y, norm, eps=1e-6), pk.swiglu(y), pk.log_prob_rows(x, w, 1.0, vocab_size=2048)]


def digests() -> dict[str, str]:
    found = {sample.name: digest(sample.call(*operands(sample, TOKENS, jnp.bfloat16))) for sample in SAMPLES}
    sequences = [sequence(0, 200), sequence(1, 33)]
    found["attention"] = digest(packed_attention(sequences))
    found["paged_attention"] = digest(paged_attention([(own, 0, own.q.shape[0]) for own in sequences]))
    found["wide"] = digest(wide_results(4))
    return found


if __name__ == "__main__":
    print(json.dumps(digests()))
