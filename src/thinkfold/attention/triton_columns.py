"""What the decode loops over codes of fewer than 16 bits share: entries are lines of a product, queries its columns.

A matrix unit multiplies 16 lines with 8 columns, and a group of queries seldom fills 16 lines. Codes are loaded two
bytes at a time, the least that a matrix unit takes transposed, and parted into planes: plane j of an entry holds the
j-th code of each two bytes, and meets the queries' plane of the same channels. Planes are float16, which holds every
code. Programs have one warp, which waits for no other.
"""

# A kernel that only compiles for a GPU looks to a type checker as if it never returned.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def queries_of(lines, channels, used, HEAD_DIM: tl.constexpr):
    """Planes `[U, M]` of the queries of `lines` in float16 between -1 and 1, and what they were divided by.

    `lines` are all queries, those of the tile `[M, LANES]`, their numbers and which exist `[M]`; `channels` those of
    each plane `[U]`.
    """
    q, queries, numbers, real = lines
    peak = tl.max(tl.max(tl.abs(queries.to(tl.float32)), 1), 0)
    peak = tl.where(peak > 0.0, peak, 1.0)
    planes = ()
    for i in tl.static_range(len(channels)):
        at = q + numbers[None, :] * HEAD_DIM + channels[i][:, None]
        plane = tl.load(at, mask=used[:, None] & real[None, :], other=0.0)
        planes += ((plane.to(tl.float32) / peak).to(tl.float16),)
    return planes, peak


@triton.jit
def numbers_at(table, first, start, high, PAGE_SIZE: tl.constexpr, PAGES: tl.constexpr):
    """The table's numbers of the pages of entries from `first` on, 0 outside of `[start, high)`."""
    numbers = ()
    for i in tl.static_range(PAGES):
        here = first + i * PAGE_SIZE
        # Only the first page may begin before `start`.
        shown = (here + PAGE_SIZE > start) & (here < high)
        numbers += (tl.load(table + here.to(tl.uint32) // PAGE_SIZE, mask=shown, other=0),)
    return numbers


@triton.jit
def places_of(first, PAGE_SIZE: tl.constexpr, N: tl.constexpr):
    """Places in their pages of `N` entries from `first` on: constants, unless they are part of a page."""
    places = tl.arange(0, N) % PAGE_SIZE
    if PAGE_SIZE > N:
        places += first % PAGE_SIZE
    return places


@triton.jit
def starts_of(starts, SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr, N: tl.constexpr):
    """`SIZE` times its page's of `starts`, for each of `N` entries."""
    page = tl.arange(0, N) // PAGE_SIZE
    spread = tl.zeros((N,), tl.int64) + starts[0] * SIZE
    for i in tl.static_range(1, len(starts)):
        spread = tl.where(page == i, starts[i] * SIZE, spread)
    return spread


@triton.jit
def products(planes, queries):
    """The sum of the products of planes `[N, U]` and `[U, M]`."""
    scores = tl.dot(planes[0], queries[0])
    for i in tl.static_range(1, len(planes)):
        scores = tl.dot(planes[i], queries[i], scores)
    return scores


@triton.jit
def column_step(scores, largest, sums):
    """`triton_softmax.softmax_step` of scores `[N, M]`; `sums` `[N, M]` are of weights, by place in the tile."""
    new = tl.maximum(largest, tl.max(scores, 0))
    safe = tl.where(new == -float("inf"), 0.0, new)  # a query that has seen nothing yet
    weights = tl.exp2(scores - safe[None, :])
    fade = tl.exp2(largest - safe)
    return weights, new, sums * fade[None, :] + weights, fade


@triton.jit
def empty_sums(planes: tl.constexpr, U: tl.constexpr, M: tl.constexpr):
    """Zeros `[U, M]` for each plane."""
    sums = ()
    for _ in tl.static_range(planes):
        sums += (tl.zeros((U, M), tl.float32),)
    return sums


@triton.jit
def add_planes(sums, fade, planes, weights):
    """`sums` `[U, M]` times `fade` `[M]`, and planes `[U, N]` times weights `[N, M]`."""
    added = ()
    for i in tl.static_range(len(sums)):
        added += (tl.dot(planes[i], weights, sums[i] * fade[None, :]),)
    return added


@triton.jit
def put_columns(values, unit, largest, sums, lines, target, channels, used, HEAD_DIM: tl.constexpr):
    """Store what a split came to: the weighted sums of `values` in `unit`, by plane, and their LSE.

    `target` is the number of the split and that of all, and where out and LSE go.
    """
    _, _, numbers, real = lines
    split, num_splits, out, lse = target
    total = tl.sum(sums, 0)
    at = numbers * num_splits + split
    tl.store(lse + at, tl.where(total == 0, -float("inf"), largest + tl.log2(total)), mask=real)
    shown = used[:, None] & (real & (total != 0))[None, :]
    for i in tl.static_range(len(channels)):
        places = out + at[None, :] * HEAD_DIM + channels[i][:, None]
        tl.store(places, values[i] * (unit / total)[None, :], mask=shown)
