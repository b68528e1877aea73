"""Weights: reading checkpoints, packed names, tokenizers, digests."""
