"""The decode loop over summaries in int4 blocks: queries are the columns, codes become float16 by their bits."""

from __future__ import annotations

import triton
import triton.language as tl

from thinkfold.attention.triton_columns import blocks_at, peak_of, plane_of, put_lse, put_plane

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _planes(codes, WIDEN: tl.constexpr):
    """Bits 0, 4, 8 and 12 of `codes` on, four each, as float16."""
    if WIDEN != "plain":
        # A code beside the exponent of 1024 or of 64 is added to it.
        a, b, c, d = tl.inline_asm_elementwise(
            """{.reg .b32 t;
            shr.b32 t, $4, 8;
            lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea; lop3.b32 $1, $4, 0x00f000f0, 0x54005400, 0xea;
            lop3.b32 $2, t, 0x000f000f, 0x64006400, 0xea; lop3.b32 $3, t, 0x00f000f0, 0x54005400, 0xea;}""",
            "=r,=r,=r,=r,r",
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
def _pair(at, behind: tl.constexpr, mask):
    """A least, and the step so many halves behind it."""
    return tl.load(at, mask=mask, other=0.0), tl.load(at + behind, mask=mask, other=0.0)


@triton.jit
def _scales(
    halves, start, place, valid, lanes, used, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, GROUPS: tl.constexpr
):
    """Least and step of the four planes of keys `[U]` and of both of values `[N]`, and β `[N]`, in one block."""
    KEYS: tl.constexpr = PAGE_SIZE * HEAD_DIM // 2
    VALUES: tl.constexpr = KEYS + 2 * HEAD_DIM
    STEPS: tl.constexpr = PAGE_SIZE * GROUPS
    HALF: tl.constexpr = HEAD_DIM // 2
    keys = halves + start + KEYS + 2 * lanes
    values = halves + start + VALUES + place * GROUPS
    return (
        _pair(keys, HEAD_DIM, used),
        _pair(keys + HALF, HEAD_DIM, used),
        _pair(keys + 1, HEAD_DIM, used),
        _pair(keys + HALF + 1, HEAD_DIM, used),
        _pair(values, STEPS, valid),
        _pair(values + GROUPS - 1, STEPS, valid),
        tl.load(halves + start + VALUES + 2 * STEPS + place, mask=valid, other=-float("inf")),
    )


@triton.jit
def _ahead(
    halves, starts, first, high, lanes, used,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """`_scales` of the blocks of entries from `first` on."""
    found = ()
    for i in tl.static_range(len(starts)):
        place = first % PAGE_SIZE + tl.arange(0, N) if PAGE_SIZE > N else tl.arange(0, N)
        valid = first + i * N + tl.arange(0, N) < high
        found = found + (_scales(halves, starts[i], place, valid, lanes, used, HEAD_DIM, PAGE_SIZE, GROUPS),)
    return found


@triton.jit
def _wide(codes, scale, axis: tl.constexpr):
    """Numbers of codes, whose scales lie along the other axis than `axis`."""
    least = tl.broadcast_to(tl.expand_dims(scale[0], axis), codes.shape)
    return tl.fma(codes, tl.broadcast_to(tl.expand_dims(scale[1], axis), codes.shape), least)


@triton.jit
def _page_scores(codes, scales, q_a, q_b, q_c, q_d, factor, WIDEN: tl.constexpr):
    """Scores `[N, M]` of one page to base 2, -inf where β hides an entry, and which it does not."""
    a, b, c, d = _planes(codes, WIDEN)
    scores = tl.dot(_wide(a, scales[0], 0), q_a)
    scores = tl.dot(_wide(b, scales[1], 0), q_b, scores)
    scores = tl.dot(_wide(c, scales[2], 0), q_c, scores)
    scores = tl.dot(_wide(d, scales[3], 0), q_d, scores)
    beta = scales[6].to(tl.float32)
    shown = (beta != -float("inf"))[:, None]
    return tl.where(shown, scores * factor + (beta * _LOG2_E)[:, None], -float("inf"))


@triton.jit
def _left(scale, shown):
    return tl.where(shown, scale[0], 0.0), tl.where(shown, scale[1], 0.0)


@triton.jit
def _starts(numbers, PER_PAGE: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Where the blocks `numbers` begin, in halves."""
    starts = ()
    for i in tl.static_range(len(numbers)):
        number = numbers[i].to(tl.uint32)
        starts = starts + ((number // PER_PAGE).to(tl.int64) * PAGE + number % PER_PAGE * BLOCK,)
    return starts


@triton.jit
def attend_int4_columns(
    q,
    queries,
    lines,
    span,
    kv,
    scale,
    splits,
    out,
    lse,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    table, low, high = span[0], span[4], span[5]
    PAIRS: tl.constexpr = HEAD_DIM // 4
    HIGH: tl.constexpr = HEAD_DIM // 2
    U: tl.constexpr = max(16, triton.next_power_of_2(PAIRS))
    M: tl.constexpr = queries.shape[0]
    BLOCK: tl.constexpr = (2 * (PAGE_SIZE * HEAD_DIM // 2 + 2 * HEAD_DIM + 2 * PAGE_SIZE * GROUPS + PAGE_SIZE) + 15) // 16 * 8
    PAGE: tl.constexpr = HEADS * PAGE_SIZE * HEAD_DIM * kv.dtype.element_ty.primitive_bitwidth // 8
    PER_PAGE: tl.constexpr = PAGE // BLOCK
    N: tl.constexpr = min(PAGE_SIZE, BLOCK_N)
    PAGES: tl.constexpr = BLOCK_N // N
    lanes = tl.arange(0, U)
    used = lanes < PAIRS
    peak = peak_of(queries)
    factor = scale * peak
    q_a = plane_of(q, lines, 2 * lanes, used, peak, HEAD_DIM)
    q_b = plane_of(q, lines, 2 * lanes + HIGH, used, peak, HEAD_DIM)
    q_c = plane_of(q, lines, 2 * lanes + 1, used, peak, HEAD_DIM)
    q_d = plane_of(q, lines, 2 * lanes + 1 + HIGH, used, peak, HEAD_DIM)
    codes = kv.to(tl.pointer_type(tl.uint16), bitcast=True)
    halves = kv.to(tl.pointer_type(tl.float16), bitcast=True)
    largest = tl.full((M,), -float("inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    a = tl.zeros((U, M), tl.float32)
    b = tl.zeros((U, M), tl.float32)
    c = tl.zeros((U, M), tl.float32)
    d = tl.zeros((U, M), tl.float32)
    starts = _starts(blocks_at(table, low, low, high, PAGE_SIZE, PAGES), PER_PAGE, PAGE, BLOCK)
    numbers = blocks_at(table, low + BLOCK_N, low, high, PAGE_SIZE, PAGES)
    ahead = _ahead(halves, starts, low, high, lanes, used, HEAD_DIM, PAGE_SIZE, N, GROUPS)
    for first in range(low, high, BLOCK_N):
        place = first % PAGE_SIZE + tl.arange(0, N) if PAGE_SIZE > N else tl.arange(0, N)
        here, scales = starts, ahead
        starts = _starts(numbers, PER_PAGE, PAGE, BLOCK)
        numbers = blocks_at(table, first + 2 * BLOCK_N, low, high, PAGE_SIZE, PAGES)
        ahead = _ahead(halves, starts, first + BLOCK_N, high, lanes, used, HEAD_DIM, PAGE_SIZE, N, GROUPS)
        scores = ()
        for i in tl.static_range(PAGES):
            at = codes + here[i] + (place * PAIRS)[:, None] + lanes[None, :]
            found = tl.load(at, mask=used[None, :], other=0)
            scores = scores + (_page_scores(found, scales[i], q_a, q_b, q_c, q_d, factor, WIDEN),)
        best = scores[0]
        for i in tl.static_range(1, PAGES):
            best = tl.maximum(best, scores[i])
        new = tl.maximum(largest, tl.max(best, 0))
        safe = tl.where(new == -float("inf"), 0.0, new)
        fade = tl.exp2(largest - safe)
        largest = new
        sums = tl.zeros((N, M), tl.float32)
        a *= fade[None, :]
        b *= fade[None, :]
        c *= fade[None, :]
        d *= fade[None, :]
        for i in tl.static_range(PAGES):
            weights = tl.exp2(scores[i] - safe[None, :])
            sums += weights
            weights = weights.to(tl.float16)
            at = codes + here[i] + PAGE_SIZE * PAIRS + (place * PAIRS)[None, :] + lanes[:, None]
            v_a, v_b, v_c, v_d = _planes(tl.load(at, mask=used[:, None], other=0), WIDEN)
            shown = scales[i][6] != -float("inf")
            even = _left(scales[i][4], shown)
            odd = _left(scales[i][5], shown)
            a = tl.dot(_wide(v_a, even, 0), weights, a)
            b = tl.dot(_wide(v_b, odd, 0), weights, b)
            c = tl.dot(_wide(v_c, even, 0), weights, c)
            d = tl.dot(_wide(v_d, odd, 0), weights, d)
        total = total * fade + tl.sum(sums, 0)
    put_lse(largest, total, lines, splits, lse)
    lines = (lines[0], lines[1] & (total != 0))
    put_plane(a, 1.0 / total, lines, splits, out, 2 * lanes, used, HEAD_DIM)
    put_plane(b, 1.0 / total, lines, splits, out, 2 * lanes + HIGH, used, HEAD_DIM)
    put_plane(c, 1.0 / total, lines, splits, out, 2 * lanes + 1, used, HEAD_DIM)
    put_plane(d, 1.0 / total, lines, splits, out, 2 * lanes + 1 + HIGH, used, HEAD_DIM)
