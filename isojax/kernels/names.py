"""The names under which a contract lists sealed kernels: readable, and decided by what a kernel is for alone."""

from contracts import float_bits
from pallas_kernels.seal import SealedProgram
from pallas_kernels.store import Bundle


def kernel_digests(bundle: Bundle) -> dict[str, dict[str, str]]:
    """SHA-256 of every module by region and name.

    A name is the step of the region, the operands' shapes and the constants, such as
    `matmul x[64,576] w[960,576] leaves=1 out_dtype=bfloat16`.
    """
    digests: dict[str, dict[str, str]] = {}
    for program in bundle.programs:
        call = _call(program)
        for module in program.modules:
            digests.setdefault(program.region, {})[f"{module.name} {call}"] = module.sha256
    return digests


def _call(program: SealedProgram) -> str:
    operands = [f"{name}[{','.join(map(str, program.buffers[name].shape))}]" for name in program.operands]
    # A float's bits, since two floats may print alike.
    constants = [f"{name}={float_bits(v) if isinstance(v, float) else v}" for name, v in program.constants]
    return " ".join([*operands, *constants])
