"""From a JAX policy function to torch.fx graphs: translate, replace a region, fix the parameters, merge segments."""

from bridge.translate.translator import translate

__all__ = ["translate"]
