"""`vllm serve FOLDER` on a card: the trainer's log-probabilities over HTTP, and a refused request that hurts nobody.

Needs exported policies, named by ISOJAX_CARD_POLICIES as in `test_engine_on_card`, and the installed plugin.
"""

import numpy as np
import pytest
from card_policies import FOLDERS, needs_policies
from served import ENVIRONMENT, REFUSED, against_trainer, card_arguments, require_refused, sampled, serving

CACHE_BYTES = 1 << 30
MAX_TOKENS = 24


@needs_policies
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_server_reports_the_trainers_bits_and_outlives_refused_requests(folder, graphs, tmp_path):
    from card_engine import proved_copy

    from bridge.start import FREE_AT_START
    from contracts import load_contract
    from contracts.float_bits import bits_float
    from isojax import load
    from isojax.kernels import KERNELS_FOLDER
    from pallas_kernels.store import load_bundle

    policy, params = load(folder)
    shapes = load_bundle(folder / KERNELS_FOLDER).shapes
    generator = np.random.default_rng(0)
    # Longer than a small policy's step, whole pages, and one token: chunks, a cache that others share, and decode.
    longest = min(shapes.max_context, shapes.trainer_tokens[-1]) - MAX_TOKENS
    prompts = [generator.integers(3, policy.config.vocab_size, min(n, longest)).tolist() for n in (700, 64, 1, 33)]
    # FlashInfer's sampler is compiled at run time, which needs a network; ours draws instead.
    environment = ENVIRONMENT | {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    log = tmp_path / "server.log"
    with proved_copy(folder) as copy:
        arguments = card_arguments(copy, shapes, free=FREE_AT_START, cache_bytes=CACHE_BYTES)
        with serving(copy, log, *arguments, *([] if graphs else ["--enforce-eager"]), environment=environment) as base:
            print("the server answers", flush=True)
            before = sampled(base, prompts, MAX_TOKENS, seed=1)
            for field, value in REFUSED:
                require_refused(base, field, value, field)
            after = sampled(base, prompts, MAX_TOKENS, seed=1)
    print(log.read_text()[-2000:], flush=True)
    temperature = bits_float(load_contract(folder).semantics.temperature)
    for completions in (before, after):
        found = against_trainer(
            completions, policy, params, temperature=temperature, capacity=shapes.trainer_tokens[-1]
        )
        print(f"{found.tokens} tokens, {found.mismatch_tokens} differ", flush=True)
        found.require_exact(0)
        assert found.tokens >= len(prompts)
    assert [completion.tokens for completion in after] == [completion.tokens for completion in before]
