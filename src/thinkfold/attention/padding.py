"""How lengths and rows are rounded up so that padding changes no bit of a sum, and what hides it.

BLAS libraries choose the order of additions by the shape of a product, and differently on each kind of processor: what
they do on this one is measured, once a process.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# Keys are visited in chunks of this many entries counted from entry 0, whatever the batch holds.
KV_CHUNK = 512
# Lengths are multiples of this, so that no vector loop of a softmax ends in a scalar tail. Pages divide it.
LENGTH_ALIGN = 64
# Sums run in blocks of this many entries; a length between one and two blocks is halved instead (seen: MKL with AVX2,
# MKL with AVX-512, no such thing).
SUM_BLOCKS = (KV_CHUNK, 256, 192)
# The products of a row are added in another order when there are fewer rows than one of these.
ROW_MULTIPLES = (1, 2, 4, 8, 16, 32)
# The most that `padded` adds to a length that is rounded up already.
MAX_EXTRA = 256 - LENGTH_ALIGN

PROBE_DIM = 64
PROBE_ROWS = 64


def rounded_up(length: int) -> int:
    """`length` in whole vector loops and whole pages."""
    return -(-length // LENGTH_ALIGN) * LENGTH_ALIGN


def padded(length: int) -> int:
    """`length` rounded up so that zeros change no bit of the sums over it."""
    return _padded(rounded_up(length), sum_block())


def first_entry(query: int, window: int) -> int:
    """The chunk border at or before the oldest entry that a query at this index may see."""
    if window <= 0:
        return 0
    return max(0, query - window + 1) // KV_CHUNK * KV_CHUNK


def additive_mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """-inf where `hidden`, else 0."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)


@cache
def sum_block() -> int:
    """The block of sums over entries on this machine, one of `SUM_BLOCKS`; with none a warning says what it costs."""
    lengths = range(LENGTH_ALIGN, KV_CHUNK + 1, LENGTH_ALIGN)
    whole = [_attend(PROBE_DIM, ROW_MULTIPLES[-1], KV_CHUNK, length) for length in lengths]
    for block in SUM_BLOCKS:
        short = [_attend(PROBE_DIM, ROW_MULTIPLES[-1], _padded(length, block), length) for length in lengths]
        if all(torch.equal(a, b) for a, b in zip(short, whole, strict=True)):
            return block
    logger.warning("sums of this machine change with their length: equal bits are not promised")
    return KV_CHUNK


@cache
def row_multiple(head_dim: int) -> int:
    """The number of rows, of which every multiple gives each row the same bits; with none a warning says so."""
    whole = _attend(head_dim, PROBE_ROWS, KV_CHUNK, KV_CHUNK)
    for multiple in ROW_MULTIPLES:
        counts = range(multiple, PROBE_ROWS, multiple)
        if all(torch.equal(_attend(head_dim, n, KV_CHUNK, KV_CHUNK), whole[:n]) for n in counts):
            return multiple
    logger.warning("products of this machine change with the batch: equal bits are not promised")
    return 1


def _padded(length: int, block: int) -> int:
    rest = length % KV_CHUNK
    return length + min(2 * block, KV_CHUNK) - rest if block < rest < 2 * block else length


@torch.inference_mode()
def _attend(head_dim: int, rows: int, length: int, seen: int) -> Tensor:
    """The first `rows` of a fixed attention `[rows, head_dim]` over `length` entries of which `seen` are seen."""
    source = torch.Generator().manual_seed(0)
    query = torch.randn(1, 1, PROBE_ROWS, head_dim, generator=source)[:, :, :rows]
    keys, values = torch.randn(2, 1, 1, KV_CHUNK, head_dim, generator=source)[..., :length, :]
    mask = additive_mask(torch.arange(length) >= seen, torch.float32).expand(1, 1, rows, -1)
    flash = torch._scaled_dot_product_flash_attention_for_cpu  # type: ignore[reportPrivateImportUsage]
    return flash(query, keys, values, 0.0, False, attn_mask=mask, scale=head_dim**-0.5)[0][0, 0]
