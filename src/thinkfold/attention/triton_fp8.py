"""The decode loop over entries of fp8, whose queries are columns."""

# A kernel that only compiles for a GPU looks to a type checker as if it never returned.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from thinkfold.attention.triton_columns import (
    add_planes,
    column_step,
    empty_sums,
    numbers_at,
    places_of,
    products,
    put_columns,
    queries_of,
    starts_of,
)

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _planes(codes, PACKED: tl.constexpr):
    """Low and high bytes of `codes` over 256, as float16: their bits are moved to the places of float16's."""
    if PACKED:
        return tl.inline_asm_elementwise(
            """{.reg .b32 t, u;
            shr.b32 t, $2, 1; and.b32 t, t, 0x3f803f80; lop3.b32 $1, $2, 0x80008000, t, 0xea;
            shl.b32 u, $2, 8; shl.b32 t, $2, 7; and.b32 t, t, 0x3f803f80; lop3.b32 $0, u, 0x80008000, t, 0xea;}""",
            "=&r,=&r,r",
            [codes],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    low = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
    high = (codes & 0x8000) | ((codes & 0x7F00) >> 1)
    return low.to(tl.uint16).to(tl.float16, bitcast=True), high.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def _blocks(numbers, unit, shift):
    """Head blocks `numbers * unit + shift`."""
    blocks = ()
    for i in tl.static_range(len(numbers)):
        blocks += (numbers[i].to(tl.int64) * unit + shift,)
    return blocks


@triton.jit
def _beside(
    memory, with_bias, blocks, first, limits, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, SUMMARY: tl.constexpr
):
    """Scales of keys and of values, and β, of the entries of `blocks` from `first` on; 0 outside of `limits`."""
    _, kv_scales, bias = memory
    entries = first + tl.arange(0, BLOCK_N)
    valid = (entries >= limits[0]) & (entries < limits[1])
    starts, places = starts_of(blocks, PAGE_SIZE, PAGE_SIZE, BLOCK_N), places_of(first, PAGE_SIZE, BLOCK_N)
    at = kv_scales + 2 * starts + places
    keys, values = tl.load(at, mask=valid, other=0.0), tl.load(at + PAGE_SIZE, mask=valid, other=0.0)
    beta = tl.load(bias + starts + places, mask=valid & (with_bias > 0), other=0.0) if SUMMARY else 0.0
    return keys, values, beta


@triton.jit
def _visible(entries, beta, span, SUMMARY: tl.constexpr):
    """Which entries `[N]` there are and their β does not hide, and which of them each query sees, `[N, M]`."""
    _, _, _, start, _, high, oldest, newest = span
    shown = (entries >= start) & (entries < high)
    if SUMMARY:
        shown &= beta != -float("inf")
    return shown, shown[:, None] & (entries[:, None] >= oldest[None, :]) & (entries[:, None] < newest[None, :])


@triton.jit
def _scaled(weights, scales, most):
    """Weights `[N, M]` times scales over the largest scale so far, as float16, that scale, and old over new largest.

    Float16 does not hold weights times scales of any size.
    """
    higher = tl.maximum(most, tl.max(scales, 0))
    inverse = 1.0 / tl.where(higher > 0.0, higher, 1.0)
    fade = tl.where(higher == most, 1.0, most * inverse)
    return (weights * (scales * inverse)[:, None]).to(tl.float16), higher, fade


@triton.jit
def attend_fp8(
    lines,
    span,
    memory,
    scale,
    with_bias,
    target,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SUMMARY: tl.constexpr,
    PACKED: tl.constexpr,
):
    """`triton_softmax.attend` over `span` of `memory` (kv, scales, bias), its result stored.

    Scales, and numbers of pages two tiles ahead, are loaded before they are needed: Triton's pipeline does so for
    codes alone.
    """
    table, unit, shift, start, low, high, _, _ = span
    PAIRS: tl.constexpr = HEAD_DIM // 2
    PAGES: tl.constexpr = triton.cdiv(BLOCK_N, PAGE_SIZE)
    U: tl.constexpr = max(16, triton.next_power_of_2(PAIRS))
    pairs = tl.arange(0, U)
    used, channels = pairs < PAIRS, (2 * pairs, 2 * pairs + 1)
    queries, peak = queries_of(lines, channels, used, HEAD_DIM)
    factor = scale * peak * 256.0
    codes = memory[0].to(tl.pointer_type(tl.uint16), bitcast=True)
    M: tl.constexpr = queries[0].shape[1]
    largest, most = tl.full((M,), -float("inf"), tl.float32), 0.0
    sums, values = tl.zeros((BLOCK_N, M), tl.float32), empty_sums(2, U, M)
    blocks = _blocks(numbers_at(table, low, start, high, PAGE_SIZE, PAGES), unit, shift)
    numbers = numbers_at(table, low + BLOCK_N, start, high, PAGE_SIZE, PAGES)
    ahead = _beside(memory, with_bias, blocks, low, (start, high), PAGE_SIZE, BLOCK_N, SUMMARY)
    for first in range(low, high, BLOCK_N):
        at = codes + starts_of(blocks, 2 * PAGE_SIZE * PAIRS, PAGE_SIZE, BLOCK_N)
        at += places_of(first, PAGE_SIZE, BLOCK_N) * PAIRS
        k_scales, v_scales, beta = ahead
        blocks = _blocks(numbers, unit, shift)
        numbers = numbers_at(table, first + 2 * BLOCK_N, start, high, PAGE_SIZE, PAGES)
        ahead = _beside(memory, with_bias, blocks, first + BLOCK_N, (start, high), PAGE_SIZE, BLOCK_N, SUMMARY)
        loaded = tl.load(at[:, None] + pairs[None, :], mask=used[None, :], other=0)
        scores = products(_planes(loaded, PACKED), queries) * (k_scales.to(tl.float32) * factor)[:, None]
        shown, visible = _visible(first + tl.arange(0, BLOCK_N), beta, span, SUMMARY)
        if SUMMARY:
            scores += (beta * _LOG2_E)[:, None]
        weights, largest, sums, fade = column_step(tl.where(visible, scores, -float("inf")), largest, sums)
        weights, most, more = _scaled(weights, tl.where(shown, v_scales.to(tl.float32), 0.0), most)
        loaded = tl.load((at + PAGE_SIZE * PAIRS)[None, :] + pairs[:, None], mask=used[:, None], other=0)
        values = add_planes(values, fade * more, _planes(loaded, PACKED), weights)
    put_columns(values, most * 256.0, largest, sums, lines, target, channels, used, HEAD_DIM)
