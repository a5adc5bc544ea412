"""How a fold makes a branch's summary longer, or a part of it shorter: arithmetic of head blocks, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from thinkfold.kv.summary import SummaryGrowth, SummaryTable


@dataclass(frozen=True, slots=True)
class GrowthPlan:
    """What `counts[h]` more entries in each head h of `summary` take.

    `new[h]` blocks are appended; where `copied[h]`, the head's partly filled last block is
    somebody else's too and is copied first.
    """

    summary: SummaryTable
    page_size: int
    counts: list[int]
    new: list[int]
    copied: list[bool]

    @classmethod
    def of(cls, summary: SummaryTable, counts: Sequence[int], page_size: int, refs: Callable[[int], int]) -> GrowthPlan:
        """`refs` says how many hold a block."""
        starts = summary.lengths or [0] * len(counts)
        new, copied = [], []
        for head, (start, count) in enumerate(zip(starts, counts, strict=True)):
            new.append(-(-(start + count) // page_size) + (-start // page_size))
            partial = count > 0 and start % page_size > 0
            copied.append(partial and refs(summary.blocks[head][-1]) > 1)
        return cls(summary, page_size, list(counts), new, copied)

    @property
    def blocks(self) -> list[int]:
        """Fresh blocks by head."""
        return [new + copied for new, copied in zip(self.new, self.copied, strict=True)]

    def grow(self, blocks: Iterable[int], share: float = 1.0) -> tuple[SummaryTable, SummaryGrowth]:
        """The longer summary, with fresh `blocks`, one head's after the other's; lists of the old one stay as they are.

        `share` of a raw entry's memory is what one of its entries takes.
        """
        heads = range(len(self.counts))
        starts = self.summary.lengths or [0 for _ in heads]
        held = self.summary.blocks or [[] for _ in heads]
        growth = SummaryGrowth(self.counts, starts, [])
        fresh, lists = iter(blocks), []
        for head, (kept, new, copied) in enumerate(zip(held, self.new, self.copied, strict=True)):
            if copied:
                growth.copies.append((head, kept[-1], next(fresh)))
                kept = [*kept[:-1], growth.copies[-1][2]]
            made = list(islice(fresh, new))
            growth.new_blocks.append(made)
            lists.append(kept + made)
        return SummaryTable(lists, [starts[head] + self.counts[head] for head in heads], share), growth


@dataclass(frozen=True, slots=True)
class Replacement:
    """What `counts[h]` entries of each head h in the place of its blocks `[places[h], places[h] + length)` take.

    All of them are whole blocks, and so are the entries before and behind them.
    """

    summary: SummaryTable
    page_size: int
    places: list[int]
    length: int
    counts: list[int]

    @property
    def old(self) -> list[int]:
        """The blocks that go."""
        return [
            block
            for blocks, place in zip(self.summary.blocks, self.places, strict=True)
            for block in blocks[place : place + self.length]
        ]

    @property
    def blocks(self) -> list[int]:
        """Fresh blocks by head."""
        return [count // self.page_size for count in self.counts]

    def make(self, blocks: Iterable[int]) -> tuple[SummaryTable, SummaryGrowth]:
        """The summary with fresh `blocks` in the place of the old ones."""
        summary, size, fresh = self.summary, self.page_size, iter(blocks)
        assert not any(count % size for count in self.counts), "blocks in the middle of a summary are full"
        new = [[next(fresh) for _ in range(count // size)] for count in self.counts]
        parts = zip(summary.blocks, self.places, new, strict=True)
        lists = [held[:place] + made + held[place + self.length :] for held, place, made in parts]
        growth = SummaryGrowth(self.counts, [place * size for place in self.places], new)
        return SummaryTable(lists, [len(held) * size for held in lists], summary.share), growth


def written_blocks(summary: SummaryTable, growth: SummaryGrowth, page_size: int) -> list[int]:
    """Head blocks of the grown `summary` that get entries of `growth`."""
    return [
        block
        for blocks, start, count in zip(summary.blocks, growth.starts, growth.counts, strict=True)
        if count > 0
        for block in blocks[start // page_size :]
    ]
