"""A trainer of a policy with sealed kernels lays out its micro-batches as those kernels want them, or refuses."""

import numpy as np
import pytest
from rl_samples import completion, run_config, small_engine, small_params, small_policy

from contracts.errors import BadConfig
from isojax.kernels import KernelShapes, packing_of
from isojax.policy.policy import Policy
from isojax.rl.check_rollout import check_rollout
from isojax.rl.learner import Learner
from isojax.rl.packing import cut
from isojax.rl.rollout import Sampling

pytestmark = pytest.mark.long_file(30)

SHAPES = KernelShapes(trainer_tokens=(128, 256), head_rows=(8, 16), max_context=64)
PACKING = packing_of(SHAPES)
# 13, 33, 50 and 9 tokens: 128 rows once every one starts at a multiple of 8, only 105 without.
LENGTHS = (13, 33, 50, 9)


def completions(*lengths):
    return [completion((0,) * 3, (1,) * (length - 3)) for length in lengths]


def sealed_policy():
    """The small policy as `isojax.load` gives one that has kernels."""
    plain = small_policy()
    policy = Policy(plain.config, dtype=plain.dtype, remat=plain.remat)
    policy.row_buckets, policy.packing = SHAPES.head_rows, PACKING
    return policy


def starts(batch):
    return np.flatnonzero((batch.positions == 0) & (batch.segment_ids >= 0))


def test_sequences_start_at_multiples_of_eight_in_a_sealed_length():
    for capacity, lengths in ((128, [128, 128]), (256, [256]), (300, [256])):
        micro_batches = cut(completions(*LENGTHS, 20), range(5), capacity, PACKING)
        assert [len(micro.batch.tokens) for micro in micro_batches] == lengths
        for micro in micro_batches:
            assert not (starts(micro.batch) % 8).any()
            assert len(starts(micro.batch)) == len(micro.completions)
        assert sum(len(micro.completions) for micro in micro_batches) == 5


def test_without_sealed_kernels_the_same_completions_lie_side_by_side():
    (micro,) = cut(completions(*LENGTHS, 20), range(5), 128)
    assert starts(micro.batch).tolist() == [0, 13, 46, 96, 105]


def test_a_batch_shorter_than_every_sealed_length_is_refused_by_name():
    with pytest.raises(BadConfig, match=r"train\.micro_batch_tokens: found 64; allowed: at least 128\..*128, 256"):
        cut(completions(9), [0], 64, PACKING)


@pytest.mark.parametrize(
    ("tokens", "says"), [(129, "found 128; allowed: at least 256"), (257, "no size that is sealed.*export the policy")]
)
def test_a_sequence_longer_than_a_sealed_length_is_refused_by_name(tokens, says):
    with pytest.raises(BadConfig, match=rf"train\.micro_batch_tokens: .*{says}"):
        cut(completions(tokens), [0], 200 if tokens == 129 else 256, PACKING)


def test_checks_and_updates_run_at_sealed_sizes_with_the_bits_of_any_other_layout(monkeypatch):
    engine = small_engine()
    engine.sync(small_params())
    rollout = engine.generate([[0, 1], [0, 2, 3]], Sampling(max_tokens=5, samples=8, seed=5), full_rows=20)
    policy, sizes, rows = sealed_policy(), set(), []
    plain_score, plain_rows = policy.score, policy.head_rows

    def score(params, buffers, batch, temperature, **probe):
        sizes.add(batch.tokens.shape[0])
        return plain_score(params, buffers, batch, temperature, **probe)

    def head_rows(params, hidden, temperature):
        rows.append(hidden.shape[0])
        return plain_rows(params, hidden, temperature)

    monkeypatch.setattr(policy, "score", score)
    monkeypatch.setattr(policy, "head_rows", head_rows)
    found = check_rollout(policy, small_params(), rollout, 1.0, 128)
    assert (found.exact, found.full_rows) == (True, 20)
    config = run_config()
    learner = Learner(
        policy,
        small_params(),
        optimizer=config.optimizer,
        algorithm=config.algorithm,
        temperature=1.0,
        micro_batch_tokens=128,
    )
    learner.update(rollout, np.ones(16, np.float32), None, require_exact=True)
    assert sizes == {128}
    assert set(rows) <= set(SHAPES.head_rows)
    assert rows
