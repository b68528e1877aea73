"""Every kernel of a program that has several gets a fault of its own, and the gates catch each one alone."""

import dataclasses
from functools import cache

import pytest
import torch
from bundle_samples import unlowered_steps
from gate_samples import CONFIG, SHAPES
from step_forms import FORMS, step_card

from bridge.gates import faults
from bridge.gates.card import Card
from bridge.gates.families import families
from bridge.gates.faults import Fault, caught, faults_of
from bridge.gates.suite import ALL_KEYS, CHECKS
from contracts.errors import DifferenceFound
from isojax.evidence import small_policy
from isojax.kernels.calls import kernel_calls
from isojax.policy import Policy
from pallas_kernels.kernel_shapes import KernelShapes
from pallas_kernels.store import Bundle

GATES = dict(CHECKS)
#: Of Qwen3-8B: a vocabulary of whole tiles, many heads, contexts of many splits.
LARGE = dataclasses.replace(
    CONFIG,
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=40960,
)


@cache
def _sealed(policy: str) -> Bundle:
    """The steps of every program that an export of this policy holds."""
    config, shapes = {
        "tiny": (CONFIG, SHAPES),
        "small": (small_policy.CONFIG, small_policy.SHAPES),
        "large": (LARGE, KernelShapes(token_buckets=(8, 256, 2048), head_rows=(8, 256), trainer_tokens=(1024, 8192))),
    }[policy]
    shapes = shapes.for_context(config.max_position)
    calls = kernel_calls(Policy(config), shapes)
    return Bundle(tuple(unlowered_steps(call.region, call.types, dict(call.parameters)) for call in calls), shapes)


@pytest.mark.parametrize(("policy", "missing"), [("tiny", {"tail", "combine"}), ("small", {}), ("large", {"tail"})])
def test_every_kernel_of_a_sealed_policy_has_a_fault_alone(policy, missing):
    several = set()
    for family in families(_sealed(policy).programs):
        names = set()
        for program in family.ends:
            hit = {digest for fault in faults_of(program, ALL_KEYS) for _, digest in fault.hits(program)}
            assert hit == set(program.digests), f"{family}: {[module.name for module in program.modules]}"
            names |= {module.name for module in program.modules}
        # The gates plant faults in the smallest and the largest bucket: what lies between has no other kernels.
        assert {module.name for program in family.programs for module in program.modules} == names
        several |= {(family.region, name) for name in names if len(names) > 1}
    expected = {step for step in FORMS if step[0] != "attention"}
    assert several == {(region, name) for region, name in expected if name not in missing}


def test_a_fault_of_several_kernels_hits_none_alone():
    (program,) = (family.smallest for family in families(_sealed("small").programs) if family.region == "log_prob_rows")
    assert Fault("all of them").hits(program) == []
    assert Fault("one", step="blocks").hits(program) == [("log_prob_rows.blocks", program.modules[2].sha256)]
    once = Fault("one", step="rows").hits(program)
    assert caught([once, once, []]) == "every planted fault caught, in 1 log_prob_rows.rows"


def test_a_fault_of_one_step_reaches_no_other():
    seen = []

    def make(program):
        (module,) = program.modules

        def run(*operands):
            seen.append((module.name, module.module, tuple(map(float, operands))))
            return tuple(torch.tensor(float(len(seen))) for _ in program.results)

        return run

    types = (((8, 64), "bfloat16"), ((256, 64), "bfloat16"), ((), "float32"))
    target = unlowered_steps("log_prob_rows", types, {"vocab_size": 256})
    other = unlowered_steps("log_prob_rows", types, {"vocab_size": 255})
    card = Card(Bundle((target,), SHAPES), torch.device("cpu"), make, lambda call: other)
    operands = {name: torch.tensor(float(-number)) for number, name in enumerate(target.operands, 1)}
    fault = Fault("", (("vocab_size", 255),), lambda values: {"sums": values["sums"] + 100}, step="leaves")
    (result,) = fault.launch(card, target)(target, operands)
    assert [name for name, _, _ in seen] == ["logits", "blocks", "leaves", "constants", "rows"]
    modules = {module.name: module.module for module in target.modules} | {"leaves": other.modules[2].module}
    assert all(modules[name] == module for name, module, _ in seen)
    # Operands from outside are negative; the result of the n-th launch is n.
    assert [values for _, _, values in seen] == [(-1, -2), (1, -3), (102,), (3,), (1, -3, 4)]
    assert float(result) == 5


