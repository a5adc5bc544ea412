"""The loop over the entries of one split: online softmax of a tile of queries over paged keys and values."""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _softmax_step(scores, largest, total):
    """One step of the online softmax to base 2; a NaN score makes its row NaN for good."""
    new = tl.maximum(largest, tl.max(scores, 1))
    safe = tl.where(new == -float("inf"), 0.0, new)  # a row that has seen nothing yet
    weights = tl.exp2(scores - safe[:, None])
    fade = tl.exp2(largest - safe)
    return weights, new, total * fade + tl.sum(weights, 1), fade


@triton.jit
def _add_values(weights, values, acc, dtype: tl.constexpr, FP8: tl.constexpr):
    """`acc + weights @ values`; bfloat16 holds every fp8 code, and weights times scales too small for float16."""
    if FP8 and dtype == tl.float16:
        return tl.dot(weights.to(tl.bfloat16), values.to(tl.bfloat16), acc, input_precision="ieee")
    return tl.dot(weights.to(dtype), values.to(dtype), acc, input_precision="ieee")


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
    dims = tl.arange(0, LANES)
    largest = tl.full((queries.shape[0],), -float("inf"), tl.float32)
    total = tl.zeros((queries.shape[0],), tl.float32)
    acc = tl.zeros(queries.shape, tl.float32)
    for first in range(low, high, BLOCK_N):
        entries = first + tl.arange(0, BLOCK_N)
        valid = (entries >= start) & (entries < high)
        block = tl.load(table + entries // PAGE_SIZE, mask=valid, other=0).to(tl.int64) * unit + shift
        beta = tl.zeros((BLOCK_N,), tl.float32)
        if SUMMARY:
            place = bias + block * PAGE_SIZE + entries % PAGE_SIZE
            beta = tl.load(place, mask=valid & (with_bias > 0), other=0.0)
            valid = valid & (beta != -float("inf"))
        rows = block * (2 * PAGE_SIZE) + entries % PAGE_SIZE
        loaded = valid[None, :] & (dims[:, None] < HEAD_DIM)
        keys = tl.load(kv + rows[None, :] * HEAD_DIM + dims[:, None], mask=loaded, other=0.0)
        scores = tl.dot(queries, keys.to(queries.dtype), input_precision="ieee") * scale
        if FP8:
            scores *= tl.load(kv_scales + rows, mask=valid, other=0.0).to(tl.float32)[None, :]
        if SUMMARY:
            scores += beta[None, :] * _LOG2_E
        visible = valid[None, :] & (entries[None, :] >= oldest[:, None]) & (entries[None, :] < newest[:, None])
        weights, largest, total, fade = _softmax_step(tl.where(visible, scores, -float("inf")), largest, total)
        loaded = valid[:, None] & (dims[None, :] < HEAD_DIM)
        values = tl.load(kv + (rows + PAGE_SIZE)[:, None] * HEAD_DIM + dims[None, :], mask=loaded, other=0.0)
        if FP8:
            weights *= tl.load(kv_scales + rows + PAGE_SIZE, mask=valid, other=0.0).to(tl.float32)[None, :]
        acc = _add_values(weights, values, acc * fade[:, None], queries.dtype, FP8)
    return largest, total, acc
