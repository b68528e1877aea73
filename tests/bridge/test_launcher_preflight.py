"""Before a launch every tensor is compared with the manifest; only a bound on the first size leaves it any freedom."""

from types import SimpleNamespace

import pytest
import torch

from bridge import launcher
from bridge.launcher import Launcher
from contracts.errors import LaunchRefused
from pallas_kernels.program import Buffer
from pallas_kernels.seal import ALIGNMENT, SealedModule, SealedProgram

PROGRAM = SealedProgram(
    region="paged_attention",
    version="1",
    constants=(),
    buffers={
        "cache": Buffer((9, 16, 2, 64), "bfloat16", leading_at_most=True),
        "positions": Buffer((8,), "int32"),
        "out": Buffer((8,), "int32"),
    },
    operands=("cache", "positions"),
    results=("out",),
    modules=(SealedModule("decode", b"", ("cache", "positions"), ("out",)),),
)


class Recorder:
    """A compiler whose kernels only note that they were launched."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.launches = 0

    def compile(self, module: SealedModule) -> SimpleNamespace:
        def launch(*_: object) -> None:
            self.launches += 1

        return SimpleNamespace(function=0, launch=launch)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setattr(launcher, "raw_stream", lambda device_index: 0)
    return Recorder()


def aligned(*shape: int, dtype: torch.dtype = torch.bfloat16, shift: int = 0) -> torch.Tensor:
    count = torch.Size(shape).numel()
    memory = torch.zeros(count + 2 * ALIGNMENT, dtype=dtype)
    first = -memory.data_ptr() % ALIGNMENT // memory.element_size() + shift
    return memory[first : first + count].view(shape)


POSITIONS = aligned(8, dtype=torch.int32)


@pytest.mark.parametrize("pages", [9, 8, 1])
def test_a_cache_with_fewer_pages_than_the_bound_is_launched(recorder: Recorder, pages: int) -> None:
    Launcher(PROGRAM, recorder)(aligned(pages, 16, 2, 64), POSITIONS)
    assert recorder.launches == 1


@pytest.mark.parametrize(
    ("cache", "positions", "says"),
    [
        (aligned(10, 16, 2, 64), POSITIONS, r"cache\.shape: found \(10, 16, 2, 64\).*or fewer of the first"),
        (aligned(0, 16, 2, 64), POSITIONS, r"cache\.shape"),
        (aligned(8, 32, 2, 64), POSITIONS, r"cache\.shape"),
        (aligned(8, 16, 128), POSITIONS, r"cache\.shape"),
        (aligned(8, 16, 2, 64, dtype=torch.float16), POSITIONS, r"cache\.dtype: found torch\.float16"),
        (aligned(8, 16, 2, 64, shift=8), POSITIONS, r"cache\.address: found 16 modulo 256"),
        (aligned(8, 16, 4, 64)[:, :, ::2], POSITIONS, r"cache\.strides"),
        (aligned(9, 16, 2, 64), aligned(7, dtype=torch.int32), r"positions\.shape: found \(7,\); allowed: \(8,\)"),
    ],
)
def test_anything_else_is_refused_and_named(recorder: Recorder, cache, positions, says: str) -> None:
    with pytest.raises(LaunchRefused, match=says):
        Launcher(PROGRAM, recorder)(cache, positions)
    assert recorder.launches == 0
