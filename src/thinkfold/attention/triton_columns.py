"""What the decode loops over codes of fewer than 16 bits share: entries are lines of a product, queries its columns.

A matrix unit multiplies 16 lines with 8 columns, and a group of queries seldom fills 16 lines. Codes are loaded two
bytes at a time, the least that a matrix unit takes transposed, and parted into planes: plane j of an entry holds
the j-th code of each two bytes, and meets the same channels of the queries. Products are of float16, which holds
every code. One warp a program needs no barriers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def peak_of(queries):
    """What queries `[M, LANES]` are divided by to lie between -1 and 1."""
    peak = tl.max(tl.max(tl.abs(queries.to(tl.float32)), 1), 0)
    return tl.where(peak > 0.0, peak, 1.0)


@triton.jit
def plane_of(q, lines, channels, used, peak, HEAD_DIM: tl.constexpr):
    """Channels `[U]` of the queries of `lines` over `peak`, as float16 `[U, M]`; 0 for those that are not there."""
    numbers, real = lines
    at = q + numbers[None, :] * HEAD_DIM + channels[:, None]
    plane = tl.load(at, mask=used[:, None] & real[None, :], other=0.0)
    return (plane.to(tl.float32) / peak).to(tl.float16)


@triton.jit
def blocks_at(table, first, start, high, PAGE_SIZE: tl.constexpr, PAGES: tl.constexpr):
    """The table's numbers of the pages that entries from `first` on lie in, 0 outside of `[start, high)`."""
    numbers = ()
    for page in tl.static_range(PAGES):
        here = first + page * PAGE_SIZE
        # Only the first page may begin before `start`.
        shown = (here + PAGE_SIZE > start) & (here < high)
        numbers = numbers + (tl.load(table + here.to(tl.uint32) // PAGE_SIZE, mask=shown, other=0),)
    return numbers


@triton.jit
def put_plane(plane, factor, lines, splits, out, channels, used, HEAD_DIM: tl.constexpr):
    """Store a plane `[U, M]` of what one split came to, times `factor` `[M]`."""
    numbers, real = lines
    split, num_splits = splits
    at = out + ((numbers * num_splits + split) * HEAD_DIM)[None, :] + channels[:, None]
    tl.store(at, plane * factor[None, :], mask=used[:, None] & real[None, :])


@triton.jit
def put_lse(largest, total, lines, splits, lse):
    """Store the log-sum-exp `[M]` of one split, to base 2."""
    numbers, real = lines
    split, num_splits = splits
    summed = tl.where(total == 0, -float("inf"), largest + tl.log2(total))
    tl.store(lse + numbers * num_splits + split, summed, mask=real)
