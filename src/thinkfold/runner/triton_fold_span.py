"""What the kernels of a fold read: kept queries as rows of one KV head, and the keys and values of a span's pages.

A head is numbered layer · KV heads + KV head. Logits are to base 2.
"""

# A kernel that only compiles for a GPU looks to a type checker as if it never returned.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

_A_TURN = tl.constexpr(6.283185307179586)
_TURNS = tl.constexpr(1 / 6.283185307179586)


@triton.jit
def query_rows(
    queries,
    lines,
    first,
    num_rows,
    num_lines,
    head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Rows `[BLOCK_M, LANES]` from `first` on, row = position · GROUP + query head; zeros behind the last.

    Also their numbers in the store seen as `[-1, HEAD_DIM]`, and which there are.
    """
    row = first + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, LANES)
    there = row < num_rows
    line = tl.load(lines + row // GROUP, mask=there, other=0)
    places = (head // HEADS * num_lines + line) * (HEADS * GROUP) + head % HEADS * GROUP + row % GROUP
    shown = there[:, None] & (dims[None, :] < HEAD_DIM)
    return tl.load(queries + places[:, None] * HEAD_DIM + dims[None, :], mask=shown, other=0.0), places, there


@triton.jit
def _cos_sin(way):
    """Of fp64 `way` in whole turns, fp32: the library's own handle any angle, which takes all registers there are."""
    quarter = tl.floor(way * 4.0 + 0.5)
    x = (way - quarter * 0.25).to(tl.float32) * _A_TURN  # within an eighth of a turn
    y = x * x
    sin = x + x * y * (-1.6666667e-1 + y * (8.3333333e-3 + y * (-1.9841270e-4 + y * 2.7557319e-6)))
    cos = 1.0 + y * (-0.5 + y * (4.1666667e-2 + y * (-1.3888889e-3 + y * (2.4801587e-5 - y * 2.7557319e-7))))
    number = quarter.to(tl.int32) & 3
    odd = (number & 1) == 1
    cosine = tl.where(odd, sin, cos)
    sine = tl.where(odd, cos, sin)
    return tl.where((number == 1) | (number == 2), -cosine, cosine), tl.where(number >= 2, -sine, sine)


@triton.jit
def turned(
    rows, queries, places, there, turns, inv_freq, HEAD_DIM: tl.constexpr, LANES: tl.constexpr, HALF: tl.constexpr
):
    """`compaction.rotate`: the first 2 · HALF channels of `rows` by `turns` `[BLOCK_M]` positions, angles in fp64."""
    dims = tl.arange(0, LANES)
    turning = dims < 2 * HALF
    across = tl.where(dims < HALF, dims + HALF, dims - HALF)
    others = tl.load(
        queries + places[:, None] * HEAD_DIM + across[None, :], mask=there[:, None] & turning[None, :], other=0.0
    ).to(tl.float32)
    speed = tl.load(inv_freq + dims % HALF, mask=turning, other=0.0).to(tl.float64) * _TURNS
    cos, sin = _cos_sin(turns.to(tl.float64)[:, None] * speed[None, :])
    others = tl.where(dims < HALF, -1.0, 1.0)[None, :] * others
    return (rows.to(tl.float32) * cos + others * sin).to(rows.dtype)


@triton.jit
def key_places(pages, token, there, head, num_heads, PAGE_SIZE: tl.constexpr):
    """Rows of the keys of a span's tokens in kv seen as `[-1, HEAD_DIM]`; values lie PAGE_SIZE behind them."""
    page = tl.load(pages + token // PAGE_SIZE, mask=there, other=0).to(tl.int64)
    return (page * num_heads + head) * (2 * PAGE_SIZE) + token % PAGE_SIZE


@triton.jit
def logits(rows, places, there, kv, kv_scales, factor, HEAD_DIM: tl.constexpr, LANES: tl.constexpr, FP8: tl.constexpr):
    """`[BLOCK_M, N]` of rows and the keys at `places`, times `factor`; -inf where there is none."""
    dims = tl.arange(0, LANES)
    shown = there[None, :] & (dims[:, None] < HEAD_DIM)
    keys = tl.load(kv + places[None, :] * HEAD_DIM + dims[:, None], mask=shown, other=0.0)
    products = tl.dot(rows, keys.to(rows.dtype), input_precision="ieee") * factor
    if FP8:
        products *= tl.load(kv_scales + places, mask=there, other=0.0).to(tl.float32)[None, :]
    return tl.where(there[None, :], products, -float("inf"))


@triton.jit
def values_of(places, there, kv, kv_scales, HEAD_DIM: tl.constexpr, LANES: tl.constexpr, FP8: tl.constexpr):
    """fp32 `[N, LANES]` at `places`, zeros where there is none."""
    dims = tl.arange(0, LANES)
    shown = there[:, None] & (dims[None, :] < HEAD_DIM)
    values = tl.load(kv + places[:, None] * HEAD_DIM + dims[None, :], mask=shown, other=0.0).to(tl.float32)
    if FP8:
        values *= tl.load(kv_scales + places, mask=there, other=0.0).to(tl.float32)[:, None]
    return values
