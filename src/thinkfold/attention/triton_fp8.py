"""The decode loop over entries of fp8: queries are the columns, and codes become float16 by their bits."""

from __future__ import annotations

import triton
import triton.language as tl

from thinkfold.attention.triton_columns import blocks_at, peak_of, plane_of, put_lse, put_plane

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _planes(codes, WIDEN: tl.constexpr):
    """The low and the high byte of `codes` as float16, over 256 unless converted."""
    if WIDEN == "convert":
        return tl.inline_asm_elementwise(
            """{.reg .b32 t; .reg .b16 a, b;
            prmt.b32 t, $2, 0, 0x3120; mov.b32 {a, b}, t;
            cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b;}""",
            "=r,=r,r",
            [codes],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif WIDEN == "bits":
        return tl.inline_asm_elementwise(
            """{.reg .b32 t, u;
            shr.b32 t, $2, 1; and.b32 t, t, 0x3f803f80; lop3.b32 $1, $2, 0x80008000, t, 0xea;
            shl.b32 u, $2, 8; shl.b32 t, $2, 7; and.b32 t, t, 0x3f803f80; lop3.b32 $0, u, 0x80008000, t, 0xea;}""",
            "=r,=r,r",
            [codes],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        low = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
        high = (codes & 0x8000) | ((codes & 0x7F00) >> 1)
        return low.to(tl.uint16).to(tl.float16, bitcast=True), high.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def _places(first, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Places in their pages of entries from `first` on."""
    places = tl.arange(0, BLOCK_N) % PAGE_SIZE
    return places + first % PAGE_SIZE if PAGE_SIZE > BLOCK_N else places


@triton.jit
def _wide_blocks(numbers, unit, shift):
    """Blocks `numbers * unit + shift`."""
    blocks = ()
    for i in tl.static_range(len(numbers)):
        blocks = blocks + (numbers[i].to(tl.int64) * unit + shift,)
    return blocks


@triton.jit
def _starts(blocks, SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where its block of `SIZE` begins, for each entry `[N]`."""
    page = tl.arange(0, BLOCK_N) // PAGE_SIZE
    starts = tl.zeros((BLOCK_N,), tl.int64) + blocks[0] * SIZE
    for i in tl.static_range(1, len(blocks)):
        starts = tl.where(page == i, blocks[i] * SIZE, starts)
    return starts


@triton.jit
def _beside(
    kv_scales,
    bias,
    with_bias,
    blocks,
    first,
    start,
    high,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SUMMARY: tl.constexpr,
):
    """Scales of the keys and of the values, and β, of entries from `first` on, 0 outside of `[start, high)`."""
    entries = first + tl.arange(0, BLOCK_N)
    valid = (entries >= start) & (entries < high)
    starts, places = _starts(blocks, PAGE_SIZE, PAGE_SIZE, BLOCK_N), _places(first, PAGE_SIZE, BLOCK_N)
    at = kv_scales + 2 * starts + places
    keys = tl.load(at, mask=valid, other=0.0)
    values = tl.load(at + PAGE_SIZE, mask=valid, other=0.0)
    if SUMMARY:
        return keys, values, tl.load(bias + starts + places, mask=valid & (with_bias > 0), other=0.0)
    else:
        return keys, values, 0.0


@triton.jit
def attend_fp8(
    q,
    queries,
    lines,
    span,
    kv,
    kv_scales,
    bias,
    scale,
    with_bias,
    splits,
    out,
    lse,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SUMMARY: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """What `triton_softmax.attend` does over `span`, for the queries `[M, LANES]` of `lines`; stores the result.

    The scales, and the numbers of the pages two iterations ahead, are loaded before they are needed: Triton's
    pipeline does so for codes alone.
    """
    table, unit, shift, start, low, high, oldest, newest = span
    PAIRS: tl.constexpr = HEAD_DIM // 2
    U: tl.constexpr = max(16, triton.next_power_of_2(PAIRS))
    M: tl.constexpr = queries.shape[0]
    PAGES: tl.constexpr = max(1, BLOCK_N // PAGE_SIZE)
    WIDEN_V: tl.constexpr = "bits" if WIDEN == "mixed" else WIDEN
    WIDEN_K: tl.constexpr = "convert" if WIDEN == "mixed" else WIDEN
    pairs = tl.arange(0, U)
    used = pairs < PAIRS
    peak = peak_of(queries)
    factor = scale * peak * (1.0 if WIDEN_K == "convert" else 256.0)
    q_even = plane_of(q, lines, 2 * pairs, used, peak, HEAD_DIM)
    q_odd = plane_of(q, lines, 2 * pairs + 1, used, peak, HEAD_DIM)
    codes = kv.to(tl.pointer_type(tl.uint16), bitcast=True)
    largest = tl.full((M,), -float("inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    even = tl.zeros((U, M), tl.float32)
    odd = tl.zeros((U, M), tl.float32)
    most = 0.0  # of the values' scales so far: float16 does not hold weights times scales of any size
    blocks = _wide_blocks(blocks_at(table, low, start, high, PAGE_SIZE, PAGES), unit, shift)
    numbers = blocks_at(table, low + BLOCK_N, start, high, PAGE_SIZE, PAGES)
    ahead = _beside(kv_scales, bias, with_bias, blocks, low, start, high, PAGE_SIZE, BLOCK_N, SUMMARY)
    for first in range(low, high, BLOCK_N):
        entries = first + tl.arange(0, BLOCK_N)
        shown = (entries >= start) & (entries < high)
        at = _starts(blocks, 2 * PAGE_SIZE * PAIRS, PAGE_SIZE, BLOCK_N) + _places(first, PAGE_SIZE, BLOCK_N) * PAIRS
        k_scale, v_scale, beta = ahead
        blocks = _wide_blocks(numbers, unit, shift)
        numbers = blocks_at(table, first + 2 * BLOCK_N, start, high, PAGE_SIZE, PAGES)
        ahead = _beside(
            kv_scales, bias, with_bias, blocks, first + BLOCK_N, start, high, PAGE_SIZE, BLOCK_N, SUMMARY
        )
        k_even, k_odd = _planes(
            tl.load(codes + at[:, None] + pairs[None, :], mask=used[None, :], other=0), WIDEN_K
        )
        scores = tl.dot(k_odd, q_odd, tl.dot(k_even, q_even)) * (k_scale.to(tl.float32) * factor)[:, None]
        v_scale = v_scale.to(tl.float32)
        if SUMMARY:
            scores += (beta * _LOG2_E)[:, None]
            shown &= beta != -float("inf")
            v_scale = tl.where(shown, v_scale, 0.0)
        visible = shown[:, None] & (entries[:, None] >= oldest[None, :]) & (entries[:, None] < newest[None, :])
        scores = tl.where(visible, scores, -float("inf"))
        new = tl.maximum(largest, tl.max(scores, 0))
        safe = tl.where(new == -float("inf"), 0.0, new)  # a query that has seen nothing yet
        weights = tl.exp2(scores - safe[None, :])
        fade = tl.exp2(largest - safe)
        largest = new
        total = total * fade + tl.sum(weights, 0)

        higher = tl.maximum(most, tl.max(v_scale, 0))
        inverse = 1.0 / tl.where(higher > 0.0, higher, 1.0)
        fade *= tl.where(higher == most, 1.0, most * inverse)
        most = higher
        weights = (weights * (v_scale * inverse)[:, None]).to(tl.float16)
        at += PAGE_SIZE * PAIRS
        if WIDEN_V == "convert":  # what is not there may hold codes of NaN
            loaded = tl.load(codes + at[None, :] + pairs[:, None], mask=used[:, None] & shown[None, :], other=0)
        else:
            loaded = tl.load(codes + at[None, :] + pairs[:, None], mask=used[:, None], other=0)
        v_even, v_odd = _planes(loaded, WIDEN_V)
        even = tl.dot(v_even, weights, even * fade[None, :])
        odd = tl.dot(v_odd, weights, odd * fade[None, :])
    put_lse(largest, total, lines, splits, lse)
    lines = (lines[0], lines[1] & (total != 0))
    units = most * (1.0 if WIDEN_V == "convert" else 256.0) / total
    put_plane(even, units, lines, splits, out, 2 * pairs, used, HEAD_DIM)
    put_plane(odd, units, lines, splits, out, 2 * pairs + 1, used, HEAD_DIM)
