"""Which head blocks the reference attention reads and writes in one step, found once per step.

All layers of a step share it: a layer only shifts block numbers, and adds its own summaries. It
knows no queries or values. Indices are found in numpy, where small arrays cost the least. From one
decode step to the next a plan is carried, and with it what was gathered: only new entries are read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinkfold.attention.padding import (
    MAX_EXTRA,
    additive_mask,
    first_entry,
    padded,
    rounded_up,
    row_multiple,
)

# Keys and values that are gathered anew in every step should stay inside a CPU's last-level cache, a group of rows at
# a time; a GPU would rather have few large groups.
GATHER_BYTES = 4 << 20
GATHER_BYTES_GPU = 1 << 30
# What is gathered, of all layers, stays in memory for the next step up to this size: copying it anew costs more than
# attention itself.
KEPT_BYTES = 512 << 20
# One more group costs about as much time as reading this much: less may be read in vain to have one less.
GROUP_BYTES = 512 << 10

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

    `kept` holds what was gathered, by layer, None where it is not kept; it lacks the rows' newest
    entries, which are `newest` `[2 * n * Hkv]` (of layer 0, rows of kv seen as `[-1, D]`) and belong
    at `places` of it. Later than the step that gathered, `blocks` and `stale` are out of date.
    """

    rows: list[Row]
    length: int
    blocks: Tensor
    stale: Tensor
    mask: Tensor
    tokens: Tensor
    queries: Tensor
    newest: Tensor
    places: Tensor
    kept: dict[int, Tensor] | None = None


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

    def has_room(self, groups: list[list[Row]]) -> bool:
        """Whether what is gathered of these rows, in all layers, may stay in memory."""
        entries = sum(len(rows) * padded(max(row.kv_len - row.first for row in rows)) for rows in groups)
        return entries * self.entry_bytes * self.num_layers <= KEPT_BYTES


class GatherPlan(NamedTuple):
    """All reads of a step: `decode` groups of one-token rows, `prefill` one row each.

    `folded` are rows with summaries, one each, of one or several tokens; they have room for
    `MAX_EXTRA` entries more. `writes` `[2 * T * Hkv]` are entries of layer 0, keys before values,
    rows of kv seen as `[-1, D]`; `written` are the token rows that store something, None where all do.
    `in_order`: all tokens are one group of decode rows, in their order.
    """

    layout: _Layout
    lengths: list[list[int]]
    table: Tensor
    slots: Tensor
    decode: list[Gather]
    prefill: list[Gather]
    folded: list[Gather]
    writes: Tensor
    written: Tensor | None
    in_order: bool


@dataclass(slots=True)
class _Memo:
    """The newest plan by window, the version of kv that they belong to, and what was asked for last.

    `tensors` are held so that no other has their place, which `asked` knows them by.
    """

    plans: dict[int, GatherPlan] = field(default_factory=dict)
    version: int | None = None
    asked: tuple[Any, ...] | None = None
    tensors: tuple[Tensor, ...] = ()


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
    """The plan of this step, made by the first layer that asks and left on `kv` for the next ones.

    `summaries` are the rows' lines that have summaries to read, else -1. A plan is used again only
    while lengths, table and slots hold the same values, and carried to the next decode step of the
    same rows. All are let go when kv was changed but for what `wrote` knows of.
    """
    memo, tensors = _memo(kv), (cu_seqlens_q, kv_lens, page_table, slot_mapping)
    if memo.version is None or memo.version != _version(kv):
        memo.plans.clear()
    versions = [_version(tensor) for tensor in tensors]
    asked = (*map(id, tensors), *versions, q.shape, q.dtype, window, summaries)
    known = memo.plans.get(window)
    if known is not None and memo.asked == asked and None not in versions:
        return known
    memo.plans[window] = plan = _plan(known, q, kv, tensors, summaries, window)
    memo.asked, memo.tensors = asked, tensors
    return plan


def wrote(kv: Tensor) -> None:
    """The newest entries of a plan have been written to `kv`: that is the one change which it knows of."""
    _memo(kv).version = _version(kv)


