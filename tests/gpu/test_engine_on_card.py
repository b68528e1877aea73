"""Real vLLM on a card against the trainer on the same card: 0 mismatches, with CUDA graphs and without.

Needs exported policies: `python benchmarks/engine_parity.py FOLDER --prepare small` where kernels can be sealed, or
`isojax export CHECKPOINT --arch sm90 --out FOLDER`; ISOJAX_CARD_POLICIES names the folders, separated by colons.
"""

import json

import pytest
from card_policies import FOLDERS, needs_policies


@needs_policies
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_path_through_the_engine_equals_the_trainer(folder, graphs, tmp_path):
    from engine_parity import Options, run
    from engine_parity_cases import Sizes

    sizes = Sizes(batches=(1, 8, 64), decode_tokens=24, rows=64)
    out = tmp_path / "results.json"
    totals = run(folder, Options(tokens=0, graphs=(graphs,), sizes=sizes), out)
    cases = json.loads(out.read_text())["cases"]
    assert len(cases) == 4 * len(sizes.batches) + 2, "every path a batch, a preemption and a sync"
    for name, case in cases.items():
        assert case.get("rows"), f"{name}: no full row was compared: {case}"
        assert case["exact"], f"{name}: {case}"
    assert totals["exact"]
