"""Somebody else's loop: REINFORCE in forty lines, on the library's API alone. `python examples/own_loop.py`."""

import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
import numpy as np
import optax

import isojax
from contracts import handshake
from isojax.export import export_policy
from isojax.rl import Sampling, open_engine

PROMPTS, SAMPLES, TOKENS = [[0, digit] for digit in (1, 2, 3, 4)], 8, 4
SIZES = tomllib.loads(Path(__file__).with_name("tiny_copy.toml").read_text())["policy"]["random"]


def main(steps: int, engine_name: str = "vllm") -> list[float]:
    """Train a tiny policy to repeat a digit; returns the mean reward of every step."""
    policy = isojax.Policy(isojax.PolicyConfig.from_hugging_face(SIZES), dtype="float32")
    params = policy.init(jax.random.key(0), 0.05)
    optimizer = optax.adam(5e-3)
    state, rewards = optimizer.init(params), []

    @jax.jit
    def update(params, state, batch, weights_T):
        def loss_of(params):
            return -jnp.sum(weights_T * policy.score(params, policy.buffers, batch))

        updates, state = optimizer.update(jax.grad(loss_of)(params), state)
        return optax.apply_updates(params, updates), state

    with TemporaryDirectory() as folder:
        contract = export_policy(Path(folder) / "policy", policy, params, tokenizer_files={})
        contract.check_mesh({"dp": 1})
        engine = open_engine(engine_name, Path(folder) / "policy")
        handshake(contract, engine.report())
        for step in range(steps):
            engine.sync(params)
            done = engine.generate(PROMPTS, Sampling(max_tokens=TOKENS, samples=SAMPLES, seed=step))
            batch = isojax.pack([c.prompt_tokens + c.tokens for c in done], [2] * len(done))
            scored, reported = np.asarray(policy.log_probs(params, batch)), np.concatenate([c.log_probs for c in done])
            assert np.array_equal(scored[batch.mask].view(np.int32), reported.view(np.int32)), "the bits differ"
            reward = np.array([np.mean([token == c.prompt_tokens[1] for token in c.tokens]) for c in done])
            weights_T = np.zeros(len(batch.tokens), np.float32)
            weights_T[batch.mask] = np.repeat((reward - reward.mean()) / len(done), TOKENS)
            params, state = update(params, state, batch, weights_T)
            rewards.append(float(reward.mean()))
            print(f"step {step}: reward {rewards[-1]:.3f}, 0 of {len(reported)} log-probabilities differ")
        engine.close()
    return rewards


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
