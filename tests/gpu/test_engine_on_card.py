"""Real vLLM on a card against the trainer on the same card: 0 mismatches, with CUDA graphs and without.

Needs exported policies: `python benchmarks/engine_parity.py --prepare FOLDER` where kernels can be sealed, or
`isojax export CHECKPOINT --arch sm90 --out FOLDER`; ISOJAX_CARD_POLICIES names the folders, separated by colons.
"""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
# Before JAX starts: the engine shares the card with the trainer.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

FOLDERS = [Path(name) for name in os.environ.get("ISOJAX_CARD_POLICIES", "").split(":") if name]


@pytest.mark.skipif(not FOLDERS, reason="ISOJAX_CARD_POLICIES names no exported policy")
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_path_through_the_engine_equals_the_trainer(folder, graphs):
    from engine_parity import BATCHES, STEP_TOKENS, measure

    settings = {"max_step_tokens": STEP_TOKENS, "max_sequences": max(BATCHES), "cuda_graphs": graphs}
    found = measure(folder, settings, tokens=24, rows=64)
    assert len(found["cases"]) == 4 * len(BATCHES)
    for name, case in found["cases"].items():
        assert case["rows"], f"{name}: no full row was compared"
        assert case["exact"], f"{name}: {case}"
