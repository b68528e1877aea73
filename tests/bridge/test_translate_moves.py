"""Every move is translated exactly, alone and merged; every other primitive is refused by name."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax
from tiny_policies import same_bits

import pallas_kernels
from bridge.arrays import to_torch
from bridge.translate import merge_segments, translate
from contracts.errors import UncoveredArithmetic

ROWS = 6
COLUMNS = 8


def symbolic():
    """x bf16[t, 8], ids int32[t] below 6, table bf16[6, 8], as shapes."""
    (t,) = jax.export.symbolic_shape("t")
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    return shape((t, COLUMNS)), jax.ShapeDtypeStruct((t,), jnp.int32), shape((ROWS, COLUMNS))


def concrete(tokens):
    """The same as arrays."""
    random = np.random.default_rng(tokens)
    x = jnp.asarray(random.normal(size=(tokens, COLUMNS)), jnp.bfloat16)
    table = jnp.asarray(random.normal(size=(ROWS, COLUMNS)), jnp.bfloat16)
    return x, jnp.asarray(random.integers(0, ROWS, tokens), jnp.int32), table


@jax.custom_vjp
def kept(x):
    return x[:, ::-1]


kept.defvjp(lambda x: (kept(x), None), lambda _, g: (g[:, ::-1],))


def counted(x, ids, table):
    def body(carry, row):
        return carry[:, ::-1], (carry[:, :2], row)

    return lax.scan(body, x, table)


def backwards(x, ids, table):
    return lax.scan(lambda carry, row: (row, carry), table[0], table, reverse=True)


def nested(x, ids, table):
    def outer(carry, row):
        def inner(state, number):
            return jnp.concatenate([state[:, 1:], state[:, :1]], axis=1), number

        return lax.scan(inner, carry, jnp.arange(2))

    return lax.scan(jax.checkpoint(outer), x, table)


MOVES = {
    "reshape": lambda x, ids, table: x.reshape(x.shape[0], 2, 4).reshape(-1),
    "reshape to twice the tokens": lambda x, ids, table: x.reshape(2 * x.shape[0], 4),
    "transpose": lambda x, ids, table: x.reshape(x.shape[0], 2, 4).transpose(1, 0, 2),
    "expand and squeeze": lambda x, ids, table: jnp.squeeze(x[:, None, :], 1),
    "slice": lambda x, ids, table: x[:, 2:5],
    "slice with a stride": lambda x, ids, table: x[:, 1::3],
    "slice of the last token": lambda x, ids, table: lax.slice_in_dim(x, x.shape[0] - 1, x.shape[0]),
    "token count as a value": lambda x, ids, table: jnp.int32(0) + x.shape[0],
    "static index": lambda x, ids, table: (table[2], table[-1]),
    "split": lambda x, ids, table: jnp.split(x, (1, 4), axis=1),
    "concatenate": lambda x, ids, table: jnp.concatenate([x, x[:, :3], x], axis=1),
    "stack": lambda x, ids, table: jnp.stack([x, x[:, ::-1]]),
    "flip": lambda x, ids, table: jnp.flip(x, axis=1),
    "broadcast": lambda x, ids, table: jnp.broadcast_to(x[:, None, :], (x.shape[0], 3, COLUMNS)),
    "repeat heads": lambda x, ids, table: jnp.repeat(x.reshape(x.shape[0], 2, 4), 3, axis=1),
    "gather with wrapped ids": lambda x, ids, table: table[ids - ROWS],
    "gather in bounds": lambda x, ids, table: table.at[ids].get(mode="promise_in_bounds", wrap_negative_indices=False),
    "take along columns": lambda x, ids, table: jnp.take(table, ids, axis=1),
    "take with ids of rank two": lambda x, ids, table: jnp.take(table, jnp.stack([ids, ids], 1), axis=0),
    "select": lambda x, ids, table: jnp.where((ids > 2)[:, None], x, x[:, ::-1]),
    "select a constant": lambda x, ids, table: jnp.where((ids != 1)[:, None], x, jnp.bfloat16(0.5)),
    "pad": lambda x, ids, table: jnp.pad(x, ((0, 2), (3, 1)), constant_values=jnp.bfloat16(1.5)),
    "more integers": lambda x, ids, table: (jnp.maximum(ids, 2), jnp.minimum(ids, ids[::-1]), -ids, ids ^ 5, ids & 3),
    "integers": lambda x, ids, table: ((ids + 3) * 2 - ids, 7 - ids, ids >= 2, ~(ids < 3) | (ids == 5) & (ids <= 5)),
    "iota over tokens": lambda x, ids, table: jnp.arange(x.shape[0]) * 2 + 1,
    "iota in two dimensions": lambda x, ids, table: lax.broadcasted_iota(jnp.int32, (x.shape[0], 3), 1),
    "integer cast": lambda x, ids, table: (ids.astype(jnp.uint8), (ids > 1).astype(jnp.int32)),
    "closed-over constant": lambda x, ids, table: jnp.asarray([[1, 2], [3, 4]], jnp.int32)[:, ::-1],
    "optimization barrier": lambda x, ids, table: lax.optimization_barrier((x, ids)),
    "stop gradient": lambda x, ids, table: lax.stop_gradient(x),
    "jit, remat and custom VJP": lambda x, ids, table: jax.jit(jax.checkpoint(lambda y: kept(y)))(x),
    "scan with stacked results": counted,
    "reverse scan": backwards,
    "scan inside of a rematerialised scan": nested,
}


@pytest.mark.parametrize("name", MOVES)
def test_a_move_is_exact_alone_and_merged(name):
    graph = translate(MOVES[name], *symbolic())
    merged = merge_segments(graph)
    for tokens in (1, 5):
        arrays = concrete(tokens)
        expected = jax.tree.leaves(jax.jit(MOVES[name])(*arrays))
        for module in (graph, merged) if tokens > 1 else (graph,):
            results = module(*map(to_torch, arrays))
            results = results if isinstance(results, tuple) else (results,)
            assert len(results) == len(expected)
            for result, array in zip(results, expected, strict=True):
                assert same_bits(result, to_torch(array)), (tokens, result, array)


def test_a_scan_unrolls_to_the_same_bits_with_regions_inside():
    random = np.random.default_rng(0)
    weights = jnp.asarray(random.normal(size=(4, COLUMNS, COLUMNS)), jnp.float32)

    def function(x, weights):
        def body(carry, inputs):
            weight, number = inputs
            return pallas_kernels.residual_add(pallas_kernels.matmul(carry, weight, leaves=2), carry), number

        return lax.scan(jax.checkpoint(body), x, (weights, jnp.arange(4)))

    (t,) = jax.export.symbolic_shape("t")
    graph = translate(function, jax.ShapeDtypeStruct((t, COLUMNS), jnp.float32), weights)
    x = jnp.asarray(random.normal(size=(5, COLUMNS)), jnp.float32)
    result, numbers = graph(to_torch(x), to_torch(weights))
    expected, _ = jax.jit(function)(x, weights)
    assert same_bits(result, to_torch(expected))
    assert numbers.tolist() == [0, 1, 2, 3]
    assert [node.name for node in graph.graph.nodes if "matmul" in node.name] == [
        f"layers_{layer}_matmul" for layer in range(4)
    ]


REFUSED = {
    "sin": lambda x, ids, table: jnp.sin(x),
    "add": lambda x, ids, table: x + x,
    "mul": lambda x, ids, table: x * 2,
    "neg": lambda x, ids, table: -x,
    "max": lambda x, ids, table: jnp.maximum(x, 0),
    "lt": lambda x, ids, table: x < 0,
    "dot_general": lambda x, ids, table: x @ table.T,
    "reduce_max": lambda x, ids, table: x.max(axis=1),
    "cumsum": lambda x, ids, table: jnp.cumsum(x, axis=1),
    "convert_element_type": lambda x, ids, table: x.astype(jnp.float32),
    "scatter": lambda x, ids, table: table.at[ids].set(x),
    "sort": lambda x, ids, table: jnp.sort(ids),
    "while": lambda x, ids, table: lax.while_loop(lambda y: y[0] < 3, lambda y: y + 1, ids),
    "cond": lambda x, ids, table: lax.cond(ids[0] > 1, lambda y: y[::-1], lambda y: y, ids),
    "dynamic_slice": lambda x, ids, table: lax.dynamic_slice_in_dim(table, ids[0], 2),
    "gather": lambda x, ids, table: table[ids, ids],
    "integer_pow": lambda x, ids, table: ids**2,
}


@pytest.mark.parametrize("primitive", REFUSED)
def test_another_primitive_is_refused_by_name_line_and_shape(primitive):
    with pytest.raises(UncoveredArithmetic) as refusal:
        translate(REFUSED[primitive], *symbolic())
    found = str(refusal.value.found)
    assert re.match(rf"{primitive} on .*\[.*\] at ", found), found
    assert "test_translate_moves.py:" in found
    assert "gather of whole rows" in str(refusal.value)


def test_stray_arithmetic_inside_of_a_rematerialised_scan_is_refused():
    def function(x, ids, table):
        return lax.scan(jax.checkpoint(lambda carry, row: (jnp.exp(carry), None)), x, table)[0]

    with pytest.raises(UncoveredArithmetic, match="exp on bfloat16"):
        translate(function, *symbolic())


def test_a_layer_number_that_is_data_is_refused():
    def function(x, ids, table):
        q = x.reshape(x.shape[0], 2, 4)
        return pallas_kernels.attention(q, q, q, ids, ids, ids[0], scale=1.0)

    with pytest.raises(UncoveredArithmetic, match=r"attention\.layer.*plain integer"):
        translate(function, *symbolic())


def test_a_size_that_no_input_gives_is_refused():
    (t,) = jax.export.symbolic_shape("t")
    with pytest.raises(UncoveredArithmetic, match=r"8\*t"):
        translate(lambda x: x.reshape(-1), jax.ShapeDtypeStruct((2 * t, 4), jnp.float32))


def test_two_inputs_of_one_name_are_refused():
    with pytest.raises(ValueError, match="same name: x"):
        translate(lambda x, others: (x, others["x"]), jnp.zeros(2), {"x": jnp.zeros(2)})


def test_equal_constants_become_one_buffer():
    pair = np.asarray([3, 4], np.int32)
    graph = translate(lambda x: (x, jnp.asarray(pair), jnp.asarray(pair.copy())), jnp.zeros(2))
    assert [name for name, _ in graph.named_buffers()] == ["constant_0"]
    _, first, second = graph(torch.zeros(2))
    assert first.tolist() == second.tolist() == [3, 4]
