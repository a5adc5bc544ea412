"""Statistics of raw logits in three Triton launches; the twin of `observed.observe`.

A row is cut into tiles, a program each, so that a few rows occupy a whole GPU. The most likely tokens are not listed:
each tile gives the largest of its lanes, the k-th largest of all those is a bound, and what stands above the bound is
counted. Only where two of the most likely tokens share a lane is a row searched (`triton_rows`).
"""

# A kernel that only compiles for a GPU looks to a type checker as if it never returned.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinkfold.runner.observed import Seen
from thinkfold.runner.triton_rows import LOG2_E, above, bound, launch_sizes, load, threshold

# What a tile tells: its largest and smallest number, what is none, sum of weights, that of weights times logits, and
# of what stands above the bound the number, what it lacks to the best in all, and the smallest.
PARTS = 8
_PARTS = tl.constexpr(PARTS)


def observe(raw: Tensor, num_top: int) -> Seen:
    """As `observed.observe`."""
    num_rows, vocab_size = raw.shape
    raw = raw.contiguous()
    sizes: dict[str, Any] = launch_sizes(vocab_size)
    tiles = -(-vocab_size // sizes["LANES"])
    crowd = max(1, min(sizes["LANES"], triton.next_power_of_2(max(512 // tiles, num_top // tiles + 1))))
    parts = torch.empty(num_rows, PARTS, tiles, dtype=torch.float32, device=raw.device)
    largest = torch.empty(num_rows, tiles * crowd, dtype=torch.float32, device=raw.device)
    bounds = torch.empty(num_rows, dtype=torch.float32, device=raw.device)
    out = torch.empty(5, num_rows, dtype=torch.float32, device=raw.device)
    if num_rows:
        sizes |= {"TILES": triton.next_power_of_2(tiles), "CROWD": crowd}
        _look[(num_rows, tiles)](raw, parts, largest, vocab_size, **sizes)
        _count[(num_rows, tiles)](raw, parts, largest, bounds, vocab_size, num_top, **sizes)
        _tell[(num_rows,)](raw, parts, bounds, out, vocab_size, num_rows, tiles, num_top, **sizes)
    return Seen(out[0] == 0, *out[1:])


@triton.jit
def _look(raw, parts, largest, vocab, LANES: tl.constexpr, TILES: tl.constexpr, CROWD: tl.constexpr):
    """A tile of a row by itself: its extremes, its sums, and the largest of each of `CROWD` groups of lanes."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    tiles = tl.num_programs(1)
    ids, x = load(raw + row * vocab, tile * LANES, vocab, LANES)
    best = tl.max(x, 0)
    weights = tl.exp2((x - tl.where(best == -float("inf"), 0.0, best)) * LOG2_E)
    broken = (ids < vocab) & (x - x != 0.0)
    at = parts + row * (_PARTS * tiles) + tile
    tl.store(at, best)
    tl.store(at + tiles, tl.min(tl.where(x > -float("inf"), x, float("inf")), 0))
    tl.store(at + 2 * tiles, tl.sum(broken.to(tl.int32), 0).to(tl.float32))
    tl.store(at + 3 * tiles, tl.sum(weights, 0))
    tl.store(at + 4 * tiles, tl.sum(tl.where(weights > 0.0, weights * (x - best), 0.0), 0))
    groups = tl.max(tl.reshape(x, (CROWD, LANES // CROWD)), 1)
    tl.store(largest + (row * tiles + tile) * CROWD + tl.arange(0, CROWD), groups)


@triton.jit
def _part(parts, row, tiles, number, empty, TILES: tl.constexpr):
    """What all tiles of a row have told under `number`."""
    tile = tl.arange(0, TILES)
    return tl.load(parts + (row * _PARTS + number) * tiles + tile, mask=tile < tiles, other=empty)


@triton.jit(do_not_specialize=["num_top"])
def _count(raw, parts, largest, bounds, vocab, num_top, LANES: tl.constexpr, TILES: tl.constexpr, CROWD: tl.constexpr):
    """The bound of a row, which each of its tiles finds by itself, and what stands above it in the tile."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    tiles = tl.num_programs(1)
    best = tl.max(_part(parts, row, tiles, 0, -float("inf"), TILES), 0)
    least = tl.min(_part(parts, row, tiles, 1, float("inf"), TILES), 0)
    members = tl.arange(0, TILES * CROWD)
    crowd = tl.load(largest + row * tiles * CROWD + members, mask=members < tiles * CROWD, other=-float("inf"))
    low = bound(crowd, least, best, num_top)
    _, x = load(raw + row * vocab, tile * LANES, vocab, LANES)
    inside = x > low
    at = parts + (row * _PARTS + 5) * tiles + tile
    tl.store(at, tl.sum(inside.to(tl.int32), 0).to(tl.float32))
    tl.store(at + tiles, tl.sum(tl.where(inside, best - x, 0.0), 0))
    tl.store(at + 2 * tiles, tl.min(tl.where(inside, x, float("inf")), 0))
    tl.store(bounds + row, low)


@triton.jit(do_not_specialize=["num_rows", "tiles", "num_top"])
def _tell(
    raw,
    parts,
    bounds,
    out,
    vocab,
    num_rows,
    tiles,
    num_top,
    LANES: tl.constexpr,
    TILES: tl.constexpr,
    CROWD: tl.constexpr,
):
    """What all tiles of a row say together: logits that are no numbers, the best one, LSE, entropy, confidence."""
    row = tl.program_id(0).to(tl.int64)
    bests = _part(parts, row, tiles, 0, -float("inf"), TILES)
    best = tl.max(bests, 0)
    fade = tl.exp2((bests - best) * LOG2_E)
    sums = _part(parts, row, tiles, 3, 0.0, TILES) * fade
    tilted = _part(parts, row, tiles, 4, 0.0, TILES) * fade + tl.where(sums > 0.0, sums * (bests - best), 0.0)
    mass = tl.sum(sums, 0)
    spread = tl.log(mass)
    low = tl.load(bounds + row)
    number = tl.sum(_part(parts, row, tiles, 5, 0.0, TILES), 0)
    lack = tl.sum(_part(parts, row, tiles, 6, 0.0, TILES), 0)
    top = num_top.to(tl.float32)
    if number >= top:
        least = tl.min(_part(parts, row, tiles, 7, float("inf"), TILES), 0)
        low = threshold(raw + row * vocab, vocab, least, best, 1.0, top, False, LANES)
        count, lack, _ = above(raw + row * vocab, vocab, low, best, LANES)
        number = count.to(tl.float32)
    mean = ((top - number) * (low - best) - lack) / top
    tl.store(out + row, tl.sum(_part(parts, row, tiles, 2, 0.0, TILES), 0))
    tl.store(out + num_rows + row, best)
    tl.store(out + 2 * num_rows + row, best + spread)
    tl.store(out + 3 * num_rows + row, spread - tl.sum(tilted, 0) / mass)
    tl.store(out + 4 * num_rows + row, spread - mean)
