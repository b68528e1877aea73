"""A policy's gradients, the same of a plain JAX policy in fp32, and how far they are apart."""

import jax
import jax.numpy as jnp
import numpy as np

from isojax import pack
from isojax.evidence.plain_forward import plain_log_probs


def _weights(lengths):
    """One a token that is predicted, so that no gradient vanishes by symmetry."""
    generator = np.random.default_rng(5)
    return [generator.standard_normal(length - 1).astype(np.float32) for length in lengths]


def gradients(policy, params, sequences, *, with_entropy=False):
    """Gradients of a weighted sum of log-probabilities, and of the probe every row's entropy."""
    batch = pack(sequences, **policy.packing)
    weights_T = np.zeros(len(batch.tokens), np.float32)
    for number, weights in enumerate(_weights([len(sequence) for sequence in sequences])):
        weights_T[np.flatnonzero(np.asarray(batch.segment_ids) == number)[:-1]] = weights
    return rows_and_gradients(policy, params, batch, weights_T, with_entropy=with_entropy)[1]


def rows_and_gradients(policy, params, batch, weights_T=None, *, with_entropy=False):
    """Log-probability of every row, and gradients of their weighted sum: the parameters', and the probe's, the entropy.

    weights_T: 1 by default for the rows that count. Only the policy's form is compiled in, so that tests of one form
    and one length share what was compiled.
    """

    def loss(params, probe_T, buffers, batch, weights_T):
        probe = {"entropy_probe": probe_T} if with_entropy else {}
        rows_T = policy.score(params, buffers, batch, 1.0, **probe)
        return jnp.sum(rows_T * weights_T), rows_T

    weights_T = np.asarray(batch.mask, np.float32) if weights_T is None else weights_T
    both = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (_, rows_T), found = both(params, jnp.zeros(len(batch.tokens)), policy.buffers, batch, weights_T)
    return rows_T, found


def plain_gradients(policy, params, sequences, dtype=jnp.float32):
    """The same of a forward without regions, parameters widened to fp32 first, or in the dtype given."""
    longest = max(map(len, sequences))
    tokens = np.array([sequence + [0] * (longest - len(sequence)) for sequence in sequences], np.int32)
    weights_BS = np.stack([np.pad(own, (0, longest - 1 - len(own))) for own in _weights(map(len, sequences))])
    own = {name: value.astype(dtype) for name, value in params.items()}

    def loss(params):
        return jnp.sum(plain_log_probs(policy.config, params, policy.buffers["rope_table"], tokens) * weights_BS)

    with jax.default_matmul_precision("highest"):
        return jax.jit(jax.grad(loss))(own)


def errors(found, expected):
    """By parameter, the error's norm over the gradient's."""
    assert found.keys() == expected.keys()
    relative = {}
    for name, value in expected.items():
        own, other = np.asarray(found[name], np.float64), np.asarray(value, np.float64)
        assert np.linalg.norm(other) > 0, f"{name} gets no gradient from the plain policy"
        relative[name] = np.linalg.norm(own - other) / np.linalg.norm(other)
    return relative
