"""The plain forward is the model: it agrees with transformers in fp32, and in bf16 only as far as rounding goes."""

import numpy as np
import pytest
from hugging_face_reference import random_checkpoint, reference_rows
from policy_samples import FAMILIES

from isojax import load
from isojax.evidence.plain_forward import plain_log_probs


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_plain_forward_agrees_with_transformers(tmp_path, family):
    model = random_checkpoint(tmp_path, FAMILIES[family])
    policy, params = load(tmp_path, "float32")
    generator = np.random.default_rng(0)
    lengths = (7, 20)
    tokens_BS = np.zeros((2, 20), np.int32)
    for number, length in enumerate(lengths):
        tokens_BS[number, :length] = generator.integers(1, policy.config.vocab_size, length)
    found = np.asarray(plain_log_probs(policy.config, params, policy.buffers["rope_table"], tokens_BS))
    for number, length in enumerate(lengths):
        sequence = tokens_BS[number, :length]
        rows = reference_rows(model, sequence.tolist())
        expected = rows[np.arange(length - 1), sequence[1:]]
        np.testing.assert_allclose(found[number, : length - 1], expected, atol=2e-5)
