"""A policy with its weights, engines on it, and what is measured of them against the trainer."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from card_engine import device_kind, running_engine
from engine_parity_cases import PAGE, Case, Prompts, Sizes
from engine_parity_policies import corpus, other_parameters, random_parameters, scaled_to_entropy
from engine_parity_stock import StockRun

from contracts import bits_float, load_contract
from isojax import Policy, digest, load
from isojax.evidence.engine_parity import ParityCounts, compare_with_trainer
from isojax.kernels import KernelShapes, load_kernels, packing_of
from isojax.rl.mismatch import different_bits
from isojax.rl.rollout import Completion, Sampling, TappedRows
from isojax.weights.load import load_policy
from isojax.weights.safetensors import INDEX_FILE, SINGLE_FILE


@dataclass
class Bench:
    """One policy, its parameters on the device, and the prompts that are cut for it."""

    folder: Path
    policy: Policy
    params: Mapping[str, jax.Array]
    shapes: KernelShapes
    temperature: float
    on_card: bool
    prompts: Prompts
    options: Any

    @classmethod
    def open(cls, folder: Path, options: Any) -> Bench:
        """Loads the policy and loads or makes its weights. options: `engine_parity.Options`."""
        contract = load_contract(folder)
        on_card = not contract.arch.startswith("cpu-")
        policy = load_policy(folder)
        shapes = KernelShapes(trainer_tokens=(1024,)).for_context(policy.config.max_position)
        if on_card:
            shapes = load_kernels(folder, contract).shapes
        if options.weights is not None or _has_weights(folder):
            _, params = load(options.weights or folder, policy.dtype)
            policy.check_parameters(params)
        else:
            params = random_parameters(policy, seed=0)
            params = scaled_to_entropy(policy, params, options.entropy, packing=packing_of(shapes))
        # Nothing of JAX may run while vLLM captures its graphs.
        params = jax.block_until_ready(jax.device_put(dict(params)))
        prompts = Prompts(corpus(folder, policy.config.vocab_size))
        temperature = bits_float(contract.semantics.temperature)
        return cls(folder, policy, params, shapes, temperature, on_card, prompts, options)

    @contextmanager
    def engine(self, *, graphs: bool, step_tokens: int, sizes: Sizes) -> Iterator[Any]:
        """An engine that has shaken hands and holds these weights, with a cache as `Sizes` wants it."""
        config = self.policy.config
        token_bytes = 2 * 2 * config.num_layers * config.key_size
        one_request = self.shapes.max_context + 4 * self.shapes.page_size
        settings = {
            "max_step_tokens": step_tokens,
            "max_sequences": sizes.batches[-1],
            "kv_cache_bytes": max(sizes.cache_tokens, one_request) * token_bytes,
            "cuda_graphs": graphs,
            "initial_weights": False,
        }
        with running_engine(self.folder, settings) as engine:
            engine.sync(self.params)
            yield engine

    def start_stock(self, scratch: Path) -> StockRun:
        """Stock vLLM on these weights, at work on as many prompts as a round has."""
        sizes = self.options.sizes
        case = Case("stock", sizes.round_prompts, 2 * PAGE, sizes.round_longest, sizes.round_tokens, 0, 1000)
        drawn, _ = Prompts(self.prompts.corpus).draw(case)
        return StockRun(scratch, self.policy, self.params, drawn, sizes.round_tokens)

    def measure(self, engine: Any, case: Case) -> dict[str, Any]:
        """Counts of one case. Raises RuntimeError where what the case is about did not happen."""
        prompts, histories = self.prompts.draw(case)
        sampling = Sampling(max_tokens=case.new_tokens, temperature=self.temperature, seed=case.seed)
        if case.proof == "hit":
            engine.generate(prompts, sampling)
        resumed = engine.describe().get("resumed_requests")
        start = time.perf_counter()
        completions = engine.generate(prompts, sampling, full_rows=case.rows, rows_on_device=True)
        seconds = time.perf_counter() - start
        tapped, cached = engine.tapped, engine.cached_tokens
        happened: dict[str, Any] = {"chunk_ends": tapped.chunk_ends, "cached_tokens": sum(cached)}
        if resumed is not None:
            happened["resumed_requests"] = engine.describe()["resumed_requests"] - resumed
        pages_hit = min(cached) // self.shapes.page_size
        needed = {"chunk": tapped.chunk_ends, "hit": pages_hit, "preempt": happened.get("resumed_requests")}
        if case.proof is not None and not needed[case.proof]:
            raise RuntimeError(f"no {case.proof} in {case.name}: {happened}")
        start = time.perf_counter()
        counts = self.compare(completions, tapped, self.params)
        return described(counts) | {
            "histories": histories,
            **happened,
            "seconds_engine": seconds,
            "seconds_trainer": time.perf_counter() - start,
        }

    def measure_sync(self, engine: Any, options: Any) -> dict[str, Any]:
        """Other weights between two rollouts: each equals the trainer's with its own weights, the third the first."""
        count, tokens = options.sizes.sync_prompts, options.sizes.sync_tokens
        case = Case("sync", count, 1, 60, tokens, count, options.seed + 900)
        prompts, histories = self.prompts.draw(case)
        sampling = Sampling(max_tokens=tokens, temperature=self.temperature, seed=case.seed)
        first = engine.generate(prompts, sampling)
        other = jax.block_until_ready(other_parameters(self.params))
        start = time.perf_counter()
        engine.sync(other)
        seconds_sync = time.perf_counter() - start
        moved = engine.generate(prompts, sampling, full_rows=case.rows, rows_on_device=True)
        counts = self.compare(moved, engine.tapped, other)
        stale = self.compare(moved, None, self.params)
        del other
        engine.sync(self.params)
        third = engine.generate(prompts, sampling, full_rows=case.rows, rows_on_device=True)
        counts += self.compare(third, engine.tapped, self.params)
        found = described(counts) | {
            "histories": histories,
            "back_equals_first": _same(first, third),
            "mismatches_against_the_old_weights": stale.token_mismatches,
            "seconds_sync": seconds_sync,
        }
        found["exact"] &= found["back_equals_first"] and stale.token_mismatches > 0
        return found

    def compare(
        self, completions: Sequence[Completion], tapped: TappedRows | None, params: Mapping[str, jax.Array]
    ) -> ParityCounts:
        """Counts against the trainer, in the largest sealed micro-batch, or the smallest where all fits into it."""
        lengths = self.shapes.trainer_tokens
        packing = packing_of(self.shapes)
        packing["sealed_lengths"] = tuple(sorted({lengths[0], lengths[-1]}))
        return compare_with_trainer(
            self.policy,
            params,
            completions,
            temperature=self.temperature,
            batch_tokens=lengths[-1],
            packing=packing,
            tapped=tapped,
            rows_at_once=self.shapes.head_rows[-1],
        )


def described(counts: ParityCounts) -> dict[str, Any]:
    """Counts as plain values, with the rows' mean entropy in nats."""
    mean = counts.entropy_sum / counts.rows if counts.rows else None
    return {**dataclasses.asdict(counts), "mean_token_entropy": mean, "exact": counts.exact}


def identity(bench: Bench) -> dict[str, str]:
    """What two calls must share for their counts to add up."""
    contract = load_contract(bench.folder)
    return {
        "policy": bench.folder.name,
        "numerical_policy": contract.identities.numerical_policy,
        "weights": digest(bench.params),
        "device": device_kind(),
    }


def _has_weights(folder: Path) -> bool:
    return any((folder / name).exists() for name in (SINGLE_FILE, INDEX_FILE))


def _same(left: Sequence[Completion], right: Sequence[Completion]) -> bool:
    """Whether two calls sampled the same tokens with the same bits."""
    return all(
        one.tokens == other.tokens and not np.any(different_bits(one.log_probs, other.log_probs))
        for one, other in zip(left, right, strict=True)
    )
