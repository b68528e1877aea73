"""What the training tests share: a tiny policy that is compiled once, its contract, a task, a trainer."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from reference_engine import ReferenceEngine

from contracts import EngineReport, ExecutionContract
from isojax.contract import build_contract
from isojax.policy import Policy, PolicyConfig
from isojax.rl.config import Config
from isojax.rl.config_file import parse_config
from isojax.rl.prompts import PromptEncoder
from isojax.rl.rollout import Completion, RolloutEngine
from isojax.rl.run_folder import RunFolder
from isojax.rl.tasks import Example, Task
from isojax.rl.trainer import Trainer

VOCABULARY = 16
RAW_POLICY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
}


def raw_run(**sections: dict[str, Any]) -> dict[str, Any]:
    """The mapping of a small but whole run's TOML file; `sections` replace keys inside of its sections."""
    values: dict[str, Any] = {
        "name": "small",
        "seed": 3,
        "policy": {"random": RAW_POLICY},
        "task": {"source": "function", "prompts": "sample_task:examples", "reward": "sample_task:reward"},
        "rollout": {"prompts_per_step": 2, "group_size": 4, "max_tokens": 3},
        "optimizer": {"learning_rate": 5e-3},
        "train": {"steps": 2, "micro_batch_tokens": 64},
        "check": {"full_rows": 5},
    }
    for name, keys in sections.items():
        values[name] = {**values.get(name, {}), **keys}
    return values


def run_config(**sections: dict[str, Any]) -> Config:
    """`raw_run`, parsed."""
    return parse_config(raw_run(**sections), source="test")


@cache
def small_policy() -> Policy:
    """One policy for all tests: what is compiled for it is compiled once."""
    return Policy(PolicyConfig.from_hugging_face(RAW_POLICY), dtype="bfloat16", remat="none")


@cache
def small_contract() -> ExecutionContract:
    """Its contract."""
    return build_contract(small_policy(), tokenizer={})


def leaf_bits(tree: Any) -> list[bytes]:
    """The bytes of every array in a tree."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def small_params(seed: int = 0) -> dict[str, jax.Array]:
    """Its random weights."""
    return jax.device_put(small_policy().init(jax.random.key(seed)), jax.devices()[0])


def honest_report(contract: ExecutionContract) -> EngineReport:
    """What an engine that follows the contract says of itself before it ran anything."""
    semantics = contract.semantics
    shared = ("rope_table_digest", "padded_vocab_size", "parameter_dtype", "compute_dtype", "kv_cache_dtype")
    shared += ("head_operand_dtype", "head_output_dtype", "quantization", "adapters", "temperature")
    return EngineReport(
        contract=contract,
        mesh={"tp": 1},
        device_kind=contract.claims.device_kinds[0],
        toolchain=contract.toolchain,
        tokenizer_digest=contract.model.tokenizer_digest,
        weight_digest=None,
        installed={},
        served={},
        **{name: getattr(semantics, name) for name in shared},
    )


def small_engine() -> ReferenceEngine:
    """A fresh engine on the small policy."""
    return ReferenceEngine(small_policy(), small_contract(), honest_report(small_contract()))


def copy_task(digits: int = 3) -> Task:
    """Reward: the fraction of sampled tokens that repeat the prompt's digit."""
    examples = [Example(tokens=(0, digit), fields={"digit": digit}) for digit in range(1, digits + 1)]

    def reward(example: Example, tokens: tuple[int, ...], text: str) -> float:
        return sum(token == example.fields["digit"] for token in tokens) / len(tokens)

    return Task(examples, reward, "copy")


def small_trainer(
    folder: Path, config: Config | None = None, engine: RolloutEngine | None = None, **changes: Any
) -> Trainer:
    """A trainer in `folder` on the small policy and the copy task; on the reference engine if none is given.

    changes: of the trainer's other arguments.
    """
    config = config or run_config()
    run = RunFolder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    run.write_config(config)
    return Trainer(
        config,
        params=small_params(config.policy.random_seed),
        engine=engine or small_engine(),
        task=copy_task(),
        encoder=PromptEncoder(folder),
        stop_token_ids=(),
        folder=run,
        **{"policy": small_policy(), "contract": small_contract()} | changes,
    )


def completion(prompt: tuple[int, ...], tokens: tuple[int, ...], log_probs: Any = None, **changes: Any) -> Completion:
    """A completion by hand."""
    values = np.zeros(len(tokens), np.float32) if log_probs is None else np.asarray(log_probs, np.float32)
    fields = {"prompt_index": 0, "finish_reason": "length", "weight_digest": "0" * 16} | changes
    return Completion(prompt_tokens=prompt, tokens=tokens, log_probs=values, **fields)
