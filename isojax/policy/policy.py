"""The facade that trainers, engines and tools use: pure functions over flat parameters, and jitted entry points."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Literal, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import pallas_kernels
from contracts import check_temperature
from contracts.errors import BadConfig, EmptyBatch, PromptTooLong
from isojax.kernels.packing import UNSEALED, Packing
from isojax.policy.batch import PackedBatch, PerToken
from isojax.policy.config import PolicyConfig
from isojax.policy.dense import REMATS, DensePolicy, Remat
from isojax.policy.placement import OneDevice, Placement
from isojax.policy.rope import rope_table
from pallas_kernels import counters

# T: tokens, H: hidden size, V: vocabulary, R: selected rows, P: positions, D: head dimension.

Parameters = Mapping[str, jax.Array]
Dtype = Literal["bfloat16", "float32"]
Arm = Literal["exact", "native"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
_ROW_STEP = 16


class Policy:
    """One policy: its config, its constant buffers and its forward.

    The parameters are a flat dict of packed arrays, layers stacked on axis 0, in the policy's dtype:
    `parameter_shapes` lists them. `hidden`, `head_rows` and `score` are pure and traceable, which is what the audit,
    the engine's translator and a training step need; `log_probs` and `log_prob_rows` are jitted.
    """

    def __init__(
        self,
        config: PolicyConfig,
        *,
        dtype: str = "bfloat16",
        remat: Remat = "layer",
        rope: np.ndarray | None = None,
        operations: Any = pallas_kernels,
    ) -> None:
        """Build a policy without parameters.

        dtype: "bfloat16" or "float32", of parameters and activations. remat: what the backward computes again, by the
        forward's own regions: "layer" every layer from its input, "regions" only the cheap regions of each from the
        results of its products and its attention, "none" nothing; no bit of the forward depends on it. rope: the
        shipped fp32 [P, D] table of an exported policy (computed from the config where None). operations: the regions,
        or what stands in for them in the baseline arm (see `isojax.policy.native`). Raises `BadConfig`.
        """
        if dtype not in DTYPES:
            raise BadConfig(
                field="dtype", found=dtype, allowed=list(DTYPES), reason="The regions are defined for these."
            )
        if remat not in REMATS:
            raise BadConfig(field="remat", found=remat, allowed=list(REMATS), reason="It is no known policy.")
        self.config = config
        self.dtype = cast(Dtype, dtype)
        self.remat = remat
        self.operations = operations
        table = rope_table(config) if rope is None else rope
        if table.shape != (config.max_position, config.head_dim) or table.dtype != np.float32:
            raise BadConfig(
                field="rope_table",
                found=f"{table.dtype}{list(table.shape)}",
                allowed=f"float32{[config.max_position, config.head_dim]}",
                reason="The rotation gathers one row a position.",
            )
        # Row counts that `log_prob_rows` is compiled for, ascending; where there are none, any multiple of 16. And how
        # a trainer lays out its batches. Loading a policy with sealed kernels sets both to theirs.
        self.row_buckets: tuple[int, ...] = ()
        self.packing: Packing = UNSEALED
        self.placement: Placement = OneDevice()
        self.buffers: dict[str, jax.Array] = {"rope_table": jnp.asarray(table)}
        abstract = nnx.eval_shape(lambda: DensePolicy(config, jnp.dtype(dtype), remat, operations))
        self._definition, state = nnx.split(abstract)
        self.parameter_shapes: dict[str, jax.ShapeDtypeStruct] = {
            ".".join(map(str, path)): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for path, leaf in nnx.to_flat_state(state)
        }

    @property
    def arm(self) -> Arm:
        """ "exact" with regions, "native" without: then nothing is promised of its bits."""
        return "exact" if self.operations is pallas_kernels else "native"

    @property
    def on_one_device(self) -> "Policy":
        """This policy without a mesh."""
        return self

    def module(self, params: Parameters, gather_axis: str | None = None) -> DensePolicy:
        """The Flax module that holds these parameters.

        gather_axis: the manual mesh axis over which they are cut, if any (see `isojax.mesh`); a rank then holds pieces.
        Raises as `check_parameters` does.
        """
        self.check_parameters(params, whole=gather_axis is None)
        flat: Any = {tuple(name.split(".")): nnx.Param(value) for name, value in params.items()}
        module = nnx.merge(self._definition, nnx.from_flat_state(flat))
        module.gather_axis = gather_axis
        return module

    def check_parameters(self, params: Parameters, *, whole: bool = True) -> None:
        """Raise `BadConfig`, naming one, unless these are the policy's parameters in name, dtype and shape.

        whole: False leaves the shapes out, for the pieces that one rank of a mesh holds.
        """

        def described(values: Mapping[str, Any]) -> dict[str, str]:
            return {name: f"{value.dtype}{list(value.shape) if whole else ''}" for name, value in values.items()}

        found, expected = described(params), described(self.parameter_shapes)
        wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        if wrong:
            raise BadConfig(
                field=f"params[{wrong[0]}]",
                found=found.get(wrong[0], "missing"),
                allowed=expected.get(wrong[0], "no such parameter"),
                reason="The parameters are not this policy's; the forward would round otherwise.",
            )

    def init(self, key: jax.Array, scale: float | None = None) -> dict[str, jax.Array]:
        """Random parameters: normal matrices of standard deviation `scale` (the config's), unit norms, zero biases."""
        deviation = self.config.initializer_range if scale is None else scale
        # On the host, in one stream: a draw in JAX would compile once for every shape.
        generator = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        params = {}
        for name, shape in self.parameter_shapes.items():
            if "norm" in name:
                values = np.ones(shape.shape, np.float32)
            elif "bias" in name:
                values = np.zeros(shape.shape, np.float32)
            else:
                values = np.float32(deviation) * generator.standard_normal(shape.shape, np.float32)
            params[name] = jnp.asarray(values.astype(shape.dtype))
        return params

    def hidden(
        self,
        params: Parameters,
        buffers: Mapping[str, jax.Array],
        tokens: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array,
    ) -> jax.Array:
        """Final-normed hidden states [T, H] of a packed batch (see `PackedBatch`). Pure and traceable."""
        return self.module(params).hidden(buffers["rope_table"], tokens, positions, segment_ids)

    def head_rows(self, params: Parameters, hidden: jax.Array, temperature: jax.Array | float) -> jax.Array:
        """log_softmax(logits / temperature) of every row, fp32 [T, V]. Pure; what the engine's compute_logits runs."""
        head = self.module(params).head_VH
        return self.operations.log_prob_rows(
            hidden, head, jnp.asarray(temperature, jnp.float32), vocab_size=self.config.vocab_size
        )

    def score(
        self,
        params: Parameters,
        buffers: Mapping[str, jax.Array],
        batch: PackedBatch,
        temperature: jax.Array | float = 1.0,
        *,
        gather_axis: str | None = None,
        entropy_probe: jax.Array | None = None,
    ) -> jax.Array:
        """Log-probability of `batch.targets` at every row, fp32 [T]. Pure, traceable and differentiable.

        entropy_probe: fp32 [T]; the gradient with respect to it is the entropy of every row, see
        `pallas_kernels.token_log_probs`.
        """
        module = self.module(params, gather_axis)
        hidden = module.hidden(buffers["rope_table"], batch.tokens, batch.positions, batch.segment_ids)
        return self.operations.token_log_probs(
            hidden,
            module.head_VH,
            batch.targets,
            jnp.asarray(temperature, jnp.float32),
            vocab_size=self.config.vocab_size,
            entropy_probe_T=entropy_probe,
        )

    def log_probs(self, params: Parameters, batch: PackedBatch, temperature: float = 1.0) -> jax.Array:
        """`score`, jitted: fp32 [T], case trainer_score. Rows outside of `batch.mask` are defined but meaningless.

        Raises `EmptyBatch` for a batch without rows and `BadConfig` for parameters of another dtype or shape and for a
        temperature that float32 does not hold; for a batch in NumPy also `PromptTooLong` for positions beyond the rope
        table and `BadConfig` for token ids outside of the vocabulary.
        """
        self._check_batch(batch)
        _check_temperature(temperature)
        with counters.case("trainer_score"):
            return self._score(dict(params), self.buffers, batch, jnp.float32(temperature))

    def log_prob_rows(
        self, params: Parameters, batch: PackedBatch, rows: np.ndarray, temperature: float = 1.0
    ) -> jax.Array:
        """Log-probabilities over the whole vocabulary of the given rows of the batch, fp32 [R, V]; case trainer_score.

        rows: int indices into the token axis. Raises as `log_probs`, `EmptyBatch` for no rows and `BadConfig` for rows
        that the batch does not have.
        """
        self._check_batch(batch)
        _check_temperature(temperature)
        wanted = np.asarray(rows)
        _check_not_empty(wanted, "rows")
        _check_range(wanted, len(batch.tokens), "rows", "The batch has no other rows.")
        with counters.case("trainer_score"):
            return self._row_values(params, batch, wanted, jnp.float32(temperature))

    def _row_values(self, params: Parameters, batch: PackedBatch, rows: np.ndarray, temperature: Any) -> jax.Array:
        # Padded by repeating a row, so that few row counts are compiled; a row's bits don't depend on its neighbours.
        padded = np.pad(rows.astype(np.int32), (0, self._row_bucket(len(rows)) - len(rows)), mode="edge")
        return self._rows(dict(params), self.buffers, batch, padded, temperature)[: len(rows)]

    def _row_bucket(self, count: int) -> int:
        """How many rows are computed where `count` are wanted."""
        return next((size for size in self.row_buckets if size >= count), -(-count // _ROW_STEP) * _ROW_STEP)

    @cached_property
    def _score(self) -> Callable[..., jax.Array]:
        return jax.jit(self.score)

    @cached_property
    def _rows(self) -> Callable[..., jax.Array]:
        def rows_of(params, buffers, batch, rows, temperature):
            hidden = self.hidden(params, buffers, batch.tokens, batch.positions, batch.segment_ids)
            return self.head_rows(params, hidden[rows], temperature)

        return jax.jit(rows_of)

    def _check_batch(self, batch: PackedBatch) -> None:
        _check_not_empty(batch.tokens, "batch.tokens")
        # Reading a JAX array here would wait for the device; the gathers themselves clamp without a word.
        if isinstance(batch.positions, np.ndarray) and batch.positions.max() >= self.config.max_position:
            raise PromptTooLong(
                field="batch.positions",
                found=int(batch.positions.max()),
                allowed=f"0..{self.config.max_position - 1}",
                reason="The policy's rope table ends there.",
            )
        if self.arm == "native" and isinstance(batch.positions, np.ndarray):
            self._check_rows(batch)
        if isinstance(batch.tokens, np.ndarray):
            _check_range(batch.tokens, self.config.vocab_size, "batch.tokens", "The embedding has no other rows.")

    def _check_rows(self, batch: PackedBatch) -> None:
        starts = np.flatnonzero((batch.positions == 0) & (batch.segment_ids >= 0))
        if np.any(starts % self.packing["start_multiple"]):
            raise BadConfig(
                field="batch.positions",
                found=f"sequences that start at {starts.tolist()[:8]}",
                allowed=f"multiples of {self.packing['start_multiple']}: isojax.pack(..., **policy.packing)",
                reason="The native arm's attention sees rows of so many tokens, one sequence in each.",
            )


def _check_temperature(temperature: float | jax.Array) -> None:
    # Reading an array would wait for the device, and a traced one has no value.
    if not isinstance(temperature, jax.Array):
        check_temperature(temperature)


def _check_not_empty(values: PerToken, name: str) -> None:
    if len(values) == 0:
        raise EmptyBatch(field=name, found=0, allowed="at least one row", reason="There is nothing to compute.")


def _check_range(values: np.ndarray, size: int, name: str, reason: str) -> None:
    if values.min() < 0 or values.max() >= size:
        found = f"{values.min()} to {values.max()}"
        raise BadConfig(field=name, found=found, allowed=f"0..{size - 1}", reason=reason)
