"""Log-probabilities for XLA:CPU: full rows and single targets share one tile of logits and its statistics.

T tokens, H hidden, V vocabulary, P vocabulary padded to whole leaves; r a row tile.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.lm_head.spec import BLOCK, LEAVES, ROW_TILES
from pallas_kernels.loops import divide, hidden_zero, map_row_tiles, pin, tile_count, trip_zero
from pallas_kernels.matmul.cpu import chain_dot, fold, pad_columns
from pallas_kernels.rounding import LANES, fold_lanes, widen


def leaf_size(vocab_size: int) -> int:
    """Columns of one of the 8 leaves: whole blocks, a function of the real vocabulary alone."""
    return tile_count(vocab_size, LEAVES * BLOCK) * BLOCK


def row_tile(rows: object) -> int:
    """The rows of one tile of logits, neutral for the bits: a few for decoding, more for the trainer."""
    return next((tile for tile in ROW_TILES if isinstance(rows, int) and rows <= tile), ROW_TILES[-1])


def scaled_logits(x_rH: jax.Array, w_NH: jax.Array, temperature: jax.Array, vocab: int, zero: jax.Array) -> jax.Array:
    """Logits / temperature of one row tile, fp32 [r, P], -inf behind the vocabulary."""
    padded = LEAVES * leaf_size(vocab)
    logits_rN = pin(chain_dot(x_rH, w_NH), zero)[:, :vocab]
    return jnp.pad(divide(logits_rN, temperature), ((0, 0), (0, padded - vocab)), constant_values=-jnp.inf)


def leaf_sums(scaled_rP: jax.Array, maximum_r: jax.Array, leaves: int, zero: jax.Array) -> jax.Array:
    """Sums of exponentials of `leaves` whole leaves side by side, fp32 [leaves, r]: a rank may hold some of the 8."""
    rows, padded = scaled_rP.shape
    steps = padded // leaves // LANES

    def leaf(number: jax.Array, lanes: jax.Array) -> jax.Array:
        # One slice of 64 at a time: exp fused into several slices would not be made vectors.
        def step(own: jax.Array, total_rl: jax.Array) -> jax.Array:
            start = (number * steps + own) * LANES
            scaled_rl = lax.dynamic_slice_in_dim(scaled_rP, start, LANES, axis=1)
            return total_rl + pin(jnp.exp(scaled_rl - maximum_r[:, None]), zero | trip_zero(own))

        total_rl = lax.fori_loop(0, steps + zero, step, jnp.zeros((rows, LANES), jnp.float32))
        return lax.dynamic_update_index_in_dim(lanes, total_rl, number, 0)

    lanes = jnp.zeros((leaves, rows, LANES), jnp.float32)
    return fold_lanes(lax.fori_loop(0, leaves + zero, leaf, lanes))


def log_sum(sums: jax.Array, zero: jax.Array) -> jax.Array:
    """The logarithm of the tree over all 8 leaves, [8, r] to [r]."""

    def logarithm(trip: jax.Array, _: jax.Array) -> jax.Array:
        own = pin(sums, zero | trip_zero(trip))
        return jnp.log(fold([own[leaf] for leaf in range(LEAVES)]))

    # A loop of one trip: the logarithm is compiled alone, for full rows and single targets alike.
    return lax.fori_loop(0, 1 + zero, logarithm, jnp.zeros_like(sums[0]))


def statistics(scaled_rP: jax.Array, zero: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The row's maximum and the logarithm of its sum of exponentials, both [r]."""
    maximum_r = jnp.max(scaled_rP, axis=1)
    return maximum_r, log_sum(leaf_sums(scaled_rP, maximum_r, LEAVES, zero), zero)


def log_prob_rows(x_TH: jax.Array, w_VH: jax.Array, temperature: jax.Array, *, vocab_size: int) -> tuple[jax.Array]:
    """The region's form for full rows."""
    if x_TH.shape[0] == 0:
        return (jnp.zeros((0, vocab_size), jnp.float32),)
    w = pad_columns(widen(w_VH))
    temperature = pin(temperature, hidden_zero(x_TH))

    def tile(zero: jax.Array, x_rH: jax.Array) -> tuple[jax.Array]:
        scaled_rP = scaled_logits(x_rH, w, temperature, vocab_size, zero)
        maximum_r, log_sum_r = statistics(scaled_rP, zero)
        return ((scaled_rP[:, :vocab_size] - maximum_r[:, None]) - log_sum_r[:, None],)

    (rows,) = map_row_tiles(tile, [x_TH], [((vocab_size,), jnp.float32)], row_tile(x_TH.shape[0]))
    return (rows,)


def token_log_probs(
    x_TH: jax.Array, w_VH: jax.Array, targets_T: jax.Array, temperature: jax.Array, *, vocab_size: int
) -> tuple[jax.Array]:
    """The region's form for one target a row."""
    if x_TH.shape[0] == 0:
        return (jnp.zeros((0,), jnp.float32),)
    w = pad_columns(widen(w_VH))
    temperature = pin(temperature, hidden_zero(x_TH))

    def tile(zero: jax.Array, x_rH: jax.Array, targets_r: jax.Array) -> tuple[jax.Array]:
        scaled_rP = scaled_logits(x_rH, w, temperature, vocab_size, zero)
        maximum_r, log_sum_r = statistics(scaled_rP, zero)
        chosen_r = jnp.take_along_axis(scaled_rP, targets_r[:, None], axis=1)[:, 0]
        chosen_r = jnp.where((targets_r >= 0) & (targets_r < vocab_size), chosen_r, jnp.nan)
        return ((chosen_r - maximum_r) - log_sum_r,)

    (chosen,) = map_row_tiles(tile, [x_TH, targets_T], [((), jnp.float32)], row_tile(x_TH.shape[0]))
    return (chosen,)
