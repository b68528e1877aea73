"""Read a policy folder's sealed kernels and compare them with its contract: the one check of trainer and engine."""

from pathlib import Path

from contracts import ExecutionContract
from contracts.errors import BadBundle
from isojax.kernels.names import kernel_digests
from pallas_kernels.store import MANIFEST, Bundle, load_bundle

KERNELS_FOLDER = "kernels"


def load_kernels(folder: str | Path, contract: ExecutionContract) -> Bundle:
    """The kernels of a policy folder, every hash recomputed, all of them those that the contract names.

    Raises BadBundle, naming the file, the toolchain's field or the kernel, for anything missing, damaged, foreign,
    exchanged, or made by other tools than the contract says.
    """
    place = Path(folder) / KERNELS_FOLDER
    bundle = load_bundle(place)
    where = str(place / MANIFEST)
    for name in ("jax", "jaxlib", "module_format", "ptxas"):
        found, proved = bundle.toolchain[name], getattr(contract.toolchain, name)
        if found != proved:
            raise BadBundle(
                field=f"{where}: toolchain.{name}",
                found=found,
                allowed=f"the contract's {proved}",
                reason="The kernels went through another compiler than the contract is about.",
            )
    declared: dict[str, dict[str, str]] = {}
    for entry in contract.composition:
        declared.setdefault(entry.impl_id, {}).update(entry.kernel_digests)
    sealed = kernel_digests(bundle)
    for region in sorted(declared.keys() | sealed.keys()):
        _compare(f"{where}: region {region}", declared.get(region, {}), sealed.get(region, {}))
    if bundle.sha256 != contract.toolchain.kernel_manifest:
        raise BadBundle(
            field=where,
            found=f"sha256 {bundle.sha256}",
            allowed=f"the contract's {contract.toolchain.kernel_manifest}",
            reason="The kernels are the contract's, but the manifest runs them otherwise or for other shapes.",
        )
    return bundle


def _compare(where: str, declared: dict[str, str], sealed: dict[str, str]) -> None:
    for name in sorted(declared.keys() | sealed.keys()):
        if sealed.get(name) != declared.get(name):
            raise BadBundle(
                field=f"{where}, kernel {name}",
                found=sealed.get(name, "no such kernel in the bundle"),
                allowed=declared.get(name, "no such kernel in the contract"),
                reason="The bundle is another export's, or kernels were exchanged or sealed anew with other constants.",
            )
