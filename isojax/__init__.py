"""Flax policies, weights, audit, reinforcement learning and the command line."""

from isojax.audit import AuditReport, audit
from isojax.contract import build_contract
from isojax.export import export_policy
from isojax.mesh import mesh_degrees, score_on_mesh
from isojax.policy import PackedBatch, Policy, PolicyConfig, completion_rows, pack
from isojax.weights.digest import digest
from isojax.weights.load import load, load_policy
from isojax.weights.tokenizer import tokenizer_files

__all__ = [
    "AuditReport",
    "PackedBatch",
    "Policy",
    "PolicyConfig",
    "audit",
    "build_contract",
    "completion_rows",
    "digest",
    "export_policy",
    "load",
    "load_policy",
    "mesh_degrees",
    "pack",
    "score_on_mesh",
    "tokenizer_files",
]
