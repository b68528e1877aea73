"""Each kernel of the regions that have several, and of packed attention, as plain torch over the same buffers.

Sums are float64 before they are rounded, so that a row's bits depend on the row alone. Nothing here says how a card
rounds: it is enough to see which gate notices a fault in one kernel.
"""

import torch
from bundle_samples import unlowered_steps

from bridge.gates.card import Card
from pallas_kernels.lm_head.hopper_sums import BLOCK, LEAVES
from pallas_kernels.matmul.hopper_weights import TAIL_ROWS, tail_start
from pallas_kernels.seal import SealedProgram
from pallas_kernels.store import Bundle

MINUS_INFINITY = float("-inf")


def step_card(bundle: Bundle) -> Card:
    """A card whose launches are these forms, one kernel after the other."""

    def seal(call):
        return unlowered_steps(call.region, call.types, dict(call.parameters))

    return Card(bundle, torch.device("cpu"), run_steps, seal)


def run_steps(program: SealedProgram):
    """The launch of a program: its kernels in their order."""

    def run(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = dict(zip(program.operands, operands, strict=True))
        for module in program.modules:
            form = FORMS[program.region, module.name]
            results = form(program, *(values[name] for name in module.operands))
            for name, result in zip(module.results, results, strict=True):
                assert tuple(result.shape) == program.buffers[name].shape
                assert str(result.dtype).removeprefix("torch.") == program.buffers[name].dtype
                values[name] = result
        return tuple(values[name] for name in program.results)

    return run


def _tail(program, w):
    rows = w[tail_start(len(w)) :]
    return (torch.cat([rows, rows.new_zeros(TAIL_ROWS - len(rows), w.shape[1])]),)


def _products(x, parts):
    """Logits over whole blocks of the vocabulary, a row at a time."""
    w, *tail = parts
    weights = torch.cat([w[: tail_start(len(w))], *tail]) if tail else w
    weights = weights[: -(-len(weights) // BLOCK) * BLOCK].double()
    return torch.stack([weights @ row for row in x.double()]).float()


def _logits(program, x, *parts):
    V = program.buffers["logits"].shape[1]
    return (torch.nn.functional.pad(_products(x, parts), (0, TAIL_ROWS))[:, :V].contiguous(),)


def _blocks(program, logits, temperature):
    padded = program.buffers["sums"].shape[-1]
    scaled = torch.nn.functional.pad(logits, (0, 0, 0, padded - len(logits))) / temperature
    return (torch.stack(_sums(program, scaled), 1),)


def _sums(program, scaled):
    """Maximum and sum of every block, [blocks, rows] each."""
    inside = torch.arange(scaled.shape[1]) < dict(program.constants)["vocab_size"]
    blocks = scaled.where(inside, MINUS_INFINITY).unflatten(1, (-1, BLOCK)).transpose(0, 1)
    highest = blocks.amax(-1)
    return [highest, (blocks - highest[..., None]).double().exp().sum(-1).float()]


def _fused(program, x, *others):
    *parts, temperature, targets = others
    blocks = program.buffers["sums"].shape[0]
    scaled = torch.nn.functional.pad(_products(x, parts), (0, TAIL_ROWS))[:, : blocks * BLOCK] / temperature
    here = torch.arange(scaled.shape[1]) == targets[:, None]
    found = scaled.where(here, MINUS_INFINITY).unflatten(1, (-1, BLOCK)).amax(-1).T
    return (torch.stack([*_sums(program, scaled), found], 1),)


def _leaves(program, sums):
    blocks, kinds, padded = sums.shape
    each = -(-blocks // LEAVES)
    result = torch.full((LEAVES, kinds, padded), MINUS_INFINITY)
    result[:, 1] = 0
    for leaf, part in enumerate(sums.split(each)):
        result[leaf] = part.amax(0)
        result[leaf, 1] = _total(part)
    return (result,)


def _total(parts):
    """Sums relative to the highest maximum."""
    highest = parts[:, 0].amax(0)
    return (parts[:, 1].double() * (parts[:, 0] - highest).double().exp()).sum(0).float()


def _constants(program, leaf_sums):
    return (torch.stack([leaf_sums[:, 0].amax(0), _total(leaf_sums).double().log().float()]),)


def _rows(program, logits, temperature, constants):
    T, V = program.buffers["log_probs"].shape
    maximum, log_sum = constants[:, :T, None]
    return (((logits / temperature)[:, :V] - maximum - log_sum).contiguous(),)


def _token_rows(program, leaf_sums):
    ((maximum, log_sum),) = _constants(program, leaf_sums)
    return (leaf_sums[:, 2].amax(0) - maximum - log_sum,)


def _packed(program, q, k, v, positions, segments):
    out = torch.zeros_like(q)
    for row in (segments >= 0).nonzero()[:, 0].tolist():
        keys = slice(row - int(positions[row]), row + 1)
        out[row] = _merged(_split_states(program, q[row], k[keys], v[keys]))
    return (out,)


def _single(owners):
    """Whether each token is the only one of its request."""
    return (owners >= 0) & ((owners[:, None] == owners).sum(1) == 1)


def _paged_states(program, operands, wanted):
    q, k_cache, v_cache, positions, owners, table = operands[:6]
    for row in wanted.nonzero()[:, 0].tolist():
        pages, keys = table[owners[row]].long(), slice(0, int(positions[row]) + 1)
        k, v = (cache[pages].flatten(0, 1)[keys] for cache in (k_cache, v_cache))
        yield row, _split_states(program, q[row], k, v)


def _tiles(program, *operands):
    owners, out = operands[4], torch.zeros_like(operands[0])
    for row, states in _paged_states(program, operands, (owners >= 0) & ~_single(owners)):
        out[row] = _merged(states)
    return (out,)


def _decode(program, *operands):
    if len(operands) > 6:
        out = operands[6].clone()
    else:
        # The program's first kernel.
        out = torch.zeros_like(operands[0])
        out[(operands[4] >= 0) & ~_single(operands[4])] = float("nan")
    if "acc" not in program.buffers:
        for row, states in _paged_states(program, operands, _single(operands[4])):
            out[row] = _merged(states)
        return (out,)
    acc, stats = (torch.full(program.buffers[name].shape, float("nan")) for name in ("acc", "stats"))
    merges = torch.zeros(program.buffers["merges"].shape, dtype=torch.int32)
    _, H, D = operands[0].shape
    K = operands[1].shape[2]
    by_part = acc.view(-1, H, acc.shape[1]), stats.view(-1, K, *stats.shape[1:])
    part = 0
    for row, states in _paged_states(program, operands, _single(operands[4])):
        if len(states) == 1:
            out[row] = _merged(states)
            part += 1
            continue
        merges[0, 0] += 1
        merges[merges[0, 0]] = torch.tensor([row, part, len(states)])
        for highest, total, values in states:
            by_part[0][part, :, :D] = values
            # Query heads of a key head are the first rows of its statistics.
            by_part[1][part, :, 0, : H // K] = highest.view(K, -1)
            by_part[1][part, :, 1, : H // K] = total.view(K, -1)
            part += 1
    return out, acc, stats, merges


def _combine(program, acc, stats, merges, out):
    _, H, D = out.shape
    K = H * len(stats) // len(acc)
    acc, stats = acc.view(-1, H, acc.shape[1]), stats.view(-1, K, *stats.shape[1:])
    out = out.clone()
    for row, first_part, used in merges[1 : 1 + merges[0, 0]].tolist():
        parts = range(first_part, first_part + used)
        states = [(*(stats[p, :, kind, : H // K].flatten() for kind in (0, 1)), acc[p, :, :D]) for p in parts]
        out[row] = _merged(states)
    return (out,)


def _split_states(program, q, k, v):
    """(maximum [H], sum [H], values [H, D]) of every split of one token's keys [n, K, D], in float32."""
    constants, G = dict(program.constants), len(q) // k.shape[1]
    found = []
    for keys, values in zip(k.split(constants["split"]), v.split(constants["split"]), strict=True):
        keys, values = (part.double().repeat_interleave(G, 1) for part in (keys, values))
        scores = (q.double() * keys).sum(-1) * constants["scale"]
        weights = (scores - scores.amax(0)).exp()
        values = (weights[..., None] * values).sum(0)
        found.append((scores.amax(0).float(), weights.sum(0).float(), values.float()))
    return found


def _merged(states):
    highest = torch.stack([state[0] for state in states]).amax(0)
    factors = [(state[0] - highest).double().exp() for state in states]
    total = sum(factor * state[1] for factor, state in zip(factors, states, strict=True))
    values = sum(factor[:, None] * state[2] for factor, state in zip(factors, states, strict=True))
    return (values / total[:, None]).bfloat16()


def _both_products(program, x, w):
    """Gate and up side by side, a row at a time."""
    return (torch.stack([w.double() @ row for row in x.double()]).bfloat16(),)


def _activated(program, products):
    gate, up = products.float().chunk(2, 1)
    return (((gate / (1 + (-gate).exp())).bfloat16().float() * up).bfloat16(),)


def _gated(program, x, w):
    return _activated(program, *_both_products(program, x, w))


FORMS = {
    ("gated_matmul", "matmul"): _both_products,
    ("gated_matmul", "swiglu"): _activated,
    ("gated_matmul", "gated_matmul"): _gated,
    ("log_prob_rows", "tail"): _tail,
    ("log_prob_rows", "logits"): _logits,
    ("log_prob_rows", "blocks"): _blocks,
    ("log_prob_rows", "leaves"): _leaves,
    ("log_prob_rows", "constants"): _constants,
    ("log_prob_rows", "rows"): _rows,
    ("token_log_probs", "tail"): _tail,
    ("token_log_probs", "logits"): _fused,
    ("token_log_probs", "leaves"): _leaves,
    ("token_log_probs", "rows"): _token_rows,
    ("attention", "attention"): _packed,
    ("paged_attention", "tiles"): _tiles,
    ("paged_attention", "decode"): _decode,
    ("paged_attention", "combine"): _combine,
    ("paged_decode_attention", "decode"): _decode,
    ("paged_decode_attention", "combine"): _combine,
}
