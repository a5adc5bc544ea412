"""The slots' summary tables on the device: which head blocks a branch's summaries lie in, and how many entries."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from thinkfold.runner.transfer import IntArray, to_device
from thinkfold.scheduler.output import FoldCommit


class SummaryTables:
    """`table` `[L, N, Hkv, S]` int32 head blocks and `lens` `[L, N, Hkv]` int32 entries of N slots.

    N is 0 until there is a summary. On a GPU S is `max_blocks` from the first summary on, since
    shapes there are fixed; on a CPU it doubles when it must. A tensor that grows is replaced, none is
    after `reserve`.
    """

    def __init__(
        self,
        num_slots: int,
        num_layers: int,
        num_kv_heads: int,
        page_size: int,
        max_blocks: int,
        device: torch.device,
    ) -> None:
        self._num_slots = num_slots
        self._heads = (num_layers, num_kv_heads)
        self.page_size = page_size
        self._device = device
        self._first_width = max_blocks if device.type == "cuda" else 8
        self._max_blocks = max_blocks
        self._used: set[int] = set()
        self.table = self._zeros(num_layers, 0, num_kv_heads, 0)
        self.lens = self._zeros(num_layers, 0, num_kv_heads)

    @property
    def nbytes(self) -> int:
        """Bytes of the tables when they are first needed."""
        layers, heads = self._heads
        return layers * heads * self._num_slots * (self._first_width + 1) * torch.int32.itemsize

    def reserve(self) -> None:
        """Allocate all that there can ever be."""
        self._widen(self._max_blocks)

    def rows(self, slots: Sequence[int]) -> list[int]:
        """The line that each slot's row reads; -1 where it has no summary."""
        return [slot if slot in self._used else -1 for slot in slots]

    def set(self, slot: int, blocks: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        """Replace a slot's tables; a list of blocks and a number of entries a head, or nothing at all."""
        had = slot in self._used
        self._used.discard(slot)
        if any(lengths):
            self._used.add(slot)
            self._write(slot, *_columns(blocks, np.zeros(len(blocks), np.int64)), np.asarray(lengths))
        elif had:
            self.lens[:, slot] = 0

    def grow(self, commit: FoldCommit) -> None:
        """Append a fold's blocks and put copies in the place of their sources; entries are counted, not written."""
        growth, slot, page = commit.growth, commit.slot, self.page_size
        if not any(growth.counts):
            return
        starts = np.array(growth.starts, dtype=np.int64)
        if slot not in self._used and starts.any():
            raise ValueError(f"slot {slot} has no summary that the fold could follow")
        self._used.add(slot)
        heads, columns, blocks = _columns(growth.new_blocks, -(-starts // page))
        if growth.copies:
            copied, targets = (np.array([copy[i] for copy in growth.copies], np.int64) for i in (0, 2))
            heads, blocks = np.append(heads, copied), np.append(blocks, targets)
            columns = np.append(columns, starts[copied] // page)
        self._write(slot, heads, columns, blocks, starts + np.array(growth.counts))

    def entry_ids(self, slot: int, heads: Tensor, numbers: Tensor) -> Tensor:
        """Entry ids in memory of entries by head and number, int64 `[n]` each."""
        layer = torch.div(heads, self._heads[1], rounding_mode="floor")
        column = torch.div(numbers, self.page_size, rounding_mode="floor")
        blocks = self.table[layer, slot, heads - layer * self._heads[1], column].long()
        return blocks * self.page_size + numbers - column * self.page_size

    def check_integrity(self) -> None:
        """Raise AssertionError unless lengths fit the tables and only slots in use have entries. Waits for a GPU."""
        lens = self.lens.cpu()
        room = self.table.shape[3] * self.page_size
        assert not lens.numel() or 0 <= int(lens.min()) <= int(lens.max()) <= room, "entries without a block"
        holding = {slot for slot in range(lens.shape[1]) if lens[:, slot].any()}
        assert holding == self._used, f"slots {sorted(holding ^ self._used)} are in use by one account only"

    def _write(self, slot: int, heads: IntArray, columns: IntArray, blocks: IntArray, lengths: IntArray) -> None:
        """Put one block a head and column, and the entries of all heads: two launches after one copy."""
        if len(columns):
            self._widen(int(columns.max()) + 1)
        _, slots, per_layer, width = self.table.shape
        layers, own = np.divmod(heads, per_layer)
        places = ((layers * slots + slot) * per_layer + own) * width + columns
        where, block, entries = to_device([places, blocks, lengths.reshape(self._heads)], self._device)
        self.table.view(-1).index_copy_(0, where, block.int())
        self.lens[:, slot] = entries

    def _widen(self, columns: int) -> None:
        width = self.table.shape[3]
        if self.table.shape[1] and columns <= width:
            return
        wanted = max(width, self._first_width)
        while wanted < columns:
            wanted *= 2
        layers, heads = self._heads
        table = self._zeros(layers, self._num_slots, heads, wanted)
        if self.table.shape[1]:
            table[..., :width] = self.table
        else:
            self.lens = self._zeros(layers, self._num_slots, heads)
        self.table = table

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self._device)


def _columns(by_head: Sequence[Sequence[int]], first: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Of each listed block its head, its column where head h's begin at `first[h]`, and its number."""
    counts = np.fromiter(map(len, by_head), np.int64, len(by_head))
    heads = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(heads)) - np.repeat(np.cumsum(counts) - counts, counts)
    return heads, np.repeat(first, counts) + place, np.fromiter(chain.from_iterable(by_head), np.int64, len(heads))
