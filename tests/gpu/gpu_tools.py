"""Shared by the card's tests: sealing and launching a program, comparing bits, hazardous inputs."""

import torch

from bridge.gates.bits import bits
from bridge.launcher import Compiler, Launcher
from pallas_kernels.program import Program
from pallas_kernels.seal import seal_program


def launcher(compiler: Compiler, program: Program) -> Launcher:
    return Launcher(seal_program("test", "1", {}, program), compiler)


def assert_equal_bits(left: torch.Tensor, right: torch.Tensor, what: str) -> None:
    differ = int((bits(left) != bits(right)).sum())
    assert differ == 0, f"{what}: {differ} of {left.numel()} elements differ"


def relative_error(found: torch.Tensor, reference: torch.Tensor) -> float:
    found, reference = found.double(), reference.double()
    return float((found - reference).norm() / reference.norm())


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device="cuda") * scale).bfloat16()


def hazardous(*shape: int, seed: int = 0) -> torch.Tensor:
    """Exponents over 2^-18 .. 2^18, subnormals and both zeros in one array."""
    generator = torch.Generator("cuda").manual_seed(seed)
    values = torch.randn(*shape, generator=generator, device="cuda")
    values *= 2.0 ** torch.randint(-18, 19, shape, generator=generator, device="cuda").float()
    which = torch.rand(*shape, generator=generator, device="cuda")
    tiny = torch.randint(1, 127, shape, generator=generator, device="cuda").to(torch.int16).view(torch.bfloat16)
    zero, negative_zero = (torch.tensor(z, dtype=torch.bfloat16, device="cuda") for z in (0.0, -0.0))
    result = torch.where(which < 0.02, tiny, values.bfloat16())
    result = torch.where((which > 0.02) & (which < 0.03), zero, result)
    result = torch.where((which > 0.03) & (which < 0.04), negative_zero, result)
    magnitude = bits(result) & 0x7FFF
    assert int(((magnitude > 0) & (magnitude < 0x80)).sum()) > 0, "no subnormal in the test's own input"
    assert int((bits(result) == -0x8000).sum()) > 0, "no negative zero in the test's own input"
    return result
