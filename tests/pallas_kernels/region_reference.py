"""The regions' rounding schedules again, in NumPy, one operation at a time: what the CPU forms must equal in every bit.

Only exp and log are taken from XLA, on whole arrays. T tokens, K depth, N columns, D head size.
"""

import jax.numpy as jnp
import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)


def bits(array):
    """The integers behind floats, for comparisons that tell +0 from -0 and see NaN."""
    array = np.asarray(array)
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def unequal(left, right) -> int:
    """How many elements differ in any bit."""
    left, right = np.asarray(left), np.asarray(right)
    assert left.shape == right.shape, (left.shape, right.shape)
    assert left.dtype == right.dtype, (left.dtype, right.dtype)
    return int((bits(left) != bits(right)).sum())


def wide(array):
    return np.asarray(array).astype(np.float32)


def rounded(array, dtype):
    return np.asarray(array, np.float32).astype(dtype).astype(np.float32)


def fused_multiply_add(a, b, c):
    """One rounding: the product of two fp32 is exact in the 64-bit mantissa of a long double."""
    long = np.longdouble
    return (a.astype(long) * b.astype(long) + c.astype(long)).astype(np.float32)


def chain(x_TK, w_NK, piece=512):
    """The dot's order: fused multiply-adds in ascending k from zero, pieces of 512 added in ascending order."""
    total = None
    for start in range(0, x_TK.shape[1], piece):
        part = np.zeros((x_TK.shape[0], w_NK.shape[0]), np.float32)
        for k in range(start, min(start + piece, x_TK.shape[1])):
            part = fused_multiply_add(x_TK[:, k : k + 1], w_NK[None, :, k], part)
        total = part if total is None else total + part
    return total


def fold(parts):
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def matmul(x_TK, w_NK, bias_N=None, *, leaves=1, dtype=np.float32):
    cuts = zip(np.split(wide(x_TK), leaves, axis=1), np.split(wide(w_NK), leaves, axis=1), strict=True)
    y_TN = rounded(fold([chain(x, w) for x, w in cuts]), dtype)
    return y_TN.astype(dtype) if bias_N is None else (y_TN + wide(bias_N)).astype(dtype)


def row_sum(x, lanes=64):
    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % lanes)])
    total = x[..., :lanes]
    for start in range(lanes, x.shape[-1], lanes):
        total = total + x[..., start : start + lanes]
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total[..., 0]


def rms_norm(x, w, *, eps):
    dtype, x = np.asarray(x).dtype, wide(x)
    mean = row_sum(x * x)[..., None] / np.float32(x.shape[-1])
    inverse = np.float32(1) / np.sqrt(mean + np.float32(eps))
    return (rounded(x * inverse, dtype) * wide(w)).astype(dtype)


def add(x, residual):
    return (wide(x) + wide(residual)).astype(np.asarray(x).dtype)


def add_rms_norm(x, residual, w, *, eps):
    total = add(x, residual)
    return rms_norm(total, w, eps=eps), total


def exp(x):
    return np.asarray(jnp.exp(jnp.asarray(x)))


def swiglu(gate_up):
    dtype = np.asarray(gate_up).dtype
    gate, up = np.split(wide(gate_up), 2, axis=1)
    silu = gate / (exp(-gate) + np.float32(1))
    return (rounded(silu, dtype) * up).astype(dtype)


def rotate(x_THD, cos_sin_TD):
    dtype = np.asarray(x_THD).dtype
    a, b = np.split(wide(x_THD), 2, axis=-1)
    cos, sin = (half[:, None] for half in np.split(np.asarray(cos_sin_TD), 2, axis=-1))
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(dtype)


def log_prob_rows(x_TH, w_VH, temperature, *, vocab_size):
    columns = wide(w_VH)[:vocab_size]
    scaled = chain(wide(x_TH), columns) / np.float32(temperature)
    leaf = -(-vocab_size // (8 * 512)) * 512
    padded = np.pad(scaled, ((0, 0), (0, 8 * leaf - vocab_size)), constant_values=-np.inf)
    maximum = padded.max(axis=1)
    exponentials = exp(padded - maximum[:, None])
    total = fold([row_sum(part) for part in np.split(exponentials, 8, axis=1)])
    return (scaled - maximum[:, None]) - np.asarray(jnp.log(jnp.asarray(total)))[:, None]


def attention_row(q_GD, k_SD, v_SD, *, scale, split=512, dtype=np.float32, block=128):
    """One query of one key head over all its keys, q [queries a key head, D] to [queries a key head, D]."""
    q, k, v = wide(q_GD), wide(k_SD), wide(v_SD)
    merged = None
    for split_start in range(0, k.shape[0], split):
        own = None
        for start in range(split_start, min(split_start + split, k.shape[0]), block):
            keys, values = k[start : start + block], v[start : start + block]
            score = chain(q, keys) * np.float32(scale)
            top = score.max(1) if own is None else np.maximum(own[0], score.max(1))
            score = np.pad(score, ((0, 0), (0, block - score.shape[1])), constant_values=-np.inf)
            weight = exp(score - top[:, None])
            seen = rounded(weight, dtype)[:, : keys.shape[0]]
            total, out = row_sum(weight), chain(seen, values.T.copy())
            if own is not None:
                keep = exp(own[0] - top)
                total, out = own[1] * keep + total, own[2] * keep[:, None] + out
            own = top, total, out
        if merged is None:
            merged = own
            continue
        top = np.maximum(merged[0], own[0])
        left, right = exp(merged[0] - top), exp(own[0] - top)
        merged = top, merged[1] * left + own[1] * right, merged[2] * left[:, None] + own[2] * right[:, None]
    return (merged[2] / merged[1][:, None]).astype(dtype)
