"""The audit finds stray arithmetic wherever it hides, and lets data move."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from audit_functions import STRAY, WRAPPERS, all_moves, regions_in_every_wrapper
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from policy_samples import FAMILIES

from contracts.errors import UncoveredArithmetic
from isojax.audit import audit
from isojax.contract import audit_policy
from isojax.policy import Policy, PolicyConfig

X = jax.ShapeDtypeStruct((8, 8), jnp.float32)
MESH = AbstractMesh((4,), ("dp",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", STRAY)
def test_stray_arithmetic_is_refused_by_name_line_and_shape(name: str, wrapper: str) -> None:
    with pytest.raises(UncoveredArithmetic) as refusal:
        audit(WRAPPERS[wrapper](STRAY[name]), X)
    assert refusal.value.field == name
    assert "float32[8,8]" in str(refusal.value) or name in ("sort", "scatter", "scatter-add")
    line = STRAY[name].__code__.co_firstlineno
    assert re.search(rf"audit_functions\.py:{line} ", str(refusal.value)), str(refusal.value)


def test_a_float_cast_is_refused_in_both_directions_and_an_integer_cast_is_not() -> None:
    for source, target in (
        ("float32", "bfloat16"),
        ("bfloat16", "float32"),
        ("int32", "float32"),
        ("float32", "int32"),
    ):
        with pytest.raises(UncoveredArithmetic, match="convert_element_type"):
            audit(lambda x, target=target: x.astype(target), jax.ShapeDtypeStruct((4,), source))
    assert audit(lambda x: x.astype(jnp.int8), jax.ShapeDtypeStruct((4,), jnp.int32)).moves


def test_moves_and_integer_arithmetic_pass() -> None:
    report = audit(all_moves, X, jax.ShapeDtypeStruct((2,), jnp.int32))
    assert report.regions == {}
    expected = {"reshape", "transpose", "slice", "split", "concatenate", "gather", "broadcast_in_dim", "select_n"}
    expected |= {"dynamic_slice", "dynamic_update_slice", "pad", "rev", "squeeze", "iota", "mul", "add", "cumsum"}
    assert expected <= report.moves.keys()


def test_regions_are_counted_where_they_hide() -> None:
    report = audit(regions_in_every_wrapper, X, X)
    assert report.sequence == ("rms_norm", "matmul", "residual_add", "cast", "cast")
    assert report.regions == Counter(report.sequence)
    assert report.calls[0].parameters == {"eps": 1e-5}
    assert report.differentiated == report.calls


def test_collectives_that_move_pass_and_those_that_add_do_not() -> None:
    def on_mesh(body):
        return jax.shard_map(body, mesh=MESH, in_specs=P("dp"), out_specs=P("dp"))

    gathered = on_mesh(lambda x: jax.lax.all_gather(x, "dp", tiled=True)[:2])
    exchanged = on_mesh(lambda x: jax.lax.all_to_all(x.reshape(4, 4), "dp", 0, 0, tiled=True).reshape(2, 8))
    assert audit(gathered, X).moves["all_gather"] == 1
    assert audit(exchanged, X).moves["all_to_all"] == 1
    for name, collective in (("psum", jax.lax.psum), ("pmax", jax.lax.pmax), ("reduce_scatter", jax.lax.psum_scatter)):
        with pytest.raises(UncoveredArithmetic) as refusal:
            audit(on_mesh(lambda x, collective=collective: x + collective(x.reshape(4, 4), "dp").sum()), X)
        # psum_invariant is what psum is called where JAX tracks which axes a value varies over.
        assert refusal.value.field.removesuffix("_invariant") == name


def test_a_region_outside_of_a_fully_manual_shard_map_is_refused_on_a_mesh() -> None:
    from pallas_kernels import residual_add

    mesh = AbstractMesh((2, 2), ("dp", "fsdp"), axis_types=(AxisType.Auto,) * 2)

    def add(x):
        return residual_add(x, x)

    half = jax.shard_map(add, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), axis_names={"dp"})
    whole = jax.shard_map(add, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
    with pytest.raises(UncoveredArithmetic, match=r"region residual_add: found mesh axes \['dp', 'fsdp'\]"):
        audit(add, X, mesh=mesh)
    with pytest.raises(UncoveredArithmetic, match=r"mesh axes \['fsdp'\] not manual"):
        audit(half, X, mesh=mesh)
    assert audit(whole, X, mesh=mesh).regions == {"residual_add": 1}
    assert audit(add, X).regions == {"residual_add": 1}


def test_an_opaque_call_is_refused() -> None:
    def callback(x):
        return jax.pure_callback(np.sin, X, x)

    with pytest.raises(UncoveredArithmetic, match="pure_callback"):
        audit(callback, X)


@pytest.mark.parametrize("remat", ["none", "layer"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_policy_passes(name: str, remat: str) -> None:
    policy = Policy(PolicyConfig.from_hugging_face(FAMILIES[name]), remat=remat)
    trainer, engine = audit_policy(policy)
    before, after = ("matmul", "qk_norm_rope", "attention", "matmul", "add_rms_norm"), ("matmul", "add_rms_norm")
    layer = (*before, "gated_matmul", *after)
    assert trainer.sequence == ("rms_norm", *layer, "token_log_probs")
    assert engine.sequence == ("rms_norm", *layer, "log_prob_rows")
    under_gradients = ("rms_norm", *before, "matmul", "swiglu", *after, "token_log_probs")
    assert tuple(call.region for call in trainer.differentiated) == under_gradients


def test_a_policy_with_stray_arithmetic_does_not_pass() -> None:
    policy = Policy(PolicyConfig.from_hugging_face(FAMILIES["qwen3"]))
    tokens = jax.ShapeDtypeStruct((8,), jnp.int32)

    def louder(params, tokens):
        hidden = policy.hidden(params, policy.buffers, tokens, tokens, tokens)
        return policy.head_rows(params, hidden * 2, 1.0)

    with pytest.raises(UncoveredArithmetic, match=r"mul: found bfloat16\[8,64\].* at .*test_audit\.py"):
        audit(louder, policy.parameter_shapes, tokens)
