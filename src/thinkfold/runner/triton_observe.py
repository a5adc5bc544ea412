"""Statistics of raw logits as one Triton kernel, a program a row; the twin of `observed.observe`.

The most likely tokens are not listed: the least of them is found by bisection (`triton_rows`), and their sum is what
stands above it. That makes about a dozen passes over a row, from the L2 cache after the first.
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinkfold.runner.observed import Seen
from thinkfold.runner.triton_rows import LOG2_E, ends, launch_sizes, load, threshold


def observe(raw: Tensor, num_top: int) -> Seen:
    """As `observed.observe`."""
    num_rows, vocab_size = raw.shape
    raw = raw.contiguous()
    out = torch.empty(5, num_rows, dtype=torch.float32, device=raw.device)
    if num_rows:
        _observe[(num_rows,)](raw, out, vocab_size, num_rows, num_top, **launch_sizes(vocab_size))
    return Seen(out[0] == 0, *out[1:])


@triton.jit(do_not_specialize=["num_rows", "num_top"])
def _observe(raw, out, vocab, num_rows, num_top, LANES: tl.constexpr):
    """Program i looks at row i: logits that are no numbers, the best one, LSE, entropy and confidence."""
    index = tl.program_id(0)
    row = raw + index.to(tl.int64) * vocab
    best, _, least = ends(row, vocab, LANES)
    broken = tl.zeros((LANES,), tl.int32)
    total = tl.zeros((LANES,), tl.float32)
    tilted = tl.zeros((LANES,), tl.float32)
    for first in range(0, vocab, LANES):
        ids, x = load(row, first, vocab, LANES)
        below = x - best
        weights = tl.exp2(below * LOG2_E)
        broken += ((ids < vocab) & (x - x != 0.0)).to(tl.int32)
        total += weights
        tilted += tl.where(weights > 0.0, weights * below, 0.0)
    mass = tl.sum(total, 0)
    spread = tl.log(mass)
    lowest = threshold(row, vocab, least, best, 1.0, num_top.to(tl.float32), False, LANES)
    above = tl.zeros((LANES,), tl.float32)
    number = tl.zeros((LANES,), tl.int32)
    for first in range(0, vocab, LANES):
        ids, x = load(row, first, vocab, LANES)
        above += tl.where(x > lowest, x - best, 0.0)
        number += (x > lowest).to(tl.int32)
    missing = (num_top - tl.sum(number, 0)).to(tl.float32)
    mean = (tl.sum(above, 0) + missing * (lowest - best)) / num_top.to(tl.float32)
    tl.store(out + index, tl.sum(broken, 0).to(tl.float32))
    tl.store(out + num_rows + index, best)
    tl.store(out + 2 * num_rows + index, best + spread)
    tl.store(out + 3 * num_rows + index, spread - tl.sum(tilted, 0) / mass)
    tl.store(out + 4 * num_rows + index, spread - mean)