def _calls(tokens: tuple[int, ...], rows: tuple[int, ...]):
    """Calls of the regions that have several kernels, and the trainer's that they are compared with."""
    H, V, N, K, D = 32, 300, 4, 2, 16
    page, pages, requests, context = 16, 64, 4, 160
    heat, w, packed = ((), "float32"), ((V, H), "bfloat16"), 256
    yield "token_log_probs", (((128, H), "bfloat16"), w, ((128,), "int32"), heat), {"vocab_size": V}
    for T in rows:
        yield "log_prob_rows", (((T, H), "bfloat16"), w, heat), {"vocab_size": V}
    for T in tokens:
        yield "gated_matmul", (((T, H), "bfloat16"), ((256, H), "bfloat16")), {}
    constants = {"scale": 0.25, "split": 128}
    q, k, one = ((packed, N, D), "bfloat16"), ((packed, K, D), "bfloat16"), ((packed,), "int32")
    yield "attention", (q, k, k, one, one, ((), "int32")), constants
    for T in tokens:
        cache_, table = ((pages, page, K, D), "bfloat16"), ((requests, context // page), "int32")
        operands = (((T, N, D), "bfloat16"), cache_, cache_, table, *[((T,), "int32")] * 2)
        yield "paged_attention", operands, constants
        if requests * 2 >= T:
            yield "paged_decode_attention", operands, constants


@cache
def _card() -> Card:
    shapes = KernelShapes(
        token_buckets=(8, 136),
        head_rows=(8, 16),
        trainer_tokens=(256,),
        page_size=16,
        max_pages=64,
        max_requests=4,
        max_context=160,
    )
    programs = [unlowered_steps(*call) for call in _calls(shapes.token_buckets, shapes.head_rows)]
    return step_card(Bundle(tuple(programs), shapes))


HEADS = {name for name in FORMS if name[0] in ("log_prob_rows", "token_log_probs")}
FUSED = {name for name in HEADS if name[0] == "token_log_probs"}
#: Of few tokens, and of more.
GATED = {("gated_matmul", "matmul"), ("gated_matmul", "swiglu")}, {("gated_matmul", "gated_matmul")}
ATTENTION = {name for name in FORMS if "attention" in name[0]}
#: Not the merge of a token's splits, of which the sample's reference has one.
REFERENCE = {("attention", "attention"), ("paged_attention", "tiles"), ("paged_decode_attention", "decode")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gate", "kernels"),
    [
        ("row_invariance", HEADS | GATED[0]),
        ("fused_head", FUSED),
        ("attention_bindings", ATTENTION),
        ("reference", HEADS | GATED[1] | REFERENCE),
    ],
)
def test_a_gate_catches_a_fault_in_each_kernel_alone(gate, kernels):
    print(told := GATES[gate](_card()))
    counted = told.partition("every planted fault caught, in ")[2].split(", ")
    found = dict(reversed(part.split()) for part in counted)
    assert found.keys() == {name if name == region else f"{region}.{name}" for region, name in kernels}
    if gate == "attention_bindings":
        # One of each in both buckets, and in the only one for steps of decoding.
        assert found["paged_decode_attention.decode"] == found["paged_decode_attention.combine"] == "1"
        assert found["paged_attention.decode"] == found["paged_attention.combine"] == "2"


def test_a_fault_in_one_kernel_that_changes_nothing_fails_the_gate(monkeypatch):
    monkeypatch.setitem(faults._FAULTS, "log_prob_rows", lambda program, longest: [Fault("nothing", step="leaves")])
    with pytest.raises(DifferenceFound, match=r"log_prob_rows.*nothing: found no difference"):
        GATES["row_invariance"](_card())
