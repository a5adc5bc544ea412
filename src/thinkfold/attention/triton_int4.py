"""The loop over summary entries in int4 blocks: they are widened in registers, never in memory."""

from __future__ import annotations

import triton
import triton.language as tl

from thinkfold.attention.triton_softmax import softmax_step

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _codes(bytes_at, dims, HEAD_DIM: tl.constexpr, mask):
    """Codes of channels `dims` of an entry whose bytes begin at `bytes_at`; the two broadcast."""
    half: tl.constexpr = HEAD_DIM // 2
    packed = tl.load(bytes_at + dims % half, mask=mask, other=0)
    return ((packed >> (dims // half * 4).to(tl.uint8)) & 15).to(tl.float32)


@triton.jit
def attend_int4(
    queries,
    span,
    kv,
    scale,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Queries `[M, LANES]` over a span as in `triton_softmax.attend`, whose table holds int4 blocks.

    A page of `kv` has room for `HEADS` head blocks; the parts of a block are as in `int4.Layout`, whose values have
    `GROUPS`. All queries see all entries. Returns what `attend` does.
    """
    table, low, high = span[0], span[4], span[5]
    dims = tl.arange(0, LANES)
    codes = kv.to(tl.pointer_type(tl.uint8), bitcast=True)
    halves = kv.to(tl.pointer_type(tl.float16), bitcast=True)
    value_codes: tl.constexpr = PAGE_SIZE * HEAD_DIM // 2
    key_scales: tl.constexpr = PAGE_SIZE * HEAD_DIM // 2  # from here on in fp16
    value_scales: tl.constexpr = key_scales + 2 * HEAD_DIM
    betas: tl.constexpr = value_scales + 2 * PAGE_SIZE * GROUPS
    block_bytes: tl.constexpr = (2 * (betas + PAGE_SIZE) + 15) // 16 * 16
    page_bytes: tl.constexpr = HEADS * PAGE_SIZE * HEAD_DIM * kv.dtype.element_ty.primitive_bitwidth // 4
    per_page: tl.constexpr = page_bytes // block_bytes
    largest = tl.full((queries.shape[0],), -float("inf"), tl.float32)
    total = tl.zeros((queries.shape[0],), tl.float32)
    acc = tl.zeros(queries.shape, tl.float32)
    for first in range(low, high, BLOCK_N):
        entries = first + tl.arange(0, BLOCK_N)
        number = entries.to(tl.uint32)  # division of what may be negative takes several instructions
        block = tl.load(table + number // PAGE_SIZE, mask=entries < high, other=0).to(tl.uint32)
        start = (block // per_page).to(tl.int64) * page_bytes + block % per_page * block_bytes
        place = number % PAGE_SIZE
        scales = halves + start // 2
        beta = tl.load(scales + betas + place, mask=entries < high, other=-float("inf")).to(tl.float32)
        valid = beta != -float("inf")

        shown = valid[None, :] & (dims[:, None] < HEAD_DIM)
        keys = _codes((codes + start + place * (HEAD_DIM // 2))[None, :], dims[:, None], HEAD_DIM, shown)
        at = (scales + key_scales)[None, :] + dims[:, None]
        keys = tl.load(at, mask=shown, other=0.0).to(tl.float32) + keys * tl.load(
            at + HEAD_DIM, mask=shown, other=0.0
        ).to(tl.float32)
        scores = tl.dot(queries, keys.to(queries.dtype), input_precision="ieee") * scale + beta[None, :] * _LOG2_E
        weights, largest, total, fade = softmax_step(tl.where(valid[None, :], scores, -float("inf")), largest, total)

        shown = valid[:, None] & (dims[None, :] < HEAD_DIM)
        values = _codes(
            (codes + start + value_codes + place * (HEAD_DIM // 2))[:, None], dims[None, :], HEAD_DIM, shown
        )
        at = (scales + value_scales + place * GROUPS)[:, None] + (dims // (HEAD_DIM // GROUPS))[None, :]
        values = tl.load(at, mask=shown, other=0.0).to(tl.float32) + values * tl.load(
            at + PAGE_SIZE * GROUPS, mask=shown, other=0.0
        ).to(tl.float32)
        acc = tl.dot(weights.to(queries.dtype), values.to(queries.dtype), acc * fade[:, None], input_precision="ieee")
    return largest, total, acc
