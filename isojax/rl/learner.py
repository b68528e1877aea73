"""The policy update: gradients accumulated over packed micro-batches, then one optimizer step a minibatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from contracts.errors import DifferenceFound, NonFiniteLogits
from isojax.policy.batch import PackedBatch
from isojax.policy.policy import Policy
from isojax.rl.algorithms import AlgorithmSection
from isojax.rl.config import OptimizerSection
from isojax.rl.losses import LossInputs, LossParts, Objective, policy_loss, token_weights
from isojax.rl.mismatch import Mismatch, compare_tokens
from isojax.rl.optimizer import LearnerState, Parameters, build_optimizer, compute_copies, start_state
from isojax.rl.packing import MicroBatch, cut
from isojax.rl.rollout import Completion
from pallas_kernels import counters

# T: tokens of a packed micro-batch.


class Estimates(NamedTuple):
    """Two estimates of one KL divergence, in nats a token; see `isojax.rl.losses`."""

    k1: float = 0.0
    k3: float = 0.0


@dataclass(frozen=True)
class UpdateResult:
    """What the updates on one rollout did. Fractions and KL are means over the tokens that the updates saw.

    policy_kl: k1 and k3 estimates of KL(rollout || policy). reference_kl: of KL(policy || reference), or None.
    mismatch: the engine against trainer_fwd, over the tokens of the first minibatch, before any weight moved; of
      nothing where other weights had sampled the rollout.
    entropy: of the policy that the updates saw, in nats, over all of their tokens; None without regions.
    gradient_norm: before clipping, the largest of the updates.
    updates: optimizer steps; 0, and 0 everywhere else, where no group was left to learn from.
    """

    loss: float = 0.0
    policy_kl: Estimates = field(default_factory=Estimates)
    reference_kl: Estimates | None = None
    clip_fraction: float = 0.0
    first_clip_fraction: float = 0.0
    first_ratio_off_one: int = 0
    entropy: float | None = None
    gradient_norm: float = 0.0
    updates: int = 0
    mismatch: Mismatch = field(default_factory=Mismatch)


class _Minibatch(NamedTuple):
    """Accumulated float32 gradients of one minibatch, its loss, parts, sum of entropies, and the engine against
    trainer_fwd."""

    gradients: Parameters
    loss: float
    parts: LossParts
    entropy: float | None
    mismatch: Mismatch


class Learner:
    """Owns the master weights and the optimizer; `params` are the copies that score, sync and the next rollout use.

    All of them lie as the policy's placement says: on one device, or every device of a mesh its piece.
    """

    def __init__(
        self,
        policy: Policy,
        params: Parameters,
        *,
        optimizer: OptimizerSection,
        algorithm: AlgorithmSection,
        temperature: float,
        micro_batch_tokens: int,
    ) -> None:
        self.policy = policy
        self.algorithm = algorithm
        self.temperature = temperature
        self.micro_batch_tokens = micro_batch_tokens
        self._optimizer = optimizer
        # Placed explicitly, as a restored checkpoint's arrays are, so that both run the same compiled programs.
        self.params: Parameters = jax.device_put(dict(params), policy.placement.shardings(dict(params)))
        self.state = _start(self.params, optimizer=optimizer, policy=policy)

    def restore(self, state: LearnerState) -> None:
        """Continue from a checkpoint's state."""
        self.state = state
        self.params = jax.jit(partial(compute_copies, policy=self.policy))(state.master)

    def whole_params(self) -> Parameters:
        """`params` on one device, as an engine takes them."""
        return self.policy.placement.whole(self.params)

    def update(
        self,
        completions: Sequence[Completion],
        advantages: np.ndarray,
        reference_log_probs: Sequence[np.ndarray] | None,
        *,
        require_exact: bool,
        groups: np.ndarray | None = None,
        on_policy: bool = True,
    ) -> UpdateResult:
        """Train on one rollout: `epochs` passes over `minibatches` disjoint parts, one optimizer step each.

        advantages: float32, one a completion. reference_log_probs: float32 arrays, one a completion, or None.
        groups: int [groups, group_size], the indices of the completions to learn from (None: all); a group is never
        cut. on_policy: the rollout was sampled from the weights as they are now. Then, before the first step moves one,
        the ratios are checked to be exactly 1 and none clipped.
        Raises DifferenceFound if they are not and `require_exact`; NonFiniteLogits for a loss or gradient that is NaN
        or infinite, with the weights as they were.
        """
        groups = np.arange(len(completions))[:, None] if groups is None else groups
        if not len(groups):
            return UpdateResult()
        minibatches: list[_Minibatch] = []
        norms: list[float] = []
        for _ in range(self.algorithm.epochs):
            for part in np.array_split(groups, min(self.algorithm.minibatches, len(groups))):
                minibatch = self._minibatch(completions, part.reshape(-1).tolist(), advantages, reference_log_probs)
                if on_policy and require_exact and not minibatches:
                    _require_untouched_ratio(minibatch)
                norms.append(self._step(minibatch))
                minibatches.append(minibatch)
        # The last step is only sent so far: whoever times an update, and the sync after it, times all of it.
        jax.block_until_ready(self.params)
        first = minibatches[0]
        total = _added([minibatch.parts for minibatch in minibatches])
        reference_kl = Estimates(_mean(total.reference_kl_k1, total), _mean(total.reference_kl_k3, total))
        return UpdateResult(
            loss=float(np.mean([minibatch.loss for minibatch in minibatches])),
            policy_kl=Estimates(_mean(total.policy_kl_k1, total), _mean(total.policy_kl_k3, total)),
            reference_kl=None if reference_log_probs is None else reference_kl,
            clip_fraction=_mean(total.clipped, total),
            first_clip_fraction=_mean(first.parts.clipped, first.parts),
            first_ratio_off_one=int(first.parts.ratio_off_one),
            entropy=_mean_entropy(minibatches, total),
            gradient_norm=max(norms),
            updates=len(norms),
            mismatch=first.mismatch if on_policy else Mismatch(),
        )

    def _minibatch(
        self,
        completions: Sequence[Completion],
        indices: list[int],
        advantages: np.ndarray,
        reference: Sequence[np.ndarray] | None,
    ) -> _Minibatch:
        """Gradients of the completions at `indices`, with the weights as they are now."""
        # Of the whole minibatch, whatever micro-batches it is then cut into.
        lengths = [len(completions[index].tokens) for index in indices]
        weights = dict(zip(indices, token_weights(lengths, self.algorithm.objective.weighting), strict=True))
        gradients = {
            name: jnp.zeros(value.shape, jnp.float32, device=value.sharding) for name, value in self.params.items()
        }
        micro_batches = cut(completions, indices, self.micro_batch_tokens, self.policy.packing)
        outputs = []
        with counters.case("trainer_fwd"):
            for micro in micro_batches:
                inputs = self._loss_inputs(micro, completions, advantages, weights, reference)
                batch, inputs = jax.device_put((micro.batch, inputs), self.policy.placement.rows)
                gradients, *output = _accumulate_gradients(
                    self.params,
                    gradients,
                    self.policy.buffers,
                    batch,
                    inputs,
                    jnp.float32(self.temperature),
                    policy=self.policy,
                    objective=self.algorithm.objective,
                )
                outputs.append(output)
        # Fetched after the last micro-batch was sent, so that the device never waits for the host between two.
        losses, parts, entropies, log_probs = zip(*jax.device_get(outputs), strict=True)
        forward: list[np.ndarray | None] = [None] * len(completions)
        for micro, log_probs_T in zip(micro_batches, log_probs, strict=True):
            micro.gather(log_probs_T, forward)
        return _Minibatch(
            gradients,
            float(sum(losses)),
            _added(parts),
            None if self.policy.arm == "native" else float(sum(entropies)),
            compare_tokens(completions, "trainer_fwd", forward),
        )

    def _loss_inputs(
        self,
        micro: MicroBatch,
        completions: Sequence[Completion],
        advantages: np.ndarray,
        weights: dict[int, float],
        reference: Sequence[np.ndarray] | None,
    ) -> LossInputs:
        per_token = [np.ones(len(completion.tokens), np.float32) for completion in completions]
        return LossInputs(
            rollout_log_probs=micro.spread([completion.log_probs for completion in completions]),
            reference_log_probs=None if reference is None else micro.spread(reference),
            advantages=micro.spread([advantages[index] * ones for index, ones in enumerate(per_token)]),
            weights=micro.spread([weights.get(index, 0.0) * ones for index, ones in enumerate(per_token)]),
            mask=micro.spread(per_token),
        )

    def _step(self, part: _Minibatch) -> float:
        """One optimizer step; returns the gradient's global norm."""
        norm = float(_global_norm(part.gradients))
        for name, value in (("loss", part.loss), ("gradient norm", norm)):
            if not np.isfinite(value):
                raise NonFiniteLogits(
                    field=name, found=value, allowed="a finite number", reason="The update was not applied."
                )
        self.state, self.params = _apply_gradients(
            self.state, part.gradients, optimizer=self._optimizer, policy=self.policy
        )
        return norm


