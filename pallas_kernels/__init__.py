"""Regions: JAX primitives with a declared rounding schedule, one folder each."""

from pallas_kernels import counters
from pallas_kernels.attention import attention, paged_attention, paged_decode_attention
from pallas_kernels.cast import cast
from pallas_kernels.gated_matmul import gated_matmul
from pallas_kernels.lm_head import log_prob_rows, token_log_probs
from pallas_kernels.matmul import matmul
from pallas_kernels.qk_norm_rope import paged_qk_norm_rope, qk_norm_rope
from pallas_kernels.region import REGIONS, Region, Spec, is_region, region_of
from pallas_kernels.residual_add import residual_add
from pallas_kernels.rms_norm import add_rms_norm, add_rms_norm_carried, norm_gradient, rms_norm
from pallas_kernels.swiglu import swiglu

__all__ = [
    "REGIONS",
    "Region",
    "Spec",
    "add_rms_norm",
    "add_rms_norm_carried",
    "attention",
    "cast",
    "counters",
    "gated_matmul",
    "is_region",
    "log_prob_rows",
    "matmul",
    "norm_gradient",
    "paged_attention",
    "paged_decode_attention",
    "paged_qk_norm_rope",
    "qk_norm_rope",
    "region_of",
    "residual_add",
    "rms_norm",
    "swiglu",
    "token_log_probs",
]
