"""From a JAX policy function to torch.fx graphs: translate, replace a region, fix the parameters, merge segments."""

from bridge.translate.passes import RegionCall, Replacement, bind_parameters, dense_operands, replace_region
from bridge.translate.segments import merge_segments
from bridge.translate.translator import translate

__all__ = [
    "RegionCall",
    "Replacement",
    "bind_parameters",
    "dense_operands",
    "merge_segments",
    "replace_region",
    "translate",
]