# Functions of the module and not of a learner, so that learners of one policy share what was compiled.
@partial(jax.jit, static_argnames=("optimizer", "policy"))
def _start(params: Parameters, *, optimizer: OptimizerSection, policy: Policy) -> LearnerState:
    return policy.placement.pinned(start_state(build_optimizer(optimizer), params))


@partial(jax.jit, static_argnames=("policy", "objective"), donate_argnames="accumulated")
def _accumulate_gradients(
    params: Parameters,
    accumulated: Parameters,
    buffers: dict[str, jax.Array],
    batch: PackedBatch,
    inputs: LossInputs,
    temperature: jax.Array,
    *,
    policy: Policy,
    objective: Objective,
) -> tuple[Parameters, jax.Array, LossParts, jax.Array, jax.Array]:
    """`accumulated` plus one micro-batch's gradients; its loss, parts, sum of entropies (0 without regions) and float32
    log-probabilities [T]."""

    def loss_of(params: Parameters, probe_T: jax.Array) -> tuple[jax.Array, tuple[LossParts, jax.Array]]:
        probe = None if policy.arm == "native" else probe_T
        log_probs_T = policy.score(params, buffers, batch, temperature, entropy_probe=probe)
        loss, parts = policy_loss(log_probs_T, inputs, objective)
        return loss, (parts, log_probs_T)

    # The backward computes every row's logits again anyway, and gives their entropy as the probe's gradient.
    of = jax.value_and_grad(loss_of, (0, 1), has_aux=True)
    (loss, (parts, log_probs_T)), (gradients, entropy_T) = of(params, jnp.zeros_like(inputs.mask))
    entropy = jnp.sum(jnp.where(inputs.mask > 0, entropy_T, 0.0))
    # Widened before the sum: micro-batches would otherwise be rounded to the policy's dtype one by one.
    accumulated = {name: accumulated[name] + gradients[name].astype(jnp.float32) for name in accumulated}
    return policy.placement.pinned(accumulated), loss, parts, entropy, log_probs_T


