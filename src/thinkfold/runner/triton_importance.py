"""How much each token of a span matters, in two Triton launches; the twin of `compaction.importance`.

The first makes rows of the queries that choose and finds what their softmax over the span sums to; the second adds up
squared shares token by token. Both read keys from their pages. Every program adds in the same order always.
"""

# A kernel that only compiles for a GPU looks to a type checker as if it never returned.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from thinkfold.attention.triton_softmax import softmax_step
from thinkfold.runner.triton_fold_span import key_places, logits, query_rows, turned, values_of

_OF_A_FOLD = ["tokens", "num_rows", "num_lines", "num_heads", "num_ends", "conclusion"]
_LISTS = ["lines", "turns", "pages", "ends"]


@triton.jit(do_not_specialize=_OF_A_FOLD[:4], do_not_specialize_on_alignment=_LISTS[:3])
def look(
    queries,
    lines,
    turns,
    inv_freq,
    kv,
    kv_scales,
    pages,
    rows,
    lse,
    factor,
    tokens,
    num_rows,
    num_lines,
    num_heads,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FP8: tl.constexpr,
):
    """Program (h, i): tile i of head h's rows `[heads, tiles · BLOCK_M, LANES]`, turned, and their log-sum-exp.

    `turns` holds one number a position, 0 for what stays; HALF is 0 where nothing turns. Rows behind the last are zero
    and their log-sum-exp is +inf, so that they draw nothing.
    """
    head = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK_M
    x, places, there = query_rows(
        queries, lines, first, num_rows, num_lines, head, HEADS, GROUP, HEAD_DIM, LANES, BLOCK_M
    )
    row = first + tl.arange(0, BLOCK_M)
    if HALF > 0:
        way = tl.load(turns + row // GROUP, mask=there, other=0)
        x = turned(x, queries, places, there, way, inv_freq, HEAD_DIM, LANES, HALF)
    at = head * (tl.num_programs(1) * BLOCK_M) + row
    tl.store(rows + at[:, None] * LANES + tl.arange(0, LANES)[None, :], x)
    largest = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, tokens, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        inside = token < tokens
        keys = key_places(pages, token, inside, head, num_heads, PAGE_SIZE)
        scores = logits(x, keys, inside, kv, kv_scales, factor, HEAD_DIM, LANES, FP8)
        _, largest, total, _ = softmax_step(scores, largest, total)
    tl.store(lse + at, tl.where(there, largest + tl.log2(total), float("inf")))


@triton.jit(do_not_specialize=_OF_A_FOLD, do_not_specialize_on_alignment=_LISTS[2:])
def score(
    rows,
    lse,
    kv,
    kv_scales,
    pages,
    ends,
    scores,
    factor,
    tokens,
    num_rows,
    num_lines,
    num_heads,
    num_ends,
    conclusion,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FP8: tl.constexpr,
):
    """Program (h, i): RMS attention × ‖v‖ of tile i of head h's tokens, `[heads, tokens]`, +inf in a conclusion.

    `num_lines` are the lines of `rows` a head, whole tiles; `num_rows` of them are there.
    """
    head = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = token < tokens
    keys = key_places(pages, token, inside, head, num_heads, PAGE_SIZE)
    squares = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(0, num_lines, BLOCK_M):
        at = head * num_lines + first + tl.arange(0, BLOCK_M)
        x = tl.load(rows + at[:, None] * LANES + tl.arange(0, LANES)[None, :])
        known = tl.load(lse + at)
        shares = tl.exp2(logits(x, keys, inside, kv, kv_scales, factor, HEAD_DIM, LANES, FP8) - known[:, None])
        squares += tl.sum(shares * shares, 0)
    values = values_of(keys + PAGE_SIZE, inside, kv, kv_scales, HEAD_DIM, LANES, FP8)
    found = tl.sqrt(squares / num_rows) * tl.sqrt(tl.sum(values * values, 1))
    for i in range(num_ends):
        end = tl.load(ends + i)
        found = tl.where((token >= end - conclusion) & (token < end), float("inf"), found)
    tl.store(scores + head * tokens + token, found, mask=inside)
