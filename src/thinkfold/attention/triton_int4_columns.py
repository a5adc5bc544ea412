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
def _of_keys(halves, starts, lanes, used, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Least and step `[U]` of each plane of the keys of each block."""
    found = ()
    for i in tl.static_range(len(starts)):
        at = halves + starts[i] + PAGE_SIZE * HEAD_DIM // 2 + 2 * lanes
        low, high = _pair(at, HEAD_DIM, used), _pair(at + HEAD_DIM // 2, HEAD_DIM, used)
        found = found + ((low, high, _pair(at + 1, HEAD_DIM, used), _pair(at + HEAD_DIM // 2 + 1, HEAD_DIM, used)),)
    return found


@triton.jit
def _spread(starts, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where its block begins, for each entry `[BLOCK_N]`; a block has `N` of them."""
    page = tl.arange(0, BLOCK_N) // N
    spread = tl.zeros((BLOCK_N,), tl.int64) + starts[0]
    for i in tl.static_range(1, len(starts)):
        spread = tl.where(page == i, starts[i], spread)
    return spread


@triton.jit
def _places(first, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Places in their pages of entries from `first` on."""
    places = tl.arange(0, BLOCK_N) % PAGE_SIZE
    return places + first % PAGE_SIZE if PAGE_SIZE > BLOCK_N else places


@triton.jit
def _of_entries(
    halves,
    starts,
    first,
    high,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Least and step of the first and of the last group of each entry's value, and β, `[BLOCK_N]`."""
    STEPS: tl.constexpr = PAGE_SIZE * GROUPS
    valid = first + tl.arange(0, BLOCK_N) < high
    place = _places(first, PAGE_SIZE, BLOCK_N)
    at = halves + _spread(starts, N, BLOCK_N) + (PAGE_SIZE * HEAD_DIM // 2 + 2 * HEAD_DIM)
    values = at + place * GROUPS
    beta = tl.load(at + 2 * STEPS + place, mask=valid, other=-float("inf"))
    return _pair(values, STEPS, valid), _pair(values + GROUPS - 1, STEPS, valid), beta


@triton.jit
def _wide(codes, scale):
    """Numbers of codes, whose scales lie along the second axis."""
    least = tl.broadcast_to(scale[0][None, :], codes.shape)
    return tl.fma(codes, tl.broadcast_to(scale[1][None, :], codes.shape), least)


@triton.jit
def _page_scores(codes, scales, queries, WIDEN: tl.constexpr):
    """Products `[N, M]` of one page's keys and the queries' planes."""
    planes = _planes(codes, WIDEN)
    scores = tl.dot(_wide(planes[0], scales[0]), queries[0])
    for i in tl.static_range(1, 4):
        scores = tl.dot(_wide(planes[i], scales[i]), queries[i], scores)
    return scores


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
    queries = (
        plane_of(q, lines, 2 * lanes, used, peak, HEAD_DIM),
        plane_of(q, lines, 2 * lanes + HIGH, used, peak, HEAD_DIM),
        plane_of(q, lines, 2 * lanes + 1, used, peak, HEAD_DIM),
        plane_of(q, lines, 2 * lanes + 1 + HIGH, used, peak, HEAD_DIM),
    )
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
    k_ahead = _of_keys(halves, starts, lanes, used, HEAD_DIM, PAGE_SIZE)
    v_ahead = _of_entries(halves, starts, low, high, HEAD_DIM, PAGE_SIZE, N, BLOCK_N, GROUPS)
    for first in range(low, high, BLOCK_N):
        place = _places(first, PAGE_SIZE, N)
        codes_at = codes + _spread(starts, N, BLOCK_N) + PAGE_SIZE * PAIRS + _places(first, PAGE_SIZE, BLOCK_N) * PAIRS
        here, k_scales = starts, k_ahead
        even, odd, beta = v_ahead
        starts = _starts(numbers, PER_PAGE, PAGE, BLOCK)
        numbers = blocks_at(table, first + 2 * BLOCK_N, low, high, PAGE_SIZE, PAGES)
        k_ahead = _of_keys(halves, starts, lanes, used, HEAD_DIM, PAGE_SIZE)
        v_ahead = _of_entries(halves, starts, first + BLOCK_N, high, HEAD_DIM, PAGE_SIZE, N, BLOCK_N, GROUPS)
        at = (place * PAIRS)[:, None] + lanes[None, :]
        scores = _page_scores(tl.load(codes + here[0] + at, mask=used[None, :], other=0), k_scales[0], queries, WIDEN)
        if PAGES == 2:
            found = tl.load(codes + here[1] + at, mask=used[None, :], other=0)
            scores = tl.join(scores, _page_scores(found, k_scales[1], queries, WIDEN))
            scores = scores.permute(2, 0, 1).reshape(BLOCK_N, M)
        bias = beta.to(tl.float32)
        scores = scores * factor + (bias * _LOG2_E)[:, None]
        scores = tl.where((bias != -float("inf"))[:, None], scores, -float("inf"))
        new = tl.maximum(largest, tl.max(scores, 0))
        safe = tl.where(new == -float("inf"), 0.0, new)  # a query that has seen nothing yet
        weights = tl.exp2(scores - safe[None, :])
        fade = tl.exp2(largest - safe)
        largest = new
        total = total * fade + tl.sum(weights, 0)
        weights = weights.to(tl.float16)

        planes = _planes(tl.load(codes_at[None, :] + lanes[:, None], mask=used[:, None], other=0), WIDEN)
        shown = beta != -float("inf")
        even, odd = _left(even, shown), _left(odd, shown)
        a = tl.dot(_wide(planes[0], even), weights, a * fade[None, :])
        b = tl.dot(_wide(planes[1], odd), weights, b * fade[None, :])
        c = tl.dot(_wide(planes[2], even), weights, c * fade[None, :])
        d = tl.dot(_wide(planes[3], odd), weights, d * fade[None, :])
    put_lse(largest, total, lines, splits, lse)
    lines = (lines[0], lines[1] & (total != 0))
    put_plane(a, 1.0 / total, lines, splits, out, 2 * lanes, used, HEAD_DIM)
    put_plane(b, 1.0 / total, lines, splits, out, 2 * lanes + HIGH, used, HEAD_DIM)
    put_plane(c, 1.0 / total, lines, splits, out, 2 * lanes + 1, used, HEAD_DIM)
    put_plane(d, 1.0 / total, lines, splits, out, 2 * lanes + 1 + HIGH, used, HEAD_DIM)
