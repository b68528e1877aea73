"""An sm90 policy folder: its contract names its kernels, and where anything was exchanged it is refused by name."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from bundle_damage import damages, rewritten, swap_in_the_contract
from bundle_samples import SHAPES
from kernel_samples import sealable_params, sealable_policy, sealed_folder, unlowered_bundle

import isojax
from contracts import CASES, load_contract, save_contract
from contracts.errors import (
    BadBundle,
    BadConfig,
    IdentityMismatch,
    KernelMissing,
    MeshNotClaimed,
    ToolchainMismatch,
)
from isojax.kernels import KERNELS_FOLDER, load_kernels, packing_of
from isojax.kernels.calls import kernel_calls
from pallas_kernels import kernel_source
from pallas_kernels.by_platform import FORMS
from pallas_kernels.hopper_regions import region_program
from pallas_kernels.store import MANIFEST, MODULES


@pytest.fixture(autouse=True)
def source(monkeypatch: pytest.MonkeyPatch) -> kernel_source.KernelSource:
    """Loaded kernels are kept for the whole process; each test has its own."""
    fresh = kernel_source.KernelSource()
    monkeypatch.setattr(kernel_source, "LOADED", fresh)
    return fresh


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return sealed_folder(tmp_path / "policy")


def test_calls_are_those_of_the_forward_at_every_bucket() -> None:
    shapes = dataclasses.replace(SHAPES, token_buckets=(8, 16, 32), head_rows=(8, 24), trainer_tokens=(128, 256))
    calls = kernel_calls(sealable_policy(), shapes)
    assert len(set(calls)) == len(calls)

    def sizes(region: str) -> set[int]:
        return {call.types[0][0][0] for call in calls if call.region == region}

    assert sizes("attention") == sizes("token_log_probs") == {128, 256}
    assert sizes("paged_attention") == {8, 16, 32}
    # Four requests fit the first bucket, so no larger step has one token of each alone.
    assert sizes("paged_decode_attention") == {8}
    assert sizes("log_prob_rows") == {8, 24}
    assert (sizes("qk_norm_rope"), sizes("paged_qk_norm_rope")) == ({128, 256}, {8, 16, 32})
    for shared in ("matmul", "rms_norm", "add_rms_norm", "gated_matmul"):
        assert sizes(shared) == {8, 16, 32, 128, 256}
    paged = next(call for call in calls if call.region == "paged_attention")
    assert paged._replace(region="paged_decode_attention") in calls
    assert [shape for shape, _ in paged.types] == [(8, 2, 64), (64, 16, 1, 64), (64, 16, 1, 64), (4, 4), (8,), (8,)]
    writing = next(call for call in calls if call.region == "paged_qk_norm_rope")
    assert [shape for shape, _ in writing.types][:5] == [(8, 256), (8, 64), (8,), (64, 16, 1, 64), (64, 16, 1, 64)]


def test_what_a_gated_matmul_is_under_gradients_is_sealed_for_the_trainer_alone() -> None:
    shapes = dataclasses.replace(SHAPES, token_buckets=(8, 16), trainer_tokens=(128, 256))
    policy = isojax.Policy(dataclasses.replace(sealable_policy().config, intermediate_size=256))
    wide = ((512, 128), "bfloat16")
    found = {
        (call.region, call.types[0][0][0])
        for call in kernel_calls(policy, shapes)
        if wide in call.types or call.region == "swiglu"
    }
    gated = {("gated_matmul", tokens) for tokens in (8, 16, 128, 256)}
    assert found == gated | {(region, tokens) for region in ("matmul", "swiglu") for tokens in (128, 256)}


@pytest.mark.parametrize(("tokens", "kernels"), [(8, 10), (256, 9)])
def test_a_decode_layer_is_nine_kernels_and_one_more_for_few_tokens(tokens, kernels) -> None:
    shapes = dataclasses.replace(SHAPES, token_buckets=(tokens,), max_context=2048, max_pages=128)
    policy = isojax.Policy(dataclasses.replace(sealable_policy().config, max_position=2048))
    steps = {
        call.region: len(region_program(call.region, call.types, dict(call.parameters)).steps)
        for call in kernel_calls(policy, shapes)
        if call.types[0][0][0] == tokens
    }
    # As the engine's graph calls them, see tests/bridge/test_dense_operands.py.
    calls = {"matmul": 3, "paged_qk_norm_rope": 1, "paged_decode_attention": 1, "add_rms_norm": 2, "gated_matmul": 1}
    assert sum(count * steps[region] for region, count in calls.items()) == kernels


def test_the_contract_names_every_kernel_and_claims_nothing(folder: Path) -> None:
    contract, bundle = load_contract(folder), unlowered_bundle()
    named = {digest for entry in contract.composition for digest in entry.kernel_digests.values()}
    assert named == set(bundle.modules)
    assert contract.arch == "sm90"
    matmul = contract.owner("matmul", "engine_decode").kernel_digests
    assert "matmul x[8,128] w[256,128] leaves=1 out_dtype=bfloat16" in matmul
    assert contract.owner("attention", "trainer_fwd").impl_id == "attention"
    assert contract.owner("attention", "engine_prefill").impl_id == "paged_attention"
    assert contract.owner("attention", "engine_decode").impl_id == "paged_decode_attention"
    constants = [contract.owner("attention", case).constants for case in CASES]
    assert all(found == constants[0] for found in constants)
    assert contract.owner("qk_norm_rope", "trainer_score").impl_id == "qk_norm_rope"
    assert contract.owner("qk_norm_rope", "engine_decode").impl_id == "paged_qk_norm_rope"
    made = contract.toolchain
    assert (made.jax, made.jaxlib, made.module_format) == ("0.11.2", "0.11.2", "mosaic_gpu_v2")
    assert (made.ptxas, made.engine_runner, made.kernel_manifest) == (None, "vllm_v2", bundle.sha256)
    assert contract.cases == CASES
    with pytest.raises(MeshNotClaimed, match="unproved"):
        contract.check_mesh({})
    with pytest.raises(ToolchainMismatch, match="no device yet"):
        contract.check_device_kind("NVIDIA H200")


def test_a_loaded_folder_gives_the_same_policy_kernels_and_contract(folder: Path) -> None:
    policy, params = isojax.load(folder)
    assert isojax.digest(params) == isojax.digest(sealable_params())
    bundle = load_kernels(folder, load_contract(folder))
    assert (bundle.sha256, bundle.shapes) == (unlowered_bundle().sha256, SHAPES)
    assert (policy.packing, policy.row_buckets) == (packing_of(SHAPES), SHAPES.head_rows)
    assert isojax.build_contract(policy, tokenizer={}, arch="sm90", kernels=bundle) == load_contract(folder)


def test_the_trainer_emits_the_bundle_and_refuses_other_token_counts(folder: Path, monkeypatch) -> None:
    # The backward is not sealed, and its kernels are lowered by the sealing JAX alone.
    for forms in FORMS.values():
        monkeypatch.setitem(forms, "cuda", forms["cpu"])
    policy = isojax.load_policy(folder)
    bundle = load_kernels(folder, load_contract(folder))

    def emitted(tokens: int, differentiated: bool = False) -> set[bytes]:
        batch = isojax.pack([[1] * tokens], length_multiple=tokens)

        def loss(*arguments) -> jax.Array:
            return policy.score(*arguments).sum()

        function = jax.jit(jax.value_and_grad(loss) if differentiated else policy.score)
        traced = function.trace(policy.parameter_shapes, policy.buffers, batch, 1.0)
        found: set[bytes] = set()

        def walk(operation) -> None:
            if operation.name == "stablehlo.custom_call" and "mhlo.backend_config" in operation.attributes:
                found.add(operation.attributes["mhlo.backend_config"]["module"].value_bytes)
            for part in operation.regions:
                for block in part.blocks:
                    for inner in block.operations:
                        walk(inner.operation)

        walk(traced.lower(lowering_platforms=("cuda",)).compiler_ir().operation)
        return found

    def sealed(without: str) -> set[bytes]:
        programs = [program for program in bundle.programs if program.buffers[program.operands[0]].shape[0] == 128]
        return {module.module for program in programs for module in program.modules if program.region != without}

    assert emitted(128) == sealed(without="swiglu")
    assert emitted(128, differentiated=True) == sealed(without="gated_matmul")
    with pytest.raises(KernelMissing, match=r"first operand .*8, 128"):
        emitted(256)


@pytest.mark.parametrize(("count", "compiled"), [(1, 8), (9, 16)])
def test_full_rows_are_computed_at_a_sealed_row_count(folder: Path, monkeypatch, count: int, compiled: int) -> None:
    policy, params = isojax.load(folder)
    plain, found = policy.head_rows, []

    def spied(params, hidden, temperature):
        found.append(hidden.shape[0])
        return plain(params, hidden, temperature)

    monkeypatch.setattr(policy, "head_rows", spied)
    rows = policy.log_prob_rows(params, isojax.pack([[1] * 16], length_multiple=16), np.arange(count))
    assert rows.shape == (count, 256)
    # Beyond the largest bucket nothing is sealed, and on a card such a call is refused.
    assert found == [compiled]


def test_an_untouched_folder_loads_twice_in_one_process(folder: Path) -> None:
    isojax.load_policy(folder)
    isojax.load_policy(folder)


@pytest.mark.parametrize("name", damages())
def test_a_damaged_folder_is_refused_by_name(folder: Path, name: str) -> None:
    damage = damages()[name]
    damage.apply(folder)
    for load in (isojax.load, lambda place: load_kernels(place, load_contract(place))):
        with pytest.raises(damage.refusal, match=damage.says):
            load(folder)


def test_missing_truncated_and_foreign_files_are_refused(folder: Path) -> None:
    modules = folder / KERNELS_FOLDER / MODULES
    path = next(modules.iterdir())
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(BadBundle, match="truncated"):
        isojax.load(folder)
    path.unlink()
    with pytest.raises(BadBundle, match="incomplete"):
        isojax.load(folder)
    path.write_bytes(content)
    (modules / "stray").touch()
    with pytest.raises(BadBundle, match="stray"):
        isojax.load(folder)
    shutil.rmtree(folder / KERNELS_FOLDER)
    with pytest.raises(BadBundle, match=f"{MANIFEST}.*no such file"):
        isojax.load(folder)


def test_a_contract_edited_by_hand_is_refused(folder: Path) -> None:
    path = folder / "execution_contract.json"
    unchanged = json.loads(path.read_text())
    swap_in_the_contract(folder)
    edited = json.loads(path.read_text())
    path.write_text(json.dumps(edited | {"identities": unchanged["identities"]}))
    with pytest.raises(IdentityMismatch, match="changed by hand"):
        isojax.load(folder)


def test_no_ptxas_version_at_all_is_refused_by_name(folder: Path) -> None:
    rewritten(folder, ptxas="")
    with pytest.raises(BadBundle, match=r"toolchain\.ptxas: found .*the contract's None"):
        isojax.load(folder)


def test_another_jax_in_the_contract_is_refused_by_name(folder: Path) -> None:
    contract = load_contract(folder)
    other = contract.toolchain.model_copy(update={"jax": "0.12.0"})
    save_contract(contract.replaced(toolchain=other), folder)
    with pytest.raises(BadBundle, match=r"toolchain\.jax: found 0\.11\.2.*contract's 0\.12\.0"):
        isojax.load(folder)


def test_other_shapes_in_the_manifest_are_refused(folder: Path) -> None:
    rewritten(folder, shapes=dataclasses.replace(SHAPES, max_pages=128))
    with pytest.raises(BadBundle, match="for other shapes"):
        isojax.load(folder)


def test_kernels_beside_a_cpu_contract_or_none_are_refused(folder: Path) -> None:
    save_contract(isojax.build_contract(sealable_policy(), tokenizer={}), folder)
    with pytest.raises(BadBundle, match="beside a CPU contract"):
        isojax.load(folder)
    (folder / "execution_contract.json").unlink()
    with pytest.raises(BadBundle, match="beside no contract"):
        isojax.load(folder)


@pytest.mark.parametrize("options", [{"arch": "sm90"}, {"arch": "cpu", "kernels": True}, {"arch": "sm80"}])
def test_an_architecture_and_its_kernels_belong_together(options: dict) -> None:
    if options.pop("kernels", False):
        options["kernels"] = unlowered_bundle()
    with pytest.raises(BadConfig, match=f"arch: found {options['arch']} with"):
        isojax.build_contract(sealable_policy(), tokenizer={}, **options)
