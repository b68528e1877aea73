"""Functions with one stray operation each, on a line of its own that the audit must name."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels

STRAY = {
    "sin": lambda x: jnp.sin(x),
    "add": lambda x: x + x,
    "dot_general": lambda x: x @ x.T,
    "reduce_sum": lambda x: jnp.broadcast_to(jnp.sum(x), x.shape),
    "cumsum": lambda x: jnp.cumsum(x, axis=0),
    "convert_element_type": lambda x: x.astype(jnp.bfloat16),
    "mul": lambda x: x * 2,
    "exp": lambda x: jnp.exp(x),
    "gt": lambda x: x > 0,
    "sort": lambda x: jnp.sort(x),
    "argmax": lambda x: jnp.argmax(x, axis=0),
    "scatter-add": lambda x: x.at[0].add(1.0),
    "scatter": lambda x: x.at[jnp.array([0, 0])].set(1.0),
    "bitcast_convert_type": lambda x: jax.lax.bitcast_convert_type(x, jnp.int32),
    "neg": lambda x: -x,
}


def in_scan(stray):
    """`stray` in the body of a scan."""
    return lambda x: jax.lax.scan(lambda carry, _: (carry, stray(carry)), x, None, length=3)[1]


def in_while(stray):
    """`stray` in the body of a while loop, its result thrown away by the loop's carry only at the end."""

    def run(x):
        shaped = jax.eval_shape(stray, x)
        start = (0, jnp.zeros(shaped.shape, shaped.dtype))
        return jax.lax.while_loop(lambda carry: carry[0] < 3, lambda carry: (carry[0] + 1, stray(x)), start)

    return run


def in_cond(stray):
    """`stray` in one branch of a cond."""

    def run(x):
        shaped = jax.eval_shape(stray, x)
        return jax.lax.cond(jnp.int32(1) > 0, stray, lambda x: jnp.zeros(shaped.shape, shaped.dtype), x)

    return run


def in_custom_vjp(stray):
    """`stray` in the primal function of a custom VJP."""
    function = jax.custom_vjp(stray)
    function.defvjp(lambda x: (stray(x), x), lambda saved, gradient: (saved,))
    return function


def in_forward_rule(stray):
    """`stray` only in the forward rule of a custom VJP: what runs under gradients and not without."""
    function = jax.custom_vjp(lambda x: jnp.zeros(jax.eval_shape(stray, x).shape, jax.eval_shape(stray, x).dtype))
    function.defvjp(lambda x: (stray(x), x), lambda saved, gradient: (saved,))
    return function


def in_custom_jvp(stray):
    """`stray` in a function with a custom JVP."""
    function = jax.custom_jvp(stray)
    function.defjvp(lambda primals, tangents: (stray(*primals), stray(*primals)))
    return function


def in_jvp_rule(stray):
    """`stray` only in the rule of a custom JVP: what runs under gradients and not without."""
    function = jax.custom_jvp(lambda x: jnp.zeros(jax.eval_shape(stray, x).shape, jax.eval_shape(stray, x).dtype))

    def rule(primals, tangents):
        result = stray(*primals)
        real = jnp.issubdtype(result.dtype, jnp.floating)
        return result, jnp.zeros_like(result) if real else np.zeros(result.shape, jax.dtypes.float0)

    function.defjvp(rule)
    return function


WRAPPERS = {
    "plain": lambda stray: stray,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": in_scan,
    "while": in_while,
    "cond": in_cond,
    "custom_vjp": in_custom_vjp,
    "forward_rule": in_forward_rule,
    "custom_jvp": in_custom_jvp,
    "jvp_rule": in_jvp_rule,
    "scan_of_remat_of_jit": lambda stray: in_scan(jax.checkpoint(jax.jit(stray))),
}


def all_moves(x, index):
    """Every move that a policy may make, on floats, and integer arithmetic beside them."""
    x = jnp.transpose(x).reshape(-1, 4)
    x = jnp.concatenate([x[1:], x[:1]], axis=0)
    left, right = jnp.split(x, 2, axis=1)
    x = jnp.stack([left, right], axis=1)[:, ::-1]
    x = jnp.squeeze(jnp.expand_dims(x, 0), 0)
    position = (index * 3 + 1) // 2 % 4 - jnp.minimum(index, 1) + jnp.arange(2)
    x = jnp.where((position > 0)[:, None, None], x[position], x[:2])
    x = jax.lax.dynamic_update_slice(x, jax.lax.dynamic_slice(x, (index[0], 0, 0), (1, 2, 2)), (index[1], 0, 0))
    x = jax.lax.pad(x, jnp.float32(0), ((0, 1, 0), (0, 0, 0), (0, 0, 0)))
    x = jnp.broadcast_to(x[None], (2, *x.shape))
    order = jnp.cumsum(index) + jnp.argmax(index).astype(jnp.int32)
    return jax.lax.optimization_barrier(jax.lax.stop_gradient(x)), order, index.astype(jnp.int8)


def regions_in_every_wrapper(x, weight):
    """Regions inside of scan, remat, jit, cond and custom derivatives."""

    def layer(carry, _):
        normed = pallas_kernels.rms_norm(carry, weight[0], eps=1e-5)
        return jax.jit(pallas_kernels.residual_add)(pallas_kernels.matmul(normed, weight), carry), None

    x = jax.lax.scan(jax.checkpoint(layer), x, None, length=2)[0]
    round_off = partial(pallas_kernels.cast, dtype="bfloat16")
    return jax.lax.cond(jnp.int32(0) < 1, round_off, lambda y: round_off(y[::-1]), x)
