"""The Triton body of the attention API: three launches a layer, and no wait for the device.

A fourth one is needed where raw entries and summaries want programs of different sizes.

It decides tiles and splits from shapes alone; lengths, tables and lines are read on the device. The
kernels are `triton_store`, `triton_splits` and `triton_merge`.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinkfold.attention.fp8 import FP8
from thinkfold.attention.int4 import Layout
from thinkfold.attention.triton_merge import merge
from thinkfold.attention.triton_splits import MIN_SPLIT, attend_splits
from thinkfold.attention.triton_store import TILE_FIELDS, store

# Splits are added until a launch has this many programs, about four for each multiprocessor of a large GPU.
PROGRAMS = 512
MAX_SPLITS = 128
MAX_SUMMARY_SPLITS = 32  # most rows have no summary or a short one; an empty split costs a program
LOG2_E = 1 / math.log(2)
LEAST_DOT = 16  # `tl.dot` takes no smaller dimension


class Blocks(NamedTuple):
    """Sizes of one program of `attend_splits`: lines of queries, entries a step, warps and pipeline stages.

    With `columns` lines are columns (`triton_columns`).
    """

    lines: int
    entries: int
    warps: int
    stages: int
    programs: int = PROGRAMS
    registers: int | None = None
    columns: bool = False


# Where queries of a decode step are columns. One program's single warp fills a twelfth of a multiprocessor.
FP8_COLUMNS = Blocks(lines=8, entries=32, warps=1, stages=3, programs=1024, columns=True)
INT4_COLUMNS = FP8_COLUMNS._replace(registers=255)


class Shapes(NamedTuple):
    """What the launches of one call share; `tokens` are those of a full tile."""

    raw: Blocks
    summary: Blocks
    tokens: int
    tiles: int
    raw_splits: int
    splits: int


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    layer: int,
    cu_seqlens_q: Tensor,
    kv_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    summary_rows: Tensor,
    summary_table: Tensor,
    summary_lens: Tensor,
    bias: Tensor,
    kv_scales: Tensor,
    scale: float,
    sliding_window: int,
    query_sink_rows: Tensor,
    query_sink: Tensor,
    lse_sink: Tensor,
    *,
    int4: bool,
) -> tuple[Tensor, Tensor]:
    """Write, then attend; see `thinkfold.attention.ops.paged_attention` for shapes and meaning.

    Scores and sums are fp32; weights are rounded to the dtype of q before they meet the values (in tiles of decode
    over fp8 or int4 to float16, in others over fp8 with a float16 q to bfloat16). `int4`: summaries lie in the blocks
    of `attention.int4`.
    Raises ValueError for a dtype that it has no kernel for.
    """
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"the triton body computes in float32, bfloat16 or float16, got q of {q.dtype}")
    q, k, v = q.contiguous(), _dense(k), _dense(v)
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if not kv_lens.numel() or not q.numel():
        return out.zero_(), lse.fill_(-torch.inf)
    shapes = _shapes(q, kv, page_table, summary_rows, summary_table, sliding_window, int4=int4)
    # Triton launches on the current device, which may be another one.
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        tiles = _store(k, v, kv, kv_scales, layer, slot_mapping, cu_seqlens_q, kv_lens, shapes)
        tables = (tiles, page_table.contiguous(), summary_rows, summary_table.contiguous(), summary_lens.contiguous())
        parts = _attend(q, kv, kv_scales, bias, layer, tables, scale, sliding_window, shapes, int4=int4)
        _merge(q, parts, cu_seqlens_q, layer, (query_sink_rows, query_sink, lse_sink), (out, lse), shapes)
    return out, lse


def _shapes(
    q: Tensor,
    kv: Tensor,
    page_table: Tensor,
    summary_rows: Tensor,
    summary_table: Tensor,
    window: int,
    *,
    int4: bool,
) -> Shapes:
    """Row b's tiles begin at (its first token + b (tokens - 1)) // tokens, so that no tile holds two rows."""
    num_heads, page_size, head_dim = kv.shape[2], kv.shape[4], kv.shape[5]
    num_tokens, num_rows = q.shape[0], page_table.shape[0]
    group = _power_of_2(q.shape[1] // num_heads)
    decode = num_tokens <= 2 * num_rows
    lined = raw = summary = _blocks(q.dtype, _power_of_2(head_dim), group, decode=decode)
    if decode and q.dtype != torch.float32:
        if kv.dtype == FP8 and head_dim % 2 == 0:
            raw = summary = _columns(FP8_COLUMNS, group)
        if int4:
            summary = _columns(INT4_COLUMNS, group) if _fits_int4(page_size, head_dim) else lined
    tokens = min(raw.lines, summary.lines) // group
    tiles = (num_tokens + num_rows * (tokens - 1)) // tokens
    entries = page_table.shape[1] * page_size
    seen = min(entries, window + tokens) if window > 0 else entries
    raw_splits = _splits(raw.programs // num_heads, tiles, seen, MAX_SPLITS)
    folded = window <= 0 and summary_rows.shape[0] and summary_table.shape[1]
    room = summary_table.shape[3] * page_size if folded else 0
    summaries = _splits(summary.programs // num_heads, tiles, room, MAX_SUMMARY_SPLITS) if room else 0
    return Shapes(raw, summary, tokens, tiles, raw_splits, raw_splits + summaries)


def _splits(programs: int, tiles: int, entries: int, most: int) -> int:
    return max(1, min(-(-programs // tiles), -(-entries // MIN_SPLIT), most))


def _columns(blocks: Blocks, group: int) -> Blocks:
    """`blocks` for `group` queries."""
    return blocks._replace(lines=max(blocks.lines, group))


def _fits_int4(page_size: int, head_dim: int) -> bool:
    """May blocks be read two bytes at a time, with one scale of a value for each plane of its codes?"""
    return page_size >= LEAST_DOT and head_dim % 4 == 0 and Layout(page_size, head_dim).groups <= 2


def _dense(x: Tensor) -> Tensor:
    """`x` `[T, H, D]` if the heads of a token lie together, else a copy: keys and values may be parts of wider rows."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _power_of_2(number: int) -> int:
    """The next power of 2 that is not less than `number`."""
    return 1 << (number - 1).bit_length()


def _blocks(dtype: torch.dtype, head_dim: int, group: int, *, decode: bool) -> Blocks:
    """`head_dim` and `group` are powers of 2."""
    if dtype == torch.float32:
        return Blocks(max(LEAST_DOT, group), 32 if head_dim <= 128 else 16, 4, 2)
    if decode:
        return Blocks(max(LEAST_DOT, group), 32, 4, 3)
    return Blocks(max(64 if head_dim <= 128 else 32, group), 64 if head_dim <= 128 else 32, 4, 2)


def _store(
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    kv_scales: Tensor,
    layer: int,
    slot_mapping: Tensor,
    cu_seqlens_q: Tensor,
    kv_lens: Tensor,
    shapes: Shapes,
) -> Tensor:
    """Store the new tokens; returns the tiles `[tiles, TILE_FIELDS]` int32."""
    _, num_layers, num_heads, _, page_size, head_dim = kv.shape
    tiles = torch.empty(shapes.tiles, TILE_FIELDS, dtype=torch.int32, device=k.device)
    kernel: Any = store
    kernel[(max(k.shape[0], shapes.tiles),)](
        k,
        v,
        kv,
        kv_scales,
        slot_mapping,
        cu_seqlens_q,
        kv_lens,
        tiles,
        k.stride(0),
        v.stride(0),
        k.shape[0],
        shapes.tiles,
        kv_lens.shape[0],
        layer,
        NUM_LAYERS=num_layers,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        TILE_TOKENS=shapes.tokens,
        FP8=kv.dtype == FP8,
        num_warps=4 if num_heads * head_dim > 256 else 1,
    )
    return tiles


def _attend(
    q: Tensor,
    kv: Tensor,
    kv_scales: Tensor,
    bias: Tensor,
    layer: int,
    tables: tuple[Tensor, ...],
    scale: float,
    window: int,
    shapes: Shapes,
    *,
    int4: bool,
) -> tuple[Tensor, Tensor]:
    """`tables` are the tiles and the four tables of raw and summary; returns out and LSE of all splits."""
    _, num_layers, num_heads, _, page_size, head_dim = kv.shape
    out = torch.empty(*q.shape[:2], shapes.splits, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(out.shape[:3], dtype=torch.float32, device=q.device)
    page_table, summary_table, last = tables[1], tables[3], shapes.splits - shapes.raw_splits
    apart = last > 0 and shapes.raw != shapes.summary
    launches = [(shapes.raw, 0, shapes.raw_splits), (shapes.summary, shapes.raw_splits, last)]
    kernel: Any = attend_splits
    for blocks, first, count in launches if apart else [(shapes.raw, 0, shapes.splits)]:
        kernel[(shapes.tiles, num_heads, count)](
            q,
            kv,
            kv_scales,
            bias,
            *tables,
            out,
            lse,
            page_table.shape[1],
            summary_table.shape[1],
            summary_table.shape[3],
            layer,
            scale * LOG2_E,
            window,
            first,
            shapes.raw_splits,
            shapes.splits,
            int(bias.numel() > 0),
            NUM_LAYERS=num_layers,
            NUM_HEADS=num_heads,
            GROUP=q.shape[1] // num_heads,
            HEAD_DIM=head_dim,
            LANES=max(LEAST_DOT, _power_of_2(head_dim)),
            PAGE_SIZE=page_size,
            BLOCK_M=blocks.lines,
            BLOCK_N=blocks.entries,
            FP8=kv.dtype == FP8,
            INT4=Layout(page_size, head_dim).groups if int4 else 0,
            RAW=first == 0,
            SUMMARIES=last > 0 if not apart else first > 0,
            COLUMNS=blocks.columns * (1 + q.is_cuda),  # the interpreter knows no inline assembly
            num_warps=blocks.warps,
            num_stages=blocks.stages,
            maxnreg=blocks.registers,
        )
    return out, lse


def _merge(
    q: Tensor,
    parts: tuple[Tensor, Tensor],
    cu_seqlens_q: Tensor,
    layer: int,
    sinks: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    shapes: Shapes,
) -> None:
    """Join the `parts` into `results`, and fill the `sinks` (rows, queries, LSE)."""
    num_tokens, num_heads, head_dim = q.shape
    rows, query_sink, lse_sink = sinks
    few = shapes.splits <= 16
    kernel: Any = merge
    kernel[(num_tokens + rows.shape[0], num_heads)](
        q,
        *parts,
        cu_seqlens_q,
        rows,
        *results,
        query_sink,
        lse_sink,
        num_tokens,
        cu_seqlens_q.shape[0] - 1,
        rows.shape[0],
        shapes.splits,
        layer,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        CHUNK=16 if few else 64,
        num_warps=(1 if head_dim <= 128 else 2) * (1 if few else 4),
    )
