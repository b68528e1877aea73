"""Hugging Face transformers on torch as the independent reference of the policy tests."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

# More threads than free cores make torch's workers wait for each other most of the time.
torch.set_num_threads(1)


def random_checkpoint(folder: Path, raw: dict, seed: int = 0) -> torch.nn.Module:
    """Write a randomly initialised checkpoint of a config.json with transformers' own code; returns the fp32 model."""
    torch.manual_seed(seed)
    fields = {name: value for name, value in raw.items() if name not in ("architectures", "model_type")}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(raw["model_type"], **fields)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model


def reference_model(folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A checkpoint folder as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def reference_rows(model: torch.nn.Module, sequence: list[int]) -> np.ndarray:
    """Log-probabilities of the token after each position, fp64 [T, V]."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([sequence])).logits[0].double(), -1).numpy()


def reference_gradients(model: torch.nn.Module, sequence: list[int]) -> dict[str, np.ndarray]:
    """Gradients of the summed log-probability of every token but the first, by Hugging Face name."""
    model.zero_grad()
    rows = torch.log_softmax(model(torch.tensor([sequence])).logits[0], -1)
    rows[torch.arange(len(sequence) - 1), torch.tensor(sequence[1:])].sum().backward()
    return {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
