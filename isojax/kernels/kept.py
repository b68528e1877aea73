"""Sealed kernels kept on the disk between runs: sealing keeps every core busy, and always gives the same bytes."""

from __future__ import annotations

import sys
from functools import cache
from hashlib import sha256
from pathlib import Path

import jax
import jaxlib

import pallas_kernels
from contracts.canonical import sha256_hex
from contracts.errors import BadBundle
from isojax.kernels.calls import kernel_calls
from isojax.kernels.sealing import seal_policy
from isojax.policy.policy import Policy
from isojax.whole_folder import appearing_whole
from pallas_kernels.kernel_shapes import KernelShapes
from pallas_kernels.seal import check_sealing_toolchain
from pallas_kernels.store import Bundle, load_bundle, save_bundle

FOLDER = "sealed"


def kept_or_sealed(policy: Policy, shapes: KernelShapes, folder: Path | None, *, processes: int = 1) -> Bundle:
    """The policy's kernels: those that an earlier call left below `folder`, else sealed now and left there.

    shapes: with max_context filled in. folder: where compiled programs are kept, None to keep nothing. They are found
    by a hash of the calls, of JAX's versions and of every line of the package that lowers them, and each module's own
    hash is computed again. Kept kernels that are damaged are sealed anew, and a disk that takes none is no error:
    stderr says so. Raises as `seal_policy`.
    """
    if folder is None:
        return seal_policy(policy, shapes, processes=processes, show_progress=True)
    check_sealing_toolchain()
    place = folder / FOLDER / _key(policy, shapes)
    try:
        if place.exists():
            return load_bundle(place)
    except (BadBundle, OSError) as error:
        print(f"isojax: kept kernels are not used and others are sealed: {error}", file=sys.stderr)
    bundle = seal_policy(policy, shapes, processes=processes, show_progress=True)
    try:
        # Of two runs that seal the same at once the later one stays.
        with appearing_whole(place) as partial:
            save_bundle(partial, bundle)
    except OSError as error:
        print(f"isojax: sealed kernels are not kept for the next run: {error}", file=sys.stderr)
    return bundle


def _key(policy: Policy, shapes: KernelShapes) -> str:
    calls = sorted(repr(call) for call in kernel_calls(policy, shapes))
    versions = [jax.__version__, jaxlib.__version__]
    return sha256_hex({"code": _code(), "versions": versions, "shapes": shapes.to_json(), "calls": calls})


@cache
def _code(root: Path = Path(pallas_kernels.__file__).parent) -> str:
    """SHA-256 of the package that lowers kernels, file by file."""
    files = sorted(root.rglob("*.py"))
    return sha256_hex({path.relative_to(root).as_posix(): sha256(path.read_bytes()).hexdigest() for path in files})
