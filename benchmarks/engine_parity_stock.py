"""The comparison without isojax: stock vLLM samples, a plain JAX forward of the same weights scores the same tokens.

Stock vLLM runs in a process of its own, without our plugin, set up as a user would set it up:

    python benchmarks/engine_parity_stock.py FOLDER --prompts FILE --max-tokens N --out FILE
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

SEQUENCES_AT_ONCE = 8
LENGTH_STEP = 64


def main() -> int:
    """Samples with stock vLLM and writes tokens and log-probabilities; see `isojax.evidence.drift`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON: a list of lists of token ids")
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--eager", action="store_true", help="neither compiled nor in CUDA graphs")
    arguments = parser.parse_args()
    prompts = json.loads(arguments.prompts.read_text())
    save(arguments.out, prompts, sample(arguments.folder, prompts, arguments.max_tokens, eager=arguments.eager))
    return 0


def sample(
    folder: Path, prompts: Sequence[Sequence[int]], max_tokens: int, *, eager: bool = False
) -> list[tuple[list[int], np.ndarray]]:
    """Each completion's tokens, and the log-probabilities that vLLM reports for them, fp32."""
    os.environ |= {"VLLM_PLUGINS": "", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1"}
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import torch
    from vllm import LLM, SamplingParams

    # Unless eager compiled and with CUDA graphs, as by default. It shares the card, so its cache has a size of its own.
    for_card: dict[str, Any] = {"gpu_memory_utilization": 0.1} if torch.cuda.is_available() else {}
    engine = LLM(
        str(folder),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=max(map(len, prompts)) + max_tokens,
        kv_cache_memory_bytes=(8 if for_card else 1) << 30,
        seed=0,
        enforce_eager=eager,
        **for_card,
    )
    wanted = SamplingParams(temperature=1.0, max_tokens=max_tokens, logprobs=0, ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], wanted, use_tqdm=False)
    sampled = []
    for output in outputs:
        tokens = list(output.outputs[0].token_ids)
        rows = zip(tokens, output.outputs[0].logprobs, strict=True)
        sampled.append((tokens, np.array([row[token].logprob for token, row in rows], np.float32)))
    return sampled


def save(path: Path, prompts: Sequence[Sequence[int]], sampled: Sequence[tuple[list[int], np.ndarray]]) -> None:
    """Writes the samples as `isojax drift` reads them."""
    from isojax.evidence.drift import LogProbs, save_log_probs

    tokens = tuple(tuple(tokens) for tokens, _ in sampled)
    save_log_probs(path, LogProbs(tokens, tuple(values for _, values in sampled), tuple(map(tuple, prompts))))


def write_checkpoint(folder: Path, policy: Any, params: Mapping[str, Any]) -> None:
    """An ordinary Hugging Face folder of these weights, without a tokenizer."""
    from isojax.export import export_checkpoint

    export_checkpoint(folder, policy, params, {})


class StockRun:
    """Stock vLLM at work beside this process, on weights and prompts that were written for it."""

    def __init__(
        self, scratch: Path, policy: Any, params: Mapping[str, Any], prompts: list[list[int]], max_tokens: int
    ) -> None:
        """Writes a checkpoint into `scratch` and starts the process."""
        folder = scratch / "stock"
        write_checkpoint(folder, policy, params)
        (scratch / "prompts.json").write_text(json.dumps(prompts))
        self._out, self._log = scratch / "stock.jsonl", scratch / "stock.log"
        command = [sys.executable, __file__, folder, "--prompts", scratch / "prompts.json", "--max-tokens", max_tokens]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*map(str, command), "--out", str(self._out)], stdout=log, stderr=subprocess.STDOUT
            )

    def compare(self, policy: Any, params: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Waits for the samples and compares them with the plain forward. Raises RuntimeError where vLLM failed."""
        from isojax.evidence.drift import LogProbs, load_log_probs, measure

        if self._process.wait(timeout):
            raise RuntimeError(f"stock vLLM failed:\n{self._log.read_text()[-3000:]}")
        stock = load_log_probs(self._out)
        assert stock.prompts is not None
        plain = LogProbs(stock.tokens, tuple(plain_scores(policy, params, stock.prompts, stock.tokens)), stock.prompts)
        return asdict(measure(stock, plain))

    def stop(self) -> None:
        """Ends the process where it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def plain_scores(
    policy: Any, params: Mapping[str, Any], prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    """The plain forward's log-probability of every token after its prompt, fp32, one array a sequence."""
    from isojax.evidence.plain_forward import plain_log_probs

    longest = max(len(prompt) + len(sampled) for prompt, sampled in zip(prompts, tokens, strict=True))
    width = -(-longest // LENGTH_STEP) * LENGTH_STEP
    sequences = np.zeros((-(-len(prompts) // SEQUENCES_AT_ONCE) * SEQUENCES_AT_ONCE, width), np.int32)
    for row, (prompt, sampled) in enumerate(zip(prompts, tokens, strict=True)):
        sequences[row, : len(prompt) + len(sampled)] = [*prompt, *sampled]
    scores = np.concatenate(
        [
            np.asarray(plain_log_probs(policy.config, dict(params), policy.buffers["rope_table"], part))
            for part in np.split(sequences, len(sequences) // SEQUENCES_AT_ONCE)
        ]
    )
    return [
        row[len(prompt) - 1 : len(prompt) + len(sampled) - 1]
        for row, prompt, sampled in zip(scores, prompts, tokens, strict=False)
    ]


if __name__ == "__main__":
    sys.exit(main())
