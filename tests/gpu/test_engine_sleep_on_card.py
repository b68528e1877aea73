"""Real vLLM on a card goes to sleep and wakes up: memory is given back, and every bit is as before.

Needs exported policies, named by ISOJAX_CARD_POLICIES as in `test_engine_on_card`.
"""

import numpy as np
import pytest
import torch
from card_policies import FOLDERS, needs_policies

CACHE_BYTES = 1 << 30


def _same(left, right) -> None:
    assert [completion.tokens for completion in left] == [completion.tokens for completion in right]
    for one, other in zip(left, right, strict=True):
        assert np.asarray(one.log_probs).tobytes() == np.asarray(other.log_probs).tobytes()
        assert sorted(one.rows) == sorted(other.rows)
        for place, row in one.rows.items():
            assert np.asarray(row).tobytes() == np.asarray(other.rows[place]).tobytes()


@needs_policies
# vLLM's allocator for sleep serves one engine a process, so the second one gets a process of its own.
@pytest.mark.parametrize(("graphs", "separate"), [(True, False), (False, True)], ids=["graphs", "eager, own process"])
def test_after_every_kind_of_sleep_the_engine_gives_the_same_bits(graphs, separate):
    from card_engine import proved_copy, running_engine

    from contracts.errors import UnsupportedRequest, WeightDigestMismatch
    from isojax import load
    from isojax.rl.rollout import Sampling

    settings = {"max_sequences": 16, "kv_cache_bytes": CACHE_BYTES, "sleep_mode": True}
    settings |= {"cuda_graphs": graphs, "separate_process": separate}
    with proved_copy(FOLDERS[0]) as folder, running_engine(folder, settings) as engine:
        policy, params = load(folder)
        engine.sync(params)
        generator = np.random.default_rng(0)
        # Longer than a step of 512 tokens, a whole number of pages, and one token.
        prompts = [generator.integers(3, policy.config.vocab_size, n).tolist() for n in (700, 64, 1, 33)]
        sampling = Sampling(max_tokens=24, samples=2, seed=1)
        # Every row, because which ones a smaller number takes depends on how requests shared steps.
        count = 2 * len(prompts) * sampling.max_tokens

        def generated():
            return engine.generate(prompts, sampling, full_rows=count)

        before = generated()
        assert sum(len(completion.rows) for completion in before) == count
        _same(generated(), before)
        print("awake: repeatable", flush=True)
        # Level 1 twice, so that what woke up can sleep again; level 2; level 1 with weights that came after level 2.
        for number, level in enumerate((1, 1, 2, 1)):
            free = torch.cuda.mem_get_info()[0]
            engine.sleep(level)
            freed = torch.cuda.mem_get_info()[0] - free
            print(f"sleep {number}, level {level}: {freed / 2**20:.0f} MiB given back", flush=True)
            assert freed >= CACHE_BYTES
            with pytest.raises(UnsupportedRequest, match="asleep"):
                generated()
            # Somebody else writes to all that was given back.
            other = torch.full((freed // 2,), 0xFF, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            del other
            torch.cuda.empty_cache()
            engine.wake_up()
            if level == 2:
                with pytest.raises(WeightDigestMismatch, match="no successful sync"):
                    generated()
                engine.sync(params)
            _same(generated(), before)
            print(f"sleep {number}, level {level}: same bits", flush=True)
