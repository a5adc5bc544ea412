"""The kernel that joins the splits of a query by log-sum-exp and keeps the queries that were asked for."""

# A kernel that only compiles for a GPU looks to a type checker as if it never returned.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _joined(split_out, split_lse, number, num_splits, dims, HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr):
    """out `[D]` and LSE (base 2) of query `number` over its splits; 0 and -inf where all are empty.

    An empty split's out holds anything. It is loaded all the same: to wait for the LSE first would take twice as long.
    """
    largest = tl.full((), -float("inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    acc = tl.zeros(dims.shape, tl.float32)
    for first in range(0, num_splits, CHUNK):
        splits = first + tl.arange(0, CHUNK)
        at = number * num_splits + splits
        there = splits < num_splits
        lse = tl.load(split_lse + at, mask=there, other=-float("inf"))
        shown = there[:, None] & (dims[None, :] < HEAD_DIM)
        part = tl.load(split_out + at[:, None] * HEAD_DIM + dims[None, :], mask=shown, other=0.0)
        part = tl.where((lse != -float("inf"))[:, None], part, 0.0)
        new = tl.maximum(largest, tl.max(lse, 0))
        safe = tl.where(new == -float("inf"), 0.0, new)
        weights = tl.exp2(lse - safe)
        fade = tl.exp2(largest - safe)
        acc = acc * fade + tl.sum(weights[:, None] * part, 0)
        total = total * fade + tl.sum(weights, 0)
        largest = new
    return acc / tl.where(total == 0, 1.0, total), tl.where(total == 0, -float("inf"), largest + tl.log2(total))


@triton.jit(
    do_not_specialize=["num_tokens", "num_rows", "num_sunk", "num_splits", "layer"],
    do_not_specialize_on_alignment=["cu_seqlens_q", "sink_rows"],
)
def merge(
    q,
    split_out,
    split_lse,
    cu_seqlens_q,
    sink_rows,
    out,
    lse,
    query_sink,
    lse_sink,
    num_tokens,
    num_rows,
    num_sunk,
    num_splits,
    layer,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A token and a query head, CHUNK splits at a time; behind the tokens come the sunk ones, whose LSE is joined anew.

    Tokens past the last row are padding and give 0 and -inf. `NUM_HEADS` counts query heads.
    """
    index = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    sunk = index - num_tokens
    token = tl.load(sink_rows + sunk, mask=sunk >= 0, other=0).to(tl.int64) + tl.where(sunk >= 0, 0, index)
    if token < 0:  # a sink that nobody asked for
        return
    number = token * NUM_HEADS + head
    splits = tl.where(token < tl.load(cu_seqlens_q + num_rows), num_splits, 0)
    joined, joined_lse = _joined(split_out, split_lse, number, splits, dims, HEAD_DIM, CHUNK)
    joined_lse *= _LN_2
    inside = dims < HEAD_DIM
    if sunk < 0:
        tl.store(out + number * HEAD_DIM + dims, joined.to(out.dtype.element_ty), mask=inside)
        tl.store(lse + number, joined_lse)
    else:
        place = (layer * num_sunk + sunk) * NUM_HEADS + head
        tl.store(query_sink + place * HEAD_DIM + dims, tl.load(q + number * HEAD_DIM + dims, mask=inside), mask=inside)
        tl.store(lse_sink + place, joined_lse)
