"""Which head blocks the reference attention reads and writes in one step, found once per step.

All layers of a step share it: a layer only shifts block numbers, and adds its own summaries. It
knows no queries or values. Indices are found in numpy, where small arrays cost the least.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinkfold.attention.padding import (
    LENGTH_ALIGN,
    MAX_EXTRA,
    additive_mask,
    first_entry,
    padded,
    rounded_up,
    row_multiple,
)

# Gathered keys and values of one group of decode rows should stay inside a CPU's last-level cache;
# a GPU would rather have few large groups.
GATHER_BYTES = 4 << 20
GATHER_BYTES_GPU = 1 << 30
# A group may pad its shorter rows up to this share of the longest one.
MAX_PADDING = 0.15

_MEMO = "_thinkfold_gather_plans"


class Row(NamedTuple):
    """One row of the batch: queries `[start, start + q_len)`, `kv_len` entries, read from `first`.

    `summary` is its line of the summary tables, -1 where there is nothing to read.
    """

    line: int
    start: int
    q_len: int
    kv_len: int
    first: int
    summary: int


class Gather(NamedTuple):
    """Entries of some rows, `length` each, counted from each row's `first`.

    `blocks` `[2, n, Hkv, P]` are key and value blocks of layer 0, rows of kv seen as
    `[num_pages * L * Hkv * 2, page_size * D]`; `stale` are entries of the gathered
    `[n * Hkv * length]` behind a row's end; `mask` `[n, 1, 1, length]` is 0 where a row's last
    query sees and -inf elsewhere; `tokens` `[n]` are the rows' first tokens; `queries`
    `[n * Hkv * M]` are rows of q seen as `[T * Hq, D]`: the heads of each KV head, its last one
    repeated up to a multiple of `row_multiple`.
    """

    rows: list[Row]
    length: int
    blocks: Tensor
    stale: Tensor
    mask: Tensor
    tokens: Tensor
    queries: Tensor


class _Layout(NamedTuple):
    """What index arithmetic needs to know of q and kv."""

    num_tokens: int
    num_layers: int
    num_heads: int
    page_size: int
    group: int
    group_rows: int  # with padding
    entry_bytes: int
    window: int
    dtype: torch.dtype
    device: torch.device


class GatherPlan(NamedTuple):
    """All reads of a step: `decode` groups of one-token rows, `prefill` one row each.

    `folded` are rows with summaries, one each, of one or several tokens; they have room for
    `MAX_EXTRA` entries more. `key_writes`, `value_writes` `[T * Hkv]` are entries of layer 0, rows
    of kv seen as `[-1, D]`; `written` are the token rows that store something, None where all do.
    `in_order`: all tokens are one group of decode rows, in their order.
    """

    layout: _Layout
    lengths: list[list[int]]
    table: Tensor
    slots: Tensor
    decode: list[Gather]
    prefill: list[Gather]
    folded: list[Gather]
    key_writes: Tensor
    value_writes: Tensor
    written: Tensor | None
    in_order: bool


def plan_for(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    kv_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    summaries: list[int],
    window: int,
) -> GatherPlan:
    """The plan of this step, made by the first layer that asks and kept on `kv` for the next ones.

    `summaries` are the rows' lines that have summaries to read, else -1. A kept plan is used only
    while lengths, table and slots still hold the same values, and in the next decode step for as
    long as no row needs another page.
    """
    _, num_layers, num_heads, _, page_size, head_dim = kv.shape
    entry_bytes = 2 * num_heads * head_dim * q.element_size()
    group = q.shape[1] // num_heads
    shape = (q.shape[0], num_layers, num_heads, page_size, group, group + -group % row_multiple(head_dim))
    layout = _Layout(*shape, entry_bytes, window, q.dtype, kv.device)
    memo: dict[int, GatherPlan] = getattr(kv, _MEMO, {})
    lengths = [cu_seqlens_q.tolist(), kv_lens.tolist(), summaries]
    known = memo.get(window)
    if known is not None and (known.layout != layout or not torch.equal(known.table, page_table)):
        known = None
    if known is not None and known.lengths == lengths and torch.equal(known.slots, slot_mapping):
        return known
    rows = _rows(lengths, window)
    plan = None if known is None else _advanced(known, rows, lengths, slot_mapping)
    plan = plan or _make(rows, layout, lengths, page_table, slot_mapping)
    setattr(kv, _MEMO, {**memo, window: plan})
    return plan


def _rows(lengths: list[list[int]], window: int) -> list[Row]:
    rows: list[Row] = []
    for index, (kv_len, summary) in enumerate(zip(*lengths[1:], strict=True)):
        start, end = lengths[0][index : index + 2]
        if end > start:
            first = first_entry(kv_len - (end - start), window)
            rows.append(Row(index, start, end - start, kv_len, first, summary))
    return rows


def _advanced(plan: GatherPlan, rows: list[Row], lengths: list[list[int]], slots: Tensor) -> GatherPlan | None:
    """`plan` one token later, where each row is one token and reads the same pages as before, else None.

    As `plan.table` and the rows' places have not changed, only their ends differ.
    """
    size = plan.layout.page_size
    later = {row.line: row for row in rows}
    gathers = plan.decode + plan.folded
    known = [row for gather in gathers for row in gather.rows]
    if plan.prefill or plan.written is not None or len(known) != len(rows):
        return None
    if any(
        row.kv_len % size == 0 or later.get(row.line) != row._replace(kv_len=row.kv_len + 1) or row.q_len > 1
        for row in known
    ):
        return None
    places = slots.cpu().numpy()
    if (places < 0).any():
        return None
    key_writes = _key_writes(places, plan.layout)
    moved = [_with_ends(gather, [later[row.line] for row in gather.rows], plan.layout) for gather in gathers]
    return plan._replace(
        lengths=lengths,
        slots=slots.clone(),
        decode=moved[: len(plan.decode)],
        folded=moved[len(plan.decode) :],
        key_writes=key_writes,
        value_writes=key_writes + size,
    )


def _make(rows: list[Row], layout: _Layout, lengths: list[list[int]], table: Tensor, slots: Tensor) -> GatherPlan:
    decode = [row for row in rows if row.q_len == 1 and row.summary < 0]
    pages = table.cpu().numpy()
    places = slots.cpu().numpy()
    keep = places >= 0
    written = None if keep.all() else np.flatnonzero(keep)
    groups = [_gather(group, pages, layout) for group in _groups(decode, layout)]
    key_writes = _key_writes(places if written is None else places[written], layout)
    return GatherPlan(
        layout=layout,
        lengths=lengths,
        table=table.clone(),
        slots=slots.clone(),
        decode=groups,
        prefill=[_gather([row], pages, layout) for row in rows if row.q_len > 1 and row.summary < 0],
        folded=[_gather([row], pages, layout, MAX_EXTRA) for row in rows if row.summary >= 0],
        key_writes=key_writes,
        value_writes=key_writes + layout.page_size,
        written=None if written is None else torch.from_numpy(written).to(layout.device),
        in_order=len(groups) == 1 and len(groups[0].rows) == layout.num_tokens,
    )


def _key_writes(slots: NDArray[np.int64], layout: _Layout) -> Tensor:
    num_heads, size = layout.num_heads, layout.page_size
    pages = slots // size
    first = pages * ((layout.num_layers * num_heads * 2 - 1) * size) + slots
    keys = (first[:, None] + np.arange(0, num_heads * 2 * size, 2 * size)).reshape(-1)
    return torch.from_numpy(keys).to(layout.device)


def _groups(rows: list[Row], layout: _Layout) -> list[list[Row]]:
    """Decode rows of similar length together, bounded in bytes and in padding."""
    limit = GATHER_BYTES if layout.device.type == "cpu" else GATHER_BYTES_GPU
    groups: list[list[Row]] = []
    span = 0
    for row in sorted(rows, key=lambda r: r.first - r.kv_len):
        length = row.kv_len - row.first
        full = groups and (len(groups[-1]) + 1) * span * layout.entry_bytes > limit
        if not groups or full or length < span * (1 - MAX_PADDING) - LENGTH_ALIGN:
            groups.append([])
            span = length
        groups[-1].append(row)
    return [sorted(group) for group in groups]


def _gather(rows: list[Row], table: NDArray[np.int32], layout: _Layout, extra: int = 0) -> Gather:
    num_heads, page_size = layout.num_heads, layout.page_size
    longest = max(row.kv_len - row.first for row in rows)
    length = rounded_up(longest) + extra if extra else padded(longest)
    lines, ends, firsts, tokens = np.array(
        [[r.line, r.kv_len - r.first, r.first // page_size, r.start] for r in rows], dtype=np.int64
    ).T[..., None]  # [n, 1] each
    columns = np.arange(length // page_size)
    # Behind its last page a row repeats its own first one: no other row's numbers can reach it.
    pages = table[lines, np.where(columns * page_size < ends, columns, 0) + firsts].astype(np.int64)
    blocks = np.empty((2, len(rows), num_heads, length // page_size), dtype=np.int64)
    heads = np.arange(0, 2 * num_heads, 2)[:, None]
    np.add((pages * (layout.num_layers * 2 * num_heads))[:, None], heads, out=blocks[0])
    np.add(blocks[0], 1, out=blocks[1])
    padded_group = np.minimum(np.arange(layout.group_rows), layout.group - 1)
    queries = (np.arange(num_heads)[:, None] * layout.group + padded_group).reshape(-1)
    device, nothing = layout.device, torch.empty(0)
    gather = Gather(
        rows,
        length,
        torch.from_numpy(blocks).to(device),
        nothing,
        nothing,
        torch.from_numpy(tokens.reshape(-1)).to(device),
        torch.from_numpy((tokens * (num_heads * layout.group) + queries).reshape(-1)).to(device),
    )
    return _with_ends(gather, rows, layout)


def _with_ends(gather: Gather, rows: list[Row], layout: _Layout) -> Gather:
    """`gather` with what depends on where its rows end: stale entries and the mask."""
    size, num_heads = layout.page_size, layout.num_heads
    ends = np.array([[row.kv_len - row.first] for row in rows], dtype=np.int64)
    entries = np.arange(gather.length)
    outside = entries >= ends
    borders = np.where(ends < size, gather.length, ends + -ends % size)
    tail_rows, tail = np.nonzero(outside & (entries < borders))
    stale = (tail_rows[:, None] * num_heads + np.arange(num_heads)) * gather.length + tail[:, None]
    hidden = outside | (entries < ends - layout.window) if layout.window > 0 else outside
    return gather._replace(
        rows=rows,
        stale=torch.from_numpy(stale.reshape(-1)).to(layout.device),
        mask=additive_mask(torch.from_numpy(hidden[:, None, None]).to(layout.device), layout.dtype),
    )
