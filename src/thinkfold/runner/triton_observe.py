"""Statistics of raw logits as one Triton kernel, a program a row; the twin of `observed.observe`.

The most likely tokens are not listed: the least of them is found (`triton_rows`), and their sum is what stands above
it. That makes three passes over a row, from the L2 cache after the first.
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinkfold.runner.observed import Seen
from thinkfold.runner.triton_rows import LOG2_E, STAGES, ends, kth_largest, launch_sizes, load


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
    best, _, least, maxima = ends(row, vocab, LANES)
    broken = tl.zeros((LANES,), tl.int32)
    total = tl.zeros((LANES,), tl.float32)
    tilted = tl.zeros((LANES,), tl.float32)
    for first in tl.range(0, vocab, LANES, num_stages=STAGES):
        ids, x = load(row, first, vocab, LANES)
        below = x - best
        weights = tl.exp2(below * LOG2_E)
        broken += ((ids < vocab) & (x - x != 0.0)).to(tl.int32)
        total += weights
        tilted += tl.where(weights > 0.0, weights * below, 0.0)
    mass = tl.sum(total, 0)
    spread = tl.log(mass)
    lowest, number, lack = kth_largest(row, vocab, maxima, least, best, num_top, LANES)
    mean = ((num_top - number).to(tl.float32) * (lowest - best) - lack) / num_top.to(tl.float32)
    tl.store(out + index, tl.sum(broken, 0).to(tl.float32))
    tl.store(out + num_rows + index, best)
    tl.store(out + 2 * num_rows + index, best + spread)
    tl.store(out + 3 * num_rows + index, spread - tl.sum(tilted, 0) / mass)
    tl.store(out + 4 * num_rows + index, spread - mean)
