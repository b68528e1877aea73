"""The weight digest on JAX: equal to the reference, and every accident of a sync moves it."""

import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from policy_samples import tiny_policy

import contracts
from contracts.errors import BadCheckpoint
from contracts.weight_digest import weight_digest
from isojax import digest

VECTORS = Path(contracts.__file__).parent / "weight_digest_vectors.json"


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (7, 3), (3, 64, 65), (70000,)])
def test_the_jax_form_equals_the_reference(dtype, shape) -> None:
    tensor = np.random.default_rng(0).normal(size=shape).astype(dtype)
    params = {"embed": tensor, "layers.qkv": tensor[:1].copy()}
    assert digest({name: jnp.asarray(value) for name, value in params.items()}) == weight_digest(params)


@pytest.mark.parametrize("shape", [(5, 31, 11), (13, 77), (701,)])
def test_a_tensor_too_large_for_one_reduction_has_the_same_digest(shape, monkeypatch) -> None:
    monkeypatch.setattr("isojax.weights.digest.LARGEST_PIECE", 700)
    tensor = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    # A shape of its own: what JAX has compiled knows the limit of its time.
    assert digest({"embed": jnp.asarray(tensor)}) == weight_digest({"embed": tensor})


def test_the_published_vectors_hold() -> None:
    vectors = json.loads(VECTORS.read_text())["tensors"]
    whole = [vector for vector in vectors if vector["first_position"] == 0]
    assert len(whole) >= 5
    for vector in whole:
        words = np.array([int(word, 16) for word in vector["words"]], np.uint32).view(np.float32)
        assert digest({vector["tensor"]: words}) == "".join(vector["lanes"]), vector["description"]


def test_an_accident_of_a_sync_moves_both_lanes() -> None:
    _, params = tiny_policy()
    right = digest(params)
    assert digest(dict(reversed(params.items()))) == right
    qkv, o = params["layers.qkv"], params["layers.o"]
    one_ulp = np.array(qkv)
    one_ulp.view(np.uint16)[0, 0, 0] ^= 1
    accidents = {
        "one bit": params | {"layers.qkv": jnp.asarray(one_ulp)},
        "permuted rows": params | {"layers.qkv": qkv[:, ::-1]},
        "swapped layers": params | {"layers.o": o[::-1]},
        "missing": {name: value for name, value in params.items() if name != "layers.o"},
        "renamed": {("layers.p" if name == "layers.o" else name): value for name, value in params.items()},
        "minus zero": params | {"layers.o": o.at[0, 0, 0].set(-0.0)},
        "zero": params | {"layers.o": o.at[0, 0, 0].set(0.0)},
    }
    found = {name: digest(changed) for name, changed in accidents.items()} | {"right": right}
    assert len({value[:8] for value in found.values()}) == len(found)
    assert len({value[8:] for value in found.values()}) == len(found)


def test_another_width_is_refused() -> None:
    with pytest.raises(BadCheckpoint, match="scale"):
        digest({"scale": jnp.zeros(3, jnp.int8)})
