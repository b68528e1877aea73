"""The log-probability regions: full rows for the engine, one target a row for the trainer, equal bits."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.jax_api import vary_alike
from pallas_kernels.lm_head import cpu, vjp
from pallas_kernels.lm_head.spec import ROWS_SPEC, TOKEN_SPEC
from pallas_kernels.region import Region, ShapeAndDtype, differentiable
from pallas_kernels.rounding import check_floats

_FLOAT32 = np.dtype(np.float32)


def _check(name: str, x: ShapeAndDtype, w: ShapeAndDtype, temperature: ShapeAndDtype, vocab_size: int) -> None:
    check_floats(name, x=x[1], w=w[1])
    if len(x[0]) != 2 or len(w[0]) != 2 or x[0][1] != w[0][1]:
        raise ValueError(f"{name} needs x [T, H] and w [V, H]; got {x[0]} and {w[0]}")
    if not 0 < vocab_size <= w[0][0]:
        raise ValueError(f"{name}: vocab_size = {vocab_size} must be positive and at most w's {w[0][0]} rows")
    if temperature[0] != () or str(temperature[1]) != "float32":
        raise ValueError(f"{name} needs an fp32 scalar temperature; got {temperature}")


def _rows_shape_rule(
    x: ShapeAndDtype, w: ShapeAndDtype, temperature: ShapeAndDtype, *, vocab_size: int
) -> tuple[ShapeAndDtype, ...]:
    _check("log_prob_rows", x, w, temperature, vocab_size)
    return (((x[0][0], vocab_size), _FLOAT32),)


def _token_shape_rule(
    x: ShapeAndDtype, w: ShapeAndDtype, targets: ShapeAndDtype, temperature: ShapeAndDtype, *, vocab_size: int
) -> tuple[ShapeAndDtype, ...]:
    _check("token_log_probs", x, w, temperature, vocab_size)
    if targets[0] != (x[0][0],) or str(targets[1]) != "int32":
        raise ValueError(f"token_log_probs needs int32 targets [T]; got {targets} for x {x[0]}")
    return (((x[0][0],), _FLOAT32),)


ROWS_REGION = Region(
    name="log_prob_rows",
    operands=("x", "w", "temperature"),
    parameters={"vocab_size": int},
    results=("log_probs",),
    shape_rule=_rows_shape_rule,
    cpu=cpu.log_prob_rows,
    spec=ROWS_SPEC,
)
TOKEN_REGION = Region(
    name="token_log_probs",
    operands=("x", "w", "targets", "temperature"),
    parameters={"vocab_size": int},
    results=("log_probs",),
    shape_rule=_token_shape_rule,
    cpu=cpu.token_log_probs,
    spec=TOKEN_SPEC,
)
_rows_call = differentiable(ROWS_REGION, vjp.rows_backward)
_token_call = differentiable(TOKEN_REGION, vjp.token_backward, vjp.keep_log_probs)


def log_prob_rows(x_TH: jax.Array, w_VH: jax.Array, temperature: jax.Array | float, *, vocab_size: int) -> jax.Array:
    """log_softmax(x @ w.T / temperature), fp32 [T, vocab_size].

    Rows of `w` from `vocab_size` on are padding and count as -inf. `w` may be stored wider than `x`. A NaN or
    +infinity among a row's logits makes the whole row NaN. Raises ValueError for shapes that do not fit.
    """
    return _rows_call(x_TH, w_VH, jnp.asarray(temperature, jnp.float32), vocab_size=vocab_size)


def token_log_probs(
    x_TH: jax.Array,
    w_VH: jax.Array,
    targets_T: jax.Array,
    temperature: jax.Array | float,
    *,
    vocab_size: int,
    entropy_probe_T: jax.Array | None = None,
) -> jax.Array:
    """The same log-probabilities at one target a row, fp32 [T], without a [T, vocab_size] array.

    Bit for bit `log_prob_rows(...)[t, targets[t]]`. Targets are int32; one outside
    [0, vocab_size) gives NaN.
    entropy_probe: fp32 [T], of any values, which no result depends on. The backward computes the logits again, and
    gives in place of the probe's gradient the entropy of every row's distribution, in nats: differentiate with respect
    to it to get the entropy without a pass of its own.
    """
    operands = x_TH, w_VH, targets_T, jnp.asarray(temperature, jnp.float32)
    if entropy_probe_T is None:
        return _token_call(*operands, vocab_size=vocab_size)
    return _probed(vocab_size, *vary_alike((*operands, entropy_probe_T)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _probed(vocab_size: int, *operands: jax.Array) -> jax.Array:
    return TOKEN_REGION.bind(*operands[:-1], vocab_size=vocab_size)


def _probed_forward(vocab_size: int, *operands: jax.Array) -> tuple[jax.Array, Any]:
    log_probs_T = _probed(vocab_size, *operands)
    return log_probs_T, vjp.keep_log_probs(operands[:-1], log_probs_T)


def _probed_backward(vocab_size: int, residuals: Any, cotangent_T: jax.Array) -> tuple[Any, ...]:
    return vjp.probed_backward(residuals, cotangent_T, vocab_size=vocab_size)


_probed.defvjp(_probed_forward, _probed_backward)
