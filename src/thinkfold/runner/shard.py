"""Which part of a model one rank holds, and its part of what a step does to memory.

Everybody but a rank's own memory speaks of all heads and of block ids over all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor

from thinkfold.runner import collectives
from thinkfold.scheduler.output import FoldCommit, MemoryWork

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`; `group` names its `collectives.Group`, which is needed from the first forward on."""

    rank: int = 0
    size: int = 1
    group: str = ""

    @property
    def alone(self) -> bool:
        return self.size == 1

    def sum_(self, x: Tensor) -> None:
        """Put the sum over all ranks in the place of `x`."""
        if not self.alone:
            collectives.sum_(x, self.group)

    def numbers(self, mine: int) -> list[int]:
        """A number of every rank, each its own; waits for the device."""
        return [mine] if self.alone else collectives.find(self.group).numbers(mine)

    def tell(self, x: Tensor) -> None:
        """Put rank 0's `x` in the place of every rank's."""
        if not self.alone:
            collectives.find(self.group).tell(x)


WHOLE = Shard()


class OwnHeads:
    """The part of one rank: of each layer and of a page's blocks the next `kv_heads` and `page_blocks`.

    A head is numbered `layer * KV heads of all ranks + KV head`.
    """

    def __init__(self, shard: Shard, num_layers: int, kv_heads: int, page_blocks: int) -> None:
        self._shard = shard
        self._page_blocks = page_blocks
        every, first = kv_heads * shard.size, kv_heads * shard.rank
        self._numbers = [layer * every + first + head for layer in range(num_layers) for head in range(kv_heads)]
        self._own = {number: index for index, number in enumerate(self._numbers)}

    def of(self, by_head: Sequence[T]) -> list[T]:
        """The own ones of what is listed by head; nothing of nothing."""
        return [by_head[number] for number in self._numbers] if by_head else []

    def work(self, work: MemoryWork) -> MemoryWork:
        """The own part of a step's memory work, in own heads and blocks. Pages and slots are those of all ranks."""
        if self._shard.alone:
            return work
        return replace(
            work,
            blocks_out=self._pairs(work.blocks_out),
            blocks_in=self._pairs(work.blocks_in),
            commits=[self._commit(commit) for commit in work.commits],
            summaries=[(slot, self._blocks(blocks), self.of(lengths)) for slot, blocks, lengths in work.summaries],
            adopted=[(slot, self._blocks(blocks), self.of(lengths)) for slot, blocks, lengths in work.adopted],
            prepares=[p if p.blocks is None else replace(p, blocks=self._blocks(p.blocks)) for p in work.prepares],
        )

    def _commit(self, commit: FoldCommit) -> FoldCommit:
        growth, own = commit.growth, self._own
        copies = [(own[head], self._block(a), self._block(b)) for head, a, b in growth.copies if head in own]
        mine = replace(
            growth,
            counts=self.of(growth.counts),
            starts=self.of(growth.starts),
            new_blocks=self._blocks(growth.new_blocks),
            copies=copies,
        )
        table = None if commit.table is None else (self._blocks(commit.table[0]), self.of(commit.table[1]))
        return replace(commit, growth=mine, table=table)

    def _blocks(self, by_head: Sequence[Sequence[int]]) -> list[list[int]]:
        return [[self._block(block) for block in blocks] for blocks in self.of(by_head)]

    def _pairs(self, pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        all_blocks, rank = self._page_blocks * self._shard.size, self._shard.rank
        return [(self._block(a), self._block(b)) for a, b in pairs if a % all_blocks // self._page_blocks == rank]

    def _block(self, block: int) -> int:
        """The own id of a block that lies here."""
        page, index = divmod(block, self._page_blocks * self._shard.size)
        return page * self._page_blocks + index - self._shard.rank * self._page_blocks