def _plan(
    known: GatherPlan | None,
    q: Tensor,
    kv: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    summaries: list[int],
    window: int,
) -> GatherPlan:
    """`known` if it is the plan of these lengths, table and slots, else `known` one step later, else a new one."""
    _, num_layers, num_heads, _, page_size, head_dim = kv.shape
    cu_seqlens_q, kv_lens, page_table, slot_mapping = tensors
    entry_bytes = 2 * num_heads * head_dim * q.element_size()
    group = q.shape[1] // num_heads
    shape = (q.shape[0], num_layers, num_heads, page_size, group, group + -group % row_multiple(head_dim))
    layout = _Layout(*shape, entry_bytes, window, q.dtype, kv.device)
    lengths = [cu_seqlens_q.tolist(), kv_lens.tolist(), summaries]
    if known is not None and known.layout != layout:
        known = None
    if (
        known is not None
        and known.lengths == lengths
        and torch.equal(known.table, page_table)
        and torch.equal(known.slots, slot_mapping)
    ):
        return known
    rows = _rows(lengths, window)
    plan = None if known is None else _advanced(known, rows, lengths, page_table, slot_mapping)
    return plan or _make(rows, layout, lengths, page_table, slot_mapping)


def _memo(kv: Tensor) -> _Memo:
    memo: _Memo | None = getattr(kv, _MEMO, None)
    if memo is None:
        memo = _Memo()
        setattr(kv, _MEMO, memo)
    return memo


def _version(tensor: Tensor) -> int | None:
    """How often a tensor has been changed in place; None where that is not counted."""
    return None if tensor.is_inference() else tensor._version


def _rows(lengths: list[list[int]], window: int) -> list[Row]:
    rows: list[Row] = []
    for index, (kv_len, summary) in enumerate(zip(*lengths[1:], strict=True)):
        start, end = lengths[0][index : index + 2]
        if end > start:
            first = first_entry(kv_len - (end - start), window)
            rows.append(Row(index, start, end - start, kv_len, first, summary))
    return rows


def _advanced(
    plan: GatherPlan, rows: list[Row], lengths: list[list[int]], table: Tensor, slots: Tensor
) -> GatherPlan | None:
    """`plan` one token later, where each row is one token and its pages are those of before and new ones, else None.

    Gathers that keep nothing are not carried over the border of a page.
    """
    size = plan.layout.page_size
    later = {row.line: row for row in rows}
    gathers = plan.decode + plan.folded
    known = [row for gather in gathers for row in gather.rows]
    if plan.prefill or plan.written is not None or len(known) != len(rows):
        return None
    if any(later.get(row.line) != row._replace(kv_len=row.kv_len + 1) or row.q_len > 1 for row in known):
        return None
    places, pages = slots.cpu().numpy(), table.cpu().numpy()
    if (places < 0).any() or not _begins_with(pages, plan):
        return None
    key_writes = _key_writes(places, plan.layout)
    moved: list[Gather] = []
    for gather in gathers:
        ends = [later[row.line] for row in gather.rows]
        if gather.kept is not None:
            moved.append(_one_later(gather, ends, pages, key_writes, plan.layout))
        elif any(row.kv_len % size == 1 for row in ends):
            return None
        else:
            moved.append(_with_ends(gather, ends, plan.layout))
    if plan.decode and plan.decode[0].kept is not None and not plan.layout.has_room([g.rows for g in moved]):
        return None
    return plan._replace(
        lengths=lengths,
        table=table.clone(),
        slots=slots.clone(),
        decode=moved[: len(plan.decode)],
        folded=moved[len(plan.decode) :],
        writes=_with_values(key_writes, plan.layout),
    )


def _begins_with(table: NDArray[np.int32], plan: GatherPlan) -> bool:
    """Whether rows still have the pages that they had in `plan`, in front of new ones."""
    before = plan.table.cpu().numpy()
    width = before.shape[1]
    if table.shape[1] < width:
        return False
    unused = np.arange(width) * plan.layout.page_size >= np.array(plan.lengths[1])[:, None]
    return bool(((table[:, :width] == before) | unused).all())


