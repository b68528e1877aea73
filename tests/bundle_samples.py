"""Bundles whose modules are any bytes: enough for all that reads, compares and refuses, and lowers nothing."""

import hashlib
import json
from pathlib import Path

import numpy as np
import rfc8785

from pallas_kernels import REGIONS
from pallas_kernels.hopper_regions import region_program
from pallas_kernels.kernel_shapes import KernelShapes
from pallas_kernels.program import Buffer
from pallas_kernels.seal import SealedModule, SealedProgram
from pallas_kernels.store import MANIFEST, Bundle

SHAPES = KernelShapes(
    token_buckets=(8,), head_rows=(8,), trainer_tokens=(128,), max_pages=64, max_requests=4, max_context=64
)


def unlowered(region, types, parameters, module=None) -> SealedProgram:
    """A program of one module with the region's own operands and results; its bytes say what it is for."""
    declared = REGIONS[region]
    operands = tuple(name.removesuffix("?") for name in declared.operands[: len(types)])
    buffers = {name: Buffer(tuple(shape), dtype) for name, (shape, dtype) in zip(operands, types, strict=True)}
    results = declared.result_types(*((shape, np.dtype(dtype)) for shape, dtype in types), **parameters)
    names = tuple(f"{name}_out" for name in declared.results)
    buffers |= {name: Buffer(tuple(s), str(np.dtype(d))) for name, (s, d) in zip(names, results, strict=True)}
    content = module or repr((region, types, sorted(parameters.items()))).encode()
    constants = tuple(sorted(parameters.items()))
    modules = (SealedModule(region, content, operands, names),)
    return SealedProgram(region, declared.version, constants, buffers, operands, names, modules)


def unlowered_steps(region, types, parameters) -> SealedProgram:
    """The steps and buffers of the region's kernels on a card; each module's bytes say what it is for."""
    program = region_program(region, types, parameters)
    constants = tuple(sorted(parameters.items()))
    modules = tuple(
        SealedModule(step.name, repr((region, types, constants, step.name)).encode(), step.operands, step.results)
        for step in program.steps
    )
    return SealedProgram(
        region, REGIONS[region].version, constants, program.buffers, program.operands, program.results, modules
    )


def matmul_types(tokens: int = 8):
    return ((tokens, 256), "bfloat16"), ((128, 256), "bfloat16")


def two_matmuls() -> Bundle:
    """Equal shapes with two constants, the way two layers may differ."""
    parameters = [{"leaves": leaves, "out_dtype": "bfloat16"} for leaves in (1, 2)]
    return Bundle(tuple(unlowered("matmul", matmul_types(), each) for each in parameters), SHAPES)


def change_manifest(folder: Path, change) -> None:
    """Edit the manifest as a careful forger would: with its own hash made right again."""
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    body = {name: value for name, value in manifest.items() if name != "sha256"}
    manifest["sha256"] = hashlib.sha256(rfc8785.dumps(body)).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(manifest))
