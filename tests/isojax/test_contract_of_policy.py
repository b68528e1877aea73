"""The contract of a policy states what its own forward is made of, and only claims what a gate runs."""

import dataclasses

import jax.numpy as jnp
import pytest
from policy_samples import FAMILIES, tiny_policy

from contracts import CASES, bits_float, diff
from contracts.errors import BadConfig, MeshNotClaimed, UncoveredArithmetic
from isojax import Policy, PolicyConfig, build_contract
from isojax.cpu_arch import cpu_arch
from isojax.policy.hugging_face import from_hugging_face
from isojax.policy.rope import rope_table_digest


def smollm2_shapes() -> PolicyConfig:
    """Heads and sizes of SmolLM2-135M with two layers."""
    raw = FAMILIES["llama_tied"] | {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
    }
    return from_hugging_face(raw)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_region_of_the_policy_has_an_owner_in_every_case(name: str) -> None:
    policy, _ = tiny_policy(name)
    contract = build_contract(policy, tokenizer={})
    owners = {case: {contract.owner(entry.region, case).impl_id for entry in contract.composition} for case in CASES}
    shared = {"matmul", "rms_norm", "add_rms_norm", "qk_norm_rope"}
    # The backward needs what is between a gated matmul's two parts.
    assert owners["trainer_fwd"] == shared | {"attention", "token_log_probs", "swiglu"}
    assert owners["trainer_score"] == shared | {"attention", "token_log_probs", "gated_matmul"}
    served = shared | {"paged_attention", "log_prob_rows", "gated_matmul"}
    assert owners["engine_prefill"] == owners["engine_decode"] == served


def test_constants_are_those_of_the_calls() -> None:
    policy, _ = tiny_policy()
    contract = build_contract(policy, tokenizer={}, temperature=0.6)
    matmul = contract.owner("matmul", "trainer_fwd").constants
    # qkv, o, gate_up (under gradients), down
    assert matmul["leaves"] == "1,4,1,4"
    for case in CASES:
        attention = contract.owner("attention", case).constants
        assert attention["split"] == 1024
        assert bits_float(attention["scale"]) == policy.config.softmax_scale
    assert bits_float(contract.owner("rms_norm", "trainer_fwd").constants["eps"]) == policy.config.rms_norm_eps
    assert bits_float(contract.semantics.temperature) == jnp.float32(0.6)
    assert contract.semantics.rope_table_digest == rope_table_digest(policy.buffers["rope_table"])
    assert contract.arch == cpu_arch()


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"leaves": 2}, {"composition.matmul.constants.leaves", "semantics.split_k_leaves"}),
        ({"attention_split": 256}, {"composition.attention.constants.split"}),
        ({"rms_norm_eps": 1.0000000000000002e-5}, {"constants.eps", "model.config_digest"}),
    ],
)
def test_a_changed_constant_is_named_and_rotates_the_numerical_policy(change: dict, fields: set[str]) -> None:
    policy, _ = tiny_policy()
    left = build_contract(policy, tokenizer={})
    right = build_contract(Policy(dataclasses.replace(policy.config, **change)), tokenizer={})
    found = diff(left, right)
    assert found
    assert all("numerical_policy" in difference.rotates for difference in found)
    for field in fields:
        assert any(part in difference.field for difference in found for part in [field.rsplit(".", 2)[-1]]), field
    assert left.validate_identities().numerical_policy != right.validate_identities().numerical_policy


def test_dtype_rope_and_tokenizer_move_the_identities_they_belong_to() -> None:
    policy, _ = tiny_policy()
    base = build_contract(policy, tokenizer={}).validate_identities()
    wide = build_contract(Policy(policy.config, dtype="float32"), tokenizer={}).validate_identities()
    assert wide.semantic == base.semantic
    assert wide.numerical_policy != base.numerical_policy
    text = build_contract(policy, tokenizer={"tokenizer.json": b"{}"}).validate_identities()
    assert text.semantic != base.semantic
    assert text.numerical_policy == base.numerical_policy
    stop = Policy(dataclasses.replace(policy.config, eos_token_ids=(5,)))
    assert build_contract(stop, tokenizer={}).validate_identities() == base
    # Recomputation in the backward is a training choice.
    assert build_contract(Policy(policy.config, remat="none"), tokenizer={}).validate_identities() == base


def test_claims_cover_what_the_mesh_gate_runs_and_nothing_else() -> None:
    contract = build_contract(Policy(smollm2_shapes()), tokenizer={})
    contract.check_mesh({"dp": 8})
    contract.check_mesh({"dp": 2, "fsdp": 4})
    with pytest.raises(MeshNotClaimed, match=r"tp=2.*9 heads and 3 KV heads"):
        contract.check_mesh({"tp": 2})
    for mesh in ({"dp": 3}, {"fsdp": 16}, {"tp": 3}, {"pp": 2}, {"sp": 2}, {"ep": 2}, {"cp": 2}):
        with pytest.raises(MeshNotClaimed):
            contract.check_mesh(mesh)


def test_fsdp_degrees_that_do_not_divide_are_not_claimed() -> None:
    policy = Policy(dataclasses.replace(tiny_policy("llama_tied")[0].config, hidden_size=68, leaves=4))
    contract = build_contract(policy, tokenizer={})
    contract.check_mesh({"fsdp": 4})
    with pytest.raises(MeshNotClaimed, match="fsdp"):
        contract.check_mesh({"fsdp": 8})


def test_an_architecture_without_kernels_is_refused() -> None:
    with pytest.raises(BadConfig, match="arch: found sm90"):
        build_contract(tiny_policy()[0], tokenizer={}, arch="sm90")


def test_a_policy_with_stray_arithmetic_has_no_contract() -> None:
    class Louder(Policy):
        def hidden(self, *arguments):
            return super().hidden(*arguments) * 2

    with pytest.raises(UncoveredArithmetic, match="mul"):
        build_contract(Louder(tiny_policy()[0].config), tokenizer={})
