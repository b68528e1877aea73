"""On a card: what vLLM reports of a token is what the engine's own log holds, bit for bit.

ISOJAX_CARD_POLICIES names exported policies, as for test_engine_on_card.py.
"""

import numpy as np
import pytest
from card_policies import FOLDERS, needs_policies

TOKENS = 24


@needs_policies
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_vllm_reports_what_the_log_holds(folder):
    from card_engine import proved_copy
    from engine_parity import Options
    from engine_parity_bench import Bench
    from engine_parity_cases import Sizes
    from vllm.inputs import TokensPrompt

    from bridge.completions import SampleRequest, reported_values
    from isojax.rl.rollout import Sampling

    sampling = Sampling(max_tokens=TOKENS, seed=5, samples=2)
    prompts = [[3 + (5 * row + at) % 60 for at in range(7 + 30 * row)] for row in range(8)]
    with proved_copy(folder) as copy:
        bench = Bench.open(copy, Options())
        sizes = Sizes(batches=(1, 16), decode_tokens=TOKENS, rows=8)
        with bench.engine(graphs=True, step_tokens=128, sizes=sizes) as engine:
            logged = engine.generate(prompts, sampling)
            requests = [SampleRequest(prompt, sample) for prompt in range(8) for sample in range(2)]
            outputs = engine._llm.generate(
                [TokensPrompt(prompt_token_ids=prompts[request.prompt]) for request in requests],
                [request.sampling_params(number, sampling) for number, request in enumerate(requests)],
                use_tqdm=False,
            )
    assert len(logged) == len(outputs) == 16
    for ours, output in zip(logged, outputs, strict=True):
        assert ours.tokens == tuple(output.outputs[0].token_ids)
        reported = reported_values(output)
        assert len(reported) == len(ours.tokens)
        assert np.isfinite(reported).all()
        assert np.array_equal(ours.log_probs.view(np.int32), reported.view(np.int32))
