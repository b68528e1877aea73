"""The example loop runs on the library's API alone."""

import importlib.util
from pathlib import Path

import pytest
from reference_engine import ReferenceEngine
from rl_samples import RAW_POLICY, honest_report

import isojax
from contracts import load_contract

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_loop.py"


def test_somebody_elses_loop_trains_with_equal_bits(monkeypatch, capsys):
    specification = importlib.util.spec_from_file_location("own_loop", EXAMPLE)
    example = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(example)
    monkeypatch.setattr(example, "SIZES", RAW_POLICY)
    make_policy, policies, engines = isojax.Policy, [], []

    def policy(*args, **options):
        # One for both runs, so that it is compiled once.
        if not policies:
            policies.append(make_policy(*args, **options))
        return policies[0]

    def open_engine(name, folder):
        contract = load_contract(folder)
        engines.append(ReferenceEngine(policies[0], contract, honest_report(contract)))
        return engines[-1]

    monkeypatch.setattr(isojax, "Policy", policy)
    monkeypatch.setattr(isojax, "open_engine", open_engine)
    rewards = example.main(steps=6)
    assert engines[0].closed
    assert rewards[-1] > rewards[0]
    assert "step 5" in capsys.readouterr().out
    # The loop's own comparison sees a difference: it scores with weights that the engine does not have.
    monkeypatch.setattr(ReferenceEngine, "sync", hold_other_weights)
    with pytest.raises(AssertionError, match="the bits differ"):
        example.main(steps=1)


def hold_other_weights(engine, params):
    engine.params = {name: value * 1.5 for name, value in params.items()}
    return "0" * 16
