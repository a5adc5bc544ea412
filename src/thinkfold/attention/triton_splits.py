"""The kernel that reads KV: one tile of queries over one split of its raw entries or of its summaries.

Split-KV decoding as in Flash-Decoding (arXiv 2311.01282), over pages; its partial results are joined by
`triton_merge`.
"""

# A kernel that only compiles for a GPU looks to a type checker as if it never returned.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from thinkfold.attention.triton_fp8 import attend_fp8
from thinkfold.attention.triton_int4 import attend_int4
from thinkfold.attention.triton_int4_columns import attend_int4_columns
from thinkfold.attention.triton_softmax import attend

# A split reads at least this many entries, so that a short row is not cut into crumbs.
MIN_SPLIT = 256
_MIN_SPLIT = tl.constexpr(MIN_SPLIT)
# Integers that differ from step to step: a kernel made for one value of them would be made again and again.
_OF_A_STEP = ("table_width", "num_lines", "summary_width", "first_split", "raw_splits", "num_splits")


@triton.jit
def _share(start, end, part, parts, BLOCK: tl.constexpr):
    """Part `part` of `parts` of entries `[start, end)`, cut at multiples of BLOCK; may be empty."""
    base = start // BLOCK * BLOCK
    size = tl.maximum(tl.cdiv(tl.cdiv(end - base, parts), BLOCK) * BLOCK, _MIN_SPLIT)
    low = base + part * size
    return low, tl.minimum(low + size, end)


