"""How lengths and rows are rounded up so that padding changes no bit of a sum, and what hides it."""

from __future__ import annotations

import torch
from torch import Tensor

# Keys are visited in chunks of this many entries counted from entry 0, whatever the batch holds.
KV_CHUNK = 512
# Lengths are multiples of this, so that no vector loop of a softmax ends in a scalar tail. Pages divide it.
LENGTH_ALIGN = 64
# BLAS sums in blocks of 192; a length between one and two blocks is halved instead (measured, MKL).
SUM_BLOCK = 192
# The most that `padded` adds to a length that is rounded up already.
MAX_EXTRA = SUM_BLOCK - LENGTH_ALIGN
# BLAS adds the products of a row in another order when a product has fewer rows than this.
MIN_ROWS = 4


def rounded_up(length: int) -> int:
    """`length` in whole vector loops and whole pages."""
    return -(-length // LENGTH_ALIGN) * LENGTH_ALIGN


def padded(length: int) -> int:
    """`length` rounded up so that zeros change no bit of the sums over it."""
    length = rounded_up(length)
    short = 2 * SUM_BLOCK - length % KV_CHUNK
    return length + short if 0 < short < SUM_BLOCK else length


def first_entry(query: int, window: int) -> int:
    """The chunk border at or before the oldest entry that a query at this index may see."""
    if window <= 0:
        return 0
    return max(0, query - window + 1) // KV_CHUNK * KV_CHUNK


def additive_mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """-inf where `hidden`, else 0."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
