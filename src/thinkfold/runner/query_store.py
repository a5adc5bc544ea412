"""Queries that will judge a fold: of every branch a few, after RoPE, with their log-sum-exp.

Which positions are kept is a rule of the logical position alone, so a branch that was recomputed,
swapped, forked or batched otherwise holds the same ones. It knows no span and no selector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from thinkfold.runner.transfer import to_device
from thinkfold.scheduler.output import BatchRow

LATE = 32  # positions of the newest stretch,
LATE_STRIDE = 4  # each so many tokens: they cover the last 128
PAST = 32  # at most so many spread over the whole past
LINES = LATE + PAST + 2  # a position whose token may still be discarded drives no other out


@dataclass(slots=True)
class _Kept:
    """Which positions of a branch are kept, and where. `next` is the position after the newest row."""

    first: int = 0
    next: int = 0
    lines: dict[int, int] = field(default_factory=dict)
    free: list[int] = field(default_factory=lambda: list(range(LINES - 1, -1, -1)))

    def copy(self) -> _Kept:
        return _Kept(self.first, self.next, dict(self.lines), list(self.free))


class _Saved(NamedTuple):
    """A branch's store off the device: queries `[L, LINES, Hq, D]`, LSE `[L, LINES, Hq]`."""

    kept: _Kept
    queries: Tensor
    lse: Tensor


