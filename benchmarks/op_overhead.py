"""What a call of a region costs the host: one op, and a decode step's graph before and after merging.

    python benchmarks/op_overhead.py [--asynchronous] [--out FILE]

The operands are so small that computing takes little; what is left is torch's dispatch, the views both ways and JAX's
call. Times are microseconds of the fastest and the median of many calls.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch

from bridge.arrays import dispatch_synchronously, shared_views, to_jax, to_torch
from bridge.torch_ops import compiled, op_of
from bridge.translate import Replacement, bind_parameters, merge_segments, replace_region, translate
from isojax.policy import Policy
from isojax.policy.config import PolicyConfig, RopeConfig
from pallas_kernels.region import REGIONS

TOKENS = 16
LAYERS = 30


def microseconds(function: Callable[[], Any], calls: int) -> dict[str, float]:
    """Fastest and median time of a call."""
    for _ in range(calls // 10):
        function()
    times = []
    for _ in range(calls):
        start = time.perf_counter_ns()
        function()
        times.append(time.perf_counter_ns() - start)
    times.sort()
    return {"fastest": times[0] / 1e3, "median": times[len(times) // 2] / 1e3}


def one_op() -> dict[str, dict[str, float]]:
    """The parts of one op and the whole: rms_norm and matmul of [16, 64]."""
    x, residual = torch.randn(TOKENS, 64).bfloat16(), torch.randn(TOKENS, 64).bfloat16()
    gain, weight = torch.ones(64).bfloat16(), torch.randn(64, 64).bfloat16()
    shared_views.add([gain, weight])
    arrays = {name: to_jax(tensor) for name, tensor in {"x": x, "gain": gain, "weight": weight}.items()}
    norm = compiled(REGIONS["rms_norm"], (("eps", 1e-5),))
    norm_op, add_norm_op, matmul_op = (op_of(REGIONS[name]) for name in ("rms_norm", "add_rms_norm", "matmul"))
    result = norm(arrays["x"], arrays["gain"])[0]
    return {
        "view of a tensor in JAX": microseconds(lambda: to_jax(x), 4000),
        "kept view of a weight": microseconds(lambda: shared_views.to_jax(weight), 4000),
        "tensor over a result": microseconds(lambda: to_torch(result), 4000),
        "rms_norm, jitted, in JAX": microseconds(
            lambda: norm(arrays["x"], arrays["gain"])[0].block_until_ready(), 4000
        ),
        "rms_norm, op": microseconds(lambda: norm_op(x, gain, eps=1e-5), 4000),
        "add_rms_norm, op": microseconds(lambda: add_norm_op(x, residual, gain, eps=1e-5), 4000),
        "matmul, op": microseconds(lambda: matmul_op(x, weight, leaves=1, out_dtype="bfloat16"), 4000),
    }


def one_step() -> dict[str, dict[str, float]]:
    """A decode step of a 30-layer llama with a hidden size of 64; attention is a copy of its queries."""
    config = PolicyConfig(
        family="llama",
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_layers=LAYERS,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position=64,
        rms_norm_eps=1e-5,
        rope=RopeConfig(10000.0),
        tied_head=True,
    )
    policy = Policy(config)
    (t,) = jax.export.symbolic_shape("t")
    integers = jax.ShapeDtypeStruct((t,), jnp.int32)
    graph = translate(policy.hidden, policy.parameter_shapes, policy.buffers, integers, integers, integers)
    graph = replace_region(graph, "attention", lambda call: Replacement(torch.clone, (call.operands["q"],)))
    parameters = policy.init(jax.random.key(0))
    tensors = {name: to_torch(value).clone() for name, value in {**parameters, **policy.buffers}.items()}
    bound = bind_parameters(graph, tensors)
    merged = merge_segments(bound)
    batch = [torch.arange(TOKENS, dtype=torch.int32) for _ in range(3)]
    return {
        f"step of {LAYERS} layers, {_regions(bound)} region ops": microseconds(lambda: bound(*batch), 100),
        f"step of {LAYERS} layers, {LAYERS + 1} segments": microseconds(lambda: merged(*batch), 100),
    }


def _regions(graph: torch.fx.GraphModule) -> int:
    ops = {op_of(region) for region in REGIONS.values()}
    return sum(node.target in ops for node in graph.graph.nodes)


def main() -> None:
    """Measures and prints; writes JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--asynchronous", action="store_true", help="leave XLA:CPU's own dispatch thread on")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    arguments = parser.parse_args()
    if not arguments.asynchronous:
        dispatch_synchronously()
    # torch only moves data here; its threads would fight XLA's for the cores.
    torch.set_num_threads(1)
    figures = {**one_op(), **one_step()}
    for name, times in figures.items():
        print(f"{name:44} fastest {times['fastest']:9.1f} us   median {times['median']:9.1f} us")
    if arguments.out:
        arguments.out.write_text(
            json.dumps({"asynchronous": arguments.asynchronous, "microseconds": figures}, indent=2)
        )


if __name__ == "__main__":
    main()
