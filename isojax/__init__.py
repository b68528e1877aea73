"""Flax policies, weights, audit, reinforcement learning and the command line."""
