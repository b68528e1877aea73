"""A trainer on a mesh: one device's bits where the engine is compared, its own pieces everywhere else."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from gradient_samples import errors
from mesh_training import GRADIENTS, learner, minibatch, sampled
from rl_samples import completion, run_config, small_params, small_policy, small_trainer

from contracts.errors import BadConfig, MeshNotClaimed, ToolchainMismatch
from isojax import build_contract, export_policy, pack
from isojax.contract import require_claimable
from isojax.kernels.packing import Packing
from isojax.mesh_policy import open_mesh
from isojax.rl import assemble
from isojax.rl.checkpoint_policy import load_checkpoint
from isojax.rl.memory_split import memory_split
from isojax.rl.packing import cut
from isojax.rl.run_folder import RunFolder

pytestmark = pytest.mark.long_file(65)

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def measured(runs):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(HERE / "mesh_training.py"), str(runs)]
    run = subprocess.run(command, env=os.environ | flags, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.slow
def test_what_the_engine_is_compared_with_has_one_devices_bits(measured):
    scores = measured["scores"]
    assert (scores["tokens"], scores["full_rows"]) == (24, 7)
    assert scores["different"] == 0
    assert scores["exact"]
    assert scores["planted"] == 1


@pytest.mark.slow
def test_every_device_holds_its_piece_and_the_engine_all_of_it(measured):
    assert measured["devices"] == [4]
    # Master weights, both moments and the copies that compute.
    assert measured["cut_in_two"] == 4 * measured["parameters"]
    assert measured["scores"]["start_digest"]
    assert measured["engine_has_the_weights"]


@pytest.mark.slow
def test_gradients_of_a_mesh_are_close_to_one_devices(measured, runs):
    expected = minibatch(learner(small_policy()), sampled())
    found = np.load(runs / GRADIENTS)
    # Each gradient is a bfloat16 value, of eight bits, rounded in every shard.
    assert 0 < max(errors(found, expected.gradients).values()) < 2**-6
    assert measured["scores"]["entropy"] == pytest.approx(expected.entropy, rel=1e-6)


@pytest.mark.slow
def test_a_run_on_a_mesh_repeats_and_resumes_bit_for_bit(measured):
    assert measured["resumed"]


@pytest.mark.slow
def test_a_checkpoint_is_restored_onto_other_devices_exactly(measured):
    assert list(measured["moved"].values()) == [True, True]


@pytest.mark.slow
def test_a_checkpoint_of_four_devices_is_exported_where_there_is_one(measured, runs):
    assert jax.device_count() < 4
    folder = RunFolder(runs / "first")
    export_policy(folder.policy, small_policy(), small_params(), tokenizer_files={})
    found = load_checkpoint(folder.path)
    assert (found.step, found.weight_digest) == (2, measured["last_digest"])
    assert {len(value.devices()) for value in found.params.values()} == {1}


@pytest.mark.slow
def test_a_mesh_that_is_not_there_or_not_claimed_is_refused_with_the_numbers(measured):
    devices, claim = measured["refused"]
    assert "dp = 4, fsdp = 2: 8 devices" in devices
    assert "at most the 4" in devices
    assert "mesh.dp: found dp=3; allowed: dp in 1, 2, 4, 8" in claim


@pytest.mark.slow
def test_a_batch_that_was_not_packed_for_the_mesh_is_refused(measured):
    cut, odd = measured["cut"]
    assert "a sequence that is cut at row 4" in cut
    assert "found 15 rows; allowed: 4 pieces of equal length" in odd


def test_degrees_whose_product_is_more_than_64_bits_are_more_than_there_are():
    with pytest.raises(BadConfig, match=r"train\.mesh.*1208925819614629174706176 devices"):
        open_mesh({"dp": 2**40, "fsdp": 2**40})


def test_a_mesh_that_no_gate_can_prove_is_refused_before_a_contract_is_made():
    require_claimable(small_policy(), {"dp": 2, "fsdp": 4})
    with pytest.raises(MeshNotClaimed, match=r"mesh\.dp: found dp=3; allowed: dp in 1, 2, 4, 8"):
        require_claimable(small_policy(), {"dp": 3})
    with pytest.raises(MeshNotClaimed, match=r"mesh\.tp: found tp=2; allowed: tp in 1"):
        require_claimable(small_policy(), {"tp": 2})


def test_a_mesh_with_a_device_of_a_kind_that_is_not_claimed_is_refused(tmp_path, monkeypatch):
    folder, policy = RunFolder(tmp_path), small_policy()
    folder.write_config(run_config())
    devices = np.array([SimpleNamespace(device_kind=kind) for kind in ("cpu", "another")])
    contract = build_contract(policy, tokenizer={})
    found = {
        "open_task": None,
        "open_mesh": SimpleNamespace(size=2, devices=devices),
        "load": (policy, {}),
        "PromptEncoder": None,
        "_require_fitting_prompts": 8,
        "load_contract": contract,
    }
    for name, value in found.items():
        monkeypatch.setattr(assemble, name, lambda *given, value=value, **also: value)
    with pytest.raises(ToolchainMismatch, match=r"claims\.device_kinds: found 'another'"):
        assemble.assemble(run_config(), config_folder=tmp_path, folder=folder, resume=True)


def test_a_policy_on_other_devices_than_the_configurations_is_refused(tmp_path):
    with pytest.raises(BadConfig, match=r"train\.mesh: .*'fsdp': 2"):
        small_trainer(tmp_path, run_config(train={"mesh": {"fsdp": 2}}))


def test_the_baseline_has_no_mesh():
    with pytest.raises(BadConfig, match="one device"):
        run_config(policy={"arm": "native"}, check={"on_mismatch": "record"}, train={"mesh": {"dp": 2}})


def test_no_sequence_is_cut_between_shards_and_none_is_lost():
    lengths = (5, 4, 3, 3, 5, 7, 1, 2, 2, 3, 6)
    sequences = [completion((0,), tuple(range(1, length))) for length in (n + 1 for n in lengths)]
    capacity, shards = 10, 2
    packing = Packing(start_multiple=2, sealed_lengths=(), shards=shards)
    micro_batches = cut(sequences, range(len(lengths)), capacity, packing)
    assert len(micro_batches) > 1
    assert sorted(index for micro in micro_batches for index in micro.completions) == list(range(len(lengths)))
    for micro in micro_batches:
        shard = len(micro.batch.tokens) // shards
        assert shard <= capacity
        for number, index in enumerate(micro.completions):
            (rows,) = np.nonzero(micro.batch.segment_ids == number)
            assert len(rows) == lengths[index] + 1
            assert rows[0] // shard == rows[-1] // shard
            assert rows[0] % shard % 2 == 0


def test_sequences_are_spread_over_the_shards():
    """First fit alone would give them all to the first device."""
    sequences = [completion((0,), (1, 2, 3))] * 8
    (micro,) = cut(sequences, range(8), 64, Packing(start_multiple=1, sealed_lengths=(), shards=4))
    filled = (micro.batch.segment_ids.reshape(4, -1) >= 0).sum(axis=1)
    assert filled.tolist() == [8] * 4


def test_shards_may_be_given_and_must_hold_every_sequence_once():
    batch = pack([[1, 2], [3], [4]], shards=[[2], [], [1, 0]], length_multiple=4)
    assert batch.tokens.reshape(3, 4).tolist() == [[4, 0, 0, 0], [0, 0, 0, 0], [3, 1, 2, 0]]
    with pytest.raises(BadConfig, match="shards"):
        pack([[1, 2], [3]], shards=[[0], [0, 1]])


def test_a_run_that_is_resumed_on_another_mesh_says_so(tmp_path, capsys):
    folder = RunFolder(tmp_path)
    folder.write_config(run_config(train={"mesh": {"fsdp": 4}}))
    folder.require_same_config(run_config(train={"mesh": {"fsdp": 4}}))
    assert capsys.readouterr().err == ""
    folder.require_same_config(run_config(train={"mesh": {"fsdp": 2}}))
    assert "train.mesh.fsdp was 4 and is 2" in capsys.readouterr().err


def test_the_trainers_part_of_a_card_is_a_piece_and_a_sync_needs_the_whole():
    sizes = {"kv_cache_bytes": 0, "reserve_bytes": 0, "with_reference": True}
    one, cut_in_four = (memory_split(small_policy().parameter_shapes, **sizes, **mesh) for mesh in ({}, MESH))
    assert one.whole == 0
    assert cut_in_four.whole == cut_in_four.engine_weights == one.engine_weights
    assert cut_in_four.trainer - cut_in_four.whole == one.trainer // 4


MESH = {"devices": 4, "pieces": 4}
