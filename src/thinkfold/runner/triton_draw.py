"""The draw as one Triton kernel, a program a row: what survives the filters is found by thresholds, not by order.

The twin of `filters.draw`. The number of passes over a row depends on the row, and the host waits for none: three
where nothing is filtered, one or two more for top-k, ten to twenty for top-p. The floor is one pass, V · 4 bytes a row
over the bandwidth of memory. Tiles are summed in fp64, weights within a tile in fp32, so a probability is off by some
1e-7.
"""

# A kernel that only compiles for a GPU looks to a type checker as if it never returned.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinkfold.runner.triton_rows import LOG2_E, ends, kth_largest, launch_sizes, load, threshold, weight_of
from thinkfold.types import SamplingParams

_BELOW_ONE = tl.constexpr(1.0 - 2.0**-52)


def draw(logits: Tensor, knobs: Tensor, params: list[SamplingParams]) -> Tensor:
    """Token ids `[N]` of `logits` `[N, V]` by `knobs` `[5, N]` fp64, as `filters.draw` gives them.

    A row with temperature 0 gets its most likely token. `params` are not looked at: the knobs say it all.
    """
    num_rows, vocab_size = logits.shape
    logits, knobs = logits.contiguous(), knobs.contiguous()
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        _draw[(num_rows,)](logits, knobs, token_ids, vocab_size, num_rows, **launch_sizes(vocab_size))
    return token_ids


@triton.jit
def _beside(row, vocab, level, best, rate, LANES: tl.constexpr):
    """The mass of what is larger than `level`, and the number of its equals."""
    mass = tl.zeros((LANES,), tl.float32)
    equal = tl.zeros((LANES,), tl.int32)
    for first in range(0, vocab, LANES):
        _, x = load(row, first, vocab, LANES)
        mass += tl.where(x > level, weight_of(x, best, rate), 0.0)
        equal += (x == level).to(tl.int32)
    return tl.sum(mass, 0), tl.sum(equal, 0)


@triton.jit
def _heaviest(row, vocab, maxima, best, least, rate, top_p, top_k, LANES: tl.constexpr):
    """What top-k and then top-p keep: logits above the first number, and its equals up to an id, the second."""
    cut = least
    ties = vocab
    if top_k < vocab:
        cut, number, _ = kth_largest(row, vocab, maxima, least, best, top_k.to(tl.int32), LANES)
        ties = top_k.to(tl.int32) - number
    mass, equal = _beside(row, vocab, cut, best, rate, LANES)
    if top_p < 1.0:
        goal = ((mass + tl.minimum(ties, equal) * weight_of(cut, best, rate)) * top_p).to(tl.float32)
        bounded = cut
        cut = threshold(row, vocab, bounded, best, rate, goal, True, LANES)
        mass, equal = _beside(row, vocab, cut, best, rate, LANES)
        weight = weight_of(cut, best, rate)
        # Equals are kept while what comes before falls short of the goal; without weight it does not matter.
        wanted = tl.where(weight > 0.0, tl.ceil((goal - mass) / tl.where(weight > 0.0, weight, 1.0)), 1.0)
        wanted = tl.minimum(tl.maximum(wanted, 1.0), equal.to(tl.float32)).to(tl.int32)
        ties = tl.where(cut == bounded, tl.minimum(ties, wanted), wanted)
    last = vocab
    if ties < equal:
        seen = 0
        for first in range(0, vocab, LANES):
            ids, x = load(row, first, vocab, LANES)
            same = (x == cut).to(tl.int32)
            rank = seen + tl.cumsum(same, 0)
            last = tl.minimum(last, tl.min(tl.where((same > 0) & (rank == ties), ids, vocab), 0))
            seen += tl.sum(same, 0)
    return cut, last


@triton.jit
def _kept(row, first, vocab, best, rate, cut, last, min_p, LANES: tl.constexpr):
    """Ids of a tile and the weights that are left after all filters."""
    ids, x = load(row, first, vocab, LANES)
    weights = weight_of(x, best, rate)
    kept = ((x > cut) | ((x == cut) & (ids <= last))) & (weights >= min_p)
    return ids, tl.where(kept, weights, 0.0)


@triton.jit
def _drawn(row, vocab, maxima, best, least, temperature, u, top_p, min_p, top_k, LANES: tl.constexpr):
    """A token by inverse CDF over what the filters keep, in id order."""
    rate = (1.0 / temperature * LOG2_E).to(tl.float32)
    cut = least
    last = vocab
    if (top_k < vocab) | (top_p < 1.0):
        cut, last = _heaviest(row, vocab, maxima, best, least, rate, top_p, top_k, LANES)
    smallest = min_p.to(tl.float32)
    total = tl.full((), 0.0, tl.float64)
    for first in range(0, vocab, LANES):
        _, weights = _kept(row, first, vocab, best, rate, cut, last, smallest, LANES)
        total += tl.sum(weights, 0)
    target = tl.minimum(u * total, total * _BELOW_ONE)
    first = 0
    before = tl.full((), 0.0, tl.float64)
    _, weights = _kept(row, first, vocab, best, rate, cut, last, smallest, LANES)
    mass = tl.sum(weights, 0)
    # The sums are those of above, bit by bit, so a tile that holds the target is found before the last one is passed.
    while (before + mass <= target) & (first + LANES < vocab):
        before += mass
        first += LANES
        _, weights = _kept(row, first, vocab, best, rate, cut, last, smallest, LANES)
        mass = tl.sum(weights, 0)
    ids, weights = _kept(row, first, vocab, best, rate, cut, last, smallest, LANES)
    passed = (tl.cumsum(weights, 0) > (target - before).to(tl.float32)) & (weights > 0.0)
    end = tl.max(tl.where(weights > 0.0, ids, 0), 0)  # where the tile's cumulated weights fall short of their sum
    return tl.minimum(tl.min(tl.where(passed, ids, vocab), 0), end)


@triton.jit(do_not_specialize=["num_rows"])
def _draw(logits, knobs, token_ids, vocab, num_rows, LANES: tl.constexpr):
    """Program i draws row i of `logits` `[num_rows, vocab]`."""
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * vocab
    temperature = tl.load(knobs + index)
    u = tl.load(knobs + num_rows + index)
    top_p = tl.load(knobs + 2 * num_rows + index)
    min_p = tl.load(knobs + 3 * num_rows + index)
    top_k = tl.load(knobs + 4 * num_rows + index)
    best, chosen, least, maxima = ends(row, vocab, LANES)
    if temperature > 0.0:
        chosen = _drawn(row, vocab, maxima, best, least, temperature, u, top_p, min_p, top_k, LANES)
    tl.store(token_ids + index, tl.minimum(chosen, vocab - 1).to(tl.int64))  # of a row that is not finite
