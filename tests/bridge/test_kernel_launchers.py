"""Sealed kernels are found by region, parameters and shapes; a call without kernels is refused with what there is."""

import pytest
import torch

from bridge.kernel_launchers import KernelLaunchers, engine_programs
from contracts.errors import BadBundle, LaunchRefused
from pallas_kernels import seal
from pallas_kernels.program import Buffer
from pallas_kernels.seal import SealedModule, SealedProgram

PAGES = 1000


def _matmul(tokens: int, leaves: int = 1, module: bytes = b"matmul") -> SealedProgram:
    buffers = {
        "x": Buffer((tokens, 32), "bfloat16"),
        "w": Buffer((48, 32), "bfloat16"),
        "out": Buffer((tokens, 48), "bfloat16"),
    }
    modules = (SealedModule("matmul", module + bytes([tokens, leaves]), ("x", "w"), ("out",)),)
    constants = (("leaves", leaves), ("out_dtype", "bfloat16"))
    return SealedProgram("matmul", "1", constants, buffers, ("x", "w"), ("out",), modules)


def _paged(tokens: int) -> SealedProgram:
    buffers = {
        "q": Buffer((tokens, 4, 16), "bfloat16"),
        "k_cache": Buffer((PAGES, 16, 2, 16), "bfloat16", True),
        "v_cache": Buffer((PAGES, 16, 2, 16), "bfloat16", True),
        "block_table": Buffer((8, 4), "int32"),
        "request_of_token": Buffer((tokens,), "int32"),
        "positions": Buffer((tokens,), "int32"),
        "out": Buffer((tokens, 4, 16), "bfloat16"),
    }
    operands = tuple(buffers)[:-1]
    modules = (SealedModule("tiles", b"paged" + bytes([tokens]), operands, ("out",)),)
    constants = (("scale", 0.25), ("split", 512))
    return SealedProgram("paged_attention", "1", constants, buffers, operands, ("out",), modules)


def _launchers(*programs: SealedProgram) -> KernelLaunchers:
    launchers = KernelLaunchers()
    launchers.add(programs, lambda program: lambda *operands: (program.digests[0], *operands))
    return launchers


def _operands(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(tokens, 32, dtype=torch.bfloat16), torch.zeros(48, 32, dtype=torch.bfloat16)


def test_shape_and_parameters_choose_the_kernels():
    programs = [_matmul(tokens, leaves) for tokens in (8, 16) for leaves in (1, 4)]
    launchers = _launchers(*programs)
    chosen = {
        launchers.launch("matmul", _operands(tokens), {"leaves": leaves, "out_dtype": "bfloat16"})[0]
        for tokens in (8, 16)
        for leaves in (1, 4)
    }
    assert chosen == {program.digests[0] for program in programs}
    assert len(chosen) == 4


@pytest.mark.parametrize(
    ("tokens", "parameters"),
    [(24, {"leaves": 1, "out_dtype": "bfloat16"}), (8, {"leaves": 2, "out_dtype": "bfloat16"})],
)
def test_a_call_without_kernels_is_refused_with_the_buckets_that_exist(tokens, parameters):
    launchers = _launchers(_matmul(8), _matmul(16))
    with pytest.raises(LaunchRefused, match=rf"region matmul: found bfloat16\[{tokens}, 32\].*of 8, 16 rows"):
        launchers.launch("matmul", _operands(tokens), parameters)
    with pytest.raises(LaunchRefused, match="nothing: it has no kernels"):
        launchers.launch("swiglu", _operands(8)[:1], {})


def test_a_cache_with_fewer_pages_takes_the_same_kernels():
    launchers = _launchers(_paged(8))
    for pages in (3, PAGES):
        cache = torch.zeros(pages, 16, 2, 16, dtype=torch.bfloat16)
        operands = [
            torch.zeros(8, 4, 16, dtype=torch.bfloat16),
            cache,
            cache,
            torch.zeros(8, 4, dtype=torch.int32),
            torch.zeros(8, dtype=torch.int32),
            torch.zeros(8, dtype=torch.int32),
        ]
        assert launchers.launch("paged_attention", operands, {"scale": 0.25, "split": 512})[2] is cache
    operands[1] = torch.zeros(3, 32, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(LaunchRefused, match="paged_attention"):
        launchers.launch("paged_attention", operands, {"scale": 0.25, "split": 512})


def test_other_kernels_for_a_call_that_is_served_already_are_refused():
    launchers = _launchers(_matmul(8))
    launchers.add([_matmul(8)], lambda program: lambda *operands: ())
    with pytest.raises(BadBundle, match="region matmul"):
        launchers.add([_matmul(8, module=b"another")], lambda program: lambda *operands: ())


def test_what_is_launched_is_recorded_by_region():
    launchers = _launchers(_matmul(8), _matmul(16))
    ran: dict[str, set[str]] = {}
    with launchers.recording(ran):
        launchers.launch("matmul", _operands(8), {"leaves": 1, "out_dtype": "bfloat16"})
    launchers.launch("matmul", _operands(16), {"leaves": 1, "out_dtype": "bfloat16"})
    assert ran == {"matmul": set(_matmul(8).digests)}
    assert launchers.digests("matmul") == {*_matmul(8).digests, *_matmul(16).digests}


def test_an_engine_compiles_its_own_buckets_alone():
    programs = [_matmul(8), _matmul(16), _matmul(128), _paged(8), _paged(16)]
    chosen = engine_programs(programs, token_buckets=(8,), head_rows=(16,))
    assert [program.digests for program in chosen] == [_matmul(8).digests, _paged(8).digests]


def test_a_launch_takes_no_digest_of_a_kernels_bytes(monkeypatch):
    """Outside of a captured graph a launch is on a step's way, and its module is long."""
    launchers, wanted = _launchers(_matmul(8)), {"matmul": set(_matmul(8).digests)}
    ran: dict[str, set[str]] = {}
    call = "matmul", _operands(8), {"leaves": 1, "out_dtype": "bfloat16"}
    with launchers.recording(ran):
        launchers.launch(*call)
        monkeypatch.setattr(seal.hashlib, "sha256", lambda _: pytest.fail("a digest was taken anew"))
        launchers.launch(*call)
    assert ran == wanted
