"""How wrong attention gets by a fold of exact entries, in one Triton launch; the twin of `gate.squares`."""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from thinkfold.attention.triton_softmax import add_values, softmax_step
from thinkfold.runner.triton_fold_span import key_places, logits, query_rows

_LN_2 = tl.constexpr(0.6931471805599453)
_MOST = tl.constexpr(1.0 - 2.0**-23)  # of a softmax that a span draws: its logit is finite


@triton.jit
def _attend(
    rows,
    indices,
    count,
    kv,
    kv_scales,
    pages,
    factor,
    head,
    num_heads,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FP8: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    """Output `[BLOCK_M, LANES]` and log-sum-exp over a span's first `count` tokens, or those that `indices` name."""
    largest = tl.full((rows.shape[0],), -float("inf"), tl.float32)
    total = tl.zeros((rows.shape[0],), tl.float32)
    acc = tl.zeros(rows.shape, tl.float32)
    for first in range(0, count, BLOCK_N):
        token = first + tl.arange(0, BLOCK_N)
        there = token < count
        if CHOSEN:
            token = tl.load(indices + token, mask=there, other=0).to(tl.int32)
        keys = key_places(pages, token, there, head, num_heads, PAGE_SIZE)
        scores = logits(rows, keys, there, kv, kv_scales, factor, HEAD_DIM, LANES, FP8)
        weights, largest, total, fade = softmax_step(scores, largest, total)
        acc *= fade[:, None]
        acc = add_values(weights, kv_scales, keys + PAGE_SIZE, there, there, kv, acc, rows.dtype, HEAD_DIM, FP8, False)
    return acc / tl.where(total == 0.0, 1.0, total)[:, None], largest + tl.log2(total)


@triton.jit
def _errors(given, lse, folded, folded_lse, known, there):
    """By row: how far its output moves, that output and the span's squared, and the squares of ρ̂ − ρ and of 1 − ρ."""
    share = tl.minimum(tl.exp(lse * _LN_2 - known), _MOST)
    tilt = (folded_lse - lse) * _LN_2 + tl.log(share / (1.0 - share))
    folded_share = 1.0 / (1.0 + tl.exp(-tilt))
    change = folded_share[:, None] * folded - share[:, None] * given
    moved, size = tl.sum(change * change, 1), tl.sum(given * given, 1)
    drift, rest = folded_share - share, 1.0 - share
    zero = tl.zeros(share.shape, tl.float32)
    return (
        tl.where(there, moved, zero),
        tl.where(there, share * share * size, zero),
        tl.where(there, size, zero),
        tl.where(there, drift * drift, zero),
        tl.where(there, rest * rest, zero),
    )


@triton.jit(
    do_not_specialize=["tokens", "width", "num_rows", "num_lines", "num_heads"],
    do_not_specialize_on_alignment=["lines", "pages", "counts"],
)
def squares(
    queries,
    context_lse,
    lines,
    windowed,
    kv,
    kv_scales,
    pages,
    indices,
    counts,
    out,
    factor,
    tokens,
    width,
    num_rows,
    num_lines,
    num_heads,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FP8: tl.constexpr,
):
    """Program h: head h's part of both sums, `out` `[heads, 2]`, by the rows of the positions at `lines`.

    The formulas are those of `gate.squares`; a layer that is `windowed` does not see the span.
    """
    head = tl.program_id(0).to(tl.int64)
    blind = tl.load(windowed + head // HEADS) != 0
    count = tl.load(counts + head).to(tl.int32)
    moved = tl.zeros((BLOCK_M,), tl.float32)
    whole = tl.zeros((BLOCK_M,), tl.float32)
    length = tl.zeros((BLOCK_M,), tl.float32)
    drift = tl.zeros((BLOCK_M,), tl.float32)
    rest = tl.zeros((BLOCK_M,), tl.float32)
    for first in range(0, num_rows, BLOCK_M):
        x, places, there = query_rows(
            queries, lines, first, num_rows, num_lines, head, HEADS, GROUP, HEAD_DIM, LANES, BLOCK_M
        )
        given, lse = _attend(
            x, indices, tokens, kv, kv_scales, pages, factor, head, num_heads,
            HEAD_DIM, LANES, PAGE_SIZE, BLOCK_N, FP8, False,
        )  # fmt: skip
        folded, folded_lse = _attend(
            x, indices + head * width, count, kv, kv_scales, pages, factor, head, num_heads,
            HEAD_DIM, LANES, PAGE_SIZE, BLOCK_N, FP8, True,
        )  # fmt: skip
        known = tl.load(context_lse + places, mask=there & (blind == 0), other=float("inf"))
        parts = _errors(given, lse, folded, folded_lse, known, there)
        moved += parts[0]
        whole += parts[1]
        length += parts[2]
        drift += parts[3]
        rest += parts[4]
    mean = tl.sum(length, 0) / num_rows
    tl.store(out + 2 * head, tl.sum(moved, 0) + tl.sum(drift, 0) * mean)
    tl.store(out + 2 * head + 1, tl.sum(whole, 0) + tl.sum(rest, 0) * mean)
