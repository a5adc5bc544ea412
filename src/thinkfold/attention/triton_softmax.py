"""The loop over the entries of one split: online softmax of a tile of queries over paged keys and values."""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def softmax_step(scores, largest, total):
    """One step of the online softmax to base 2; a NaN score makes its row NaN for good."""
    new = tl.maximum(largest, tl.max(scores, 1))
    safe = tl.where(new == -float("inf"), 0.0, new)  # a row that has seen nothing yet
    weights = tl.exp2(scores - safe[:, None])
    fade = tl.exp2(largest - safe)
    return weights, new, total * fade + tl.sum(weights, 1), fade


@triton.jit
def _in_float16(queries):
    """Queries as float16 between -1 and 1, and what each was divided by: fp8 becomes float16 in one instruction."""
    wide = queries.to(tl.float32)
    peak = tl.max(tl.abs(wide), 1)
    peak = tl.where(peak > 0.0, peak, 1.0)
    return (wide / peak[:, None]).to(tl.float16), peak


@triton.jit
def _add_pairs(weights, scales, rows, valid, shown, kv, even, odd, HEAD_DIM: tl.constexpr, SUMMARY: tl.constexpr):
    """Add `weights @ values` of fp8 to the sums of even lanes and of odd ones.

    Two codes are loaded as one integer, since 16 bits are the least that matrix units take transposed.
    """
    scale = tl.load(scales + rows, mask=valid, other=0.0).to(tl.float32)
    if SUMMARY:
        scale = tl.where(shown, scale, 0.0)
    most = tl.max(scale, 0)  # float16 does not hold weights times scales of any size
    most = tl.where(most > 0.0, most, 1.0)
    weights = (weights * (scale / most)[None, :]).to(tl.float16)
    lanes = tl.arange(0, even.shape[1])
    pairs = kv.to(tl.pointer_type(tl.uint16), bitcast=True) + rows[:, None] * (HEAD_DIM // 2) + lanes[None, :]
    codes = tl.load(pairs, mask=valid[:, None] & (lanes[None, :] < HEAD_DIM // 2), other=0)
    if SUMMARY:
        codes = tl.where(shown[:, None], codes, 0)
    first = (codes & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    second = (codes >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return even + tl.dot(weights, first) * most, odd + tl.dot(weights, second) * most


@triton.jit
def _scores(
    queries,
    factor,
    rows,
    place,
    valid,
    kv,
    kv_scales,
    bias,
    with_bias,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    FP8: tl.constexpr,
    SUMMARY: tl.constexpr,
):
    """Queries times the keys of `rows` and `factor` `[M]`, to base 2, and which entries are not hidden by their β."""
    dims = tl.arange(0, LANES)
    loaded = valid[None, :] & (dims[:, None] < HEAD_DIM)
    keys = tl.load(kv + rows[None, :] * HEAD_DIM + dims[:, None], mask=loaded, other=0.0)
    scores = tl.dot(queries, keys.to(queries.dtype), input_precision="ieee") * factor[:, None]
    if FP8:
        scores *= tl.load(kv_scales + rows, mask=valid, other=0.0).to(tl.float32)[None, :]
    shown = valid
    if SUMMARY:
        beta = tl.load(bias + place, mask=valid & (with_bias > 0), other=0.0)
        scores += beta[None, :] * _LOG2_E
        # No load waits for this one: hidden entries are loaded, and left out afterwards.
        shown = valid & (beta != -float("inf"))
    return scores, shown


@triton.jit
def add_values(
    weights,
    kv_scales,
    rows,
    valid,
    shown,
    kv,
    acc,
    query_dtype: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FP8: tl.constexpr,
    SUMMARY: tl.constexpr,
):
    """`acc + weights @ values` of `rows`, in the dtype of queries."""
    dims = tl.arange(0, acc.shape[1])
    loaded = valid[:, None] & (dims[None, :] < HEAD_DIM)
    values = tl.load(kv + rows[:, None] * HEAD_DIM + dims[None, :], mask=loaded, other=0.0)
    if FP8:
        scales = tl.load(kv_scales + rows, mask=valid, other=0.0).to(tl.float32)
        weights *= tl.where(shown, scales, 0.0)[None, :]
    # bfloat16 holds every fp8 code, and weights times scales that are too small for float16.
    values = values.to(tl.bfloat16 if FP8 and query_dtype == tl.float16 else query_dtype)
    if SUMMARY:
        values = tl.where(shown[:, None], values, 0.0)
    return tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")


@triton.jit
def _blocks(table, first, start, high, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The table's numbers for entries from `first` on, 0 outside of `[start, high)`."""
    entries = first + tl.arange(0, BLOCK_N)
    # Division of what may be negative takes several instructions.
    return tl.load(table + entries.to(tl.uint32) // PAGE_SIZE, mask=(entries >= start) & (entries < high), other=0)


@triton.jit
def attend(
    queries,
    span,
    kv,
    kv_scales,
    bias,
    scale,
    with_bias,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FP8: tl.constexpr,
    SUMMARY: tl.constexpr,
):
    """Queries `[M, LANES]` over a span (table, unit, shift, start, low, high, oldest, newest) of entries.

    Its entries are `[low, high)` of blocks `table[i] * unit + shift`, and a query sees those in `[oldest, newest)`
    `[M]`. Memory outside `[start, high)` may hold anything: it is not loaded. Returns the largest score and the sum
    of weights `[M]`, to base 2, and the weighted sum of values `[M, LANES]`; lanes behind
    HEAD_DIM are zero: `tl.dot` takes no inner dimension below 16.
    """
    table, unit, shift, start, low, high, oldest, newest = span
    # Larger tiles go to other matrix units, which gave wrong sums this way (Triton 3.6 on an H200).
    PAIRED: tl.constexpr = FP8 and queries.dtype != tl.float32 and HEAD_DIM % 2 == 0 and queries.shape[0] < 64
    largest = tl.full((queries.shape[0],), -float("inf"), tl.float32)
    total = tl.zeros((queries.shape[0],), tl.float32)
    acc = tl.zeros((queries.shape[0], LANES // 2 if PAIRED else LANES), tl.float32)
    odd = tl.zeros((queries.shape[0], LANES // 2 if PAIRED else 1), tl.float32)
    factor = tl.zeros((queries.shape[0],), tl.float32) + scale
    if PAIRED:
        queries, peak = _in_float16(queries)
        factor *= peak
    ahead = _blocks(table, low, start, high, PAGE_SIZE, BLOCK_N)
    for first in range(low, high, BLOCK_N):
        entries = first + tl.arange(0, BLOCK_N)
        valid = (entries >= start) & (entries < high)
        number = entries.to(tl.uint32)
        block = ahead.to(tl.int64) * unit + shift
        ahead = _blocks(table, first + BLOCK_N, start, high, PAGE_SIZE, BLOCK_N)
        rows = block * (2 * PAGE_SIZE) + number % PAGE_SIZE
        place = block * PAGE_SIZE + number % PAGE_SIZE
        scores, shown = _scores(
            queries, factor, rows, place, valid, kv, kv_scales, bias, with_bias, HEAD_DIM, LANES, FP8, SUMMARY
        )
        visible = shown[None, :] & (entries[None, :] >= oldest[:, None]) & (entries[None, :] < newest[:, None])
        weights, largest, total, fade = softmax_step(tl.where(visible, scores, -float("inf")), largest, total)
        acc *= fade[:, None]
        rows += PAGE_SIZE
        if PAIRED:
            odd *= fade[:, None]
            acc, odd = _add_pairs(weights, kv_scales, rows, valid, shown, kv, acc, odd, HEAD_DIM, SUMMARY)
        else:
            acc = add_values(weights, kv_scales, rows, valid, shown, kv, acc, queries.dtype, HEAD_DIM, FP8, SUMMARY)
    if PAIRED:
        acc = tl.interleave(acc, odd)
    return largest, total, acc
