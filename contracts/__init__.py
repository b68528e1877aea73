"""The execution contract: types, identities, claims, validation, diff and handshake."""

from contracts.axes import AXES, Axis, parse_mesh
from contracts.canonical import canonical_bytes, sha256_hex
from contracts.cases import CASES, Case, check_case
from contracts.claims import Claims, InvariantClaim, PinnedClaim, topology
from contracts.composition import CompositionEntry
from contracts.contract import ExecutionContract
from contracts.deployment import Deployment
from contracts.diff import Difference, diff, format_diff
from contracts.engine_report import EngineReport
from contracts.files import FILE_NAME, load_contract, parse_contract, save_contract
from contracts.float_bits import FloatBits, bits_float, float_bits
from contracts.frozen_map import FrozenMap
from contracts.handshake import check_kernels, handshake
from contracts.identities import Identities, compute_identities
from contracts.model import ModelSection
from contracts.section import IDENTITIES
from contracts.semantics import Semantics
from contracts.show import format_contract, format_value
from contracts.temperature import check_temperature
from contracts.token_ids import token_ids
from contracts.toolchain import Toolchain

__all__ = [
    "AXES",
    "CASES",
    "FILE_NAME",
    "IDENTITIES",
    "Axis",
    "Case",
    "Claims",
    "CompositionEntry",
    "Deployment",
    "Difference",
    "EngineReport",
    "ExecutionContract",
    "FloatBits",
    "FrozenMap",
    "Identities",
    "InvariantClaim",
    "ModelSection",
    "PinnedClaim",
    "Semantics",
    "Toolchain",
    "bits_float",
    "canonical_bytes",
    "check_case",
    "check_kernels",
    "check_temperature",
    "compute_identities",
    "diff",
    "float_bits",
    "format_contract",
    "format_diff",
    "format_value",
    "handshake",
    "load_contract",
    "parse_contract",
    "parse_mesh",
    "save_contract",
    "sha256_hex",
    "token_ids",
    "topology",
]
