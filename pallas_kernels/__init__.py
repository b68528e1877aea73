"""Regions: JAX primitives with a declared rounding schedule, one folder each."""
