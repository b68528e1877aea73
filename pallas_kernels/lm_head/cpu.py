"""Log-probabilities for XLA:CPU: full rows and single targets share one tile of logits and its statistics.

T tokens, H hidden, V vocabulary, P vocabulary padded to whole leaves; r a row tile, c a column tile.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.lm_head.spec import BLOCK, LEAVES
from pallas_kernels.loops import ROW_TILE, hidden_zero, isolated, map_row_tiles, pad_rows, pin, tile_count
from pallas_kernels.matmul.cpu import fold, tile_leaves
from pallas_kernels.matmul.spec import COLUMN_TILE


def leaf_size(vocab_size: int) -> int:
    """Columns of one of the 8 leaves: whole blocks, a function of the real vocabulary alone."""
    return tile_count(vocab_size, LEAVES * BLOCK) * BLOCK


def logits_tile(x_rH: jax.Array, w_VH: jax.Array, temperature: jax.Array, vocab: int, zero: jax.Array) -> jax.Array:
    """Logits / temperature of one row tile, fp32 [r, P], -inf behind the vocabulary."""
    width = max(LEAVES * leaf_size(vocab), COLUMN_TILE)
    w = pad_rows(w_VH[:vocab] if w_VH.shape[0] != vocab else w_VH, COLUMN_TILE)

    def column_tile(column: jax.Array, logits_rP: jax.Array) -> jax.Array:
        start = jnp.minimum(column * COLUMN_TILE, w.shape[0] - COLUMN_TILE)
        w_cH = lax.dynamic_slice_in_dim(w, start, COLUMN_TILE)
        (logits_rc,) = tile_leaves(x_rH, w_cH, 1)
        inside = start + jnp.arange(COLUMN_TILE) < vocab
        return lax.dynamic_update_slice(
            logits_rP, jnp.where(inside, logits_rc / temperature, -jnp.inf), (jnp.int32(0), start)
        )

    empty = jnp.full((x_rH.shape[0], width), -jnp.inf, jnp.float32)
    return lax.fori_loop(0, tile_count(vocab, COLUMN_TILE) + zero, column_tile, empty)


def tile_statistics(logits_rP: jax.Array, vocab: int, zero: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The row's maximum and the logarithm of its sum of exponentials, both [r]."""
    leaf = leaf_size(vocab)
    maximum_r = isolated(lambda logits: jnp.max(logits, axis=1), zero, logits_rP)

    def leaf_sum(number: jax.Array, sums: jax.Array) -> jax.Array:
        logits_rl = lax.dynamic_slice_in_dim(logits_rP, number * leaf, leaf, axis=1)
        exponentials = jnp.exp(logits_rl - maximum_r[:, None])
        return lax.dynamic_update_index_in_dim(sums, jnp.sum(exponentials, axis=1), number, 0)

    sums = lax.fori_loop(0, LEAVES + zero, leaf_sum, jnp.zeros((LEAVES, logits_rP.shape[0]), jnp.float32))
    return maximum_r, isolated(lambda sums: jnp.log(fold([sums[leaf] for leaf in range(LEAVES)])), zero, sums)


def log_prob_rows(x_TH: jax.Array, w_VH: jax.Array, temperature: jax.Array, *, vocab_size: int) -> tuple[jax.Array]:
    """The region's form for full rows."""
    if x_TH.shape[0] == 0:
        return (jnp.zeros((0, vocab_size), jnp.float32),)
    zero = hidden_zero(x_TH)
    temperature = pin(temperature, zero)

    def tile(x_rH: jax.Array) -> tuple[jax.Array]:
        logits_rP = logits_tile(x_rH, w_VH, temperature, vocab_size, zero)
        maximum_r, log_sum_r = tile_statistics(logits_rP, vocab_size, zero)
        return ((logits_rP[:, :vocab_size] - maximum_r[:, None]) - log_sum_r[:, None],)

    (rows,) = map_row_tiles(tile, [x_TH], [((vocab_size,), jnp.float32)], zero, ROW_TILE)
    return (rows,)


def token_log_probs(
    x_TH: jax.Array, w_VH: jax.Array, targets_T: jax.Array, temperature: jax.Array, *, vocab_size: int
) -> tuple[jax.Array]:
    """The region's form for one target a row."""
    if x_TH.shape[0] == 0:
        return (jnp.zeros((0,), jnp.float32),)
    zero = hidden_zero(x_TH)
    temperature = pin(temperature, zero)

    def tile(x_rH: jax.Array, targets_r: jax.Array) -> tuple[jax.Array]:
        logits_rP = logits_tile(x_rH, w_VH, temperature, vocab_size, zero)
        maximum_r, log_sum_r = tile_statistics(logits_rP, vocab_size, zero)
        chosen_r = jnp.take_along_axis(logits_rP, targets_r[:, None], axis=1)[:, 0]
        return ((chosen_r - maximum_r) - log_sum_r,)

    (chosen,) = map_row_tiles(tile, [x_TH, targets_T], [((), jnp.float32)], zero, ROW_TILE)
    return (chosen,)
