"""A policy that is cut over devices gives the bits of one device; any other mesh is refused before it compiles."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from policy_samples import tiny_policy

from contracts.errors import MeshNotClaimed
from isojax import build_contract, mesh_degrees, score_on_mesh
from isojax.mesh import PROVED_DEGREES
from isojax.policy import PackedBatch

pytestmark = pytest.mark.long_file(75)

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def measured() -> dict:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, str(HERE / "mesh_gate.py")], env=environment, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_sharded_policy_equals_one_device(measured: dict) -> None:
    for name, found in measured.items():
        degrees = [int(part.partition("=")[2]) for part in name.split(",")]
        assert found["devices"] == int(np.prod(degrees)), name
        assert found["rows"] > 100
        assert found["different"] == 0, name
        assert found["same_regions"], name
        assert (found["gathers"] > 0) == ("fsdp" in name)
    for axis in ("dp", "fsdp"):
        assert {f"{axis}={degree}" for degree in PROVED_DEGREES[1:]} <= measured.keys()


@pytest.mark.slow
def test_gradients_of_a_sharded_policy_are_whole(measured: dict) -> None:
    # Summed in another order, and rounded where devices meet: equal in size, not in bits.
    assert measured["dp=2,fsdp=4,tp=1"]["gradient_error"] < 0.05


def _sums_over_devices(jaxpr) -> list[str]:
    """Dtype of every operand that devices add up."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name.startswith(("psum", "reduce_scatter")):
            found += [str(operand.aval.dtype) for operand in equation.invars]
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found += _sums_over_devices(inner)
    return found


@pytest.mark.parametrize("degrees", [{"dp": 4}, {"fsdp": 2}, {"dp": 2, "fsdp": 4}], ids=str)
def test_gradients_are_summed_over_devices_in_fp32(degrees: dict[str, int]) -> None:
    policy, _ = tiny_policy()
    mesh = AbstractMesh(tuple(degrees.values()), tuple(degrees), axis_types=(AxisType.Auto,) * len(degrees))
    score = score_on_mesh(policy, mesh, build_contract(policy, tokenizer={}))
    number = jax.ShapeDtypeStruct((64,), "int32")
    batch = PackedBatch(number, number, number, number, jax.ShapeDtypeStruct((64,), "bool"))

    def loss(params, batch):
        return score(params, policy.buffers, batch, np.float32(1)).sum()

    sums = _sums_over_devices(jax.make_jaxpr(jax.grad(loss))(policy.parameter_shapes, batch).jaxpr)
    assert len(sums) >= len(policy.parameter_shapes)
    assert set(sums) == {"float32"}


def test_a_mesh_outside_of_the_claims_is_refused() -> None:
    policy, _ = tiny_policy()
    contract = build_contract(policy, tokenizer={})

    def mesh(**degrees: int) -> AbstractMesh:
        return AbstractMesh(tuple(degrees.values()), tuple(degrees), axis_types=(AxisType.Auto,) * len(degrees))

    assert mesh_degrees(mesh(dp=2, fsdp=4)) == {"dp": 2, "fsdp": 4}
    with pytest.raises(MeshNotClaimed, match=r"mesh\.x"):
        mesh_degrees(mesh(x=2))
    for degrees in ({"tp": 2}, {"dp": 16}, {"dp": 3}, {"pp": 2}):
        with pytest.raises(MeshNotClaimed):
            score_on_mesh(policy, mesh(**degrees), contract)
    one = Mesh(np.array(jax.devices()[:1]), ("dp",))
    assert callable(score_on_mesh(policy, one, contract))