@triton.jit
def _queries(
    q,
    tiles,
    head,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The tile's lines (all queries, its own `[M, D]`, numbers token * Hq + head, which exist), and what each sees."""
    padded: tl.constexpr = triton.next_power_of_2(GROUP)
    lines = tl.arange(0, BLOCK_M)
    token, lane = lines // padded, lines % padded
    real = (token < tl.load(tiles + 2)) & (lane < GROUP)
    number = (tl.load(tiles + 1) + token).to(tl.int64) * (NUM_HEADS * GROUP) + head * GROUP + lane
    dims = tl.arange(0, LANES)
    shown = real[:, None] & (dims[None, :] < HEAD_DIM)
    rows = tl.load(q + number[:, None] * HEAD_DIM + dims[None, :], mask=shown, other=0.0)
    return (q, rows, number, real), tl.load(tiles + 3) + token


@triton.jit
def _raw(
    table,
    tile,
    seen,
    window,
    part,
    parts,
    layer,
    head,
    NUM_LAYERS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The span of one part of the raw entries that the tile sees; `table` holds pages."""
    first = tl.load(tile + 3)
    start = tl.where(window > 0, tl.maximum(first - window, 0), 0)
    low, high = _share(start, first + tl.load(tile + 2) - 1, part, parts, BLOCK_N)
    oldest = tl.where(window > 0, seen - window, 0)
    return table, NUM_LAYERS * NUM_HEADS, layer * NUM_HEADS + head, start, low, high, oldest, seen


@triton.jit
def _line(rows, lens, tables, row, first, head, width):
    """The table of a head's summaries and how many entries it has; the row's line counts from line `first` on."""
    line = tl.load(rows + row)
    at = (first + line) * tl.num_programs(1) + head  # before the table for line -1
    return tables + at * width, tl.load(lens + at, mask=line >= 0, other=0)


@triton.jit
def _summary(table, length, seen, part, parts, BLOCK_N: tl.constexpr):
    """The span of one part of a head's summaries, which all queries see; `table` holds head blocks."""
    low, high = _share(0, length, part, parts, BLOCK_N)
    return table, 1, 0, 0, low, high, tl.zeros_like(seen), tl.zeros_like(seen) + length


@triton.jit
def _put(parts, lines, target, HEAD_DIM: tl.constexpr, LANES: tl.constexpr):
    """Store what one split came to for the queries that are real; LANES is HEAD_DIM as `tl.dot` takes it."""
    largest, total, acc = parts
    _, _, numbers, real = lines
    split, num_splits, out, lse = target
    at = numbers * num_splits + split
    tl.store(lse + at, tl.where(total == 0, -float("inf"), largest + tl.log2(total)), mask=real)
    dims = tl.arange(0, LANES)
    shown = (real & (total != 0))[:, None] & (dims[None, :] < HEAD_DIM)
    tl.store(out + at[:, None] * HEAD_DIM + dims[None, :], acc / total[:, None], mask=shown)


@triton.jit
def _attend(
    lines,
    span,
    memory,
    scale,
    beta,
    target,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FP8: tl.constexpr,
    INT4: tl.constexpr,
    SUMMARY: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Choose the loop over `span` of `memory` (kv, scales, bias), and store what it comes to."""
    kv, kv_scales, bias = memory
    PACKED: tl.constexpr = COLUMNS > 1
    if INT4 > 0 and COLUMNS > 0:
        attend_int4_columns(lines, span, kv, scale, target, HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_N, INT4, PACKED)
    elif INT4 > 0:
        parts = attend_int4(lines[1], span, kv, scale, HEADS, HEAD_DIM, LANES, PAGE_SIZE, BLOCK_N, INT4)
        _put(parts, lines, target, HEAD_DIM, LANES)
    elif COLUMNS > 0:
        attend_fp8(lines, span, memory, scale, beta, target, HEAD_DIM, PAGE_SIZE, BLOCK_N, SUMMARY, PACKED)
    else:
        parts = attend(
            lines[1], span, kv, kv_scales, bias, scale, beta, HEAD_DIM, LANES, PAGE_SIZE, BLOCK_N, FP8, SUMMARY
        )
        _put(parts, lines, target, HEAD_DIM, LANES)


@triton.jit(
    do_not_specialize=[*_OF_A_STEP, "layer", "window", "beta"],
    do_not_specialize_on_alignment=["page_table", "summary_rows", "summary_table", "summary_lens"],
)
def attend_splits(
    q,
    kv,
    kv_scales,
    bias,
    tiles,
    page_table,
    summary_rows,
    summary_table,
    summary_lens,
    out,
    lse,
    table_width,
    num_lines,
    summary_width,
    layer,
    scale,
    window,
    first_split,
    raw_splits,
    num_splits,
    beta,
    NUM_LAYERS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FP8: tl.constexpr,
    INT4: tl.constexpr,
    RAW: tl.constexpr,
    SUMMARIES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Tile, KV head and split of the grid `[tiles, Hkv, splits]`, whose first split is number `first_split`.

    Those below `raw_splits` read raw entries, others summaries; RAW and SUMMARIES tell which there are. Writes out
    `[T, Hq, splits, D]` and lse `[T, Hq, splits]` (base 2; -inf where out is not written) of the tile's tokens. `scale`
    is to base 2; `window`, `beta` (is there a `bias`) and `INT4` (groups of a value) are 0 for none. With COLUMNS
    queries are columns (`triton_columns`); 2 widens codes by instructions of a GPU.
    """
    tile, head, split = tiles + tl.program_id(0).to(tl.int64) * 4, tl.program_id(1), tl.program_id(2) + first_split
    if tl.load(tile + 2) == 0:
        return
    row = tl.load(tile).to(tl.int64)
    lines, seen = _queries(q, tile, head, NUM_HEADS, GROUP, HEAD_DIM, LANES, BLOCK_M)
    memory, target = (kv, kv_scales, bias), (split, num_splits, out, lse)
    HEADS: tl.constexpr = NUM_LAYERS * NUM_HEADS
    if RAW and (not SUMMARIES or split < raw_splits):
        table = page_table + row * table_width
        span = _raw(table, tile, seen, window, split, raw_splits, layer, head, NUM_LAYERS, NUM_HEADS, BLOCK_N)
        _attend(lines, span, memory, scale, 0, target, HEADS, HEAD_DIM, LANES, PAGE_SIZE, BLOCK_N, FP8, 0, 0, COLUMNS)
    else:
        table, length = _line(summary_rows, summary_lens, summary_table, row, layer * num_lines, head, summary_width)
        span = _summary(table, length, seen, split - raw_splits, num_splits - raw_splits, BLOCK_N)
        _attend(
            lines, span, memory, scale, beta, target, HEADS, HEAD_DIM, LANES, PAGE_SIZE, BLOCK_N, FP8, INT4, 1, COLUMNS
        )
