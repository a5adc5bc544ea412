"""The decode loop over summaries in int4 blocks, whose queries are columns."""

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
    """Bits 0, 4, 8 and 12 of `codes` on, four each, as float16: beside the exponent of 1024 or 64 they add to it."""
    if PACKED:
        a, b, c, d = tl.inline_asm_elementwise(
            """{.reg .b32 t;
            shr.b32 t, $4, 8;
            lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea; lop3.b32 $1, $4, 0x00f000f0, 0x54005400, 0xea;
            lop3.b32 $2, t, 0x000f000f, 0x64006400, 0xea; lop3.b32 $3, t, 0x00f000f0, 0x54005400, 0xea;}""",
            "=&r,=&r,=&r,=&r,r",
            [codes],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        a = ((codes & 0xF) | 0x6400).to(tl.uint16).to(tl.float16, bitcast=True)
        b = ((codes & 0xF0) | 0x5400).to(tl.uint16).to(tl.float16, bitcast=True)
        c = (((codes >> 8) & 0xF) | 0x6400).to(tl.uint16).to(tl.float16, bitcast=True)
        d = (((codes >> 8) & 0xF0) | 0x5400).to(tl.uint16).to(tl.float16, bitcast=True)
    return a - 1024.0, b - 64.0, c - 1024.0, d - 64.0


@triton.jit
def _starts(
    numbers,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    BITS: tl.constexpr,
):
    """Where the blocks `numbers` begin, in halves; a number of the memory has `BITS`."""
    SCALES: tl.constexpr = 2 * HEAD_DIM + 2 * PAGE_SIZE * GROUPS
    BLOCK: tl.constexpr = (PAGE_SIZE * HEAD_DIM // 2 + SCALES + PAGE_SIZE + 7) // 8 * 8
    PAGE: tl.constexpr = HEADS * PAGE_SIZE * HEAD_DIM * BITS // 8
    starts = ()
    for i in tl.static_range(len(numbers)):
        number = numbers[i].to(tl.uint32)
        starts += ((number // (PAGE // BLOCK)).to(tl.int64) * PAGE + number % (PAGE // BLOCK) * BLOCK,)
    return starts


@triton.jit
def _pair(at, behind: tl.constexpr, mask):
    """A least, and the step so many halves behind it."""
    return tl.load(at, mask=mask, other=0.0), tl.load(at + behind, mask=mask, other=0.0)


@triton.jit
def _of_keys(scales, starts, channels, used, HEAD_DIM: tl.constexpr):
    """Least and step `[U]` of each plane of the keys of each block; those of the first block begin at `scales`."""
    found = ()
    for i in tl.static_range(len(starts)):
        at = scales + starts[i]
        low, high = _pair(at + channels[0], HEAD_DIM, used), _pair(at + channels[1], HEAD_DIM, used)
        found += ((low, high, _pair(at + channels[2], HEAD_DIM, used), _pair(at + channels[3], HEAD_DIM, used)),)
    return found


@triton.jit
def _of_entries(scales, starts, first, high, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr):
    """Least and step of the first and of the last group of each entry's value, and β, `[BLOCK_N]`."""
    STEPS: tl.constexpr = PAGE_SIZE * GROUPS
    valid = first + tl.arange(0, BLOCK_N) < high
    places = places_of(first, PAGE_SIZE, BLOCK_N)
    at = scales + starts_of(starts, 1, PAGE_SIZE, BLOCK_N)
    beta = tl.load(at + 2 * STEPS + places, mask=valid, other=-float("inf"))
    at += places * GROUPS
    return _pair(at, STEPS, valid), _pair(at + GROUPS - 1, STEPS, valid), beta


@triton.jit
def _wide(codes, scale):
    """Numbers of codes whose scale lies along the second axis."""
    least = tl.broadcast_to(scale[0][None, :], codes.shape)
    return tl.fma(codes, tl.broadcast_to(scale[1][None, :], codes.shape), least)


@triton.jit
def _scores(at, rows, used, scales, queries, PACKED: tl.constexpr):
    """Products `[rows, M]` of the queries and the keys at `at` + `rows`."""
    a, b, c, d = _planes(tl.load(at + rows, mask=used[None, :], other=0), PACKED)
    keys = _wide(a, scales[0]), _wide(b, scales[1]), _wide(c, scales[2]), _wide(d, scales[3])
    return products(keys, queries)


@triton.jit
def _values(codes, even, odd, shown, PACKED: tl.constexpr):
    """Planes of values of codes `[U, N]`; what is not `shown` is 0."""
    a, b, c, d = _planes(codes, PACKED)
    even = tl.where(shown, even[0], 0.0), tl.where(shown, even[1], 0.0)
    odd = tl.where(shown, odd[0], 0.0), tl.where(shown, odd[1], 0.0)
    return _wide(a, even), _wide(b, odd), _wide(c, even), _wide(d, odd)


@triton.jit
def attend_int4_columns(
    lines,
    span,
    kv,
    scale,
    target,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """`triton_int4.attend_int4` for the queries of `lines`, and its result stored; keys are widened page by page.

    A tile has a part of a page, a page or two; values have one or two groups.
    """
    table, low, high = span[0], span[4], span[5]
    N: tl.constexpr = min(PAGE_SIZE, BLOCK_N)
    PAGES: tl.constexpr = BLOCK_N // N
    PAIRS: tl.constexpr = HEAD_DIM // 4
    U: tl.constexpr = max(16, triton.next_power_of_2(PAIRS))
    BITS: tl.constexpr = kv.dtype.element_ty.primitive_bitwidth
    pairs = tl.arange(0, U)
    used = pairs < PAIRS
    channels = 2 * pairs, 2 * pairs + HEAD_DIM // 2, 2 * pairs + 1, 2 * pairs + 1 + HEAD_DIM // 2
    queries, peak = queries_of(lines, channels, used, HEAD_DIM)
    codes = kv.to(tl.pointer_type(tl.uint16), bitcast=True)
    scales = kv.to(tl.pointer_type(tl.float16), bitcast=True) + PAGE_SIZE * PAIRS * 2
    M: tl.constexpr = queries[0].shape[1]
    largest = tl.full((M,), -float("inf"), tl.float32)
    sums, values = tl.zeros((BLOCK_N, M), tl.float32), empty_sums(4, U, M)
    starts = _starts(numbers_at(table, low, low, high, PAGE_SIZE, PAGES), HEADS, HEAD_DIM, PAGE_SIZE, GROUPS, BITS)
    numbers = numbers_at(table, low + BLOCK_N, low, high, PAGE_SIZE, PAGES)
    k_ahead = _of_keys(scales, starts, channels, used, HEAD_DIM)
    v_ahead = _of_entries(scales + 2 * HEAD_DIM, starts, low, high, PAGE_SIZE, BLOCK_N, GROUPS)
    for first in range(low, high, BLOCK_N):
        at, here, k_scales = codes + starts_of(starts, 1, PAGE_SIZE, BLOCK_N), starts, k_ahead
        even, odd, beta = v_ahead
        starts = _starts(numbers, HEADS, HEAD_DIM, PAGE_SIZE, GROUPS, BITS)
        numbers = numbers_at(table, first + 2 * BLOCK_N, low, high, PAGE_SIZE, PAGES)
        k_ahead = _of_keys(scales, starts, channels, used, HEAD_DIM)
        v_ahead = _of_entries(scales + 2 * HEAD_DIM, starts, first + BLOCK_N, high, PAGE_SIZE, BLOCK_N, GROUPS)
        rows = (places_of(first, PAGE_SIZE, N) * PAIRS)[:, None] + pairs[None, :]
        scores = _scores(codes + here[0], rows, used, k_scales[0], queries, PACKED)
        if PAGES == 2:
            second = _scores(codes + here[1], rows, used, k_scales[1], queries, PACKED)
            scores = tl.join(scores, second).permute(2, 0, 1).reshape(BLOCK_N, M)
        bias = beta.to(tl.float32)
        scores = scores * (scale * peak) + (bias * _LOG2_E)[:, None]
        scores = tl.where((bias != -float("inf"))[:, None], scores, -float("inf"))
        weights, largest, sums, fade = column_step(scores, largest, sums)
        at += (PAGE_SIZE + places_of(first, PAGE_SIZE, BLOCK_N)) * PAIRS
        loaded = tl.load(at[None, :] + pairs[:, None], mask=used[:, None], other=0)
        planes = _values(loaded, even, odd, beta != -float("inf"), PACKED)
        values = add_planes(values, fade, planes, weights.to(tl.float16))
    put_columns(values, 1.0, largest, sums, lines, target, channels, used, HEAD_DIM)
