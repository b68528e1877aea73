"""Measures the problem: stock vLLM samples, a plain Hugging Face forward of the same weights scores the same tokens.

Run as a program of its own, so that stock vLLM never shares a process with isojax:

    python examples/stock_drift.py MODEL_FOLDER --prompts prompts.json --out drift.json
"""

import argparse
import json
import os
from pathlib import Path

import numpy as np


def sample_with_stock_vllm(
    folder: str, prompts: list[list[int]], max_tokens: int
) -> list[tuple[list[int], np.ndarray]]:
    """Returns each completion's tokens and the float32 log-probabilities that vLLM reports for them."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ["VLLM_PLUGINS"] = ""
    from vllm import LLM, SamplingParams

    engine = LLM(folder, dtype="bfloat16", max_model_len=512, enforce_eager=True, seed=0, disable_log_stats=True)
    outputs = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=1.0, max_tokens=max_tokens, logprobs=0),
        use_tqdm=False,
    )
    sampled = []
    for output in outputs:
        tokens = list(output.outputs[0].token_ids)
        rows = zip(tokens, output.outputs[0].logprobs, strict=True)
        sampled.append((tokens, np.array([row[token].logprob for token, row in rows], np.float32)))
    return sampled


def score_with_hugging_face(folder: str, prompt: list[int], tokens: list[int]) -> np.ndarray:
    """Returns the float32 log-probabilities of `tokens` after `prompt` from one full forward in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM

    global _model
    if _model is None:
        _model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        logits = _model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    rows = torch.log_softmax(logits.float(), dim=-1)
    return rows.gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()


_model = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--prompts", required=True, help="JSON file: a list of lists of token ids")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    prompts = json.loads(Path(arguments.prompts).read_text())
    sampled = sample_with_stock_vllm(arguments.folder, prompts, arguments.max_tokens)
    engine = np.concatenate([log_probs for _, log_probs in sampled])
    trainer = np.concatenate(
        [score_with_hugging_face(arguments.folder, p, t) for p, (t, _) in zip(prompts, sampled, strict=True)]
    )
    gap = np.abs(engine.astype(np.float64) - trainer.astype(np.float64))
    # Bits, not values: +0.0 and -0.0 are equal as numbers, and a promise about bits must not lean on that.
    differing = engine.view(np.int32) != trainer.view(np.int32)
    result = {
        "tokens": int(engine.size),
        "mismatch_tokens": int(differing.sum()),
        "mean_abs": float(gap.mean()),
        "max_abs": float(gap.max()),
    }
    Path(arguments.out).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
