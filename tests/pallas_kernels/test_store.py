"""The kernel store: digests that never change by themselves, and bundles that are refused when anything else did."""

import json
import subprocess
import sys

import jax
import pytest
from sealing_tools import needs_sealing_jax, small_program

from contracts.errors import BadBundle, ToolchainMismatch
from pallas_kernels.seal import check_sealing_toolchain, seal_program
from pallas_kernels.store import MANIFEST, MODULES, load_bundle, save_bundle

pytestmark = needs_sealing_jax

SEAL_IN_A_NEW_PROCESS = """
import sys
sys.path.insert(0, {tests!r})
from sealing_tools import small_program
from pallas_kernels.seal import seal_program
print(seal_program("matmul", "1", {{"leaves": 2}}, small_program()).digests[0])
"""


@pytest.fixture(scope="module")
def sealed():
    return [seal_program("matmul", "1", {"leaves": n, "scale": 0.1}, small_program(n)) for n in (1, 2)]


@pytest.fixture
def bundle(tmp_path, sealed):
    save_bundle(tmp_path, sealed)
    return tmp_path


def _modules(bundle):
    return sorted((bundle / MODULES).iterdir())


def test_digests_are_stable_within_and_across_processes(request):
    here = seal_program("matmul", "1", {"leaves": 2}, small_program()).digests[0]
    again = seal_program("matmul", "1", {"leaves": 2}, small_program()).digests[0]
    code = SEAL_IN_A_NEW_PROCESS.format(tests=str(request.path.parent))
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert here == again == other.stdout.strip()


def test_a_constant_of_the_schedule_changes_the_digest(sealed):
    assert sealed[0].digests != sealed[1].digests


def test_a_bundle_comes_back_as_it_was_saved_in_any_order(bundle, sealed, tmp_path_factory):
    assert sorted(load_bundle(bundle), key=lambda p: p.digests) == sorted(sealed, key=lambda p: p.digests)
    other = tmp_path_factory.mktemp("reversed")
    assert save_bundle(other, sealed[::-1]) == save_bundle(bundle, sealed)
    assert (other / MANIFEST).read_bytes() == (bundle / MANIFEST).read_bytes()


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


def test_a_foreign_file_is_refused(bundle):
    (bundle / MODULES / "foreign.mlirbc").write_bytes(b"x")
    with pytest.raises(BadBundle, match=r"foreign\.mlirbc"):
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


def test_another_version_of_the_bundle_is_refused(bundle):
    manifest = json.loads((bundle / MANIFEST).read_text())
    manifest["bundle_version"] = 99
    (bundle / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BadBundle, match="bundle_version 99"):
        load_bundle(bundle)


def test_a_bundle_of_another_toolchain_is_refused(bundle, sealed, monkeypatch):
    monkeypatch.setitem(load_bundle.__globals__["_TOOLCHAIN"], "jax", "0.12.0")
    with pytest.raises(BadBundle, match="toolchain"):
        load_bundle(bundle)


def test_sealing_with_another_jax_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "__version__", "0.10.2")
    with pytest.raises(ToolchainMismatch, match=r"0\.10\.2"):
        check_sealing_toolchain()
