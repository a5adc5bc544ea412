"""What of a pool can be had now: free pages, idle ones of the prefix tree, and a reserve that only summaries use."""

from __future__ import annotations

from collections.abc import Sequence

from thinkfold.kv.blocks import HeadBlocks
from thinkfold.kv.pages import PagePool
from thinkfold.kv.prefixes import SharedPrefixes


class Room:
    """Counts pages over the `reserve` and makes some free. It knows no branch."""

    def __init__(self, pool: PagePool, prefixes: SharedPrefixes, blocks: HeadBlocks, reserve: int) -> None:
        self._pool = pool
        self._prefixes = prefixes
        self._blocks = blocks
        self._reserve = reserve

    @property
    def available(self) -> int:
        """Pages that raw entries can have now: free ones and idle ones of the prefix tree over the reserve."""
        return max(0, self._pool.num_free + self._pool.num_idle - self._reserve)

    @property
    def returning(self) -> int:
        """Pages that become available when the steps in flight, and the one being planned, have finished."""
        pool = self._pool
        return max(0, pool.num_free + pool.num_idle + pool.num_quarantined - self._reserve) - self.available

    def make(self, pages: int, *, of_reserve: bool = False) -> bool:
        """Have `pages` free pages over the reserve or of it, if need be by dropping idle ones of the prefix tree."""
        keep = 0 if of_reserve else self._reserve
        missing = pages + keep - self._pool.num_free
        if pages == 0 or missing <= 0:
            return True
        return self._prefixes.evict(missing) and pages + keep <= self._pool.num_free  # evicted pages may still be read

    def make_for_blocks(self, blocks: Sequence[int]) -> bool:
        """Have pages for so many head blocks by head; the reserve comes after the tree's idle pages."""
        pages = self._blocks.pages_needed(blocks)
        return self.make(pages) or self.make(pages, of_reserve=True)

    def holds_blocks(self, blocks: Sequence[int]) -> bool:
        """Whether pages for so many head blocks by head are free or idle, the reserve included."""
        return self._blocks.pages_needed(blocks) <= self._pool.num_free + self._pool.num_idle
