"""A card whose launches are the regions' CPU forms: the gates run whole, over a bundle that nothing lowered."""

from functools import cache

import jax
import torch
from bundle_samples import unlowered

from bridge.gates.card import Card, call_of
from isojax.kernels.calls import kernel_calls
from isojax.policy import Policy, PolicyConfig, RopeConfig
from pallas_kernels.kernel_shapes import KernelShapes
from pallas_kernels.region import REGIONS
from pallas_kernels.store import Bundle

CONFIG = PolicyConfig(
    family="qwen3",
    vocab_size=264,
    hidden_size=128,
    intermediate_size=128,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    max_position=64,
    rms_norm_eps=1e-6,
    rope=RopeConfig(10000.0),
    attention_bias=True,
)
SHAPES = KernelShapes(
    token_buckets=(8, 16),
    head_rows=(8, 16),
    trainer_tokens=(128,),
    page_size=32,
    max_pages=256,
    max_requests=4,
    max_context=64,
)


@cache
def _compiled(call):
    return jax.jit(lambda *operands: REGIONS[call.region].bind(*operands, **dict(call.parameters)))


def cpu_form(program):
    call = _compiled(call_of(program))

    def run(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = jax.block_until_ready(call(*(jax.dlpack.from_dlpack(operand) for operand in operands)))
        results = results if isinstance(results, tuple | list) else (results,)
        return tuple(torch.from_dlpack(result).clone() for result in results)

    return run


@cache
def bundle(config: PolicyConfig = CONFIG, shapes: KernelShapes = SHAPES) -> Bundle:
    calls = kernel_calls(Policy(config), shapes)
    return Bundle(tuple(unlowered(call.region, call.types, dict(call.parameters)) for call in calls), shapes)


def cpu_card(make=cpu_form, sealed: Bundle | None = None) -> Card:
    def seal(call):
        return unlowered(call.region, call.types, dict(call.parameters))

    return Card(sealed or bundle(), torch.device("cpu"), make, seal)
