"""The gate of a mesh passes on devices that are right, and fails where they are not or where it would prove nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from bridge.gates import sm90_suite, suite
from bridge.gates.suite import require_cards
from contracts.errors import BadConfig, MeshNotClaimed, ToolchainMismatch
from isojax.evidence import mesh_gate

pytestmark = pytest.mark.long_file(30)

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, str(HERE / "mesh_gate_faults.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.slow
def test_two_devices_that_are_right_pass_and_a_changed_weight_is_seen(said):
    assert (
        said["right"] == "fsdp=2: 62 tokens and 4 full rows; a changed weight on the last device was caught each time"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("a token", "mesh fsdp=2: found 62 of 62 tokens and 0 of 4 full rows differ"),
        ("a row", "mesh fsdp=2: found 0 of 62 tokens and 4 of 4 full rows differ"),
        ("nothing planted", "mesh fsdp=2: found no difference; allowed: a difference"),
    ],
)
def test_a_difference_fails_the_gate_and_so_does_a_fault_that_is_not_seen(said, fault, found):
    assert said[fault].startswith(f"DifferenceFound: {found}")


@pytest.mark.slow
def test_a_mesh_that_cannot_be_is_refused_by_name(said):
    assert said["more than there are"].startswith("BadConfig: train.mesh: found dp = 4: 4 devices")
    assert said["one device"].startswith("BadConfig: mesh: found {'dp': 1}; allowed: a degree above 1")
    assert said["not claimable"].startswith("MeshNotClaimed: mesh.tp: found tp=2; allowed: tp in 1")


def test_each_axis_alone_is_run_as_well_since_a_claim_allows_it():
    assert list(mesh_gate._parts({"dp": 2, "fsdp": 4})) == [{"dp": 2}, {"fsdp": 4}, {"dp": 2, "fsdp": 4}]
    assert list(mesh_gate._parts({"fsdp": 4})) == [{"fsdp": 4}]


def test_a_mesh_of_anything_but_cards_of_the_proofs_kind_is_refused():
    def devices(*kinds):
        return [SimpleNamespace(device_kind=kind, platform="cpu" if kind == "cpu" else "gpu") for kind in kinds]

    require_cards(devices("NVIDIA H200", "NVIDIA H200"), "NVIDIA H200")
    for others in (("cpu", "cpu"), ("NVIDIA H200", "NVIDIA H100")):
        with pytest.raises(ToolchainMismatch, match=r"mesh: found .*1 NVIDIA H100|mesh: found 2 cpu \(cpu\)"):
            require_cards(devices(*others), "NVIDIA H200")


def test_a_mesh_that_is_none_of_cards_stops_verify_before_any_gate(monkeypatch):
    def opened(folder):
        raise AssertionError("nothing may be sealed for it")

    monkeypatch.setattr(suite, "check_card", lambda: None)
    monkeypatch.setattr(suite, "_open", opened)
    monkeypatch.setattr(suite.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    with pytest.raises(MeshNotClaimed, match=r"mesh\.tp: found tp=2"):
        sm90_suite(None, {"tp": 2}).prepare()
    with pytest.raises(BadConfig, match="8 devices"):
        sm90_suite(None, {"dp": 2, "fsdp": 4}).prepare()
    # As where JAX_PLATFORMS names the CPU first, which then is as many devices as it is told to be.
    monkeypatch.setattr(suite, "require_provable", lambda policy, mesh: None)
    monkeypatch.setattr(suite, "open_mesh", lambda mesh: SimpleNamespace(devices=np.array(jax.devices("cpu") * 2)))
    with pytest.raises(ToolchainMismatch, match="mesh: found 2 cpu"):
        sm90_suite(None, {"fsdp": 2}).prepare()


def test_the_gate_is_there_where_a_mesh_is_named():
    def names(mesh):
        return [gate.name for gate in sm90_suite(None, mesh).gates]

    assert names({"dp": 1, "fsdp": 2}) == [*names({}), "mesh"]
    assert names({"dp": 1}) == names({})
    assert sm90_suite(None, {"fsdp": 2}).gates[-1].claim.endswith(".")
