"""Sealed kernels are kept between runs: found again for the same calls and code, and for nothing else."""

import dataclasses
import errno
import shutil
from pathlib import Path

import jax
import pytest
from bundle_samples import SHAPES
from kernel_samples import sealable_policy, unlowered_bundle

import pallas_kernels
from isojax.kernels import kept
from isojax.kernels.kept import kept_or_sealed
from isojax.policy import Policy
from isojax.rl import card


@pytest.fixture
def sealings(monkeypatch: pytest.MonkeyPatch) -> list[Policy]:
    """Every policy that was sealed; nothing is lowered."""
    monkeypatch.setattr(kept, "check_sealing_toolchain", lambda: None)
    sealed = []

    def seal(policy, shapes, **_):
        sealed.append(policy)
        return dataclasses.replace(unlowered_bundle(), shapes=shapes)

    monkeypatch.setattr(kept, "seal_policy", seal)
    return sealed


def test_the_second_run_finds_what_the_first_one_sealed(sealings: list[Policy], tmp_path: Path) -> None:
    bundles = [kept_or_sealed(sealable_policy(), SHAPES, tmp_path) for _ in range(2)]
    assert len(sealings) == 1
    assert bundles[0].sha256 == bundles[1].sha256
    assert bundles[0].modules.keys() == bundles[1].modules.keys()


@pytest.mark.parametrize("change", ["shapes", "policy", "code", "jax"])
def test_other_kernels_are_not_found(
    change: str, sealings: list[Policy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, shapes = sealable_policy(), SHAPES
    kept_or_sealed(policy, shapes, tmp_path)
    if change == "shapes":
        shapes = dataclasses.replace(shapes, page_size=32)
    elif change == "policy":
        policy = Policy(dataclasses.replace(policy.config, rms_norm_eps=1e-3))
    elif change == "code":
        monkeypatch.setattr(kept, "_code", lambda: "another")
    else:
        monkeypatch.setattr(jax, "__version__", "0.0.1")
    kept_or_sealed(policy, shapes, tmp_path)
    assert len(sealings) == 2
    assert len(list((tmp_path / "sealed").iterdir())) == 2


def test_the_code_is_every_line_of_the_package(tmp_path: Path) -> None:
    package = tmp_path / "pallas_kernels"
    shutil.copytree(Path(pallas_kernels.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    assert kept._code(package) == kept._code()
    changed = package / "attention" / "hopper_softmax.py"
    changed.write_text(changed.read_text(encoding="utf-8") + "#\n", encoding="utf-8")
    assert kept._code.__wrapped__(package) != kept._code()


@pytest.mark.parametrize(("name", "how"), [("*.mlirbc", "cut"), ("manifest.json", "cut"), ("manifest.json", "folder")])
def test_damaged_kernels_are_sealed_anew_and_said(
    name: str, how: str, sealings: list[Policy], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = kept_or_sealed(sealable_policy(), SHAPES, tmp_path)
    damaged = next(tmp_path.rglob(name))
    if how == "cut":
        damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    else:
        damaged.unlink()
        damaged.mkdir()
    assert kept_or_sealed(sealable_policy(), SHAPES, tmp_path).sha256 == bundle.sha256
    assert len(sealings) == 2
    assert "kept kernels are not used" in capsys.readouterr().err
    kept_or_sealed(sealable_policy(), SHAPES, tmp_path)
    assert len(sealings) == 2


def test_a_full_disk_keeps_nothing_and_says_so(
    sealings: list[Policy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(folder, bundle):
        (Path(folder) / "half").write_bytes(b"")
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    monkeypatch.setattr(kept, "save_bundle", full)
    assert kept_or_sealed(sealable_policy(), SHAPES, tmp_path).sha256 == unlowered_bundle().sha256
    assert "not kept for the next run" in capsys.readouterr().err
    assert list((tmp_path / "sealed").iterdir()) == []


def test_a_run_keeps_them_where_compiled_programs_are(
    sealings: list[Policy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = jax.config.jax_compilation_cache_dir
    try:
        for folder, count in ((None, 0), ("gs://bucket/compiled", 0), (str(tmp_path), 1)):
            jax.config.update("jax_compilation_cache_dir", folder)
            card.seal_for_run(sealable_policy(), SHAPES)
            assert len(list(tmp_path.rglob("sealed/*"))) == count
        card.seal_for_run(sealable_policy(), SHAPES)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert len(sealings) == 3