class QueryStore:
    """Per slot up to `LINES` positions: queries `[L, Hq, D]` and their fp32 LSE `[L, Hq]`.

    Kept are the last `LATE` multiples of `LATE_STRIDE`, and positions `first + i · stride` over the
    whole past, where the stride doubles whenever more than `PAST` would be kept. Memory is
    allocated when the first row asks for it, or by `reserve`. `nowhere` is a line that nobody reads.
    """

    def __init__(
        self, num_slots: int, num_layers: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._num_slots = num_slots
        self._shape = (num_layers, num_slots * LINES + 1, num_heads, head_dim)
        self.nowhere = num_slots * LINES
        self._dtype = dtype
        self._device = device
        self._queries: Tensor | None = None
        self._lse: Tensor | None = None
        self._kept: dict[int, _Kept] = {}
        self._saved: dict[int, _Saved] = {}
        self._no_sinks = self._make_sinks(0)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory when allocated."""
        layers, lines, heads, dim = self._shape
        return layers * lines * heads * (dim * self._dtype.itemsize + torch.float32.itemsize)

    def reserve(self) -> tuple[Tensor, Tensor]:
        """Allocate now; queries and LSE, which stay where they are from then on."""
        return self._tensors()

    def place(self, rows: Sequence[BatchRow]) -> tuple[list[int], list[int]]:
        """Which token rows of a step are kept, and the lines they go to; call it once a step, in order.

        What a row computes again, or beyond which it starts again, is forgotten.
        """
        tokens: list[int] = []
        lines: list[int] = []
        offset = 0
        for row in rows:
            if row.keep_queries:
                kept = self._kept.setdefault(row.slot, _Kept())
                for position, line in _add(kept, row):
                    tokens.append(offset + position - row.position)
                    lines.append(row.slot * LINES + line)
            offset += row.num_tokens
        return tokens, lines

    def sinks(self, count: int) -> tuple[Tensor, Tensor]:
        """Where a forward writes `count` queries `[L, count, Hq, D]` and their LSE `[L, count, Hq]`."""
        return self._make_sinks(count) if count else self._no_sinks

    def keep(self, lines: Tensor, queries: Tensor, lse: Tensor) -> None:
        """Store what a forward wrote into its sinks, at the lines that `place` named."""
        stored, stored_lse = self._tensors()
        stored.index_copy_(1, lines, queries)
        stored_lse.index_copy_(1, lines, lse)

    def positions(self, slot: int, now: int | None) -> list[int]:
        """Kept positions before `now`, ascending; None means all. Equal for every way to get there."""
        kept = self._kept.get(slot)
        if kept is None:
            return []
        now = kept.next if now is None else now
        return sorted(p for p in kept.lines if p < now and _is_wanted(p, now, kept.first))

    def lines(self, slot: int, positions: Sequence[int]) -> list[int]:
        """The lines of kept positions in the tensors that `reserve` gives."""
        return [slot * LINES + self._kept[slot].lines[p] for p in positions]

    def read(self, slot: int, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Queries `[L, n, Hq, D]` and LSE `[L, n, Hq]` of kept positions."""
        (index,) = to_device([self.lines(slot, positions)], self._device)
        queries, lse = self._tensors()
        return queries.index_select(1, index), lse.index_select(1, index)

    def forget(self, slot: int) -> None:
        """Empty a slot for another branch."""
        self._kept.pop(slot, None)

    def fork(self, source: int, target: int) -> None:
        """Let `target` hold what `source` holds."""
        self.forget(target)
        if source in self._kept:
            self._kept[target] = self._kept[source].copy()
            for tensor in self._tensors():
                tensor[:, _lines(target)] = tensor[:, _lines(source)]

    def save(self, slot: int, key: int, *, leave: bool = True) -> None:
        """Copy a slot's store to the host under `key`; the slot is empty then if the branch does `leave` it."""
        kept = self._kept.pop(slot, None)
        if kept is None:
            return
        if not leave:
            self._kept[slot] = kept.copy()
        queries, lse = (_to_host(tensor[:, _lines(slot)]) for tensor in self._tensors())
        self._saved[key] = _Saved(kept, queries, lse)

    def share(self, key: int, other: int) -> None:
        """What was saved under `key` has a second name."""
        if key in self._saved:
            self._saved[other] = self._saved[key]

    def restore(self, key: int, slot: int) -> None:
        """Bring back what was saved under `key`, into any slot; nothing if nothing was kept."""
        self.forget(slot)
        saved = self._saved.pop(key, None)
        if saved is not None:
            self._kept[slot] = saved.kept.copy()
            for tensor, home in zip(self._tensors(), (saved.queries, saved.lse), strict=True):
                tensor[:, _lines(slot)].copy_(home, non_blocking=True)

    def discard(self, key: int) -> None:
        """Forget what was saved under `key`: its branch will not come back."""
        self._saved.pop(key, None)

    def _make_sinks(self, count: int) -> tuple[Tensor, Tensor]:
        layers, _, heads, dim = self._shape
        queries = torch.empty((layers, count, heads, dim), dtype=self._dtype, device=self._device)
        return queries, torch.empty((layers, count, heads), dtype=torch.float32, device=self._device)

    def _tensors(self) -> tuple[Tensor, Tensor]:
        if self._queries is None or self._lse is None:
            self._queries = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
            self._lse = torch.zeros(self._shape[:-1], dtype=torch.float32, device=self._device)
        return self._queries, self._lse

    def check_integrity(self) -> None:
        """Raise AssertionError unless every line is free or holds one position."""
        for slot, kept in self._kept.items():
            assert 0 <= slot < self._num_slots, f"slot {slot} does not exist"
            used = [*kept.lines.values(), *kept.free]
            assert sorted(used) == list(range(LINES)), f"slot {slot}: a line is lost or used twice"
            assert all(kept.first <= p < kept.next for p in kept.lines), f"slot {slot}: a position was never computed"


def _add(kept: _Kept, row: BatchRow) -> list[tuple[int, int]]:
    """Where a row's positions go, (position, line). What is not wanted any more stays until its room is needed."""
    start, end, again = row.position, row.position + row.num_tokens, row.position < kept.next
    kept.first, kept.next = row.queries_from, end
    wanted = _wanted(max(start, kept.first), end, kept.first)
    if again or len(wanted) > len(kept.free):
        # The one token of a row may be discarded: what it would drive out stays until the next row.
        sure = start if row.num_tokens == 1 else end
        for position in [p for p in kept.lines if p >= start or not _is_wanted(p, sure, kept.first)]:
            kept.free.append(kept.lines.pop(position))
    new = []
    for position in wanted:
        kept.lines[position] = line = kept.free.pop()
        new.append((position, line))
    return new


def _is_wanted(position: int, now: int, first: int) -> bool:
    """Whether a branch that has computed all positions before `now` keeps this one."""
    late = position % LATE_STRIDE == 0 and position >= now - LATE * LATE_STRIDE
    return late or (position - first) % _past_stride(now - first) == 0


def _wanted(start: int, end: int, first: int) -> list[int]:
    """The positions in `[start, end)` that are kept at `end`; `first <= start`."""
    if end - start == 1:
        return [start] if _is_wanted(start, end, first) else []
    newest = max(start, end - LATE * LATE_STRIDE)
    late = range(newest + -newest % LATE_STRIDE, end, LATE_STRIDE)
    stride = _past_stride(end - first)
    past = range(start + (first - start) % stride, end, stride)
    return sorted({*late, *past})


def _past_stride(length: int) -> int:
    """The stride at which at most `PAST` positions lie in a past of so many tokens: `LATE_STRIDE`, doubled as often."""
    return LATE_STRIDE << ((length - 1) // (LATE_STRIDE * PAST)).bit_length()


def _lines(slot: int) -> slice:
    return slice(slot * LINES, (slot + 1) * LINES)


def _to_host(tensor: Tensor) -> Tensor:
    pinned = tensor.device.type == "cuda"
    home = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
    return home.copy_(tensor, non_blocking=pinned)