def _one_later(
    gather: Gather, rows: list[Row], table: NDArray[np.int32], key_writes: Tensor, layout: _Layout
) -> Gather:
    """A gather that keeps what it has read, one token later; read anew where it has no more room."""
    if max(row.kv_len - row.first for row in rows) > gather.length:
        return _keeping(_gather(rows, table, layout), key_writes, layout)
    last = torch.tensor([[row.kv_len - row.first - 1] for row in rows], device=layout.device)
    gather.mask.view(len(rows), -1).scatter_(1, last, 0.0)
    return gather._replace(rows=rows, newest=_newest(gather, key_writes, layout), places=gather.places + 1)


def _keeping(gather: Gather, key_writes: Tensor, layout: _Layout) -> Gather:
    """`gather`, which keeps what it reads."""
    ends = np.array([row.kv_len - row.first for row in gather.rows], dtype=np.int64)[:, None]
    heads = np.arange(2 * len(ends) * layout.num_heads).reshape(2, len(ends), -1)
    places = torch.from_numpy((heads * gather.length + ends - 1).reshape(-1)).to(layout.device)
    return gather._replace(newest=_newest(gather, key_writes, layout), places=places, kept={})


def _newest(gather: Gather, key_writes: Tensor, layout: _Layout) -> Tensor:
    """Where the newest entries of a gather's rows are written."""
    return _with_values(key_writes.view(-1, layout.num_heads).index_select(0, gather.tokens).view(-1), layout)


def _with_values(keys: Tensor, layout: _Layout) -> Tensor:
    """Entries of keys and then those of their values."""
    return torch.cat([keys, keys + layout.page_size])


def _make(rows: list[Row], layout: _Layout, lengths: list[list[int]], table: Tensor, slots: Tensor) -> GatherPlan:
    pages = table.cpu().numpy()
    decode = [row for row in rows if row.q_len == 1 and row.summary < 0]
    prefill = [_gather([row], pages, layout) for row in rows if row.q_len > 1 and row.summary < 0]
    places = slots.cpu().numpy()
    keep = places >= 0
    written = None if keep.all() else np.flatnonzero(keep)
    key_writes = _key_writes(places if written is None else places[written], layout)
    groups = _groups(decode, layout, KEPT_BYTES)
    # A step that also has longer rows or padding is not carried, one with a window seldom.
    keeps = not prefill and written is None and not layout.window and layout.has_room(groups)
    if keeps:
        gathers = [_keeping(_gather(group, pages, layout), key_writes, layout) for group in groups]
    else:
        limit = GATHER_BYTES if layout.device.type == "cpu" else GATHER_BYTES_GPU
        gathers = [_gather(group, pages, layout) for group in _groups(decode, layout, limit)]
    return GatherPlan(
        layout=layout,
        lengths=lengths,
        table=table.clone(),
        slots=slots.clone(),
        decode=gathers,
        prefill=prefill,
        folded=[_gather([row], pages, layout, MAX_EXTRA) for row in rows if row.summary >= 0],
        writes=_with_values(key_writes, layout),
        written=None if written is None else torch.from_numpy(written).to(layout.device),
        in_order=len(gathers) == 1 and len(gathers[0].rows) == layout.num_tokens,
    )


def _key_writes(slots: NDArray[np.int64], layout: _Layout) -> Tensor:
    num_heads, size = layout.num_heads, layout.page_size
    pages = slots // size
    first = pages * ((layout.num_layers * num_heads * 2 - 1) * size) + slots
    keys = (first[:, None] + np.arange(0, num_heads * 2 * size, 2 * size)).reshape(-1)
    return torch.from_numpy(keys).to(layout.device)


def _groups(rows: list[Row], layout: _Layout, limit: int) -> list[list[Row]]:
    """Decode rows of similar length together, bounded in bytes and in what is read in vain."""
    groups: list[list[Row]] = []
    span = vain = 0
    for row in sorted(rows, key=lambda r: r.first - r.kv_len):
        length = padded(row.kv_len - row.first)
        vain += span - length
        full = groups and (len(groups[-1]) + 1) * span * layout.entry_bytes > limit
        if not groups or full or vain * layout.entry_bytes > GROUP_BYTES:
            groups.append([])
            span, vain = length, 0
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
        nothing,
        nothing,
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
