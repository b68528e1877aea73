"""Reinforcement learning on equal bits: rollouts, advantages, losses, the trainer and its records."""