@partial(jax.jit, static_argnames=("optimizer", "policy"), donate_argnames=("state", "gradients"))
def _apply_gradients(
    state: LearnerState, gradients: Parameters, *, optimizer: OptimizerSection, policy: Policy
) -> tuple[LearnerState, Parameters]:
    updates, moments = build_optimizer(optimizer).update(gradients, state.optimizer, state.master)
    master = optax.apply_updates(state.master, updates)
    return policy.placement.pinned(LearnerState(master, moments)), compute_copies(master, policy)


def _added(parts: Sequence[LossParts]) -> LossParts:
    return LossParts(*(float(sum(values)) for values in zip(*parts, strict=True)))


def _mean(summed: Any, parts: LossParts) -> float:
    return float(summed / parts.tokens)


def _mean_entropy(minibatches: Sequence[_Minibatch], total: LossParts) -> float | None:
    sums = [minibatch.entropy for minibatch in minibatches if minibatch.entropy is not None]
    return _mean(sum(sums), total) if sums else None


_global_norm = jax.jit(optax.tree.norm)


def _require_untouched_ratio(part: _Minibatch) -> None:
    if part.parts.ratio_off_one or part.parts.clipped or not part.mismatch.exact:
        raise DifferenceFound(
            field="ratio of the first minibatch after the rollout",
            found=f"{int(part.parts.ratio_off_one)} of {int(part.parts.tokens)} not exactly 1, "
            f"{int(part.parts.clipped)} clipped, {part.mismatch.mismatch_tokens} log-probabilities differ",
            allowed="exactly 1 everywhere, none clipped, none differs",
            reason=f"The trainer's forward and the engine disagree. First difference: {part.mismatch.first}.",
        )
