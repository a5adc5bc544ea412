"""Which head blocks the reference attention reads and writes in one step, found once per step.

All layers of a step share it: a layer only shifts block numbers. It knows no queries or values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Keys are visited in chunks of this many entries counted from entry 0, whatever the batch holds.
KV_CHUNK = 512
# Gathered keys and values of one group of decode rows should stay inside a CPU's last-level cache;
# a GPU would rather have few large groups.
GATHER_BYTES = 8 << 20
GATHER_BYTES_GPU = 1 << 30
# A group may pad its shorter rows up to this share of the longest one.
MAX_PADDING = 0.15
# Lengths are padded to this, so that no vector loop of a softmax ends in a scalar tail.
LENGTH_ALIGN = 64
# BLAS sums in blocks of 192; a length between one and two blocks is halved instead (measured, MKL).
SUM_BLOCK = 192

_MEMO = "_thinkfold_gather_plans"


class Row(NamedTuple):
    """One row of the batch: queries `[start, start + q_len)`, `kv_len` entries, read from `first`."""

    line: int
    start: int
    q_len: int
    kv_len: int
    first: int


class Gather(NamedTuple):
    """Entries of some rows, `length` each, counted from each row's `first`.

    `blocks` `[2, n * Hkv * P]` are key and value blocks of layer 0, rows of kv seen as
    `[num_pages * L * Hkv * 2, page_size * D]`; `stale` are entries of the gathered
    `[n * Hkv * length]` behind a row's end; `mask` `[n, 1, 1, length]` is 0 where a row's last
    query sees and -inf elsewhere; `tokens` `[n]` are the rows' first tokens.
    """

    rows: list[Row]
    length: int
    blocks: Tensor
    stale: Tensor
    mask: Tensor
    tokens: Tensor


class GatherPlan(NamedTuple):
    """All reads of a step: `decode` groups of one-token rows, `prefill` one row each.

    `writes` `[2, T * Hkv]` are key and value entries of layer 0, rows of kv seen as `[-1, D]`;
    `written` are the token rows that store something, None where all do.
    """

    lengths: list[list[int]]
    table: Tensor
    slots: Tensor
    decode: list[Gather]
    prefill: list[Gather]
    writes: Tensor
    written: Tensor | None


def plan_for(
    kv: Tensor, cu_seqlens_q: Tensor, kv_lens: Tensor, page_table: Tensor, slot_mapping: Tensor, window: int
) -> GatherPlan:
    """The plan of this step, made by the first layer that asks and kept on its `page_table`.

    A kept plan is used only while lengths, table and slots still hold the same values.
    """
    memo: dict[tuple[int, torch.Size, torch.dtype], GatherPlan] = getattr(page_table, _MEMO, {})
    key = (window, kv.shape, kv.dtype)
    lengths = [cu_seqlens_q.tolist(), kv_lens.tolist()]
    plan = memo.get(key)
    if (
        plan is None
        or plan.lengths != lengths
        or not torch.equal(plan.table, page_table)
        or not torch.equal(plan.slots, slot_mapping)
    ):
        plan = _make(kv, lengths, page_table, slot_mapping, window)
        setattr(page_table, _MEMO, {**memo, key: plan})
    return plan


def first_entry(query: int, window: int) -> int:
    """The chunk border at or before the oldest entry that a query at this index may see."""
    if window <= 0:
        return 0
    return max(0, query - window + 1) // KV_CHUNK * KV_CHUNK


def padded(length: int, page_size: int) -> int:
    """`length` rounded up to whole pages, so that zeros change no bit of the sums over it."""
    align = max(LENGTH_ALIGN, page_size)
    length = -(-length // align) * align
    short = 2 * SUM_BLOCK - length % KV_CHUNK
    return length + short if 0 < short < SUM_BLOCK else length


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `visible`, else -inf."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


def _make(kv: Tensor, lengths: list[list[int]], table: Tensor, slots: Tensor, window: int) -> GatherPlan:
    starts, kv_lens = lengths
    decode: list[Row] = []
    prefill: list[Row] = []
    for index, kv_len in enumerate(kv_lens):
        q_len = starts[index + 1] - starts[index]
        row = Row(index, starts[index], q_len, kv_len, first_entry(kv_len - q_len, window))
        if q_len:
            (decode if q_len == 1 else prefill).append(row)
    keep = slots >= 0
    written = None if bool(keep.all()) else keep.nonzero()[:, 0]
    return GatherPlan(
        lengths=lengths,
        table=table.clone(),
        slots=slots.clone(),
        decode=[_gather(group, kv, table, window) for group in _groups(decode, kv)],
        prefill=[_gather([row], kv, table, window) for row in prefill],
        writes=_writes(kv, slots if written is None else slots[written]),
        written=written,
    )


def _writes(kv: Tensor, slots: Tensor) -> Tensor:
    _, num_layers, num_heads, _, page_size, _ = kv.shape
    pages = torch.div(slots, page_size, rounding_mode="floor")
    first = pages * (num_layers * num_heads * 2 * page_size) + slots - pages * page_size
    heads = torch.arange(num_heads, device=kv.device) * (2 * page_size)
    keys = (first[:, None] + heads).view(-1)
    return torch.stack([keys, keys + page_size])


def _groups(rows: list[Row], kv: Tensor) -> list[list[Row]]:
    """Decode rows of similar length together, bounded in bytes and in padding."""
    entry_bytes = 2 * kv.shape[2] * kv.shape[5] * kv.element_size()
    limit = GATHER_BYTES if kv.device.type == "cpu" else GATHER_BYTES_GPU
    groups: list[list[Row]] = []
    span = 0
    for row in sorted(rows, key=lambda r: r.first - r.kv_len):
        length = row.kv_len - row.first
        full = groups and (len(groups[-1]) + 1) * span * entry_bytes > limit
        if not groups or full or length < span * (1 - MAX_PADDING) - LENGTH_ALIGN:
            groups.append([])
            span = length
        groups[-1].append(row)
    return groups


def _gather(rows: list[Row], kv: Tensor, page_table: Tensor, window: int) -> Gather:
    _, num_layers, num_heads, _, page_size, _ = kv.shape
    length = padded(max(row.kv_len - row.first for row in rows), page_size)
    lines, ends, firsts, tokens = torch.tensor(
        [[r.line, r.kv_len - r.first, r.first // page_size, r.start] for r in rows], device=kv.device
    ).T[..., None]  # [n, 1] each
    used = torch.div(ends + page_size - 1, page_size, rounding_mode="floor")
    columns = torch.arange(length // page_size, device=kv.device)
    # Behind its last page a row repeats its own first one: no other row's numbers can reach it.
    pages = page_table[lines, torch.where(columns < used, columns, 0) + firsts].long()
    heads = torch.arange(0, 2 * num_heads, 2, device=kv.device)[:, None]
    keys = (pages[:, None, :] * (num_layers * 2 * num_heads) + heads).view(-1)
    entries = torch.arange(length, device=kv.device)
    inside = entries < ends
    tail = (~inside & ((entries < used * page_size) | (used == 1))).nonzero()  # [s, 2]
    head_rows = torch.arange(num_heads, device=kv.device)
    stale = ((tail[:, :1] * num_heads + head_rows) * length + tail[:, 1:]).view(-1)
    visible = inside & (entries >= ends - window) if window > 0 else inside
    mask = additive_mask(visible, kv.dtype)[:, None, None, :]
    return Gather(rows, length, torch.stack([keys, keys + 1]), stale, mask, tokens[:, 0].contiguous())
