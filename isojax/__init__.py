"""Flax policies, weights, audit, reinforcement learning and the command line."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isojax import audit
    from isojax.contract import build_contract
    from isojax.export import export_policy
    from isojax.mesh import mesh_degrees, score_on_mesh
    from isojax.mesh_policy import MeshPolicy, open_mesh
    from isojax.policy import PackedBatch, Policy, PolicyConfig, completion_rows, pack
    from isojax.rl.rollout import Completion, RolloutEngine, Sampling, open_engine
    from isojax.weights.digest import digest
    from isojax.weights.load import load, load_policy
    from isojax.weights.tokenizer import tokenizer_files

__all__ = [
    "Completion",
    "MeshPolicy",
    "PackedBatch",
    "Policy",
    "PolicyConfig",
    "RolloutEngine",
    "Sampling",
    "audit",
    "build_contract",
    "completion_rows",
    "digest",
    "export_policy",
    "load",
    "load_policy",
    "mesh_degrees",
    "open_engine",
    "open_mesh",
    "pack",
    "score_on_mesh",
    "tokenizer_files",
]

_HOMES = {
    "build_contract": "isojax.contract",
    "export_policy": "isojax.export",
    "mesh_degrees": "isojax.mesh",
    "score_on_mesh": "isojax.mesh",
    **dict.fromkeys(("MeshPolicy", "open_mesh"), "isojax.mesh_policy"),
    "digest": "isojax.weights.digest",
    "load": "isojax.weights.load",
    "load_policy": "isojax.weights.load",
    "tokenizer_files": "isojax.weights.tokenizer",
    **dict.fromkeys(("PackedBatch", "Policy", "PolicyConfig", "completion_rows", "pack"), "isojax.policy"),
    **dict.fromkeys(("Completion", "RolloutEngine", "Sampling", "open_engine"), "isojax.rl.rollout"),
}


def __getattr__(name: str) -> Any:
    """Import on first use: reading a contract or printing help should not wait for JAX and Flax."""
    if name == "audit":
        return import_module("isojax.audit")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
