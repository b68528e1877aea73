"""The kernel store: digests that never change by themselves, and bundles that are refused when anything else did."""

import dataclasses
import json
import subprocess
import sys

import jax
import jaxlib
import pytest
from bundle_samples import SHAPES, change_manifest, matmul_types, two_matmuls, unlowered

from contracts.errors import BadBundle, ToolchainMismatch
from pallas_kernels.seal import SEALING_JAX, check_sealing_toolchain, seal_program
from pallas_kernels.store import MANIFEST, MODULE_LIMIT, MODULES, Bundle, load_bundle, save_bundle

SEAL_IN_A_NEW_PROCESS = """
from pallas_kernels.matmul.hopper import matmul_program
from pallas_kernels.seal import seal_program
print(seal_program("matmul", "1", {"leaves": 2}, matmul_program(8, 128, 256, leaves=2)).digests[0])
"""


@pytest.fixture
def bundle(tmp_path):
    save_bundle(tmp_path, two_matmuls())
    return tmp_path


def _modules(bundle):
    return sorted((bundle / MODULES).iterdir())


@pytest.mark.sealing
def test_digests_are_stable_within_and_across_processes_and_change_with_a_constant():
    from pallas_kernels.matmul.hopper import matmul_program

    def digest(leaves):
        return seal_program("matmul", "1", {"leaves": leaves}, matmul_program(8, 128, 256, leaves=leaves)).digests[0]

    command = [sys.executable, "-c", SEAL_IN_A_NEW_PROCESS]
    other = subprocess.run(command, capture_output=True, text=True, check=True)
    assert digest(2) == digest(2) == other.stdout.strip()
    assert digest(1) != digest(2)


def test_a_bundle_comes_back_as_it_was_saved_in_any_order(bundle, tmp_path_factory):
    saved, found = two_matmuls(), load_bundle(bundle)
    assert sorted(found.programs, key=lambda p: p.digests) == sorted(saved.programs, key=lambda p: p.digests)
    assert (found.shapes, found.ptxas, found.sha256) == (SHAPES, None, saved.sha256)
    other = tmp_path_factory.mktemp("reversed")
    save_bundle(other, dataclasses.replace(saved, programs=saved.programs[::-1]))
    assert (other / MANIFEST).read_bytes() == (bundle / MANIFEST).read_bytes()


def test_every_field_of_a_bundle_is_in_its_hash():
    saved = two_matmuls()
    changed = dataclasses.replace(saved.programs[0].buffers["x"], leading_at_most=True)
    program = dataclasses.replace(saved.programs[0], buffers={**saved.programs[0].buffers, "x": changed})
    others = [
        dataclasses.replace(saved, ptxas="12.9"),
        dataclasses.replace(saved, shapes=dataclasses.replace(SHAPES, page_size=32)),
        dataclasses.replace(saved, programs=saved.programs[:1]),
        dataclasses.replace(saved, programs=(program, saved.programs[1])),
    ]
    assert len({saved.sha256, *(other.sha256 for other in others)}) == 5


def test_too_many_modules_are_refused(tmp_path):
    parameters = {"leaves": 1, "out_dtype": "bfloat16"}
    programs = tuple(unlowered("matmul", matmul_types(8 * n), parameters) for n in range(1, MODULE_LIMIT + 2))
    with pytest.raises(BadBundle, match=f"found {MODULE_LIMIT + 1}.*at most {MODULE_LIMIT}"):
        save_bundle(tmp_path, Bundle(programs, SHAPES))
    assert not list(tmp_path.iterdir())


def test_one_flipped_byte_is_refused_and_named(bundle):
    path = _modules(bundle)[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(BadBundle, match=path.name):
        load_bundle(bundle)


def test_a_truncated_module_is_refused_and_named(bundle):
    path = _modules(bundle)[0]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BadBundle, match=path.name):
        load_bundle(bundle)


def test_two_swapped_modules_are_refused(bundle):
    first, second = _modules(bundle)
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)
    with pytest.raises(BadBundle, match="another kernel's"):
        load_bundle(bundle)


def test_a_missing_module_is_refused(bundle):
    _modules(bundle)[0].unlink()
    with pytest.raises(BadBundle, match="incomplete"):
        load_bundle(bundle)


@pytest.mark.parametrize("place", [f"{MODULES}/foreign.mlirbc", "foreign.ptx"])
def test_a_foreign_file_is_refused(bundle, place):
    (bundle / place).write_bytes(b"x")
    with pytest.raises(BadBundle, match="foreign"):
        load_bundle(bundle)


def test_two_swapped_digests_in_the_manifest_are_refused(bundle):
    manifest = json.loads((bundle / MANIFEST).read_text())
    first, second = (program["modules"][0] for program in manifest["programs"])
    first["sha256"], second["sha256"] = second["sha256"], first["sha256"]
    (bundle / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BadBundle, match="changed after it was sealed"):
        load_bundle(bundle)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_damaged_manifest_is_refused(bundle, text):
    (bundle / MANIFEST).write_text(text)
    with pytest.raises(BadBundle, match=MANIFEST):
        load_bundle(bundle)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda manifest: manifest.update(bundle_version=99), "bundle_version 99"),
        (lambda manifest: manifest.update(alignment=16), "alignment 16"),
        (lambda manifest: manifest["toolchain"].update(jax="0.12.0"), r"toolchain\.jax 0\.12\.0"),
        (lambda manifest: manifest["toolchain"].update(module_format="other"), r"toolchain\.module_format other"),
        (lambda manifest: manifest["toolchain"].pop("ptxas"), "what made the kernels"),
        (lambda manifest: manifest["shapes"].update(page_size=24), "page_size"),
        (lambda manifest: manifest["shapes"].update(pages=2), "pages"),
        (lambda manifest: manifest["programs"][0].pop("modules"), "KeyError: 'modules'"),
    ],
)
def test_a_manifest_of_other_tools_or_another_layout_is_refused_by_name(bundle, change, says):
    change_manifest(bundle, change)
    with pytest.raises(BadBundle, match=says):
        load_bundle(bundle)


def test_sealing_with_another_jax_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "__version__", "0.10.2")
    with pytest.raises(ToolchainMismatch, match=r"0\.10\.2"):
        check_sealing_toolchain()


def test_sealing_with_64_bit_types_is_refused(monkeypatch):
    for module in (jax, jaxlib):
        monkeypatch.setattr(module, "__version__", SEALING_JAX)
    check_sealing_toolchain()
    with jax.enable_x64(True), pytest.raises(ToolchainMismatch, match="JAX_ENABLE_X64: found 64-bit types"):
        check_sealing_toolchain()
